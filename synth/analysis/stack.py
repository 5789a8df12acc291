"""The LRU hit rate at every cache size at once, by exact stack distances.

A reference to a block hits in a cache of C blocks if fewer than C others were referenced since its last
reference: its stack distance. A request refers to the blocks of its prompt from the first to the last,
and a plain LRU cache of single blocks is asked, as in the published curves for these traces.

Such a cache loses the front of a prompt before its end, and with the front all of it. Engines give up
a prompt's last block first (`keeps_front`): they ask for the longest front that is there, then touch the
prompt from its last block to its first. On Mooncake's conversations that hits 0.001 more at most, on a
fleet of coding agents 0.01; where a cache holds few whole prompts it makes all the difference.

Mattson's stack needs a search tree over all blocks and a step for each of some ten million references.
Prompts are paths of a tree, and that makes it cheap. A request that touches a block touches all above
it, so along a path the last touch gets older and older: the path falls into runs which one earlier
request touched last, and of what that request was the last to touch each run is the begin. Let a run
begin at place a of both paths, t be its toucher, held(t) the blocks which t was the last to touch,
newer(t) those touched by later requests. At place j of the run were touched since t touched it:
newer(t), what t touched after it (held(t) - (j - a) - 1), and what this request has touched in the run
(j - a; what it touched before is in newer(t)). The sum does not depend on j: one distance, one step of
a Fenwick tree over requests, for a run of hundreds of blocks. With `keeps_front` t touched only the
run's front after j, and this request nothing yet: newer(t) + j - a.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from mallee.synth.core.jit import kernel
from mallee.traces.numbers import Floats, Int32s, Ints
from mallee.traces.trace import Trace

SHARES: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Of a trace's distinct blocks: the cache sizes at which curves are compared."""


@dataclass(frozen=True, slots=True)
class MissCurve:
    """LRU hits at any cache size: `hits[k]` references have a distance of at most `distances[k]`."""

    distances: Ints  # that occur, ascending
    hits: Ints  # cumulative
    num_references: int
    num_blocks: int  # distinct

    @property
    def ideal(self) -> float:
        """Share of references that hit when nothing is evicted; 0 of a trace without blocks."""
        return float(self.hits[-1]) / self.num_references if len(self.hits) else 0.0

    def hits_at(self, sizes: npt.ArrayLike) -> Floats:
        """Share of all references that hit in caches of `sizes` blocks."""
        if not self.num_references:
            return np.zeros(np.shape(sizes))
        fewer = np.searchsorted(self.distances, np.asarray(sizes, np.float64), side="left")
        return np.concatenate([[0], self.hits])[fewer] / self.num_references

    def sizes(self) -> Floats:
        """The sizes of `SHARES`, in whole blocks, at least 1."""
        return np.maximum(1.0, np.round(np.array(SHARES) * self.num_blocks))


def miss_curve(trace: Trace, *, keeps_front: bool = False) -> MissCurve:
    """Of a trace whose blocks form a prefix tree: `PrefixTree.of` tells, and must have been asked.

    `keeps_front`: of a cache that gives up a prompt's last block first, as engines do; else of plain LRU.
    """
    num = trace.num_blocks
    histogram = _stack_distances(trace.starts, trace.blocks, num, keeps_front)
    distances = np.flatnonzero(histogram)
    return MissCurve(distances, np.cumsum(histogram[distances]), len(trace.blocks), num)


@kernel
def _add_at(tree: Ints, at: int, value: int) -> None:
    """Fenwick tree `tree` (from 1): `value` more at place `at` from 0."""
    at += 1
    while at < len(tree):
        tree[at] += value
        at += at & -at


@kernel
def _sum_to(tree: Ints, at: int) -> int:
    """Sum of the places below `at`."""
    total = 0
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total


@kernel
def _stack_distances(starts: Ints, blocks: Int32s, num_blocks: int, keeps_front: bool) -> Ints:
    """Number of references at each LRU stack distance, [blocks].

    The module says why a whole run has one distance, and what `keeps_front` changes.
    """
    num = len(starts) - 1
    histogram = np.zeros(num_blocks, np.int64)
    last = np.full(num_blocks, -1, np.int32)  # request that touched each block last
    held = np.zeros(num, np.int64)  # blocks that each request was the last to touch
    tree = np.zeros(num + 1, np.int64)  # the same as a Fenwick tree
    distinct = 0
    for i in range(num):
        end = starts[i + 1]
        at = starts[i]
        while at < end and last[blocks[at]] >= 0:
            toucher = last[blocks[at]]
            first = at
            newer = distinct - _sum_to(tree, toucher + 1)
            while at < end and last[blocks[at]] == toucher:
                last[blocks[at]] = i
                if keeps_front:
                    histogram[newer + at - first] += 1
                at += 1
            if not keeps_front:
                histogram[newer + held[toucher] - 1] += at - first
            held[toucher] -= at - first
            _add_at(tree, toucher, first - at)
            _add_at(tree, i, at - first)  # newer than all that this request goes on to
        distinct += end - at
        _add_at(tree, i, end - at)
        held[i] = end - starts[i]
        while at < end:
            last[blocks[at]] = i
            at += 1
    return histogram
