"""Arrivals: gaps, variation of counts over time, ticks that a recorder left."""

from typing import Final, NamedTuple

import numpy as np

from mallee.traces.numbers import Floats, Ints

BINS_S: Final = (1.0, 10.0, 60.0, 300.0)
_FEWEST_BINS: Final = 8
_JITTER_MS: Final = 3.0  # of recorded ticks
_FEWEST_TICKS: Final = 8  # fewer times may be whole seconds by chance


class Counts(NamedTuple):
    """Of requests in bins of one width: variance / mean, and correlation of neighbours (NaN: constant)."""

    dispersion: float
    autocorrelation: float


def counts_of(arrival_s: Floats) -> dict[float, Counts]:
    """By width in seconds; widths of which the trace has less than 8 whole bins are left out.

    Bins begin at the first arrival. A last bin that the trace does not fill is not counted, unless
    it ends on the last arrival. 1 is the dispersion of a Poisson process, at every width.
    """
    found = {}
    span = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    for width in BINS_S:
        num = int(span / width)
        if num >= _FEWEST_BINS:
            place = ((arrival_s - arrival_s[0]) / width).astype(np.int64)
            bins, counts = np.unique(place[place < num], return_counts=True)
            found[width] = _counts(bins, counts, num)
    return found


def _counts(bins: Ints, counts: Ints, num: int) -> Counts:
    """Of `num` bins, those not in `bins` (ascending) empty: a file may leave years out."""
    mean = float(counts.sum()) / num
    apart = counts - mean
    squares = float(apart @ apart) + (num - len(bins)) * mean * mean
    if len(bins) == num and not np.ptp(counts):
        return Counts(0.0, float("nan"))
    is_next = np.diff(bins) == 1
    # Sum of (a - mean) (b - mean) over neighbours, of which all but the two at the ends are in two pairs.
    products = float(counts[1:][is_next] @ counts[:-1][is_next])
    ends = float(counts[0] * (bins[0] == 0) + counts[-1] * (bins[-1] == num - 1))
    lagged = products - mean * (2 * float(counts.sum()) - ends) + (num - 1) * mean * mean
    return Counts(squares / num / mean, lagged / squares)


def variation(values: Floats) -> float:
    """Standard deviation / mean; NaN of nothing or zeros."""
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.std()) / mean if mean > 0 else float("nan")


def tick_of(arrival_s: Floats) -> float | None:
    """The tick in seconds to which all arrivals were cut, if most share theirs with others; else None.

    Ticks of a second and more, give or take 3 ms. They are told from exact times by how many requests
    come at the very same time, so a trace with few requests has none.
    """
    times = np.unique(np.round(1000 * (arrival_s - arrival_s[:1])))
    times = times[np.diff(times, prepend=-np.inf) > _JITTER_MS]
    steps = np.diff(times)
    if not _FEWEST_TICKS <= len(times) <= len(arrival_s) / 2:
        return None
    tick = float(np.median(steps[steps < 1.5 * steps.min()]))
    off = np.abs(times - tick * np.round(times / tick))
    return round(tick) / 1000 if tick >= 1000 and off.max() <= _JITTER_MS else None
