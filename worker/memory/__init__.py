"""The memory of a worker's device: a probe of it, and its split into weights, KV and the rest.

Must not know requests, blocks or tensors; only the probe asks torch.
"""
