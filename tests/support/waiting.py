"""Waiting for a claim that no event announces."""

import asyncio
from collections.abc import Callable


async def until(claim: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Return once `claim` holds; another task, thread or process makes it hold."""
    async with asyncio.timeout(timeout_s):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
