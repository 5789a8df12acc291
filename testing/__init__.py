"""Test doubles for the engine, shared by tests and benches: forward passes, grammars, tiny random models.

Knows `worker` and `mocker`. No product package may import it; a module says itself whether it loads torch.
"""
