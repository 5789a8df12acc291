"""Retention: the blocks that requests want to keep for a while beyond others, softly.

The tree takes these as ranks of its blocks (`kv.eviction`), and nothing else: whose they are, for how
long, and how many one tenant may have is decided here.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from mallee.protocol.messages import RetainSpan
from mallee.worker.kv.node import Node

_MIN_LIMIT: Final = 64  # entries that the heap may have at any rate


class _Wish(NamedTuple):
    """Retention of one block: the higher priority stays longer, for so many seconds after its last use."""

    priority: int
    duration_s: float


class _Kept(NamedTuple):
    wish: _Wish
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

    def keep(
        self, path: Sequence[int], spans: Sequence[RetainSpan], tenant: str, *, block_size: int
    ) -> tuple[int, int]:
        """Retain the full blocks of a text, `path`, that lie inside `spans`, as far as there is room.

        Returns how many were asked for and how many are retained, the first ones. Of two wishes for a block
        the higher priority holds, and the later end.
        """
        wishes: list[tuple[int, _Wish]] = []
        for span in spans:
            if not span.priority:  # nor have those after it one
                break
            wish = _Wish(span.priority, span.duration_s)
            wishes += [(value, wish) for value in path[len(wishes) : span.end // block_size]]
        return len(wishes), self._keep(wishes, tenant)

    def _keep(self, wishes: Sequence[tuple[int, _Wish]], tenant: str) -> int:
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
            self._set(value, _Kept(_Wish(priority, longer), until, known.tenant))
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
