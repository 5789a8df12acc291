"""Engines without a GPU: the real pool, tree and scheduler under a mocked forward pass.

Knows `worker.kv`, `worker.sched`, `worker.engine` and `router`. Must not know torch or ray.
"""
