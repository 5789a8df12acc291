"""Rank correlation, which no stretching of either side changes."""

from typing import Final, TypeAlias

import numpy as np

from mallee.traces.numbers import Floats, Int32s, Ints

Numbers: TypeAlias = Floats | Ints | Int32s

_FEWEST: Final = 8  # pairs; of fewer a correlation says nothing


def spearman(x: Numbers, y: Numbers) -> float:
    """Correlation of the ranks, ties at their mean; NaN of less than 8 pairs or where one is constant."""
    if len(x) < _FEWEST:
        return float("nan")
    a, b = _ranks(x), _ranks(y)
    a -= a.mean()
    b -= b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else float("nan")


def _ranks(values: Numbers) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middles: Floats = ends - (counts - 1) / 2.0
    return middles[place.reshape(-1)]


# Members of a group that are alive at a time.


def others_alive(group: Ints, begin_s: Floats, end_s: Floats) -> Floats:
    """Per member: how many others of its `group` (numbers from 0) are alive at its begin.

    Members that begin or end at that moment count as alive.
    """
    if not len(group):
        return np.empty(0)
    moments = dense(np.concatenate([begin_s, end_s]))
    # All groups on one axis, one after another: each as long as there are moments.
    shift = group * (int(moments.max()) + 1)
    begin, end = shift + moments[: len(group)], shift + moments[len(group) :]
    begun = np.searchsorted(np.sort(begin), begin, side="right")
    ended = np.searchsorted(np.sort(end), begin, side="left")
    alive: Floats = (begun - ended - 1).astype(np.float64)
    return alive


def dense(values: Int32s | Ints | Floats) -> Ints:
    """Numbers from 0 in the order of the values, equal ones for equal values."""
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)
