"""Virtual time: what is due, in order."""

import heapq
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from mallee.protocol.errors import ConfigError

Act: TypeAlias = Callable[[Any], None]


MAX_S: Final = 1e9  # 30 years; with more, float64 seconds are too coarse for waits
_LAST: Final = 1 << 60  # added to the order of what comes last


class Clock:
    """Runs what is due at its time, so that runs repeat: at equal times what was added first.

    Ends of engines' steps, and their begins, come after all else of the same time: a command at the very
    end of a step is there for the next one.
    """

    __slots__ = ("_due", "_order", "now", "num_events")

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.num_events = 0  # that were run
        self._due: list[tuple[float, int, Act, Any]] = []
        self._order = 0

    def read(self) -> float:
        """The time, for those that want a function."""
        return self.now

    def at(self, time: float, act: Act, subject: Any) -> None:
        """`act(subject)` is called at `time`, which must not be over. Raises ConfigError beyond MAX_S."""
        assert time >= self.now, f"{time} is over, it is {self.now}"
        if time > MAX_S:
            raise _too_late(time)
        self._order += 1
        heapq.heappush(self._due, (time, self._order, act, subject))

    def run(self) -> None:
        """Until nothing is due any more."""
        due, pop, num = self._due, heapq.heappop, 0
        try:
            while due:
                self.now, _, act, subject = pop(due)
                num += 1
                act(subject)
        finally:
            self.num_events += num

    def at_last(self, time: float, act: Act, subject: Any) -> None:
        """As `at`, after everything else of that time."""
        assert time >= self.now, f"{time} is over, it is {self.now}"
        if time > MAX_S:
            raise _too_late(time)
        self._order += 1
        heapq.heappush(self._due, (time, self._order + _LAST, act, subject))

    def __len__(self) -> int:
        """Acts that are still to be run."""
        return len(self._due)


def _too_late(time: float) -> ConfigError:
    return ConfigError(
        f"virtual time {time:g} s: replays end before {MAX_S:g} s; look at the trace's times (tool waits"
        " too), at the speedup and at the timing"
    )
