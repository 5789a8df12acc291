"""The Python SDK: prefill once, fork many, stream the branches side by side.

Needs only httpx, msgspec and rich. Must not know torch, ray, numba or anything behind the HTTP API.
"""
