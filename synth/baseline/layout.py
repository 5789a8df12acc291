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
    heads: Ints  # first node of the run of numbers that ends with this node
    num_blocks: int  # of one family
    families: Ints  # the node's, or ANY_FAMILY

    def runs(self, node: int, family: int) -> list[Run]:
        """(first id, how many) of the path from the root to the end of `node`."""
        found: list[Run] = []
        offset = family * self.num_blocks
        while node >= 0:
            head = int(self.heads[node])
            count = int(self.firsts[node] + self.lengths[node] - self.firsts[head])
            if count:
                found.append((offset + int(self.firsts[head]), count))
            node = int(self.parents[head])
        found.reverse()
        return found


def lay_out(core: Core, owners: Int32s, *, stretch: float, families: int, seed: int) -> Layout:
    """Numbers all blocks. Nodes are `stretch` times as long, rounded by chance, each by itself."""
    lengths = core.lengths.astype(np.int64)
    if stretch != 1.0:
        lengths = scaled(lengths, stretch, stream(seed, "prefix length"))
    num = len(core)
    parents, sizes, depths = core.parents.tolist(), lengths.tolist(), lengths.tolist()
    for node in range(1, num):
        depths[node] += depths[parents[node]]
    for node in range(num - 1, 0, -1):
        sizes[parents[node]] += sizes[node]
    firsts, heads = _depth_first(core, lengths, sizes)
    return Layout(
        parents=core.parents,
        lengths=lengths,
        depths=np.array(depths, np.int64),
        firsts=firsts,
        heads=heads,
        num_blocks=int(sizes[0]),
        families=_dealt(owners, families, seed),
    )


def _depth_first(core: Core, lengths: Ints, sizes: list[int]) -> tuple[Ints, Ints]:
    """First number of each node, and the node that its run of numbers begins with."""
    num = len(core)
    parents, widths = core.parents.tolist(), lengths.tolist()
    firsts, heads = [0] * num, [0] * num
    free = [0] * num  # the number that a node's next child begins with
    by_visits = np.lexsort((np.arange(num), -core.visits))  # a parent before its children
    for node in by_visits.tolist()[1:]:
        parent = parents[node]
        first = firsts[node] = free[parent]
        free[parent] += sizes[node]
        free[node] = first + widths[node]
        goes_on = first == firsts[parent] + widths[parent]
        heads[node] = heads[parent] if goes_on else node
    return np.array(firsts, np.int64), np.array(heads, np.int64)


def _dealt(owners: Int32s, families: int, seed: int) -> Ints:
    """The family of each node: its session's, or ANY_FAMILY where several sessions came through."""
    if families == 1:
        return np.zeros(len(owners), np.int64)
    sessions, place = np.unique(owners, return_inverse=True)
    dealt = stream(seed, "sessions of families").permutation(len(sessions)) % families
    return np.where(owners >= 0, dealt[place.reshape(-1)], ANY_FAMILY)
