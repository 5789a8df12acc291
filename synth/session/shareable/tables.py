"""Quantile tables: samples as the means of groups of values.

A table is a sample sorted and cut into groups of `K` values or more, finer at both ends. It holds no
value, but keeps means exactly, and a group whose values are equal (a limit, a zero) stays so. Dependence
between marks is a Gaussian copula: correlations of normal scores, which tell nothing of the values.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.extras import scipy
from mallee.traces.numbers import Floats, Int32s, Ints

K: Final = 20
"""No number of a shareable model is of fewer values than this."""
_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class Tables:
    """Many tables end to end. The groups of table t have `edges` in [t, t + 1): t plus the share below."""

    counts: Ints  # values behind each table
    edges: Floats  # of all groups; where each begins
    means: Floats
    spreads: Floats  # values of a group are mean +- spread; of a table's last, mean - spread and up

    def draw(self, table: Ints, shares: Floats) -> Floats:
        """The value of each of `table` that has such a share of its values below.

        The last group of a table is as long as an exponential tail, others are even.
        """
        at = table + np.clip(shares, 0.0, 1.0 - 1e-9)
        group = np.searchsorted(self.edges, at, side="right") - 1
        ends = np.append(self.edges[1:], len(self.counts))
        inside = (at - self.edges[group]) / (ends - self.edges)[group]
        tail = -np.log(np.maximum(1.0 - inside, 0.5 / K)) - 1.0
        off = np.where(ends[group] > table + 1.0 - 1e-12, tail, 2.0 * inside - 1.0)
        return self.means[group] + self.spreads[group] * off

    def spread_out(self, table: int, count: int, rng: np.random.Generator) -> Floats:
        """`count` values of one table in no order, evenly over it; none of no table."""
        shares = (rng.permutation(count) + rng.random(count)) / max(count, 1)
        return self.draw(np.full(count, table, np.int64), shares)


class TableBuilder:
    """Collects tables."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._edges: list[Floats] = []
        self._means: list[Floats] = []
        self._spreads: list[Floats] = []

    def add(self, values: Floats | Ints | Int32s) -> int:
        """Add a table of `values` and return its number; -1 if they are too few for one."""
        count = len(values)
        if count < K:
            return -1
        cuts = _cuts(count)
        ordered = np.sort(values.astype(np.float64))
        means = np.add.reduceat(ordered, cuts[:-1]) / np.diff(cuts)
        squares = np.add.reduceat(ordered**2, cuts[:-1]) / np.diff(cuts) - means**2
        # a group stays on its side of the middle between its mean and the next one's
        room = np.concatenate([[np.inf], np.diff(means) / 2, [np.inf]])
        spreads = np.minimum(
            np.sqrt(3.0 * np.maximum(0.0, squares)), np.minimum(room[:-1], room[1:])
        )
        spreads[-1] = min(spreads[-1], np.sqrt(max(0.0, squares[-1])))
        self._spreads.append(np.minimum(spreads, means) if ordered[0] >= 0 else spreads)
        self._means.append(means)
        self._edges.append(len(self._counts) + cuts[:-1] / count)
        self._counts.append(count)
        return len(self._counts) - 1

    def build(self) -> Tables:
        columns = (np.concatenate(each) for each in (self._edges, self._means, self._spreads))
        return Tables(np.array(self._counts), *columns)


def _cuts(count: int) -> Ints:
    """Begins and ends of the groups of a sorted sample of `count`."""
    num = max(1, min(_GROUPS, count // K))
    cuts = set(np.linspace(0, count, num + 1).astype(np.int64).tolist())
    end = count // num
    while (end := end // 2) >= K:
        cuts |= {end, count - end}
    return np.array(sorted(cuts), np.int64)


def scores_in(cells: Ints, values: Floats | Ints, rng: np.random.Generator) -> Floats:
    """Normal score of each value among those of its cell; equal values in no order."""
    order = np.lexsort((rng.random(len(values)), values, cells))
    counts = np.bincount(cells[order])
    first, sizes = (np.repeat(each, counts) for each in (np.cumsum(counts) - counts, counts))
    scores = np.empty(len(values))
    scores[order] = scipy("special").ndtri((np.arange(len(values)) - first + 0.5) / sizes)
    return scores
