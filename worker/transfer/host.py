"""Books of host memory: which block lies in which slot, who holds it, and which goes first.

A block that is held stays. Of the others the one that was used longest ago goes first; whoever uses a text
uses its blocks from the last to the first, so a block outlives those that continue it.

A block whose copy has not come yet is *expected*: it has its slot, held by those that copy it. If all of
these copies fail, it is gone when nothing holds it any more.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice


class HostSlots:
    """Slots of one arena by block key. Holds are counted."""

    __slots__ = ("_expected", "_free", "_holds", "_idle", "_slots", "num_slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # not held, the oldest first
        self._holds: dict[int, int] = {}
        self._expected: dict[int, int] = {}  # copies under way, of those of which none has come

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

    def slots(self, keys: Iterable[int]) -> tuple[int, ...]:
        """Those of `keys`, which are here."""
        slots = self._slots
        return tuple([slots[key] for key in keys])

    def is_whole(self, key: int) -> bool:
        """Whether the bytes of `key` are here."""
        return key in self._slots and key not in self._expected

    def is_coming(self, key: int) -> bool:
        """Whether they are here, or on their way: what is read after that copy finds them."""
        return key in self._slots and self._expected.get(key, 1) > 0

    def whole(self, keys: Iterable[int]) -> list[int]:
        """Those of `keys` whose bytes are here."""
        slots, expected = self._slots, self._expected
        return [key for key in keys if key in slots and key not in expected]

    def known(self, keys: Iterable[int]) -> list[int]:
        """Those that have a slot."""
        slots = self._slots
        return [key for key in keys if key in slots]

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

    def expect(self, keys: Sequence[int]) -> list[int]:
        """A copy of `keys` begins, which holds them; the blocks that gave way for it. There is room."""
        gone, expected = [], self._expected
        for key in keys:
            if key not in self._slots:
                got = self.put(key)
                assert got is not None, "there was room"
                if got[1] is not None:
                    gone.append(got[1])
                expected[key] = 0
            if key in expected:
                expected[key] += 1
            self.hold((key,))
        return gone

    def came(self, keys: Sequence[int]) -> list[int]:
        """A copy of `keys` has come: those that were not here before."""
        return [key for key in keys if self._expected.pop(key, None) is not None]

    def failed(self, keys: Sequence[int]) -> None:
        """A copy of `keys` has failed."""
        for key in keys:
            if key in self._expected:
                self._expected[key] -= 1

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
        """Those that nobody holds any more are the youngest, or go first if they `are_oldest`, in order.

        Those that never came are gone.
        """
        for key in reversed(keys) if are_oldest else keys:
            self._holds[key] -= 1
            if self._holds[key]:
                continue
            del self._holds[key]
            self._idle[key] = None
            self._idle.move_to_end(key, last=not are_oldest)
            if key in self._expected:
                del self._expected[key]
                self.drop(key)

    def oldest(self, n: int) -> list[int]:
        """The n blocks that give way first."""
        return list(islice(self._idle, n))

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert len(self._free) + len(self._slots) == self.num_slots, "slots got lost"
        assert len({*self._free, *self._slots.values()}) == self.num_slots, "a slot has two owners"
        assert set(self._idle) | set(self._holds) == set(self._slots), "a block is neither"
        assert not set(self._idle) & set(self._holds), "a held block may give way"
        assert all(n > 0 for n in self._holds.values()), "a hold of nobody"
        assert set(self._expected) <= set(self._holds), "a block is expected by nobody"
