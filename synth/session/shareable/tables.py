"""Cells: what is known of values that belong to a key, told by groups of `K` values or more.

Keys have a major part, which is never mixed, and a minor one, whose neighbours are joined until a cell has
enough. A cell holds each of its columns sorted and cut into groups, finer at both ends: no value, but means
exactly, and a group whose values are equal (a limit, a zero) stays so. Dependence between columns is a
Gaussian copula: correlations of normal scores, which tell nothing of the values.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.extras import scipy
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

K: Final = 20
"""No number of a shareable model is of fewer values than this."""
MINORS: Final = 1 << 12
"""A key is its major part times this plus its minor one."""
_GROUPS: Final = 64
_LAG: Final = 4  # steps apart, where only the thread itself still ties marks


@dataclass(frozen=True, slots=True)
class Cells:
    """Quantile tables of all columns, cell by cell. Majors of fewer than `K` values have none."""

    begins: Ints  # lowest key of each cell
    counts: Ints  # values of each column in each cell
    edges: Floats  # of all groups: the cell's number plus the share of its values below
    means: Floats  # [groups, columns]
    spreads: (
        Floats  # [groups, columns]: mean +- spread; of a cell's last group, mean - spread and up
    )

    @staticmethod
    def fit(keys: Ints, values: Floats, least: int = K) -> "Cells":
        """`values` [keys, columns]. Cells of fewer than `least` are joined with their neighbours."""
        begins = joined(keys, np.ones(len(keys)), least)
        cell = cells_of(begins, keys)
        counts, edges, means, spreads = [], [], [], []
        for one in range(len(begins)):
            mine = np.sort(values[cell == one], axis=0)
            cuts = _cuts(len(mine))
            found = _grouped(mine, cuts)
            counts.append(len(mine))
            edges.append(one + cuts[:-1] / len(mine))
            means.append(found[0])
            spreads.append(found[1])
        none = np.zeros((0, values.shape[1]))
        return Cells(
            begins=begins,
            counts=np.array(counts, np.int64),
            edges=np.concatenate([np.zeros(0), *edges]),
            means=np.concatenate([none, *means]),
            spreads=np.concatenate([none, *spreads]),
        )

    def draw(self, keys: Ints, shares: Floats) -> Floats:
        """Values [keys, columns] that have such `shares` of their cell's values below.

        The last group of a cell is as long as an exponential tail, others are even.
        """
        cell = cells_of(self.begins, keys)[:, None]
        at = cell + np.clip(shares, 0.0, 1.0 - 1e-9)
        group = np.searchsorted(self.edges, at, side="right") - 1
        ends = np.append(self.edges[1:], len(self.counts))
        inside = (at - self.edges[group]) / (ends - self.edges)[group]
        tail = -np.log(np.maximum(1.0 - inside, 0.5 / K)) - 1.0
        off = np.where(ends[group] > cell + 1.0 - 1e-12, tail, 2.0 * inside - 1.0)
        columns = np.arange(shares.shape[1])
        found: Floats = self.means[group, columns] + self.spreads[group, columns] * off
        return found

    def spread_out(self, key: int, count: int, rng: np.random.Generator) -> Floats:
        """`count` values of each column of one cell in no order, evenly over it."""
        columns = range(self.means.shape[1])
        even = np.stack([rng.permutation(count) for _ in columns], 1)
        shares = (even + rng.random(even.shape)) / max(count, 1)
        return self.draw(np.full(count, key, np.int64), shares)


@dataclass(frozen=True, slots=True)
class Chances:
    """The chance of an event by key, each of `K` events or more; 0 of majors that had fewer."""

    begins: Ints  # lowest key of each cell
    chance: Floats

    @staticmethod
    def fit(keys: Ints, hits: Floats, weights: Floats) -> "Chances":
        """`hits` is the part of each key's weight that had the event."""
        begins = joined(keys, hits > 0, K)
        cell = cells_of(begins, keys)
        one, other = (np.bincount(cell + 1, each, len(begins) + 1)[1:] for each in (hits, weights))
        return Chances(begins, one / np.maximum(1.0, other))

    def at(self, keys: Ints) -> Floats:
        return np.append(self.chance, 0.0)[cells_of(self.begins, keys)]


