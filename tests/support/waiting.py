"""Waiting for a claim that no event announces."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from support.virtual.loop import virtual_loop


async def until(claim: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Return once `claim` holds; another task, thread or process makes it hold.

    A claim that meets a change by another thread while it reads (an engine's, which counts in its own) is
    asked again. In virtual time it is asked after each round of the loop's callbacks.
    """
    async with asyncio.timeout(timeout_s):
        if (loop := virtual_loop()) is not None:
            await loop.came_true(claim)
            return
        while not _holds(claim):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def _holds(claim: Callable[[], bool]) -> bool:
    try:
        return claim()
    except RuntimeError as error:
        if "during iteration" not in str(error):
            raise
        return False


async def elapse(seconds: float) -> None:
    """Let so much virtual time pass, in which the loop goes on: exact, and at once."""
    assert virtual_loop() is not None, "only for tests in virtual time"
    await asyncio.sleep(seconds)


async def until_asked(claim: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    """As `until`, for a claim that has to be asked for."""
    async with asyncio.timeout(timeout_s):
        while not await claim():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def wait_until(claim: Callable[[], bool], *, timeout_s: float, pause_s: float = 0.02) -> float:
    """As `until`, without an event loop. Returns the seconds that it took."""
    begin = time.monotonic()
    while not claim():
        assert time.monotonic() - begin < timeout_s, "it did not come true in time"
        time.sleep(pause_s)
    return time.monotonic() - begin
