"""Messages between processes, block hashes, ids and errors: the ground floor.

Knows wire types, ids, block hashes and the error tree. Must not know Ray, torch, asyncio or HTTP.
"""
