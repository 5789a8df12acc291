"""A bound on the bandwidth that moves take while answers are drawn."""

from collections.abc import Callable
from threading import Lock


class Pace:
    """Has those who move bytes wait, so that together they move at most `bytes_s` (0: any) a second."""

    def __init__(
        self, bytes_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._bytes_s = bytes_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0
        self._lock = Lock()

    def spent(self, nbytes: int) -> None:
        """So many bytes were moved: return when more may be."""
        if not self._bytes_s:
            return
        with self._lock:
            now = self._clock()
            self._free_at = max(now, self._free_at) + nbytes / self._bytes_s
            wait_s = self._free_at - now
        self._sleep(wait_s)
