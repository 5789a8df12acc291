"""Compiles grammars one at a time; tenants take turns.

One thread: what it compiles holds the interpreter's lock for a part of the time. A grammar may take seconds,
so those of one tenant may delay each other, but those of another by one of them at most.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
        self._turns = TurnLock()
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
            try:
                async with asyncio.timeout(limit_s):
                    await self._turns.acquire(tenant)
            except TimeoutError:
                done(_late(self._num_open[tenant] - 1, self._max_wait_s))
                return
            try:
                loop = asyncio.get_running_loop()
                error = await loop.run_in_executor(self._thread, _caught, prepare)
            finally:
                self._turns.release()
            done(error)
        finally:
            self._num_open[tenant] -= 1
            if not self._num_open[tenant]:
                del self._num_open[tenant]


class TurnLock:
    """A lock for one holder; the names that wait for it take turns."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of their turns
        self._holder: str | None = None

    async def acquire(self, name: str) -> None:
        if self._holder is None:
            self._holder = name
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.release()  # it was given just now
            raise

    def release(self) -> None:
        """The next name's turn; after it this holder's, if it waits again."""
        assert self._holder is not None, "nobody holds it"
        if (own := self._waiting.pop(self._holder, None)) is not None:
            self._waiting[self._holder] = own
        self._holder = None
        while self._waiting:
            name = next(iter(self._waiting))
            turns = self._waiting[name]
            turn = turns.popleft()
            if not turns:
                del self._waiting[name]
            if not turn.done():  # else it was given up
                self._holder = name
                turn.set_result(None)
                return


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
