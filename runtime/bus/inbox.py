"""Messages from the bus on their way into the router: a bounded queue, emptied a little at a time.

Requests are routed in the same event loop. A turn here takes a fraction of a millisecond and then lets
the loop go round, so that a request waits for one turn at most, however busy the fleet is. Where requests
make the loop slow, a turn takes a share of its time: leases wait here too, and would run out.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

log = logging.getLogger(__name__)

TURN_S = 0.0003
MAX_TURN_S = 0.01
SHARE = 0.2  # of the time that messages have waited since the last turn
PATIENCE_S = 0.01
WORK_BLOCKS = 2048  # of housekeeping in one call
MAX_MESSAGES = 16_384
MAX_NBYTES = 64 << 20

Handle: TypeAlias = Callable[[bytes], None]


class _Item(NamedTuple):
    put_at: float
    handle: Handle
    raw: bytes
    is_loose: bool


class Pump:
    """Hands messages to their handlers in order of arrival. Belongs to one event loop.

    Between messages, in every turn, `work()` does a piece of housekeeping and returns whether there is more.
    Beyond `max_messages` or `max_nbytes` the oldest loose messages are dropped, others only if that
    doesn't help. `clock` gives seconds of real time. `on_turn(lag_s, queued)` is given the age of the
    oldest message, `on_drop(n)` the number dropped.
    """

    def __init__(
        self,
        *,
        work: Callable[[], bool],
        clock: Callable[[], float],
        on_turn: Callable[[float, int], None] = lambda lag_s, queued: None,
        on_drop: Callable[[int], None] = lambda n: None,
        max_messages: int = MAX_MESSAGES,
        max_nbytes: int = MAX_NBYTES,
        turn_s: float = TURN_S,
    ) -> None:
        if max_messages < 1:
            raise ValueError(f"max_messages={max_messages}: must be at least 1")
        self._work = work
        self._clock = clock
        self._on_turn = on_turn
        self._on_drop = on_drop
        self._max_messages = max_messages
        self._max_nbytes = max_nbytes
        self._turn_s = turn_s
        self._queue: deque[_Item] = deque()
        self._nbytes = 0
        self._turned_at = 0.0
        self._next: asyncio.Handle | None = None
        self._is_next_late = False  # the next turn may still be moved up
        self._waiters: list[asyncio.Future[None]] = []
        self._is_closed = False
        self.num_dropped = self.num_failed = 0  # messages; failed ones made their handler raise

    def put(
        self, handle: Handle, raw: bytes, *, is_loose: bool = False, is_patient: bool = False
    ) -> None:
        """`handle(raw)` will be called. `is_loose`: or not; its loss is noticed and mended later.

        `is_patient`: it may wait for PATIENCE_S, to share a turn with others of its kind.
        """
        if self._is_closed:
            return
        self._queue.append(_Item(self._clock(), handle, raw, is_loose))
        self._nbytes += len(raw)
        if len(self._queue) > self._max_messages or self._nbytes > self._max_nbytes:
            self._make_room()
        if not is_patient:
            self.poke()
        elif self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.call_later(PATIENCE_S, self._turn)
            self._is_next_late = True

    def poke(self) -> None:
        """Schedule a turn, as there may be housekeeping to do."""
        if (self._next is not None and not self._is_next_late) or self._is_closed:
            return
        if self._next is not None:
            self._next.cancel()
        self._next = asyncio.get_running_loop().call_soon(self._turn)
        self._is_next_late = False

    @property
    def is_busy(self) -> bool:
        """Whether messages or housekeeping are left to do."""
        return self._next is not None

    async def drain(self) -> None:
        """Returns when the housekeeping known of now is done, or the pump is closed."""
        if self.is_busy:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def close(self) -> None:
        """Stop handling messages and drop those that wait. Idempotent."""
        self._is_closed = True
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._queue.clear()
        self._nbytes = 0
        self._release()

    def check(self) -> None:
        """Raises AssertionError if the bytes don't add up, bounds are broken or messages are stuck."""
        assert self._nbytes == sum(len(item.raw) for item in self._queue), "bytes don't add up"
        assert len(self._queue) <= self._max_messages, f"{len(self._queue)} messages wait"
        assert self._nbytes <= self._max_nbytes or len(self._queue) == 1, f"{self._nbytes} bytes"
        assert self._next is not None or not self._queue, "messages wait and no turn comes"

    def _turn(self) -> None:
        self._next = None
        now = self._clock()
        until = now + self._turn_s
        if self._queue:
            waits_since = self._queue[0].put_at
            self._on_turn(now - waits_since, len(self._queue))
            share_s = SHARE * (now - max(waits_since, self._turned_at))
            until = now + max(self._turn_s, min(share_s, MAX_TURN_S))
            self._handle(until)
        has_work = self._keep_house(until)
        self._turned_at = self._clock()
        if not has_work:
            self._release()
        if has_work or self._queue:
            self.poke()

    def _handle(self, until: float) -> None:
        queue, clock = self._queue, self._clock
        while queue:
            item = queue.popleft()
            self._nbytes -= len(item.raw)
            try:
                item.handle(item.raw)
            except Exception:  # event pump: one bad message must not hold up the others
                self.num_failed += 1
                log.exception("a message of %d bytes was not taken in", len(item.raw))
            if clock() >= until:
                return

    def _keep_house(self, until: float) -> bool:
        """One piece at least, so that a stream of messages can't starve it. True: there is more."""
        try:
            while self._work():
                if self._clock() >= until:
                    return True
        except Exception:  # event pump: what comes next may still be taken in
            self.num_failed += 1
            log.exception("housekeeping failed")
        return False

    def _make_room(self) -> None:
        """Free a quarter of the queue: dropping one by one would cost a scan for each."""
        before = len(self._queue)
        for may_drop_all in (False, True):
            kept: deque[_Item] = deque()
            while self._queue and self._is_above(3 / 4, len(kept)):
                item = self._queue.popleft()
                if item.is_loose or may_drop_all:
                    self._nbytes -= len(item.raw)
                else:
                    kept.append(item)
            self._queue.extendleft(reversed(kept))
            if not self._is_above(1.0, 0):
                break
        dropped = before - len(self._queue)
        self.num_dropped += dropped
        self._on_drop(dropped)

    def _is_above(self, share: float, num_apart: int) -> bool:
        """Whether more than one message and `share` of a bound wait, with `num_apart` out of the queue."""
        n = len(self._queue) + num_apart
        is_full = n > share * self._max_messages or self._nbytes > share * self._max_nbytes
        return is_full and n > 1

    def _release(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
