"""One device that several engines use by turns, as a GPU does for processes without MPS.

Only one engine's work runs at a time. While others wait it runs for a slice, then it is the next one's
turn, in the order in which they came; alone it runs on. A change to another engine's work takes
`switch_s`, and what is unfinished goes on later, nothing of it lost. An endless slice lets every step run
to its end. Left out: engines side by side on parts of the device (MPS, MIG), cold caches after a change.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from mallee.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """`engines` on each device; seconds of a slice and of a change to another engine.

    The defaults are of the order of NVIDIA's: 2 ms, and tenths of a millisecond. They are not
    measured; the bench `bench.contention` says how much hangs on them.
    """

    engines: int = 1
    slice_s: float = 0.002
    switch_s: float = 0.0002

    def validate(self) -> "DeviceConfig":
        """Itself. Raises ConfigError."""
        if self.engines < 1:
            raise ConfigError(f"engines_per_device={self.engines}: give at least 1")
        if not self.slice_s > 0.0:
            raise ConfigError(f"slice_s={self.slice_s}: give more than 0 (infinity: whole steps)")
        if not 0.0 <= self.switch_s < inf:
            raise ConfigError(f"switch_s={self.switch_s}: give 0 or more")
        return self


class Done(NamedTuple):
    """The end of a piece of work."""

    tenant: int
    at: float


class DeviceStats(NamedTuple):
    """Seconds of work that ran, seconds that changes took, and how many there were."""

    busy_s: float
    switching_s: float
    num_switches: int


class SharedDevice:
    """Work of several tenants in virtual time. `due`: until then nothing ends or changes.

    Each tenant has at most one piece of work. The driver calls `pop` at `due`, or later, until it gives
    None; between two calls tenants may begin their next work at the end of their last.
    """

    def __init__(self, config: DeviceConfig) -> None:
        self._slice_s = config.slice_s
        self._switch_s = config.switch_s
        self._now = 0.0
        self._coming: list[tuple[float, int, int, float]] = []  # at, order, tenant, seconds
        self._order = 0
        self._waiting: deque[int] = deque()
        self._left: dict[int, float] = {}  # seconds, of those that wait
        self._running: int | None = None
        self._last: int | None = None  # that ran
        self._start = self._end = 0.0  # of the work that runs, without a break
        self._slice_end = inf
        self._busy_s = self._switching_s = 0.0
        self._num_switches = 0

    @property
    def due(self) -> float:
        at = self._coming[0][0] if self._coming else inf
        if self._running is not None:
            at = min(at, self._end)
            if self._waiting:
                at = min(at, self._slice_end)
        return max(at, self._now)

    def begin(self, tenant: int, at: float, work_s: float) -> None:
        """Work of `work_s` seconds is there from `at` on, or from now if that is over."""
        self._order += 1
        heapq.heappush(self._coming, (max(at, self._now), self._order, tenant, work_s))

    def leave(self, tenant: int, now: float) -> None:
        """Forget the work of a tenant, if it has any. Nothing may be due before `now`."""
        self._now = max(self._now, now)
        self._coming = [entry for entry in self._coming if entry[2] != tenant]
        heapq.heapify(self._coming)
        if self._running == tenant:
            self._stop(self._now)
            self._next(self._now)
        elif self._left.pop(tenant, None) is not None:
            self._waiting.remove(tenant)

    def pop(self, now: float) -> Done | None:
        """The first end until `now`, None if there is none."""
        while (at := self.due) <= now and at < inf:
            self._now = at
            while self._coming and self._coming[0][0] <= at:
                _, _, tenant, seconds = heapq.heappop(self._coming)
                self._join(tenant, seconds, at)
            running = self._running
            if running is None:
                self._next(at)
            elif self._end <= at:
                self._stop(at)
                self._next(at)
                return Done(running, at)
            elif self._waiting and self._slice_end <= at:
                self._left[running] = self._end - at
                self._waiting.append(running)
                self._stop(at)
                self._next(at)
        return None

    def stats(self) -> DeviceStats:
        """Without the work that runs."""
        return DeviceStats(self._busy_s, self._switching_s, self._num_switches)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        assert len(set(self._waiting)) == len(self._waiting), "a tenant waits twice"
        assert set(self._waiting) == set(self._left), "work without a place in the queue"
        assert self._running not in self._left, "what runs also waits"
        assert self._running is not None or not self._waiting, "nothing runs, and work waits"

    def _join(self, tenant: int, seconds: float, at: float) -> None:
        assert tenant not in self._left, f"tenant {tenant} has work already"
        assert tenant != self._running, f"tenant {tenant} has work already"
        if self._running is not None and not self._waiting and self._slice_s < inf:
            # It was alone, its slices passed unseen: the present one ends where one of them does.
            passed = ceil(max(at - self._start, 0.0) / self._slice_s)
            self._slice_end = self._start + max(1, passed) * self._slice_s
        self._left[tenant] = seconds
        self._waiting.append(tenant)

    def _next(self, at: float) -> None:
        if not self._waiting:
            return
        tenant = self._waiting.popleft()
        change_s = self._switch_s if self._last not in (None, tenant) else 0.0
        self._num_switches += self._last not in (None, tenant)
        self._switching_s += change_s
        self._running = self._last = tenant
        self._start = at + change_s
        self._end = self._start + self._left.pop(tenant)
        self._slice_end = self._start + self._slice_s

    def _stop(self, at: float) -> None:
        self._busy_s += max(0.0, at - self._start)
        self._running = None
