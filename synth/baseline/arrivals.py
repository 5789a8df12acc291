"""Arrivals as bursts: how many come at one time, and how long until the next; drawn independently.

Whatever makes rates change over minutes is lost by that.
"""

from dataclasses import dataclass

import numpy as np

from mallee.synth.core.streams import places, stream
from mallee.traces.numbers import Floats, Ints


@dataclass(frozen=True, slots=True)
class Bursts:
    """Samples of the source."""

    sizes: Ints  # requests that came at one time, at least 1 each
    gaps_s: Floats  # between times at which some came; empty if all came at one


def fit_bursts(arrival_s: Floats) -> Bursts:
    """`arrival_s` increases."""
    times, sizes = np.unique(arrival_s, return_counts=True)
    return Bursts(sizes.astype(np.int64), np.diff(times))


class Arrivals:
    """Draws arrival times, any number at once: how many doesn't change them."""

    def __init__(self, bursts: Bursts, *, seed: int, speedup: float) -> None:
        self._sizes = bursts.sizes
        self._gaps_s = bursts.gaps_s / speedup if len(bursts.gaps_s) else np.zeros(1)
        self._size_rng = stream(seed, "burst sizes")
        self._gap_rng = stream(seed, "gaps")
        self._next_s = 0.0
        self._left = np.empty(0)  # drawn already

    def take(self, count: int) -> Floats:
        """The next `count` times in seconds; the first of all is 0."""
        drawn = [self._left]
        missing = count - len(self._left)
        while missing > 0:
            drawn.append(self._bursts(missing))
            missing -= len(drawn[-1])
        times = np.concatenate(drawn)
        self._left = times[count:]
        return times[:count]

    def _bursts(self, wanted: int) -> Floats:
        """At least one burst; about `wanted` requests."""
        num = int(wanted / self._sizes.mean()) + 1
        sizes = self._sizes[places(self._size_rng, num, len(self._sizes))]
        gaps = self._gaps_s[places(self._gap_rng, num, len(self._gaps_s))]
        times = np.cumsum(np.concatenate([[self._next_s], gaps]))
        self._next_s = float(times[-1])
        return np.repeat(times[:-1], sizes)
