"""The memory of one segmented hash table: grows and shrinks a few segments at a time.

Layout and the reasons for it: `router.index.kernels.layout`.
"""

import math
import mmap

import numpy as np

from mallee.router.index.kernels import layout
from mallee.router.index.kernels.layout import Ints
from mallee.router.index.kernels.table import move_some

_AT_ONCE = 65_536  # entries; a table as small as this moves in one go: 0.3 ms
_ENTRY_NBYTES = 16
_GIVE_BACK_NBYTES = 2 << 20  # a huge page


class Table:
    """A control block and the entries it governs. Kernels get `address`.

    Their owner calls `follow_growth` after any kernel that may insert, and `make_room` when one stopped for
    WANTS_FULL. Raises nothing; memory is the limit.
    """

    __slots__ = (
        "_entries",
        "_given_back",
        "_memory",
        "_next",
        "_next_memory",
        "address",
        "capacity",
        "control",
        "is_moving",
    )

    def __init__(self, columns: int = 0) -> None:
        self.control: Ints = np.zeros(layout.control_words(columns), dtype=np.int64)
        self.address = self.control.ctypes.data
        self._next: Ints = np.zeros(0, dtype=np.int64)
        self._given_back = 0
        self.is_moving = False  # whether a larger or smaller table is being filled
        self.control[layout.AT_MAX_KEYS] = np.iinfo(np.int64).max
        self.control[layout.AT_COLUMNS] = columns
        self._memory, self._entries = _entries(8)
        self._next_memory = self._memory
        self._publish(8)
        move_some(self.address, 0)  # compiles, as no request should have to

    @property
    def num_keys(self) -> int:
        return int(self.control[layout.AT_NUM_KEYS])

    @property
    def nbytes(self) -> int:
        """Memory of the control block and the entries: of two tables, during a move."""
        moved = (
            int(self.control[layout.AT_MOVE_CURSOR]) / layout.NUM_SEGMENTS
            if self.is_moving
            else 0.0
        )
        nbytes = self._entries.nbytes * (1 - moved) + self._next.nbytes * moved
        return int(nbytes) + self.control.nbytes

    def follow_growth(self) -> None:
        """Begin a requested move, end one that is over. Call after insertions."""
        control = self.control
        if control[layout.AT_WANTS]:
            control[layout.AT_WANTS] = 0
            if not control[layout.AT_NEXT_CAP]:
                self._begin()
        if control[layout.AT_NEXT_CAP]:
            if control[layout.AT_NUM_MOVED] == layout.NUM_SEGMENTS:
                self._end()
            else:
                self._give_back(int(control[layout.AT_MOVE_CURSOR]) * self._cap() * _ENTRY_NBYTES)

    def make_room(self) -> None:
        """Grow the table at once, after a kernel stopped because a segment is full."""
        self.control[layout.AT_WANTS] = 0
        if self.is_moving:
            move_some(self.address, layout.NUM_SEGMENTS)
            self._end()
        self._begin()
        move_some(self.address, layout.NUM_SEGMENTS)
        self._end()

    def segments(self, num_entries: int) -> int:
        """The number of segments that so many entries fill, at least one."""
        return max(1, num_entries // self._cap())

    def work(self, num_entries: int) -> bool:
        """Move some entries; begin to shrink when mostly empty. True: there is more to do."""
        if not self.is_moving:
            if not self._is_too_large():
                return False
            self._begin()
        if self.is_moving:
            move_some(self.address, self.segments(num_entries))
            self.follow_growth()
        return self.is_moving or self._is_too_large()

    def entries(self) -> dict[int, int]:
        """Key -> value, of all. O(table), for checks."""
        found: dict[int, int] = {}
        control = self.control
        moved = (control[layout.AT_MOVED : layout.AT_PER_COLUMN] != 0) & self.is_moving
        counts = control[layout.AT_SEGMENT_COUNTS : layout.AT_MOVED]
        for table, is_here in ((self._entries, ~moved), (self._next, moved)):
            if not is_here.any():
                continue
            part = table.reshape(layout.NUM_SEGMENTS, -1, 2)
            is_used = (part[:, :, 0] != 0) & is_here[:, np.newaxis]
            assert (is_used.sum(axis=1)[is_here] == counts[is_here]).all(), "a segment's count"
            assert not part[:, :, 1][(part[:, :, 0] == 0) & is_here[:, np.newaxis]].any(), "dirty"
            found.update(zip(*part[is_used].T.tolist(), strict=True))
        assert len(found) == self.num_keys, f"{len(found)} keys found, {self.num_keys} counted"
        return found

    def _cap(self) -> int:
        return int(self.control[layout.AT_CAP])

    def _is_too_large(self) -> bool:
        is_empty = self.capacity > _AT_ONCE and self.num_keys * 5 < self.capacity
        return is_empty and self._fitting() * 3 < self._cap() * 2

    def _fitting(self) -> int:
        """Entries per segment that fit what is held now; shrinks by steps.

        A third leaves room for keys inserted before the move is over, so that it doesn't stop as full.
        """
        counts = self.control[layout.AT_SEGMENT_COUNTS : layout.AT_MOVED]
        mean = self.num_keys / layout.NUM_SEGMENTS
        most = int(self.control[layout.AT_MAX_KEYS]) / layout.NUM_SEGMENTS  # more would stay empty
        wanted = min(mean * 2 + 5 * math.sqrt(mean), most * 1.25 + 6 * math.sqrt(most))
        least = max(int(wanted), int(counts.max()) * 3 // 2, self._cap() // 3) + 8
        line = 1 << layout.LINE_SHIFT
        return -(-least // line) * line

    def _begin(self) -> None:
        """Allocate the next table, of a size for what is held now."""
        control, cap = self.control, self._fitting()
        self._next_memory, self._next = _entries(cap)
        control[layout.AT_MOVED : layout.AT_PER_COLUMN] = 0
        control[layout.AT_MOVE_CURSOR] = control[layout.AT_MOVE_DEBT] = control[
            layout.AT_NUM_MOVED
        ] = 0
        control[layout.AT_NEXT_TABLE] = self._next.ctypes.data
        control[layout.AT_NEXT_CAP] = cap
        self.is_moving = True
        if self.capacity <= _AT_ONCE:
            move_some(self.address, layout.NUM_SEGMENTS)

    def _give_back(self, nbytes: int) -> None:
        """Give the memory of the first `nbytes` of the present entries, all moved, back."""
        if nbytes - self._given_back >= _GIVE_BACK_NBYTES:
            nbytes -= nbytes % _GIVE_BACK_NBYTES
            self._memory.madvise(mmap.MADV_DONTNEED, self._given_back, nbytes - self._given_back)
            self._given_back = nbytes

    def _end(self) -> None:
        cap = int(self.control[layout.AT_NEXT_CAP])
        self._memory, self._entries = self._next_memory, self._next
        self._next = np.zeros(0, dtype=np.int64)
        self._publish(cap)

    def _publish(self, cap: int) -> None:
        control = self.control
        self.capacity = cap * layout.NUM_SEGMENTS  # entries of the present table
        control[layout.AT_TABLE] = self._entries.ctypes.data
        control[layout.AT_CAP] = cap
        control[layout.AT_NEXT_CAP] = control[layout.AT_NEXT_TABLE] = control[
            layout.AT_NUM_MOVED
        ] = 0
        self._given_back = 0
        self.is_moving = False  # whether a larger or smaller table is being filled


def _entries(cap: int) -> tuple[mmap.mmap, Ints]:
    """Zeroed memory for a table: pages are there once they are written, and can be given back singly."""
    # Private: shared pages are never huge, and stay in memory when they are given back.
    nbytes, private = layout.NUM_SEGMENTS * cap * _ENTRY_NBYTES, mmap.MAP_PRIVATE
    memory = mmap.mmap(-1, nbytes, flags=private | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and len(memory) >= 2 * _GIVE_BACK_NBYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)  # probes are random: with small pages each waits twice
    return memory, np.frombuffer(memory, dtype=np.int64)
