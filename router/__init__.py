"""Places requests on workers: by the prefixes that they hold, their load, and the price of waiting.

Knows block hashes, load and capsules by id. Must not know torch, ray, asyncio, tokens' text or HTTP.
"""
