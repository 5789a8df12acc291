"""Arrivals as bursts: how many come at one time, and how long until the next; drawn independently.

Whatever makes rates change over minutes is lost by that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.streams import places, stream
from mallee.traces.numbers import Floats, Ints

_CHUNK: Final = 1024  # bursts that are drawn at once


@dataclass(frozen=True, slots=True)
class Bursts:
    """Samples of the source."""

    sizes: Ints  # requests that came at one time, at least 1 each
    gaps_s: Floats  # between times at which some came; empty if all came at one


def fit_bursts(arrival_s: Floats) -> Bursts:
    """`arrival_s` increases."""
    times, sizes = np.unique(arrival_s, return_counts=True)
    return Bursts(sizes.astype(np.int64), np.diff(times))


def arrivals(bursts: Bursts, *, seed: int, speedup: float) -> Iterator[float]:
    """Arrival times in seconds without end; the first is 0."""
    sizes, gaps_s = bursts.sizes, bursts.gaps_s / speedup if len(bursts.gaps_s) else np.zeros(1)
    size_rng, gap_rng = stream(seed, "burst sizes"), stream(seed, "gaps")
    next_s = 0.0
    while True:
        gaps = gaps_s[places(gap_rng, _CHUNK, len(gaps_s))]
        *times, next_s = np.cumsum(np.append(next_s, gaps)).tolist()
        yield from np.repeat(times, sizes[places(size_rng, _CHUNK, len(sizes))]).tolist()
