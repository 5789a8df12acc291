"""The prefix index: chain hash -> set of workers that hold the block.

A chain hash names a block and all before it, so a flat table answers prefix queries: no tree, no
parent pointers, and late or orphan events cannot hang a block under the wrong parent. Sets of workers
are interned, so that what a fleet shares costs no memory per worker and a path is compared set by set
(`router.index.kernels.layout`).

A worker is *prefix-closed* if it holds, with any block, all blocks before it on the path. Mallee's workers
report that they are, since their trees lose leaves first. For prefix-closed workers a match jumps: those
that hold the last block of a path hold it whole. For the others the path is walked, which costs a lookup
for each block but is exact with holes. Holes of a prefix-closed worker come from `repair` (until its
events catch up) and from the byte cap, and are tracked.
"""

from dataclasses import dataclass

import numpy as np

from mallee.protocol.events import NUM_TIERS
from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.router.index.columns import Columns, num_columns
from mallee.router.index.kernels import layout
from mallee.router.index.kernels.blocks import (
    ref_of,
    remove,
    set_holes,
    store,
    sweep,
)
from mallee.router.index.kernels.layout import Counts
from mallee.router.index.kernels.match import match
from mallee.router.index.sets import Sets
from mallee.router.index.table import Table

_LEAST_NBYTES = 1 << 20
_WORST_BLOCK_NBYTES = 48  # a table just grown, beside the one it grew from
_SWEEP_AT_ONCE = 65_536  # entries


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Sizes now, and counts since birth."""

    num_blocks: int  # distinct; with those of forgotten workers that are not swept yet
    num_entries: int  # (worker, block) pairs
    num_sets: int  # distinct sets of two or more workers
    nbytes: int
    evicted: int  # blocks dropped for the byte cap
    probes: int  # blocks looked up by matches
    num_walked: int  # workers with blocks that may have holes: their paths are walked

    @property
    def num_copies(self) -> float:
        """Workers that hold a block, on average."""
        return self.num_entries / self.num_blocks if self.num_blocks else 0.0


class PrefixIndex:
    """Blocks held by workers 0 .. num_workers - 1, in about `max_nbytes` at most.

    Below 8 MiB it may take twice as much: segments of a small table differ in how full they are.

    `is_prefix_closed`: what is assumed of workers until `set_prefix_closed`.
    """

    def __init__(
        self, num_workers: int, *, is_prefix_closed: bool = False, max_nbytes: int = 1 << 62
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: must be at least 1")
        if max_nbytes < _LEAST_NBYTES:
            raise ValueError(f"max_nbytes={max_nbytes}: must be at least {_LEAST_NBYTES}")
        self.num_workers = num_workers
        self.num_tiers = 1  # until a block is stored in host memory or on disk
        self._max_nbytes = max_nbytes
        self._tier_columns = num_columns(num_workers)  # columns of a tier
        self._table = Table(self._tier_columns)
        self.address = self._table.address  # of the control block that kernels read
        self._control = self._table.control
        self._sets = Sets(self._control, self._tier_columns)
        self._columns = Columns(self._control, num_workers)
        self.column_of = self._columns.of  # by worker, on workers' devices, until they are cleared
        self._missing: dict[int, set[int]] = {}  # worker -> repaired, not yet removed by its events
        self._is_prefix_closed = [is_prefix_closed] * num_workers
        self._loading: set[int] = set()
        self._evicted_before = [0] * num_workers
        for worker in range(num_workers):
            self._update_holes(worker)
        self._cap_keys()
        _compile()

    @property
    def num_blocks(self) -> int:
        """Distinct blocks held, with those of forgotten workers that are not swept yet."""
        return self._table.num_keys

    @property
    def nbytes(self) -> int:
        """Memory of the table and the sets."""
        return self._table.nbytes + self._sets.nbytes

    def store(self, worker: int, hashes: Hashes, tier: int = 0) -> None:
        """Note that `worker` holds these blocks. Idempotent. Raises ValueError for a worker out of range."""
        is_usual = tier == 0 and 0 <= worker < self.num_workers
        column = self._columns.of[worker] if is_usual else self._column(worker, tier)
        done = store(self.address, hashes, column)
        if done < 0:
            self._store_rest(column, hashes[~done:])
        if self._missing and not tier:
            self._found(worker, hashes)

    def remove(self, worker: int, hashes: Hashes, tier: int = 0) -> None:
        """Remove blocks of `worker`; those it never held are ignored.

        Raises ValueError for a worker out of range.
        """
        self._remove(self._column(worker, tier), hashes)
        if self._missing and not tier:
            self._found(worker, hashes)

    def repair(self, worker: int, hashes: Hashes) -> int:
        """Remove blocks that `worker` turned out not to hold; returns how many. Its path may have holes now,
        until its own events say what became of them.
        """
        column = self._column(worker, 0)
        before = self.num_held(worker)
        self._remove(column, hashes)
        repaired = before - self.num_held(worker)
        if repaired:
            self._missing.setdefault(worker, set()).update(hashes.tolist())
            self._update_holes(worker)
        return repaired

    def clear(self, worker: int) -> None:
        """Remove all blocks of `worker`, in any tier. O(1): the table is swept in `work`; when columns
        become scarce without that, each call sweeps a share.

        Raises ValueError for a worker out of range.
        """
        self._column(worker, 0)
        self._missing.pop(worker, None)
        self._loading.discard(worker)
        columns = self._columns
        if self.num_held(worker):
            if not columns.num_free:
                self._sweep_all()
            columns.replace(worker)
            num_spare = self._tier_columns - self.num_workers
            if self._table.capacity <= _SWEEP_AT_ONCE:
                self._sweep_all()
            elif 2 * columns.num_free < num_spare:  # all are swept before the other half is used up
                self._sweep(2 * layout.NUM_SEGMENTS // num_spare + 1)
        self._evicted_before[worker] = int(self._control[layout.AT_EVICTED])
        self._update_holes(worker)

    def set_prefix_closed(self, worker: int, is_prefix_closed: bool) -> None:
        """Whether `worker` holds, with any block, all blocks before it on the path."""
        self._column(worker, 0)
        self._is_prefix_closed[worker] = is_prefix_closed
        self._update_holes(worker)

    def set_loading(self, worker: int, is_loading: bool) -> None:
        """While `worker`'s blocks are stored in pieces, in no order, it may have holes."""
        (self._loading.add if is_loading else self._loading.discard)(worker)
        self._update_holes(worker)

    def match(self, hashes: Hashes, tier: int = 0) -> Counts:
        """Leading blocks of `hashes` that each worker holds in the tiers up to `tier`.

        int32[num_workers].
        """
        counts = np.empty(self.num_workers, dtype=np.int32)
        tiers = min(tier, self.num_tiers - 1) + 1 if tier else 1
        match(self.address, hashes, tiers, 1, len(hashes), counts)
        return counts

    def match_waypoints(
        self, waypoints: Hashes, stride: int, num_blocks: int, counts: Counts
    ) -> None:
        """As `match`, into `counts`, for waypoints that stand for `stride` of `num_blocks` blocks each."""
        match(self.address, waypoints, 1, stride, num_blocks, counts)

    def num_held(self, worker: int) -> int:
        """Blocks that `worker` holds, of all tiers. Raises ValueError for a worker out of range."""
        self._column(worker, 0)
        return sum(self._columns.held(worker))

    def digest(self, worker: int) -> int:
        """A 64-bit sum over `worker`'s blocks and tiers: equal for equal holdings. O(1)."""
        self._column(worker, 0)
        sums = enumerate(self._columns.digests(worker))
        return sum((2 * tier + 1) * each for tier, each in sums) & (1 << 64) - 1

    def work(self, num_entries: int = 16_384) -> bool:
        """Sweep and rehash a little. True: there is more to do."""
        if not self._columns.num_dead:
            return self._table.work(num_entries)
        self._sweep(self._table.segments(num_entries))
        return self._table.work(num_entries) or self._columns.num_dead > 0

    def stats(self) -> IndexStats:
        control = self._control
        return IndexStats(
            num_blocks=self._table.num_keys,
            num_entries=self._columns.num_entries(),
            num_sets=self._sets.num_rows,
            nbytes=self.nbytes,
            evicted=int(control[layout.AT_EVICTED]),
            probes=int(control[layout.AT_PROBES]),
            num_walked=self._columns.num_walked(),
        )

    def check(self) -> None:
        """Raises AssertionError unless table, sets, counts and digests agree. O(everything)."""
        entries = self._table.entries()
        uses: dict[int, int] = {}
        held: dict[int, list[int]] = {}
        for key, value in entries.items():
            ref = value & layout.LOW
            assert ref_of(self.address, key) == ref, f"block {key} is out of reach"
            uses[ref] = uses.get(ref, 0) + 1
            for column in self._sets.members(ref):
                held.setdefault(column, []).append(key)
        self._sets.check(uses)
        for worker in range(self.num_workers):
            self._check_worker(worker, held)
        self._columns.check(set(held))

    def _check_worker(self, worker: int, held: dict[int, list[int]]) -> None:
        column, digest = self._columns.of[worker], 0
        for tier, num_held in enumerate(self._columns.held(worker)):
            keys = held.get(column + tier * self._tier_columns, [])
            assert len(keys) == num_held, f"worker {worker} holds {len(keys)} in {tier}"
            digest += (2 * tier + 1) * sum(map(_fingerprint, keys))
        assert digest & (1 << 64) - 1 == self.digest(worker), f"digest of worker {worker}"

    def _column(self, worker: int, tier: int) -> int:
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker={worker}: {self._range()}")
        if not tier:
            return self._columns.of[worker]
        if not 0 < tier < NUM_TIERS:
            raise ValueError(f"tier={tier}: tiers are 0 (device) to {NUM_TIERS - 1}")
        if self.num_tiers == 1:
            self._sets.add_tiers(NUM_TIERS)
            self._cap_keys()
            self.num_tiers = NUM_TIERS
        return self._columns.of[worker] + tier * self._tier_columns

    def _range(self) -> str:
        return f"the index has workers 0 to {self.num_workers - 1}"

    def _update_holes(self, worker: int) -> None:
        column = self._columns.of[worker]
        may_have_holes = (
            not self._is_prefix_closed[worker]
            or worker in self._missing
            or worker in self._loading
            or self._evicted_before[worker] != int(self._control[layout.AT_EVICTED])
        )
        set_holes(self.address, column, may_have_holes)

    def _found(self, worker: int, hashes: Hashes) -> None:
        """Events of `worker` named these: a repair has no more doubts about them."""
        missing = self._missing.get(worker)
        if missing is not None:
            missing.difference_update(hashes.tolist())
            if not missing:
                del self._missing[worker]
                self._update_holes(worker)

    # Memory

    def _store_rest(self, column: int, hashes: Hashes) -> None:
        """Make room and store what is left, perhaps nothing; let the table grow."""
        while len(hashes):
            self._make_room()
            done = store(self.address, hashes, column)
            hashes = hashes[max(done, ~done) :]
        self._table.follow_growth()

    def _remove(self, column: int, hashes: Hashes) -> None:
        while (done := remove(self.address, hashes, column)) < len(hashes):
            self._make_room()
            hashes = hashes[done:]

    def _make_room(self) -> None:
        why = int(self._control[layout.AT_WANTS])
        self._control[layout.AT_WANTS] = 0
        if why == layout.WANTS_ROWS:
            self._sets.grow()
            self._cap_keys()
        else:
            assert why == layout.WANTS_FULL, f"a kernel stopped for {why}"
            self._table.make_room()

    def _cap_keys(self) -> None:
        left = max(self._max_nbytes - self._sets.nbytes, self._max_nbytes // 8)
        self._control[layout.AT_MAX_KEYS] = max(4096, left // _WORST_BLOCK_NBYTES)

    def _sweep_all(self) -> None:
        while self._columns.num_dead:
            self._sweep(layout.NUM_SEGMENTS)

    def _sweep(self, num_segments: int) -> None:
        done = sweep(self.address, self._columns.dead, num_segments)
        if done < num_segments:
            self._make_room()
        self._columns.swept(done)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fingerprint(key: int) -> int:
    """As `kernels.blocks.fingerprint`, in Python, to check it by."""
    mixed = _signed((key ^ (key >> 29)) * -4658895280553007687 & (1 << 64) - 1)
    return mixed ^ (mixed >> 32)


_compiled: list[bool] = []


def _compile() -> None:
    """Compile every kernel, for both kinds of arrays, before the first request needs it."""
    if _compiled:
        return
    _compiled.append(True)
    index = PrefixIndex(1)
    for hashes in (
        NO_HASHES,
        np.frombuffer(b"", dtype=np.uint64),
    ):  # the latter as messages have it
        index.store(0, hashes)
        index.remove(0, hashes)
        index.match(hashes)
    index.store(0, np.array([1], dtype=np.uint64))
    index.clear(0)
    index.work()
