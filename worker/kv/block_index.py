"""Finds the node that holds a block by the block's chain hash.

Two nodes may hold blocks of the same chain hash (siblings that chose equal tokens). The first is found
by hash; the journal gets the first store and the last removal only.
"""

from typing import Generic, TypeVar

import numpy as np

from mallee.protocol.hashing import Hashes
from mallee.worker.kv.journal import Journal

Holder = TypeVar("Holder")


class BlockIndex(Generic[Holder]):
    """Chain hash to holders. Every change is the caller's to keep true: it looks into no node."""

    __slots__ = ("_first", "_journal", "_twins", "version")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.version = 0  # grows whenever a hash comes or goes
        self._first: dict[int, Holder] = {}
        self._twins: dict[int, list[Holder]] = {}  # further holders of the same hash

    def find(self, value: int) -> Holder:
        """A holder of the block. Raises KeyError if there is none."""
        return self._first[value]

    def holders_of(self, value: int) -> list[Holder]:
        """All holders of the block; none if it is not held."""
        first = self._first.get(value)
        return [] if first is None else [first, *self._twins.get(value, ())]

    def count_leading(self, hashes: Hashes) -> int:
        """The number of leading blocks that are held. A binary search: with a block, its prefix is held."""
        low, high = 0, len(hashes)
        while low < high:
            mid = (low + high) // 2
            if int(hashes[mid]) in self._first:
                low = mid + 1
            else:
                high = mid
        return low

    def add(self, values: list[int], holder: Holder, *, is_preferred: bool = False) -> None:
        """`holder` has these blocks from now on; if it is preferred, it is the one to be found."""
        first = self._first
        new = [value for value in values if value not in first]
        if len(new) < len(values):
            for value in values:
                if value in first:
                    twin = holder
                    if is_preferred:
                        twin, first[value] = first[value], holder
                    self._twins.setdefault(value, []).append(twin)
            self.version += is_preferred
        if new:
            self.version += 1
            first.update(dict.fromkeys(new, holder))
            self._journal.stored(new)

    def remove(self, value: int, holder: Holder) -> None:
        twins = self._twins.get(value)
        if self._first[value] is not holder:
            assert twins is not None, "a hash without its holder"
            twins.remove(holder)
        elif twins:
            self._first[value] = twins.pop()
        else:
            del self._first[value]
            self.version += 1
            self._journal.removed(value)
        if twins is not None and not twins:
            del self._twins[value]

    def move(self, value: int, old: Holder, new: Holder) -> None:
        """`new` holds what `old` held; nothing is journaled."""
        if self._first[value] is old:
            self._first[value] = new
        else:
            twins = self._twins[value]
            twins[twins.index(old)] = new

    def hashes(self) -> Hashes:
        """Every hash that is held, in no particular order."""
        return np.fromiter(self._first, dtype=np.uint64, count=len(self._first))

    def holders(self) -> dict[int, list[Holder]]:
        """Every hash with all its holders; a copy."""
        return {value: [first, *self._twins.get(value, ())] for value, first in self._first.items()}

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert set(self._twins) <= set(self._first), "twins of a block that is gone"
        assert all(self._twins.values()), "an empty list of twins"
