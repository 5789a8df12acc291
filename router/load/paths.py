"""Paths of blocks that something uses on workers, counted: a path lasts until its last user leaves.

A path is known by its *waypoints*: every STRIDE-th chain hash and the last one. A chain hash names all
before it, so waypoints at the same depth are equal only on the same path; what is lost is where inside a
stride two paths part, at most STRIDE - 1 blocks. In return a path of 2048 blocks costs 128 entries.
"""

from typing import Final

import numpy as np

from mallee.protocol.bookings import WAYPOINT_STRIDE
from mallee.protocol.hashing import Hashes
from mallee.router.index.index import PrefixIndex
from mallee.router.index.kernels import layout
from mallee.router.index.kernels.layout import Counts
from mallee.router.index.table import Table
from mallee.router.load.kernels import count_up, leave_path, use_path

STRIDE: Final = WAYPOINT_STRIDE


def room_for_waypoints(num_blocks: int) -> Hashes:
    """Memory for the waypoints of a path of so many blocks."""
    return np.empty(-(-num_blocks // STRIDE), dtype=np.uint64)


class CountedPaths:
    """Users of paths on workers 0 .. num_workers - 1."""

    def __init__(self, num_workers: int, *, stride: int = STRIDE) -> None:
        if stride < 1:
            raise ValueError(f"stride={stride}: must be at least 1")
        self.stride = stride
        self._index = PrefixIndex(num_workers, is_prefix_closed=True)
        self._counts = Table()
        self._scratch: Hashes = np.empty(64, dtype=np.uint64)
        # One per worker, so that (worker, waypoint) is one key; the same in every process.
        self._salts = np.random.default_rng(1).integers(1, 1 << 62, num_workers).tolist()

        one = np.array([1], dtype=np.uint64)
        for waypoints in (one, np.frombuffer(one.tobytes(), dtype=np.uint64)):
            self.use(0, waypoints, 1)  # compiles, as no request should have to
            self.leave(0, waypoints, 1)
            count_up(self._counts.address, waypoints[:0], 0, 0, self._scratch, 0)

    @property
    def address(self) -> int:
        """The address of the control block that a match reads."""
        return self._index.address

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._counts.nbytes

    def use(self, worker: int, waypoints: Hashes, num_blocks: int) -> int:
        """Count one user more of this path of `num_blocks` blocks; returns how many had no user before."""
        if not num_blocks:
            return 0
        if len(self._scratch) < len(waypoints):
            self._grow(waypoints)
        fresh, salt, index = self._scratch, self._salts[worker], self._index
        column = index.column_of[worker]
        num_fresh = use_path(self._counts.address, index.address, waypoints, salt, column, fresh)
        if num_fresh < 0:
            num_fresh = self._use_rest(worker, waypoints, ~num_fresh, fresh)
        return num_blocks - (len(waypoints) - num_fresh) * self.stride if num_fresh else 0

    def _use_rest(self, worker: int, waypoints: Hashes, done: int, fresh: Hashes) -> int:
        """Count the waypoints from `done` on, index the new ones, and let the tables grow."""
        counts = self._counts
        num_fresh = int(counts.control[layout.AT_FRESH])
        while done < len(waypoints):
            counts.make_room()
            salt = self._salts[worker]
            done = count_up(counts.address, waypoints, salt, done, fresh, num_fresh)
            num_fresh = int(counts.control[layout.AT_FRESH])
        counts.follow_growth()
        self._index.store(worker, fresh[:num_fresh])
        return num_fresh

    def leave(self, worker: int, waypoints: Hashes, num_blocks: int) -> int:
        """Count one user less of a path; returns how many of its blocks have no user now."""
        if not num_blocks:
            return 0
        gone, salt, index = self._scratch, self._salts[worker], self._index
        column = index.column_of[worker]
        num_gone = leave_path(self._counts.address, index.address, waypoints, salt, column, gone)
        if num_gone < 0:
            num_gone = ~num_gone
            index.remove(worker, gone[:num_gone])
        return num_blocks - (len(waypoints) - num_gone) * self.stride if num_gone else 0

    def match_into(self, waypoints: Hashes, num_blocks: int, counts: Counts) -> None:
        """Leading blocks of a path that are used on each worker, in `counts` [num_workers].

        Whole strides, or the whole path.
        """
        self._index.match_waypoints(waypoints, self.stride, num_blocks, counts)

    def work(self, num_entries: int = 16_384) -> bool:
        """Sweep and rehash a little. True: there is more to do."""
        return self._counts.work(num_entries) | self._index.work(num_entries)

    def num_used(self, worker: int) -> int:
        """Waypoints in use on `worker`."""
        return self._index.num_held(worker)

    def check(self) -> None:
        """Raises AssertionError unless waypoints are indexed exactly while they are counted."""
        self._index.check()
        counts = self._counts.entries()
        assert all(count > 0 for count in counts.values()), "a waypoint without users"
        assert len(counts) == self._index.stats().num_entries, (
            "indexed and counted waypoints differ"
        )

    def _grow(self, waypoints: Hashes) -> None:
        self._scratch = np.empty(2 * len(waypoints), dtype=np.uint64)
