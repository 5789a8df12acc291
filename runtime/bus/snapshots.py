"""Requests for snapshots, a few at a time.

A gateway that joins a thousand workers wants a thousand snapshots at once. Eight are under way at any
moment, and the next is requested when one is taken in whole: neither the broker nor the loop is flooded.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from mallee.protocol.errors import CodecError
from mallee.runtime.bus.inbox import Pump
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 5.0
MAX_AT_ONCE = 8


class Fetcher:
    """One queue of senders to ask. Belongs to one event loop.

    `ask(name, timeout_s)` asks `name`; `take(raw, asked_at)` takes the answer in, through `pump`, and
    returns whether it was too old: then the sender is asked again. After a failure a sender is asked at its
    next sign of life. `tasks` are the owner's: it ends them after `close`.
    """

    def __init__(
        self,
        pump: Pump,
        tasks: Tasks,
        *,
        ask: Callable[[str, float], Awaitable[bytes]],
        take: Callable[[bytes, float], bool],
        clock: Callable[[], float],
        timeout_s: float = SNAPSHOT_TIMEOUT_S,
    ) -> None:
        self._pump = pump
        self._tasks = tasks
        self._ask = ask
        self._take = take
        self._clock = clock
        self._timeout_s = timeout_s
        self._queue: deque[str] = deque()
        self._known: set[str] = set()  # queued or under way
        self._num_under_way = 0
        self._silent: set[str] = set()  # gave no answer when last asked, which was logged once
        self.num_failed = 0
        self._is_closed = False

    def want(self, name: str) -> None:
        """Queue a request to `name`, unless one is queued."""
        if name not in self._known and not self._is_closed:
            self._known.add(name)
            self._queue.append(name)
            self._start()

    def close(self) -> None:
        """Ask nobody any more; requests under way end with their owner's tasks."""
        self._is_closed = True

    def check(self) -> None:
        """Raises AssertionError if more are under way than allowed, or a sender is asked twice."""
        assert self._num_under_way <= MAX_AT_ONCE, f"{self._num_under_way} under way"
        assert len(self._known) == len(self._queue) + self._num_under_way, "a sender is asked twice"

    def _start(self) -> None:
        while self._queue and self._num_under_way < MAX_AT_ONCE and not self._is_closed:
            self._num_under_way += 1
            self._tasks.spawn(self._fetch(self._queue.popleft()))

    async def _fetch(self, name: str) -> None:
        try:
            is_old = True
            while is_old:
                asked_at = self._clock()
                raw = await self._ask(name, self._timeout_s)
                is_old = await self._hand_over(raw, asked_at)
            self._silent.discard(name)
        except (TimeoutError, ConnectionError, CodecError) as error:
            self.num_failed += 1
            if name not in self._silent:
                self._silent.add(name)
                log.warning("no snapshot of %s: %s", name, error or type(error).__name__)
        finally:
            self._num_under_way -= 1
            self._known.discard(name)
            self._start()

    async def _hand_over(self, raw: bytes, asked_at: float) -> bool:
        """Whether the snapshot, taken in whole by now, was too old. Raises CodecError."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def take(raw: bytes) -> None:
            if answer.done():
                return  # given up meanwhile
            try:
                answer.set_result(self._take(raw, asked_at))
            except CodecError as error:
                answer.set_exception(error)

        self._pump.put(take, raw)
        async with asyncio.timeout(self._timeout_s):
            is_old = await answer
        await self._pump.drain()
        return is_old
