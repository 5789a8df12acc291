"""Loans of one process in one direction, for metrics: counted from many threads."""

from threading import Lock

from mallee.protocol.events import LoanUse


class Counts:
    """Counts loans, their bytes, and the seconds in which those crossed."""

    __slots__ = (
        "_lock",
        "_nbytes",
        "_num_failed",
        "_num_granted",
        "_num_open",
        "_num_refused",
        "_seconds",
    )

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_open = self._num_granted = self._num_refused = self._num_failed = 0
        self._nbytes = 0
        self._seconds = 0.0

    def refused(self) -> None:
        """Count a question that got an error for an answer."""
        with self._lock:
            self._num_refused += 1

    def failed(self) -> None:
        """Count a connection or a loan that ended by an error."""
        with self._lock:
            self._num_failed += 1

    def opened(self) -> None:
        """Count a loan that has begun."""
        with self._lock:
            self._num_open += 1
            self._num_granted += 1

    def moved(self, nbytes: int, seconds: float) -> None:
        """Count blocks that crossed."""
        with self._lock:
            self._nbytes += nbytes
            self._seconds += seconds

    def closed(self) -> None:
        """Count a loan that is over."""
        with self._lock:
            self._num_open -= 1

    @property
    def use(self) -> LoanUse:
        with self._lock:
            return LoanUse(
                self._num_open,
                self._num_granted,
                self._num_refused,
                self._num_failed,
                self._nbytes,
                self._seconds,
            )
