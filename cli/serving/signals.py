"""SIGINT and SIGTERM, which end start-up and service alike."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from rich.console import Console

_ENDING: Final = (signal.SIGINT, signal.SIGTERM)


def catch_signals() -> None:
    """Make them KeyboardInterrupt, also where SIGINT was ignored (nohup, &)."""
    for number in _ENDING:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def until_interrupted(console: Console, drain_s: float) -> Iterator[None]:
    """The block until KeyboardInterrupt, which the console tells."""
    try:
        yield
    except KeyboardInterrupt:
        console.print(
            f"stopping, {drain_s:g} s at most for requests that run (Ctrl-C: at once) ..."
        )


async def until_signal(serving: Coroutine[None, None, None]) -> None:
    """Await `serving` until it ends or is cancelled by the first signal; later ones change nothing."""
    task = asyncio.current_task()
    assert task is not None
    for number in _ENDING:
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: task.cancelling() or task.cancel()
        )
    with suppress(asyncio.CancelledError):
        await serving
