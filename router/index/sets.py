"""The memory of an index's interned sets: rows of bits, the table that finds them, free rows."""

import numpy as np
import numpy.typing as npt

from mallee.router.index.kernels import layout
from mallee.router.index.kernels.layout import Ints
from mallee.router.index.kernels.sets import intern_all

_FIRST_ROWS = 64
_SEED = 0x6D616C6C6565  # of the columns' keys: the same in every process, so that runs repeat


class Sets:
    """Sets of `columns` columns a tier, under the control block `control`."""

    __slots__ = ("_columns", "_control", "_free", "_intern", "_rows")

    def __init__(self, control: Ints, columns: int) -> None:
        self._control = control
        self._columns = columns
        keys = np.random.default_rng(_SEED).integers(-(1 << 63), (1 << 63) - 1, 3 * columns)
        first = layout.AT_PER_COLUMN + layout.REGION_SET_KEYS * columns
        control[first : first + 3 * columns] = keys
        control[layout.AT_TIERS] = 1
        control[layout.AT_NUM_ROWS] = 1
        self._publish(np.zeros((_FIRST_ROWS, 2 + columns // 64), dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._intern.nbytes + self._free.nbytes

    @property
    def num_rows(self) -> int:
        """Sets of two or more columns in use."""
        control = self._control
        return int(control[layout.AT_NUM_ROWS] - control[layout.AT_NUM_FREE_ROWS]) - 1

    def grow(self) -> None:
        """Add free rows."""
        rows: Ints = np.zeros((2 * len(self._rows), self._rows.shape[1]), dtype=np.int64)
        rows[: len(self._rows)] = self._rows
        free = self._free
        self._publish(rows)
        self._free[: len(free)] = free

    def add_tiers(self, tiers: int) -> None:
        """Widen the rows to so many tiers."""
        if self._control[layout.AT_TIERS] >= tiers:
            return
        rows: Ints = np.zeros((len(self._rows), 2 + tiers * self._columns // 64), dtype=np.int64)
        rows[:, : self._rows.shape[1]] = self._rows
        self._control[layout.AT_TIERS] = tiers
        free = self._free
        self._publish(rows)
        self._free[: len(free)] = free

    def members(self, ref: int) -> list[int]:
        """Columns of a set, ascending."""
        if not ref & layout.ROW_BIT:
            return [ref]
        return np.flatnonzero(_bits(self._rows[ref ^ layout.ROW_BIT])).tolist()

    def check(self, uses: dict[int, int]) -> None:
        """Raises AssertionError unless rows are used as in `uses` (ref -> blocks), and are distinct."""
        control, seen = self._control, set[bytes]()
        keys = control[layout.AT_PER_COLUMN + layout.REGION_SET_KEYS * self._columns :][
            : 3 * self._columns
        ]
        num_free = int(control[layout.AT_NUM_FREE_ROWS])
        free = set(self._free[:num_free].tolist())
        assert len(free) == num_free, "a row is free twice"
        for row in range(1, int(control[layout.AT_NUM_ROWS])):
            count = uses.get(row | layout.ROW_BIT, 0)
            assert self._rows[row, 1] == count, f"row {row} has {count} blocks"
            assert (row in free) == (count == 0), f"row {row}: {count} blocks, free {row in free}"
            if count:
                members = np.flatnonzero(_bits(self._rows[row]))
                assert len(members) > 1, f"row {row} has {len(members)} members"
                assert np.bitwise_xor.reduce(keys[members]) == self._rows[row, 0], f"key of {row}"
                seen.add(self._rows[row, 2:].tobytes())
        assert len(seen) == self.num_rows, "two rows are the same set"
        interned = sorted(self._intern[self._intern != 0].tolist())
        used = [row for row in range(1, int(control[layout.AT_NUM_ROWS])) if row not in free]
        assert interned == used, "the intern table differs from the rows"

    def _publish(self, rows: Ints) -> None:
        """Give the kernels `rows` (a copy, perhaps larger), with a table and stack to match."""
        control = self._control
        self._rows = rows
        self._intern: Ints = np.zeros(2 * len(rows), dtype=np.int64)
        self._free: Ints = np.zeros(len(rows), dtype=np.int64)
        control[layout.AT_ROWS] = rows.ctypes.data
        control[layout.AT_INTERN] = self._intern.ctypes.data
        control[layout.AT_FREE_ROWS] = self._free.ctypes.data
        control[layout.AT_ROW_WORDS] = rows.shape[1]
        control[layout.AT_MAX_ROWS] = len(rows)
        control[layout.AT_INTERN_MASK] = len(self._intern) - 1
        intern_all(control.ctypes.data)


def _bits(row: Ints) -> npt.NDArray[np.uint8]:
    return np.unpackbits(row[2:].view(np.uint8), bitorder="little")
