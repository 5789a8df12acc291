"""The orders in which cached nodes give up blocks.

A node is *dead* when neither it nor anything below it is held. The tree stamps it then with a count that
only grows, a parent after its child; so a parent's stamp is never older than its children's. Blocks
are taken from a dead leaf, from its end: whatever the order, no parent goes before its child.

    lru      the leaf that died first. Block by block this is vLLM's queue of free blocks, in which
             every block goes to the end when its last user leaves, the last of the text first.
    lineage  a lineage is a dead node below a live one (or a dead root) with everything under it: a
             session that is over, a side branch of one that goes on. The lineage that was used longest
             ago goes first and whole; in it, the leaf that died first. So a session that was used a
             moment ago keeps its old side branches, which it may come back to, while an older one
             still has anything.

Stamps change and nodes come back to life: entries of the heaps are dropped when they are found stale.
"""

import heapq
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
        """The last child of the dead `node` is gone."""
        ...

    def oldest(self) -> Node:
        """The dead leaf that gives up blocks next. There must be one."""
        ...


class _Heap:
    """Nodes by the stamp that they had when they were pushed."""

    __slots__ = ("_entries", "_limit", "_num_pushed")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Node]] = []
        self._num_pushed = 0  # breaks ties, so that nodes are never compared
        self._limit = _MIN_LIMIT

    def push(self, node: Node) -> None:
        """O(log n), stale entries counted: there are never more of them than of others, and 64."""
        if len(self._entries) >= self._limit:
            self._entries = [entry for entry in self._entries if entry[2].stamp == entry[0]]
            heapq.heapify(self._entries)
            self._limit = 2 * len(self._entries) + _MIN_LIMIT
        self._num_pushed += 1
        heapq.heappush(self._entries, (node.stamp, self._num_pushed, node))

    def first(self) -> Node:
        """The node with the oldest stamp that is still true."""
        while self._entries[0][2].stamp != self._entries[0][0]:
            heapq.heappop(self._entries)
        return self._entries[0][2]

    def drop_first(self) -> None:
        heapq.heappop(self._entries)


class Lru:
    """Leaves by stamp."""

    __slots__ = ("_leaves",)

    def __init__(self) -> None:
        self._leaves = _Heap()

    def died(self, node: Node) -> None:
        if not node.children:
            self._leaves.push(node)

    def revived(self, node: Node) -> None:
        pass  # its entry is stale

    def became_leaf(self, node: Node) -> None:
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


def eviction_order(name: EvictionName) -> EvictionOrder:
    """The order of that name, empty."""
    return Lru() if name == "lru" else Lineage()
