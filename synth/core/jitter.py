"""Values that are like a source's without being its own."""

from typing import Final

import numpy as np

from mallee.traces.numbers import Floats, Int32s, Ints

_REACH: Final = 0.004  # of all ranks, up and down
_TAIL_REACH: Final = 0.1  # of the ranks to the nearer end: a tail's mean is not to move


class Ranks:
    """A sample by rank. What is drawn near a value's rank lies between its neighbours in the sample.

    So a distribution keeps its shape: a value that many share (a limit, a zero) is kept, since its
    neighbours are equal, and where values are sparse they spread.
    """

    def __init__(self, values: Floats) -> None:
        self._sorted = np.sort(values)
        self._rank = np.empty(len(values), np.float64)
        self._rank[np.argsort(values, kind="stable")] = np.arange(len(values))

    def near(self, rows: Int32s | Ints, rng: np.random.Generator) -> Floats:
        """For each of `rows` of the sample a value near its own."""
        last = len(self._sorted) - 1
        rank = self._rank[rows]
        reach = np.minimum(_REACH * last, _TAIL_REACH * np.minimum(rank, last - rank))
        at = rank + reach * rng.uniform(-1, 1, len(rows))
        low = np.floor(at).astype(np.int64)
        share = at - low
        high = np.minimum(low + 1, last)
        drawn: Floats = (1 - share) * self._sorted[low] + share * self._sorted[high]
        return drawn
