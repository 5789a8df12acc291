"""The Python SDK: prefill once, fork many, stream the branches side by side.

Needs only httpx, msgspec and rich. Must not know torch, ray, numba or anything behind the HTTP API.

    from mallee.client import Mallee

    with Mallee("http://127.0.0.1:8000") as client:
        with client.prefill("A long document ...") as capsule:
            for branch in capsule.fork([" Question one?", " Question two?"]).wait():
                print(branch.worker, branch.ttft_ms, branch.text)
"""

from mallee.client.aio import AsyncMallee
from mallee.client.errors import ApiError, ConnectionFailed, StreamBroken
from mallee.client.results import Branch, BranchEvent
from mallee.client.sync import Mallee

__all__ = [
    "ApiError",
    "AsyncMallee",
    "Branch",
    "BranchEvent",
    "ConnectionFailed",
    "Mallee",
    "StreamBroken",
]