def joined(keys: Ints, counted: Floats | Bools, least: int) -> Ints:
    """The lowest key of each cell: neighbours are joined until `least` are counted, if there are so many.

    Majors that count fewer than `K` have none. Keys that count nothing stay apart from one that has enough.
    """
    begins: list[int] = []
    found, place = np.unique(keys, return_inverse=True)
    counts = np.bincount(place, counted, len(found))
    left = np.bincount(found // MINORS, counts)
    major, inside = -1, 0.0
    for key, count in zip(found.tolist(), counts.tolist(), strict=True):
        if key // MINORS != major:
            major, inside = key // MINORS, 0.0
            if left[major] >= K:
                begins.append(major * MINORS)
        elif left[major] >= least and (inside >= least or (not inside and count >= least)):
            begins.append(key)
            inside = 0.0
        inside += count
        left[major] -= count
    return np.array(begins, np.int64)


def cells_of(begins: Ints, keys: Ints) -> Ints:
    """The cell of each key; -1: none."""
    cell = np.searchsorted(begins, keys, side="right") - 1
    return np.where(np.append(begins, -1)[cell] // MINORS == keys // MINORS, cell, -1)


def _grouped(ordered: Floats, cuts: Ints) -> tuple[Floats, Floats]:
    """Means and spreads of the groups of sorted columns."""
    sizes = np.diff(cuts)[:, None]
    means = np.add.reduceat(ordered, cuts[:-1]) / sizes
    squares = np.maximum(0.0, np.add.reduceat(ordered**2, cuts[:-1]) / sizes - means**2)
    # a group stays on its side of the middle between its mean and the next one's
    room = np.pad(np.diff(means, axis=0) / 2, ((1, 1), (0, 0)), constant_values=np.inf)
    spreads = np.minimum(np.sqrt(3.0 * squares), np.minimum(room[:-1], room[1:]))
    spreads[-1] = np.minimum(spreads[-1], np.sqrt(squares[-1]))
    return means, np.where(ordered[0] >= 0, np.minimum(spreads, means), spreads)


def _cuts(count: int) -> Ints:
    """Begins and ends of the groups of a sorted sample of `count`."""
    num = max(1, min(_GROUPS, count // K))
    cuts = set(np.linspace(0, count, num + 1).astype(np.int64).tolist())
    end = count // num
    while (end := end // 2) >= K:
        cuts |= {end, count - end}
    return np.array(sorted(cuts), np.int64)


def fit_copula(cells: Ints, values: Floats, thread: Int32s, position: Int32s) -> Floats:
    """[2, columns, columns] factors of the scores: of what a whole thread keeps, of what each step brings.

    Scores are normal ranks in cells; equal values have no order. Products of scores some steps apart are
    what the thread keeps.
    """
    rng = np.random.default_rng(0)
    scores = np.stack([_scores(cells, column, rng) for column in values.T], 1)
    order = np.lexsort((position, thread))
    one, other = order[:-_LAG], order[_LAG:]
    is_pair = thread[one] == thread[other]
    products = scores[one[is_pair]].T @ scores[other[is_pair]] / max(1, is_pair.sum())
    of_thread = _root(products if is_pair.sum() >= 10 * K else 0 * products, 1e-9)
    whole = scores.T @ scores / len(scores)
    return np.stack([of_thread, _root(whole - of_thread @ of_thread.T, 0.02)])


def _scores(cells: Ints, values: Floats, rng: np.random.Generator) -> Floats:
    """Normal score of each value among those of its cell."""
    order = np.lexsort((rng.random(len(values)), values, cells))
    _, first, sizes = np.unique(cells[order], return_index=True, return_counts=True)
    place = np.arange(len(values)) - np.repeat(first, sizes)
    scores = np.empty(len(values))
    scores[order] = scipy("special").ndtri((place + 0.5) / np.repeat(sizes, sizes))
    return scores


def _root(matrix: Floats, least: float) -> Floats:
    """A matrix that times its transpose is about this one, with no eigenvalue below `least`."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    found: Floats = vectors * np.sqrt(np.maximum(values, least))
    return found
