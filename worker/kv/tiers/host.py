"""Books of host memory: which block lies in which slot, who holds it, and which goes first.

A block that is held stays. Of the others the one that was used longest ago goes first; whoever uses a text
uses its blocks from the last to the first, so a block outlives those that continue it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


class HostSlots:
    """Slots of one arena by block key. Holds are counted."""

    __slots__ = ("_free", "_holds", "_idle", "_slots", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # not held, the oldest first
        self._holds: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    @property
    def num_free(self) -> int:
        """Slots with nothing in them."""
        return len(self._free)

    @property
    def num_room(self) -> int:
        """Slots that `put` can get: free ones, and those of blocks that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return len(self._holds)

    def slot(self, key: int) -> int:
        return self._slots[key]

    def use(self, keys: Iterable[int]) -> None:
        """`keys`, which are here, are the youngest from now on, the last one the very youngest."""
        for key in keys:
            if key in self._idle:
                self._idle.move_to_end(key)

    def put(self, key: int) -> tuple[int, int | None] | None:
        """A slot for the new block `key`, and the block that gave way for it; None if all are held."""
        assert key not in self._slots, f"block {key:x} is here already"
        gone = None
        if not self._free:
            if not self._idle:
                return None
            gone = next(iter(self._idle))
            self.drop(gone)
        slot = self._free.pop()
        self._slots[key] = slot
        self._idle[key] = None
        return slot, gone

    def drop(self, key: int) -> None:
        """Forget a block that nobody holds."""
        del self._idle[key]
        self._free.append(self._slots.pop(key))

    def hold(self, keys: Iterable[int]) -> None:
        """`keys`, which are here, stay until they are released as often."""
        for key in keys:
            self._holds[key] = self._holds.get(key, 0) + 1
            self._idle.pop(key, None)

    def release(self, keys: Sequence[int], *, are_oldest: bool = False) -> None:
        """Those that nobody holds any more are the youngest, or go first if they `are_oldest`, in order."""
        for key in reversed(keys) if are_oldest else keys:
            self._holds[key] -= 1
            if not self._holds[key]:
                del self._holds[key]
                self._idle[key] = None
                self._idle.move_to_end(key, last=not are_oldest)

    def oldest(self, n: int) -> list[int]:
        """The n blocks that give way first."""
        found: list[int] = []
        for key in self._idle:
            if len(found) == n:
                break
            found.append(key)
        return found

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert len(self._free) + len(self._slots) == self.num_slots, "slots got lost"
        assert len({*self._free, *self._slots.values()}) == self.num_slots, "a slot has two owners"
        assert set(self._idle) | set(self._holds) == set(self._slots), "a block is neither"
        assert not set(self._idle) & set(self._holds), "a held block may give way"
        assert all(n > 0 for n in self._holds.values()), "a hold of nobody"
