"""The time that a device stands still between two pieces of work: it waits for the host.

Each piece lies between two marks in the order of the device's work, so that a piece that was enqueued while
the device was busy leaves no gap, whatever the host did meanwhile. Time in which there is no work counts not.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class HostGap(NamedTuple):
    """Pieces of work that came after another one, and the seconds between them. Both only grow."""

    num_pieces: int
    seconds: float


class Marks(Protocol):
    """Times in the order of a device's work."""

    def mark(self) -> Any:
        """The time at which the device is through with all that was enqueued so far, or will be."""
        ...

    def seconds(self, first: Any, second: Any) -> float | None:
        """From one mark to another; None as long as the device has not come to it."""
        ...


class ClockMarks:
    """Marks of work that is done when the call for it returns."""

    __slots__ = ("_clock",)

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock()

    def seconds(self, first: float, second: float) -> float:
        return second - first


class WorkGaps:
    """Adds up the gaps of one device. Belongs to the thread that enqueues its work."""

    __slots__ = ("_end", "_marks", "_num", "_open", "_seconds")

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._end: Any = None  # of the last piece, until the next one begins
        self._open: deque[tuple[Any, Any]] = deque()  # gaps of which the length is not known yet
        self._num, self._seconds = 0, 0.0

    def begin(self) -> None:
        """A piece of work is about to be enqueued."""
        if self._end is not None:
            self._open.append((self._end, self._marks.mark()))
            self._end = None
            self._settle()

    def end(self) -> None:
        """All of it is enqueued."""
        self._end = self._marks.mark()

    def rest(self) -> None:
        """There is no work: the time until the next piece is no gap."""
        self._end = None

    def stats(self) -> HostGap:
        self._settle()
        return HostGap(self._num, self._seconds)

    def _settle(self) -> None:
        while self._open:
            seconds = self._marks.seconds(*self._open[0])
            if seconds is None:
                return
            self._open.popleft()
            self._num += 1
            self._seconds += max(0.0, seconds)
