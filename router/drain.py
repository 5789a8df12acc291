"""How fast a queue drains, and so when to come back to a full one."""

import math
from typing import Final

RATE_WINDOW_S: Final = 10.0
MIN_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0


class DrainRate:
    """Departures per second, over about the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = -math.inf
        self._since: float | None = None

    def departed(self, now: float) -> None:
        if self._since is None:
            self._since = now
        self._rate = self._decayed(now) + 1.0 / RATE_WINDOW_S
        self._at = now

    def retry_after_s(self, waiting: float, now: float) -> float:
        """Until `waiting` have departed at this rate, within the bounds; the least before any has."""
        if self._since is None:
            return MIN_RETRY_S
        # A young average has not seen a whole window yet.
        seen = -math.expm1(-max(now - self._since, 1.0) / RATE_WINDOW_S)
        rate = self._decayed(now) / seen
        if waiting >= MAX_RETRY_S * rate:
            return MAX_RETRY_S
        return max(MIN_RETRY_S, waiting / rate)

    def _decayed(self, now: float) -> float:
        return self._rate * math.exp(min(0.0, self._at - now) / RATE_WINDOW_S)
