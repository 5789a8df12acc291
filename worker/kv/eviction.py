"""The orders in which cached nodes give up blocks.

A node is *dead* when neither it nor anything below it is held. The tree stamps it then with a count that
only grows, a parent after its child; so a parent's stamp is never older than its children's. Blocks
are taken from a dead leaf, from its end: whatever the order, no parent goes before its child.

    lru      the leaf that died first. Block by block this is vLLM's queue of free blocks, in which
             every block goes to the end when its last user leaves, the last of the text first.
    lineage  a lineage is a dead node below a live one (or a dead root) with everything under it: a
             text that is over, a side branch of one that goes on. The lineage that was used longest
             ago goes first and whole; in it, the leaf that died first. So a text that was used a
             moment ago keeps its old side branches, which may be gone back to, while an older one
             still has anything.

Blocks may have a *rank* for a while: a leaf whose last block has one gives up nothing while another leaf has
blocks of a lower rank, or of none. Along a text ranks don't rise, so the last block of a leaf is its
least. Ranks are by chain hash, and know nothing of nodes: they split and merge meanwhile. Only
`lru` heeds them.

Stamps change and nodes come back to life: entries of the heaps are dropped when they are found stale.
"""

import heapq
from collections.abc import Iterable
from operator import attrgetter
from typing import Literal, Protocol, TypeAlias

from mallee.worker.kv.node import Node

EvictionName: TypeAlias = Literal["lru", "lineage"]
_MIN_LIMIT = 64


class EvictionOrder(Protocol):
    """Told of what dies; names the next leaf to take blocks from."""

    def died(self, node: Node) -> None:
        """`node` has a stamp from now on. Called for a child before its parent."""
        ...

    def revived(self, node: Node) -> None:
        """`node` has none any more."""
        ...

    def became_leaf(self, node: Node) -> None:
        """The last child of the dead `node` is gone, or the rank of its last block is another one now."""
        ...

    def oldest(self) -> Node:
        """The dead leaf that gives up blocks next. There must be one."""
        ...


class Ranks(Protocol):
    """The blocks that are to stay longer than others, by chain hash: which ones, its owner decides."""

    def __len__(self) -> int:
        """Blocks with a rank above 0. Without any nothing else is asked."""
        ...

    def __contains__(self, value: int) -> bool: ...

    def rank(self, node: Node) -> int:
        """The rank of the last block of `node`, the least of its blocks; 0: it has none."""
        ...

    def num_above(self, node: Node) -> int:
        """The number of leading blocks of `node` whose rank is higher than that of its last one."""
        ...

    def refresh(self, values: Iterable[int]) -> None:
        """These blocks are used now."""
        ...

    def take_expired(self) -> list[int]:
        """Blocks that have no rank any more since the last call."""
        ...

    def drop(self, value: int) -> None:
        """This block is gone."""
        ...


class AllAlike:
    """No block has a rank."""

    __slots__ = ()

    def __len__(self) -> int:
        return 0

    def __contains__(self, value: int) -> bool:
        return False

    def rank(self, node: Node) -> int:
        return 0

    def num_above(self, node: Node) -> int:
        return 0

    def refresh(self, values: Iterable[int]) -> None:
        pass

    def take_expired(self) -> list[int]:
        return []

    def drop(self, value: int) -> None:
        pass


class _Heap:
    """Nodes by the rank and stamp that they had when they were pushed."""

    __slots__ = ("_entries", "_limit", "_num_pushed")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, int, Node]] = []
        self._num_pushed = 0  # breaks ties, so that nodes are never compared
        self._limit = _MIN_LIMIT

    def push(self, node: Node) -> None:
        """O(log n), stale entries counted: there are never more of them than of others, and 64."""
        if len(self._entries) >= self._limit:
            self._entries = [entry for entry in self._entries if _is_true(entry)]
            heapq.heapify(self._entries)
            self._limit = 2 * len(self._entries) + _MIN_LIMIT
        self._num_pushed += 1
        heapq.heappush(self._entries, (node.rank, node.stamp, self._num_pushed, node))

    def first(self) -> Node:
        """The node with the lowest rank, and of those the oldest stamp, that are still true."""
        while not _is_true(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][3]

    def drop_first(self) -> None:
        heapq.heappop(self._entries)


def _is_true(entry: tuple[int, int, int, Node]) -> bool:
    rank, stamp, _, node = entry
    return node.stamp == stamp and node.rank == rank


class Lru:
    """Leaves by rank, then by stamp."""

    __slots__ = ("_leaves", "_ranks")

    def __init__(self, ranks: Ranks) -> None:
        self._leaves = _Heap()
        self._ranks = ranks

    def died(self, node: Node) -> None:
        if not node.children:
            self.became_leaf(node)

    def revived(self, node: Node) -> None:
        pass  # its entry is stale

    def became_leaf(self, node: Node) -> None:
        node.rank = self._ranks.rank(node)
        self._leaves.push(node)

    def oldest(self) -> Node:
        leaf = self._leaves.first()
        assert not leaf.children, "a dead node grew a child"
        return leaf


class Lineage:
    """Tops of lineages by stamp. A top is found stale when its parent is dead too."""

    __slots__ = ("_tops",)

    def __init__(self) -> None:
        self._tops = _Heap()

    def died(self, node: Node) -> None:
        self._tops.push(node)

    def revived(self, node: Node) -> None:
        for child in node.children:
            if child.stamp:
                self._tops.push(child)

    def became_leaf(self, node: Node) -> None:
        pass  # its lineage is listed

    def oldest(self) -> Node:
        top = self._tops.first()
        while top.parent is not None and top.parent.stamp:
            self._tops.drop_first()
            top = self._tops.first()
        while top.children:
            top = min(top.children, key=attrgetter("stamp"))
        return top


def eviction_order(name: EvictionName, ranks: Ranks) -> EvictionOrder:
    """The order of that name, empty."""
    return Lru(ranks) if name == "lru" else Lineage()
