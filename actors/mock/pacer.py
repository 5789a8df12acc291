"""One timer for many engines: calls back at given times, those that are nearly due together.

A timer of the loop for each of a thousand engines would cost a wake-up for every step of every one.
"""

import asyncio
import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, Protocol, TypeAlias

# Between two wake-ups, unless something is due at once. uvloop counts whole milliseconds, and takes
# less than half of one for none: it would spin until the time has come.
GRAIN_S = 0.001
PACE_S = 0.001
LATE_S = 0.005  # a loop that is so late has more to do than it can
MAX_PACE_S = 0.25
_SMOOTHING = 0.2


class PacerStats(NamedTuple):
    """`lag_s`: how late wake-ups found what was due first, of late."""

    waiting: int  # given up ones included
    wakes: int
    calls: int
    lag_s: float


class Paced(Protocol):
    """Waits for a time. `due` is None or another time if it does no longer."""

    @property
    def due(self) -> float | None: ...

    def wake(self) -> None:
        """Called when `due` has come."""
        ...


_Entry: TypeAlias = tuple[float, int, Paced]


class Pacer:
    """A heap of times behind one timer. Belongs to one event loop.

    `clock` gives the monotonic seconds of the times. No call is early, or from inside `at`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[_Entry] = []
        self._order = count()
        self._timer: asyncio.Handle | None = None
        self._timer_at = float("inf")
        self._wakes = self._calls = 0
        self._lag_s = 0.0
        self._is_closed = False

    def at(self, due: float, paced: Paced) -> None:
        """`paced.wake()` at `due`, if `paced.due` is still that then."""
        if self._is_closed:
            return
        heapq.heappush(self._heap, (due, next(self._order), paced))
        if due < self._timer_at:
            self._set(due)

    @property
    def pace_s(self) -> float:
        """The shortest useful time between two wake-ups of one engine: longer if the loop is behind."""
        return PACE_S if self._lag_s < LATE_S else min(4 * self._lag_s, MAX_PACE_S)

    def close(self) -> None:
        """Call nothing any more. Idempotent."""
        self._is_closed = True
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stats(self) -> PacerStats:
        return PacerStats(len(self._heap), self._wakes, self._calls, self._lag_s)

    def check(self) -> None:
        """Raises AssertionError if an entry waits and no timer runs, or runs too late."""
        assert not self._heap or self._timer is not None, "no timer runs"
        assert not self._heap or self._timer_at <= self._heap[0][0] + GRAIN_S, "the timer is late"

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop, wait = asyncio.get_running_loop(), at - self._clock()
        self._timer_at = at
        if wait <= 0:
            self._timer = loop.call_soon(self._wake)
        else:
            self._timer = loop.call_later(math.ceil(wait / GRAIN_S) * GRAIN_S, self._wake)

    def _wake(self) -> None:
        self._timer, self._timer_at = None, float("-inf")  # `at` sets none until this is over
        self._wakes += 1
        now, heap = self._clock(), self._heap
        if heap:
            lag_s = max(0.0, now - heap[0][0])
            self._lag_s += _SMOOTHING * (lag_s - self._lag_s)
        try:
            self._wake_due(now)
        finally:  # the others wait even if one of them raised
            self._timer_at = float("inf")
            if heap and not self._is_closed:
                is_due = heap[0][0] <= now
                self._set(heap[0][0] if is_due else max(heap[0][0], now + GRAIN_S))

    def _wake_due(self, now: float) -> None:
        heap, later = self._heap, list[_Entry]()
        last = next(self._order)  # what is put in from here on has its turn at the next wake-up
        try:
            while heap and heap[0][0] <= now:
                entry = heapq.heappop(heap)
                if entry[1] > last:
                    later.append(entry)
                elif entry[2].due == entry[0]:
                    self._calls += 1
                    entry[2].wake()
        finally:
            for entry in later:
                heapq.heappush(heap, entry)
