"""One engine: a paged copy-on-write tree of KV blocks, a scheduler, and the model that fills it.

`kv`, `sched` and `engine` are torch-free (the mocker runs them unchanged); only `model` knows torch.
"""
