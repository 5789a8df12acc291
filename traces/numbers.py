"""Kinds of arrays, and numbers for names: from 0, in the order in which names appear first."""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.traces.jit import kernel

Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Int32s: TypeAlias = npt.NDArray[np.int32]

_EMPTY: Final = -1
_FIRST_SLOTS: Final = 1 << 12


class Numbers:
    """A hash table from names (0 or more) to numbers. 12 bytes a slot, twice to four times the names."""

    def __init__(self) -> None:
        self._keys, self._values = _table(_FIRST_SLOTS)
        self._names = np.empty(_FIRST_SLOTS // 2, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, names: Ints) -> Int32s:
        """The number of each of `names`; new names get new numbers."""
        while 2 * (self._count + len(names)) > len(self._keys):
            self._grow()
        found = np.empty(len(names), np.int32)
        self._count = _number(names, self._keys, self._values, self._names, self._count, found)
        return found

    def _grow(self) -> None:
        self._keys, self._values = _table(2 * len(self._keys))
        wider = np.empty(len(self._keys) // 2, np.int64)
        wider[: self._count] = self._names[: self._count]
        self._names = wider
        again = np.empty(self._count, np.int32)
        _number(self._names[: self._count].copy(), self._keys, self._values, self._names, 0, again)


def _table(slots: int) -> tuple[Ints, Int32s]:
    return np.full(slots, _EMPTY, np.int64), np.empty(slots, np.int32)


@kernel
def _number(
    names: Ints, keys: Ints, values: Int32s, by_number: Ints, count: int, found: Int32s
) -> int:
    """Fills `found`, adds to the table; how many names there are then."""
    mask = len(keys) - 1
    for i in range(len(names)):
        name = names[i]
        mixed = np.uint64(name) * np.uint64(0x9E3779B97F4A7C15)
        at = np.int64((mixed ^ (mixed >> np.uint64(29))) >> np.uint64(16)) & mask
        while keys[at] != name and keys[at] >= 0:
            at = (at + 1) & mask
        if keys[at] < 0:
            keys[at] = name
            values[at] = count
            by_number[count] = name
            count += 1
        found[i] = values[at]
    return count
