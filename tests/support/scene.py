"""Running what a test does in a loop, and waiting in it for what has no event of its own."""

import asyncio
from collections.abc import Awaitable, Callable


async def until(claim: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns once `claim` holds; another thread or process decides when."""
    async with asyncio.timeout(timeout_s):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    """Run what a test does, for 20 s at most."""

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(bounded())
