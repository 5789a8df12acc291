"""Distances between samples: 0 between two empty ones, infinite between an empty one and another."""

import math
from typing import Final

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.traces.numbers import Floats

_LARGEST: Final = 1 << 20  # of the values that `log2_bins` tells apart


def ks(a: Floats, b: Floats) -> float:
    """Kolmogorov and Smirnov's statistic: the widest gap between the two distribution functions."""
    if not len(a) or not len(b):
        return _of_empty(a, b)
    a, b = np.sort(a), np.sort(b)
    at = np.concatenate([a, b])
    below_a = np.searchsorted(a, at, side="right") / len(a)
    below_b = np.searchsorted(b, at, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def w1_share(a: Floats, b: Floats) -> float:
    """Wasserstein's first distance (the mean shift of a value) as a share of a's mean."""
    if not len(a) or not len(b):
        return _of_empty(a, b)
    a, b = np.sort(a), np.sort(b)
    at = np.sort(np.concatenate([a, b]))
    below_a = np.searchsorted(a, at[:-1], side="right") / len(a)
    below_b = np.searchsorted(b, at[:-1], side="right") / len(b)
    shift = float(np.sum(np.abs(below_a - below_b) * np.diff(at)))
    return _share(shift, float(np.mean(np.abs(a))))


def relative(a: float, b: float) -> float:
    """(b - a) / a. 0 if both are 0, infinite if only a is."""
    return _share(b - a, abs(a))


def emd(a_depth: Floats, a_width: Floats, b_depth: Floats, b_width: Floats) -> float:
    """Earth mover's distance between histograms of (depth, width), each in doublings, in doublings.

    Values from 1 up; one doubling further in depth costs as much as one in width. Raises ConfigError where
    scipy is missing.
    """
    if not len(a_depth) or not len(b_depth):
        return _of_empty(a_depth, b_depth)
    a, b = _histogram(a_depth, a_width), _histogram(b_depth, b_width)
    rows, columns = max(a.shape[0], b.shape[0]), max(a.shape[1], b.shape[1])
    surplus = _padded(a, rows, columns) - _padded(b, rows, columns)
    return _grid_flow(surplus)


def _of_empty(a: Floats, b: Floats) -> float:
    return 0.0 if len(a) == len(b) else math.inf


def _share(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 0.0 if part == 0 else math.copysign(math.inf, part)


def _histogram(depth: Floats, width: Floats) -> Floats:
    """Shares by doubling of depth (rows) and of width."""
    row, column = (np.log2(np.clip(x, 1, _LARGEST)).astype(np.int64) for x in (depth, width))
    counts = np.zeros((row.max() + 1, column.max() + 1))
    np.add.at(counts, (row, column), 1.0)
    return counts / len(depth)


def _padded(counts: Floats, rows: int, columns: int) -> Floats:
    return np.pad(counts, ((0, rows - counts.shape[0]), (0, columns - counts.shape[1])))


def _grid_flow(surplus: Floats) -> float:
    """The least mass times steps between neighbours that levels `surplus` (sums to 0).

    With city-block distance all mass may go by neighbours, so four flows a cell are enough where
    the general problem has one for each pair of cells. Source: Ling and Okada, EMD-L1, 2007.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array
    except ModuleNotFoundError as error:
        raise ConfigError("comparing needs scipy: pip install 'mallee[synth]'") from error
    if surplus.size == 1:
        return 0.0
    cell = np.arange(surplus.size).reshape(surplus.shape)
    one = np.concatenate([cell[:-1].ravel(), cell[:, :-1].ravel()])
    other = np.concatenate([cell[1:].ravel(), cell[:, 1:].ravel()])
    begin, end = np.concatenate([one, other]), np.concatenate([other, one])
    edge = np.arange(len(begin))
    signs = np.concatenate([np.ones(len(begin)), -np.ones(len(begin))])
    leaving = coo_array(
        (signs, (np.concatenate([begin, end]), np.concatenate([edge, edge]))),
        shape=(surplus.size, len(begin)),
    )
    # The last row follows from the others; without it rounding can't make them contradict each other.
    solved = linprog(
        np.ones(len(begin)), A_eq=leaving.tocsr()[:-1], b_eq=surplus.ravel()[:-1], method="highs"
    )
    assert solved.success, solved.message
    return float(solved.fun)
