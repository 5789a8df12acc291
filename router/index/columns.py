"""Columns of an index's sets: each worker's own, and those given up.

A worker that is forgotten gets a fresh column at once. Its old one is *dead*: masked out of every match,
and free again when the whole table has been swept of it.
"""

import numpy as np

from mallee.router.index.kernels import layout
from mallee.router.index.kernels.blocks import set_holes
from mallee.router.index.kernels.layout import Ints


def num_columns(num_workers: int) -> int:
    """Columns of a tier for so many workers: a quarter to spare, in whole words."""
    return -(-(num_workers + max(8, num_workers // 4)) // 64) * 64


class Columns:
    """The columns of workers 0 .. num_workers - 1 under the control block `control`."""

    def __init__(self, control: Ints, num_workers: int) -> None:
        self._control = control
        self._num = num_columns(num_workers)
        self.of = list(range(num_workers))  # by worker
        self.dead: Ints = np.zeros(self._num // 64, dtype=np.int64)  # bits
        self._free = list(range(self._num - 1, num_workers - 1, -1))
        self._to_sweep: dict[int, int] = {}  # dead column -> segments left
        for worker in range(num_workers):
            self._give(worker, worker)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_dead(self) -> int:
        """Columns that the table must be swept of."""
        return len(self._to_sweep)

    def worker(self, column: int) -> int:
        """The worker that has this column, which is live."""
        return int(self._control[self._region(layout.REGION_PLACES) + column])

    def held(self, worker: int) -> list[int]:
        """Blocks of `worker` by tier."""
        return [int(num) for num in self._of_place(layout.REGION_HELD, worker)]

    def digests(self, worker: int) -> list[int]:
        """Sums over the blocks of `worker` by tier."""
        return [int(digest) for digest in self._of_place(layout.REGION_DIGESTS, worker)]

    def is_live(self, column: int) -> bool:
        word = int(self._control[self._region(layout.REGION_LIVE) + (column >> 6)])
        return bool(word >> (column & 63) & 1)

    def replace(self, worker: int) -> None:
        """Give `worker` a fresh column; its old one is dead. There must be a free one."""
        old = self.of[worker]
        self._set_live(old, False)
        self._of_place(layout.REGION_PLACES, old)[:] = self._num - 1
        for region in (layout.REGION_HELD, layout.REGION_DIGESTS):
            self._of_place(region, worker)[:] = 0
        _set_bit(self.dead, old, True)
        self._to_sweep[old] = layout.NUM_SEGMENTS
        self._give(worker, self._free.pop())

    def swept(self, num_segments: int) -> None:
        """Count segments swept of all dead columns."""
        for column in list(self._to_sweep):
            self._to_sweep[column] -= num_segments
            if self._to_sweep[column] <= 0:
                self._set_free(column)

    def num_entries(self) -> int:
        """(worker, block) pairs."""
        first = self._region(layout.REGION_HELD)
        held = self._control[first : first + 3 * self._num].reshape(3, self._num)
        return int(held[:, : len(self.of)].sum())

    def num_walked(self) -> int:
        """Workers with blocks that may have holes; the control block counts empty and dead columns, too."""
        holes = self._control[self._region(layout.REGION_MAY_HAVE_HOLES) :][: self._num // 64]
        may_have_holes = np.unpackbits(holes.view(np.uint8), bitorder="little")[self.of]
        held = self._control[self._region(layout.REGION_HELD) :][: len(self.of)]
        return int(np.count_nonzero(may_have_holes * held))

    def check(self, in_use: set[int]) -> None:
        """Raises AssertionError unless every column is of a worker, free or dead; `in_use` by blocks."""
        dead = {column % self._num for column in in_use} - set(self.of)
        assert dead <= set(self._to_sweep), f"columns {dead} belong to no worker"
        known = sorted([*self.of, *self._free, *self._to_sweep])
        assert known == list(range(self._num)), "columns don't add up"
        for worker, column in enumerate(self.of):
            assert self.is_live(column), f"worker {worker}'s column is not live"
            assert self.worker(column) == worker, f"column {column} is misfiled"

    def _region(self, region: int) -> int:
        return layout.AT_PER_COLUMN + region * self._num

    def _give(self, worker: int, column: int) -> None:
        self.of[worker] = column
        self._of_place(layout.REGION_PLACES, column)[:] = worker + self._num * np.arange(3)
        self._set_live(column, True)

    def _set_live(self, column: int, is_live: bool) -> None:
        _set_bit(self._control[self._region(layout.REGION_LIVE) :], column, is_live)

    def _set_free(self, column: int) -> None:
        del self._to_sweep[column]
        _set_bit(self.dead, column, False)
        set_holes(self._control.ctypes.data, column, False)
        self._free.append(column)

    def _of_place(self, region: int, place: int) -> Ints:
        """The words of a worker or column, one a tier."""
        first = self._region(region) + place
        return self._control[first : first + 3 * self._num : self._num]


def _set_bit(words: Ints, bit: int, is_set: bool) -> None:
    word, mask = words.view(np.uint64)[bit >> 6 :][:1], np.uint64(1 << (bit & 63))
    word[0] = word[0] | mask if is_set else word[0] & ~mask
