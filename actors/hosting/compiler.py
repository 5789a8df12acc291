"""Compiles grammars one at a time; tenants take turns.

One thread: what it compiles holds the interpreter's lock for a part of the time. A grammar may take seconds,
so those of one tenant may delay each other, but those of another by one of them at most.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Final, TypeAlias

from mallee.protocol.errors import Unavailable
from mallee.runtime.tasks import Tasks

MAX_WAITING: Final = 128
"""Grammars of one tenant that may wait for their turn: those of real schemas take 2 to 34 ms each."""
MAX_WAIT_S: Final = 10.0
"""Time that a grammar may wait for its turn."""

Done: TypeAlias = Callable[[BaseException | None], None]


class Compiler:
    """The thread that compiles grammars. All methods belong to one event loop."""

    def __init__(self, name: str, tasks: Tasks, *, max_wait_s: float = MAX_WAIT_S) -> None:
        self._tasks = tasks
        self._max_wait_s = max_wait_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"grammars of {name}")
        # One grammar of each tenant at most waits for the thread, in order: so the tenants take turns.
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._thread_turn = asyncio.Lock()
        self._num_open: Counter[str] = Counter()  # by tenant, the one that compiles included

    def submit(
        self, tenant: str, prepare: Callable[[], None], done: Done, *, is_new: bool = True
    ) -> None:
        """Call `prepare` in the thread when its turn has come, then `done` here with what it raised.

        If it `is_new`, `done` gets Unavailable if the turn does not come in time. Raises Unavailable: too
        many of `tenant` wait. What goes on from another worker waits as long as it takes.
        """
        if is_new and self._num_open[tenant] > MAX_WAITING:
            raise _full(self._num_open[tenant] - 1)
        self._num_open[tenant] += 1
        limit_s = self._max_wait_s if is_new else None
        work = self._compile(tenant, prepare, done, limit_s)
        self._tasks.spawn(work, name="a grammar's compilation")

    @property
    def num_open(self) -> int:
        """Grammars that are compiled, or wait for their turn."""
        return sum(self._num_open.values())

    def close(self) -> None:
        """Begin nothing any more; the tasks are to be closed before."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compile(
        self, tenant: str, prepare: Callable[[], None], done: Done, limit_s: float | None
    ) -> None:
        try:
            async with AsyncExitStack() as turn:
                try:
                    async with asyncio.timeout(limit_s):
                        await turn.enter_async_context(self._turns[tenant])
                        await turn.enter_async_context(self._thread_turn)
                except TimeoutError:
                    done(_late(self._num_open[tenant] - 1, self._max_wait_s))
                    return
                loop = asyncio.get_running_loop()
                error = await loop.run_in_executor(self._thread, _caught, prepare)
            done(error)
        finally:
            self._num_open[tenant] -= 1
            if not self._num_open[tenant]:
                del self._num_open[tenant], self._turns[tenant]


def _caught(prepare: Callable[[], None]) -> BaseException | None:
    """The exception that `prepare` raised: Rust's panics are no Exceptions."""
    try:
        prepare()
    except BaseException as error:  # the top of a foreign compiler
        return error
    return None


def _full(waiting: int) -> Unavailable:
    return Unavailable(
        f"{waiting} grammars of this tenant wait to be compiled already, the limit is {MAX_WAITING};"
        " retry later",
        waiting=waiting,
        limit=MAX_WAITING,
    )


def _late(others: int, limit_s: float) -> Unavailable:
    return Unavailable(
        f"the grammar's turn to be compiled did not come within {limit_s:g} s, this tenant has {others}"
        " others; retry later",
        others=others,
        limit_s=limit_s,
    )
