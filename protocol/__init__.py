"""The ground floor: what every process says to every other, and how it is hashed and encoded.

Knows wire types, ids, block hashes and the error tree. Must not know Ray, torch, asyncio or HTTP.
"""
