"""Rank correlation, which no stretching of either side changes."""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.float64] | npt.NDArray[np.int64] | npt.NDArray[np.int32]

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


def _ranks(values: Numbers) -> npt.NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middles: npt.NDArray[np.float64] = ends - (counts - 1) / 2.0
    return middles[place.reshape(-1)]
