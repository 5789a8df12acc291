"""Distances between samples, neither of which is empty."""

import math
from typing import Final

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.traces.numbers import Floats

_LARGEST: Final = 1 << 20  # of the values that `log2_bins` tells apart


def ks(a: Floats, b: Floats) -> float:
    """Kolmogorov and Smirnov's statistic: the widest gap between the two distribution functions."""
    return float(_gaps(a, b, np.concatenate([a, b])).max())


def w1_share(a: Floats, b: Floats) -> float:
    """Wasserstein's first distance (the mean shift of a value) as a share of a's mean."""
    at = np.sort(np.concatenate([a, b]))
    shift = float(np.sum(_gaps(a, b, at[:-1]) * np.diff(at)))
    return _share(shift, float(np.mean(np.abs(np.sort(a)))))


def _gaps(a: Floats, b: Floats, at: Floats) -> Floats:
    """Between the distribution functions, at each of `at`."""
    shares = [np.searchsorted(np.sort(x), at, side="right") / len(x) for x in (a, b)]
    return np.abs(shares[0] - shares[1])


def relative(a: float, b: float) -> float:
    """(b - a) / a. 0 if both are 0, infinite if only a is."""
    return _share(b - a, abs(a))


def emd(a_depth: Floats, a_width: Floats, b_depth: Floats, b_width: Floats) -> float:
    """Earth mover's distance between histograms of (depth, width), each in doublings, in doublings.

    Values from 1 up; one doubling further in depth costs as much as one in width. Raises ConfigError where
    scipy is missing.
    """
    both = (a_depth, a_width), (b_depth, b_width)
    places = [np.log2(np.clip(each, 1, _LARGEST)).astype(np.int64) for each in both]  # [2, values]
    shape = 1 + np.maximum(*(each.max(axis=1) for each in places))
    counts = [np.zeros(shape), np.zeros(shape)]
    for count, place in zip(counts, places, strict=True):
        np.add.at(count, tuple(place), 1.0)
    return _grid_flow(counts[0] / len(a_depth) - counts[1] / len(b_depth))


def _share(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 0.0 if part == 0 else math.copysign(math.inf, part)


def _grid_flow(surplus: Floats) -> float:
    """The least mass times steps between neighbours that levels `surplus` (sums to 0).

    With city-block distance all mass may go by neighbours, so four flows a cell are enough where
    the general problem has one for each pair of cells. Source: Ling and Okada, EMD-L1, 2007.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array, eye, hstack, kron
    except ModuleNotFoundError as error:
        raise ConfigError("comparing needs scipy: pip install 'mallee[synth]'") from error
    if surplus.size == 1:
        return 0.0
    rows, columns = surplus.shape
    down, across = (eye(num, num - 1) - eye(num, num - 1, k=-1) for num in (rows, columns))
    flows = hstack([kron(down, eye(columns)), kron(eye(rows), across)])  # [cells, neighbours]
    leaving = csr_array(hstack([flows, -flows]))
    # The last row follows from the others; without it rounding can't make them contradict each other.
    solved = linprog(
        np.ones(leaving.shape[1]), A_eq=leaving[:-1], b_eq=surplus.ravel()[:-1], method="highs"
    )
    assert solved.success, solved.message
    return float(solved.fun)
