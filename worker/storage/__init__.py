"""KV blocks and capsule records that outlive their process: one volume of files for one worker.

Knows bytes, names, checksums and budgets. Must not know tensors, the branch tree, or who asks.
Blocking calls from one thread; no asyncio.
"""
