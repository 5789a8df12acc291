"""Ids for the blocks of a core: stretched, and in as many disjoint families as asked for.

A family is a copy of the whole core. A session's requests have to meet in one copy, and which session a
walk belongs to is known once it has come to blocks that only one session of the source had: so sessions are
dealt to the families, and all of such a block's walks go to its session's. A walk that leaves before
goes on with text of its own, whichever copy it came through.

Nodes are numbered in depth-first order, the most visited child first, so that a long path is a few runs
of numbers.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.baseline.core import Core
from mallee.synth.core.streams import scaled, stream
from mallee.traces.numbers import Int32s, Ints

ANY_FAMILY: Final = -1

Run = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """By node: how many blocks it has now, how deep its last one is, and the number of its first."""

    parents: Int32s
    lengths: Ints
    depths: Ints
    firsts: Ints
    num_blocks: int  # of one family
    families: Ints  # the node's, or ANY_FAMILY

    def runs(self, node: int, family: int) -> tuple[Run, ...]:
        """(first id, how many) of the path from the root to the end of `node`."""
        found: list[Run] = []
        while node >= 0:
            first, count = int(self.firsts[node]), int(self.lengths[node])
            if found and first + count == found[-1][0]:
                count += found.pop()[1]
            if count:
                found.append((first, count))
            node = int(self.parents[node])
        offset = family * self.num_blocks
        return tuple((offset + first, count) for first, count in reversed(found))


def lay_out(core: Core, owners: Int32s, *, stretch: float, families: int, seed: int) -> Layout:
    """Numbers all blocks. Nodes are `stretch` times as long, rounded by chance, each by itself."""
    lengths = core.lengths.astype(np.int64)
    if stretch != 1.0:
        lengths = scaled(lengths, stretch, stream(seed, "prefix length"))
    num, parents = len(core), core.parents.tolist()
    sizes, depths, firsts = lengths.copy(), lengths.copy(), np.zeros(num, np.int64)
    for node in range(1, num):
        depths[node] += depths[parents[node]]
    for node in range(num - 1, 0, -1):
        sizes[parents[node]] += sizes[node]
    free = np.zeros(num, np.int64)  # the number that a node's next child begins with
    by_visits = np.lexsort((np.arange(num), -core.visits))  # a parent before its children
    for node in by_visits.tolist()[1:]:
        parent = parents[node]
        firsts[node] = free[parent]
        free[node] = free[parent] + lengths[node]
        free[parent] += sizes[node]
    return Layout(
        parents=core.parents,
        lengths=lengths,
        depths=depths,
        firsts=firsts,
        num_blocks=int(sizes[0]),
        families=_dealt(owners, families, seed),
    )


def _dealt(owners: Int32s, families: int, seed: int) -> Ints:
    """The family of each node: its session's, or ANY_FAMILY where several sessions came through."""
    if families == 1:
        return np.zeros(len(owners), np.int64)
    sessions, place = np.unique(owners, return_inverse=True)
    dealt = stream(seed, "sessions of families").permutation(len(sessions)) % families
    return np.where(owners >= 0, dealt[place.reshape(-1)], ANY_FAMILY)
