"""Which worker holds which block: chain hash -> set of workers.

A chain hash names a block and all before it, so a flat table answers prefix queries: no tree, no
parent pointers, and late or orphan events cannot hang a block under the wrong parent. A set of
workers is one Python int used as a bitmask, so walking a prompt costs one lookup and one `&` a
block whatever the fleet's size. Rejected for now: an open-addressing table in numpy arrays with
compiled kernels (design note 3), which needs a compiler at run time; the interface allows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.protocol.hashing import Hashes

Counts: TypeAlias = npt.NDArray[np.int32]
WorkerMasks: TypeAlias = dict[int, int]
"""Chain hash -> bitmask of workers, never 0."""


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Sizes now, and how often the index was told what it knew (or could not know) since birth."""

    num_blocks: int
    num_entries: int  # (worker, block) pairs
    duplicate_stores: int
    absent_removes: int


def members(mask: int, num_workers: int) -> npt.NDArray[np.bool_]:
    """Which workers are in `mask`: bool[num_workers]."""
    raw = np.frombuffer(mask.to_bytes((num_workers + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(raw, count=num_workers, bitorder="little").view(np.bool_)


def unset(rows: WorkerMasks, block: int, worker: int) -> None:
    """`worker` is not in the mask of `block` (it was); an empty mask is dropped."""
    left = rows[block] & ~(1 << worker)
    if left:
        rows[block] = left
    else:
        del rows[block]


def count_leading(rows: WorkerMasks, blocks: Sequence[int], num_workers: int) -> Counts:
    """Leading `blocks` whose masks have each worker: int32[num_workers]."""
    counts = np.zeros(num_workers, dtype=np.int32)
    alive = rows.get(blocks[0], 0) if blocks else 0
    if not alive:
        return counts
    for matched, mask in enumerate(map(rows.get, blocks)):
        if mask == alive:
            continue
        still = alive & (mask or 0)
        if still != alive:
            counts[members(alive ^ still, num_workers)] = matched
            alive = still
            if not alive:
                return counts
    counts[members(alive, num_workers)] = len(blocks)
    return counts


class PrefixIndex:
    """Blocks held by workers 0 .. num_workers - 1."""

    __slots__ = ("_absent_removes", "_duplicate_stores", "_held", "_rows", "num_workers")

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: must be at least 1")
        self.num_workers = num_workers
        self._rows: WorkerMasks = {}
        self._held: list[set[int]] = [set() for _ in range(num_workers)]
        self._duplicate_stores = 0
        self._absent_removes = 0

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that any worker holds."""
        return len(self._rows)

    def store(self, worker: int, hashes: Hashes) -> None:
        """`worker` holds these blocks. Idempotent. Raises ValueError for a worker out of range."""
        held = self._held_by(worker)
        blocks = hashes.tolist()
        new = set(blocks).difference(held)
        self._duplicate_stores += len(blocks) - len(new)
        held |= new
        rows, bit = self._rows, 1 << worker
        for block in new:
            rows[block] = rows.get(block, 0) | bit

    def remove(self, worker: int, hashes: Hashes) -> None:
        """`worker` holds these blocks no more; those it never held are ignored and counted.

        Raises ValueError for a worker out of range.
        """
        held = self._held_by(worker)
        blocks = hashes.tolist()
        gone = held.intersection(blocks)
        self._absent_removes += len(blocks) - len(gone)
        held -= gone
        for block in gone:
            unset(self._rows, block, worker)

    def clear(self, worker: int) -> None:
        """`worker` holds nothing. O(its blocks). Raises ValueError for a worker out of range."""
        held = self._held_by(worker)
        for block in held:
            unset(self._rows, block, worker)
        held.clear()

    def match(self, hashes: Hashes) -> Counts:
        """Leading blocks of `hashes` that each worker holds: int32[num_workers]."""
        return count_leading(self._rows, hashes.tolist(), self.num_workers)

    def holders(self, block: int) -> tuple[int, ...]:
        """Workers that hold `block`, ascending."""
        return tuple(np.flatnonzero(members(self._rows.get(block, 0), self.num_workers)).tolist())

    def num_held(self, worker: int) -> int:
        """Blocks that `worker` holds. Raises ValueError for a worker out of range."""
        return len(self._held_by(worker))

    def held(self, worker: int) -> frozenset[int]:
        """A copy of the blocks of `worker`. Raises ValueError for a worker out of range."""
        return frozenset(self._held_by(worker))

    def stats(self) -> IndexStats:
        return IndexStats(
            num_blocks=len(self._rows),
            num_entries=sum(map(len, self._held)),
            duplicate_stores=self._duplicate_stores,
            absent_removes=self._absent_removes,
        )

    def check(self) -> None:
        """Raises AssertionError unless both directions of the table agree and no row is empty."""
        rebuilt: WorkerMasks = {}
        for worker, held in enumerate(self._held):
            for block in held:
                rebuilt[block] = rebuilt.get(block, 0) | 1 << worker
        assert rebuilt == self._rows, "rows and per-worker sets differ"

    def _held_by(self, worker: int) -> set[int]:
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker={worker}: the index has workers 0 to {self.num_workers - 1}")
        return self._held[worker]
