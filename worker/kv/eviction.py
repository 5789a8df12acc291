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

Requests may ask that blocks be *retained* for a while, softly: a leaf whose last block is retained gives
up nothing while another leaf has blocks that are retained less, or not at all. Along a text priorities
don't rise, so the last block of a leaf is its least. Retention is by chain hash, and knows nothing of
nodes: they split and merge meanwhile. Only `lru` heeds it.

Stamps change and nodes come back to life: entries of the heaps are dropped when they are found stale.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol, TypeAlias

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
        """The last child of the dead `node` is gone, or its last block is retained less or more now."""
        ...

    def oldest(self) -> Node:
        """The dead leaf that gives up blocks next. There must be one."""
        ...


class Wish(NamedTuple):
    """Retention of one block: the higher priority stays longer, for so many seconds after its last use."""

    priority: int
    duration_s: float


class _Kept(NamedTuple):
    wish: Wish
    until: float
    tenant: str


class Retention:
    """The blocks that are to stay beyond others, by chain hash: at most `max_blocks` in all.

    A tenant with a name has at most half of them. `clock` gives seconds.
    """

    __slots__ = ("_by_tenant", "_clock", "_due", "_kept", "max_blocks")

    def __init__(self, max_blocks: int, clock: Callable[[], float]) -> None:
        self.max_blocks = max_blocks
        self._clock = clock
        self._kept: dict[int, _Kept] = {}
        self._due: list[tuple[float, int]] = []  # a heap; entries may be too early, never too late
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, value: int) -> bool:
        return value in self._kept

    def keep(self, wishes: Sequence[tuple[int, Wish]], tenant: str) -> int:
        """Retain blocks of one text, in its order, as far as there is room; how many are.

        Of two wishes for a block the higher priority holds, and the later end.
        """
        now, room = self._clock(), self._room(tenant)
        for num, (value, wish) in enumerate(wishes):
            known = self._kept.get(value)
            if known is None:
                if room <= 0:
                    return num
                room -= 1
                self._by_tenant[tenant] += 1
                self._set(value, _Kept(wish, now + wish.duration_s, tenant))
                continue
            longer = max(known.wish.duration_s, wish.duration_s)
            priority = max(known.wish.priority, wish.priority)
            until = max(known.until, now + wish.duration_s)
            self._set(value, _Kept(Wish(priority, longer), until, known.tenant))
        return len(wishes)

    def _room(self, tenant: str) -> int:
        room = self.max_blocks - len(self._kept)
        if tenant:
            room = min(room, self.max_blocks // 2 - self._by_tenant[tenant])
        return room

    def _set(self, value: int, kept: _Kept) -> None:
        self._kept[value] = kept
        heapq.heappush(self._due, (kept.until, value))
        if len(self._due) > 4 * len(self._kept) + _MIN_LIMIT:
            self._due = [(each.until, value) for value, each in self._kept.items()]
            heapq.heapify(self._due)

    def refresh(self, values: Iterable[int]) -> None:
        """These blocks are used now."""
        now = self._clock()
        for value in values:
            known = self._kept.get(value)
            if known is not None:  # its entry among those that are due is too early now
                until = max(known.until, now + known.wish.duration_s)
                self._kept[value] = known._replace(until=until)

    def drop(self, value: int) -> None:
        """This block is gone."""
        known = self._kept.pop(value, None)
        if known is not None:
            self._leave(known.tenant)

    def _leave(self, tenant: str) -> None:
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def take_expired(self) -> list[int]:
        """Retain no longer what has not been used for its time; the blocks."""
        expired = []
        while self._due and self._due[0][0] <= self._clock():
            _, value = heapq.heappop(self._due)
            known = self._kept.get(value)
            if known is None:
                continue
            if known.until > self._clock():
                heapq.heappush(self._due, (known.until, value))
                continue
            self.drop(value)
            expired.append(value)
        return expired

    def rank(self, node: Node) -> int:
        """The priority of the last block of `node`; 0: it is not retained."""
        if not self._kept or not node.hashes:
            return 0
        known = self._kept.get(node.hashes[-1])
        return 0 if known is None else known.wish.priority

    def num_above(self, node: Node) -> int:
        """The number of leading blocks of `node` that are retained more than its last one."""
        if not self._kept:
            return 0
        last, num = self.rank(node), len(node.hashes)
        while num:
            known = self._kept.get(node.hashes[num - 1])
            if known is not None and known.wish.priority > last:
                return num
            num -= 1
        return 0

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert len(self._kept) <= self.max_blocks, "more is retained than may be"
        assert self._by_tenant == Counter(each.tenant for each in self._kept.values()), "tenants"
        due = {value for at, value in self._due}
        assert due >= self._kept.keys(), "a block is retained for ever"


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
    """Leaves by stamp, those that are retained after the others."""

    __slots__ = ("_leaves", "_retention")

    def __init__(self, retention: Retention) -> None:
        self._leaves = _Heap()
        self._retention = retention

    def died(self, node: Node) -> None:
        if not node.children:
            self.became_leaf(node)

    def revived(self, node: Node) -> None:
        pass  # its entry is stale

    def became_leaf(self, node: Node) -> None:
        node.rank = self._retention.rank(node)
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


def eviction_order(name: EvictionName, retention: Retention) -> EvictionOrder:
    """The order of that name, empty."""
    return Lru(retention) if name == "lru" else Lineage()
