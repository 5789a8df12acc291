"""Kinds of lines: what a shareable model has tables of its own for."""

from typing import Final

import numpy as np

from mallee.synth.session.steps import Steps
from mallee.synth.share.chances import CONTEXTS, context_bins, joined_bins
from mallee.synth.share.tables import K
from mallee.traces.numbers import Floats, Int32s, Ints

_MOST_PARTS: Final = 4
_PART_LINES: Final = 5 * K


def kinds_of(steps: Steps) -> tuple[Ints, Ints, Ints]:
    """(kind of each line; of each kind the sort of lines that it is part of; whether it is spawned).

    Lines of a sort have the same class and depth in the hierarchy. Sorts of fewer than `K` lines are joined
    with the commonest like them (roots, spawned lines, forks); where even that has fewer, they are left
    out: -1. A sort of many lines is several kinds, by how long contexts grow: their limits differ.
    """
    heads = steps.heads
    role = np.where(steps.parent_step[heads] < 0, 0, np.where(steps.is_fork[heads], 2, 1))
    if (role == 2).sum() < K:
        role[role == 2] = 1
    own = steps.kind[heads]
    longest = np.zeros(len(heads))
    np.maximum.at(longest, steps.thread, steps.context)
    of_line = np.full(len(heads), -1, np.int64)
    sorts: list[int] = []
    spawned: list[int] = []
    for each in range(3):
        mine = np.flatnonzero(role == each)
        if len(mine) < K:
            continue
        counts = np.bincount(own[mine])
        is_rare = counts[own[mine]] < K
        _, sort = np.unique(np.where(is_rare, counts.argmax(), own[mine]), return_inverse=True)
        for one in range(int(sort.max()) + 1):
            lines = mine[sort == one]
            parts = min(_MOST_PARTS, max(1, len(lines) // _PART_LINES))
            order = np.argsort(np.argsort(longest[lines], kind="stable"), kind="stable")
            of_line[lines] = len(sorts) + order * parts // len(lines)
            sorts += [max(sorts, default=-1) + 1] * parts
            spawned += [int(each > 0)] * parts
    return of_line, np.array(sorts, np.int64), np.array(spawned, np.int64)


def shares_by_depth(of_line: Ints, sorts: Ints, depth: Int32s) -> Floats:
    """[kinds, context bins]: how lines of a sort with about so much of the forest's text are of its kinds."""
    bins = context_bins(depth)
    counts = np.zeros((len(sorts), CONTEXTS))
    np.add.at(counts, (of_line[of_line >= 0], bins[of_line >= 0]), 1)
    shares = np.zeros_like(counts)
    for sort in range(int(sorts.max()) + 1):
        mine = np.flatnonzero(sorts == sort)
        joined = joined_bins(counts[mine].sum(0).astype(np.int64))
        for each in range(int(joined[-1]) + 1):
            inside = np.flatnonzero(joined == each)
            total = counts[np.ix_(mine, inside)].sum(1)
            shares[np.ix_(mine, inside)] = (total / total.sum())[:, None]
    return shares


def kinds_given(
    sort: Ints, shares: Floats, sorts: Ints, depth: Int32s, rng: np.random.Generator
) -> Ints:
    """A kind for each line, of those of its `sorts`; `shares` are those of `shares_by_depth`."""
    kinds = np.zeros(len(sorts), np.int64)
    bins = context_bins(depth)
    for one in np.unique(sorts).tolist():
        of_sort = np.flatnonzero(sort == one)
        for each in np.unique(bins[sorts == one]).tolist():
            mine = rng.permutation(np.flatnonzero((sorts == one) & (bins == each)))
            upto = np.cumsum(shares[of_sort, each])
            place = np.searchsorted(upto, (np.arange(len(mine)) + rng.random()) / len(mine))
            kinds[mine] = of_sort[np.minimum(place, len(of_sort) - 1)]
    return kinds
