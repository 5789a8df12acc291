"""KV bookkeeping: the block pool and the tree of token runs that own its blocks.

Knows block ids, tokens, hashes and reference counts. Must not know tensors, tenants or requests.
"""
