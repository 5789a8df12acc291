"""Engines without a GPU: the real pool, tree and scheduler under a mocked forward pass.

Knows `worker.kv`, `worker.sched`, `worker.engine`, `router` and `traces`. Must not know torch, ray or
asyncio.
"""
