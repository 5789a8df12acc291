"""Decides which worker serves a request: who holds its prefix, who is busy, what waiting costs.

Knows block hashes, load and capsules by id. Must not know torch, ray, asyncio, tokens' text or HTTP.
"""
