"""Quantile tables: samples as groups of values, with the mean and spread of each group.

A table is a sample sorted and cut into groups of `K` values or more, finer at both ends. It holds no
value, but keeps means exactly, and a group whose values are equal (a limit, a zero) stays so. Dependence
between marks is a Gaussian copula: correlations of normal scores, which tell nothing of the values.
"""

from dataclasses import dataclass
from math import erf, sqrt
from typing import Final

import numpy as np

from mallee.traces.numbers import Floats, Int32s, Ints

K: Final = 20
"""No number of a shareable model is of fewer values than this."""
_GROUPS: Final = 64
_GRID: Final = np.linspace(-6.0, 6.0, 4801)
_NORMAL: Final = np.array([0.5 * (1.0 + erf(z / sqrt(2.0))) for z in _GRID.tolist()])


def normal_cdf(scores: Floats) -> Floats:
    """Shares below normal scores, in (0, 1)."""
    found: Floats = np.interp(scores, _GRID, _NORMAL)
    return found


def normal_scores(shares: Floats) -> Floats:
    """The inverse of `normal_cdf`."""
    found: Floats = np.interp(shares, _NORMAL, _GRID)
    return found


@dataclass(frozen=True, slots=True)
class Tables:
    """Many tables end to end. The groups of table t have `edges` in [t, t + 1): t plus the share below."""

    counts: Ints  # values behind each table
    edges: Floats  # of all groups; where each begins
    widths: Floats  # share of each
    means: Floats
    spreads: Floats  # values of a group are mean +- spread; of a table's last, mean - spread and up

    def draw(self, table: Ints, shares: Floats) -> Floats:
        """The value of each of `table` that has such a share of its values below.

        The last group of a table is as long as an exponential tail, others are even.
        """
        at = table + np.clip(shares, 0.0, 1.0 - 1e-9)
        group = np.searchsorted(self.edges, at, side="right") - 1
        inside = np.clip((at - self.edges[group]) / self.widths[group], 0.0, 1.0)
        is_last = self.edges[group] + 1.25 * self.widths[group] > table + 1.0
        least = 0.5 / (self.counts[table] * self.widths[group])
        tail = -np.log(np.maximum(1.0 - inside, least)) - 1.0
        drawn: Floats = self.means[group] + self.spreads[group] * np.where(
            is_last, tail, 2.0 * inside - 1.0
        )
        return drawn

    def spread_out(self, table: int, count: int, rng: np.random.Generator) -> Floats:
        """`count` values of one table in no order, evenly over it."""
        shares = (rng.permutation(count) + rng.random(count)) / max(count, 1)
        return self.draw(np.full(count, table, np.int64), shares)


class TableBuilder:
    """Collects tables. `add_if` gives -1 where there are too few values for one."""

    def __init__(self) -> None:
        self._parts: list[tuple[Floats, Floats, Floats, Floats]] = []
        self._counts: list[int] = []

    def add(self, values: Floats | Ints | Int32s) -> int:
        """Add a table of at least `K` values; returns its number."""
        assert len(values) >= K, "cells with fewer values are merged before"
        ordered = np.sort(values.astype(np.float64))
        cuts = _cuts(len(ordered))
        sizes = np.diff(cuts)
        means = np.add.reduceat(ordered, cuts[:-1]) / sizes
        squares = np.add.reduceat((ordered - np.repeat(means, sizes)) ** 2, cuts[:-1]) / sizes
        # a group stays on its side of the middle between its mean and the next one's
        room = np.full(len(sizes) + 1, np.inf)
        room[1:-1] = np.diff(means) / 2
        spreads = np.sqrt(3.0 * squares)
        spreads[-1] = np.sqrt(squares[-1])
        spreads = np.minimum(spreads, np.minimum(room[:-1], room[1:]))
        if ordered[0] >= 0:
            spreads = np.minimum(spreads, means)
        number = len(self._counts)
        shares = cuts / len(ordered)
        self._parts.append((number + shares[:-1], np.diff(shares), means, spreads))
        self._counts.append(len(ordered))
        return number

    def add_if(self, values: Floats | Ints | Int32s) -> int:
        """The table of `values` if they are enough for one, else -1."""
        return self.add(values) if len(values) >= K else -1

    def build(self) -> Tables:
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        return Tables(np.array(self._counts, np.int64), *columns)


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
    counts = np.bincount(cells[order]) if len(cells) else np.zeros(0, np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    scores = np.empty(len(values))
    sizes = np.repeat(counts, counts)
    scores[order] = normal_scores((np.arange(len(values)) - first + 0.5) / sizes)
    return scores
