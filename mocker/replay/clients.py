"""Clients: requests begin at the trace's times, at a fixed concurrency, or after one another."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from mallee.mocker.replay.clock import Clock
from mallee.protocol.errors import ConfigError
from mallee.traces.workload import NO_PARENT, Request

_AT_ONCE: Final = 4096  # requests that are read ahead


class Clients:
    """Begins requests through `begin` at their times; `ended` reports their ends.

    Requests are read a little ahead, so that a long trace need not fit into memory. With `keeps_order`
    all are read at first, and those that wait for others start `tool_wait_s` after the last of them has
    ended, whenever they are said to arrive; else only forks wait, for their parents. With `concurrency`
    at most so many are under way, the trace's order decides, and arrival times don't count. The time
    that reading takes is in `read_s`.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        clock: Clock,
        begin: Callable[[Request], None],
        *,
        speedup: float,
        concurrency: int,
        keeps_order: bool,
        max_requests: int,
        wall_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._requests = iter(requests)
        self._clock = clock
        self._begin = begin
        self._speedup = speedup
        self._concurrency = concurrency
        self._keeps_order = keeps_order
        self._left = max_requests or -1
        self._wall_clock = wall_clock
        self._ahead: Iterator[Request] = iter(())
        self._next: Request | None = None
        self._ended: set[int] = set()  # that others may name
        self._waiting: dict[int, list[Request]] = {}  # by a request that they wait for
        self._missing: dict[int, int] = {}  # how many ends each still waits for
        self._ready: deque[Request] = deque()  # may start, once there is room
        self._running = 0
        self.num_begun = self.num_ended = 0
        self.most_running = 0
        self.read_s = 0.0

    def start(self) -> None:
        """Put the first requests on the clock."""
        if self._keeps_order:
            self._ahead = iter(self._read_all())
        self._next = self._read()
        if self._concurrency:
            self._fill()
        else:
            self._schedule()

    def ended(self, request: Request) -> None:
        """Start the requests that waited for `request`, which is over, well or not."""
        self._running -= 1
        self.num_ended += 1
        if request.num_children or self._keeps_order:
            self._ended.add(request.number)
        for waiting in self._waiting.pop(request.number, ()):
            self._missing[waiting.number] -= 1
            if not self._missing[waiting.number]:
                del self._missing[waiting.number]
                wait_s = waiting.tool_wait_s if self._keeps_order else 0.0
                now = self._clock.now
                at = now + wait_s if self._keeps_order else max(now, self._arrival(waiting))
                self._clock.at(at, self._release, waiting)
        if self._concurrency:
            self._fill()

    def count_waiting(self) -> int:
        """Requests that have not begun: for others' ends, or for room. Reads what is left of them."""
        while self._next is not None:
            self._ready.append(self._next)
            self._next = self._read()
        return len(self._missing) + len(self._ready)

    # How they come

    def _schedule(self) -> None:
        if self._next is not None:
            at = max(self._clock.now, self._arrival(self._next))
            self._clock.at(at, self._arrive, None)

    def _arrive(self, _: None) -> None:
        """Begin all that arrive now, then put the next on the clock."""
        now = self._clock.now
        request = self._next
        while request is not None and request.arrival_s / self._speedup <= now:
            if request.wait_for or request.parent != NO_PARENT:
                self._admit(request)
            else:
                self._go(request)  # in an open loop there is always room
            request = next(self._ahead, None) or self._read()
        self._next = request
        self._schedule()

    def _arrival(self, request: Request) -> float:
        return request.arrival_s / self._speedup

    def _fill(self) -> None:
        """Begin what there is room for: what waited first, then the next of the trace."""
        while self._running < self._concurrency:
            if self._ready:
                self._go(self._ready.popleft())
            elif self._next is not None:
                request, self._next = self._next, self._read()
                self._admit(request)
            else:
                return

    def _read_all(self) -> list[Request]:
        """Read all requests; return those without dependencies, and queue the others behind theirs."""
        begin = self._wall_clock()
        every = list(itertools.islice(self._requests, self._left if self._left > 0 else None))
        self._left = 0
        self.read_s += self._wall_clock() - begin
        free: list[Request] = []
        for request in every:
            if request.wait_for or request.parent != NO_PARENT:
                self._admit(request)
            else:
                free.append(request)
        return free

    def _admit(self, request: Request) -> None:
        """Begin an arrived request, or let it wait for those that it depends on."""
        names = request.wait_for if self._keeps_order else ()
        if request.parent != NO_PARENT:
            names = (*names, request.parent)
        missing = [name for name in dict.fromkeys(names) if name not in self._ended]
        if not missing:
            self._release(request)
            return
        for name in missing:
            if name >= request.number:
                raise ConfigError(
                    f"request {request.name or request.number} waits for one that comes after it"
                )
            self._waiting.setdefault(name, []).append(request)
        self._missing[request.number] = len(missing)

    def _release(self, request: Request) -> None:
        if self._concurrency and self._running >= self._concurrency:
            self._ready.append(request)
        else:
            self._go(request)

    def _go(self, request: Request) -> None:
        self._running += 1
        self.num_begun += 1
        if self._running > self.most_running:
            self.most_running = self._running
        self._begin(request)

    def _read(self) -> Request | None:
        request = next(self._ahead, None)
        if request is None and self._left:
            begin = self._wall_clock()
            n = _AT_ONCE if self._left < 0 else min(_AT_ONCE, self._left)
            ahead = list(itertools.islice(self._requests, n))
            self.read_s += self._wall_clock() - begin
            if self._left > 0:
                self._left -= len(ahead)
            self._ahead = iter(ahead)
            request = next(self._ahead, None)
        return request

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert self._running == self.num_begun - self.num_ended, "requests under way"
        assert not self._concurrency or self.most_running <= self._concurrency, "too many at once"
        waiting = {r.number for rs in self._waiting.values() for r in rs}
        assert waiting == set(self._missing), "dependencies disagree"
