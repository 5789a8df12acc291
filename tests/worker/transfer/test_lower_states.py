"""The books of the tiers against bytes that are known: whatever fails, and in whatever order moves end."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mallee.protocol.errors import DeviceMemoryExhausted, StorageFailed, TierFull, WorkerLost
from mallee.protocol.events import Removed, Stored, unpack_hashes
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.watch import Row, Rows
from mallee.worker.storage.volume import Read
from mallee.worker.transfer.lower import LowerTiers, Part
from mallee.worker.transfer.movers import Carrier
from mallee.worker.transfer.prices import MeasuredPrices
from mallee.worker.transfer.values import DISK, HOST, PEER, Moved, Place
from support.examples import examples
from support.tiers import DictDisk, LooseMover

NUM_BLOCKS, NUM_SLOTS, NBYTES = 24, 6, 16
KEYS = st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True)
GARBAGE = 255


def bytes_of(key: int) -> Row:
    """The bytes of a block, each of which tells its key."""
    return np.full(NBYTES, key, np.uint8)


class Blocks:
    """Device memory whose next reads or writes may fail, in the middle of a batch too."""

    block_nbytes = NBYTES

    def __init__(self) -> None:
        self.bytes = np.full((NUM_BLOCKS, NBYTES), GARBAGE, np.uint8)
        self.fails_in: int | None = None

    def new_rows(self, num: int) -> Rows:
        return np.zeros((num, NBYTES), np.uint8)

    def mark(self) -> object:
        return None

    def read(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        self._fail()
        rows[:] = self.bytes[list(blocks)]

    def write(self, blocks: Sequence[int], rows: Rows, after: object = None) -> None:
        self._fail()
        self.bytes[list(blocks)] = rows

    def are_numbers(self, blocks: Sequence[int], rows: Rows) -> bool:
        return True

    def _fail(self) -> None:
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                self.fails_in = None
                raise DeviceMemoryExhausted("no room for what is gathered")


class FailingDisk(DictDisk):
    """A disk of few blocks, whose next writes, reads or records may fail."""

    def __init__(self) -> None:
        super().__init__(max_blocks=8)
        self.fails = False

    def _fail(self) -> None:
        if self.fails:
            self.fails = False
            raise StorageFailed("write", "a run", 28, "no space left")

    def put(self, keys: Sequence[int], rows: Sequence[memoryview]) -> int:
        self._fail()
        return super().put(keys, rows)

    def get(self, keys: Sequence[int], rows: Sequence[memoryview]) -> Read:
        try:
            self._fail()
        except StorageFailed as error:
            return Read(0, error)
        return super().get(keys, rows)

    def commit(self, *given: Any, **more: Any) -> None:
        self._fail()
        super().commit(*given, **more)


class PeerLoan:
    """Blocks of another worker, of which so many can be read."""

    record = b""
    block_nbytes = NBYTES

    def __init__(self, keys: Sequence[int], num_good: int) -> None:
        self._keys = keys
        self._num_good = num_good

    @property
    def num_blocks(self) -> int:
        return len(self._keys)

    def read(self, places: Sequence[int], rows: Rows) -> None:
        if max(places) >= self._num_good:
            raise WorkerLost("peer", "the connection was cut")
        for place, row in zip(places, rows, strict=True):
            row[:] = bytes_of(self._keys[place])

    def close(self) -> None:
        """Nothing is held."""


class TransferMachine(RuleBasedStateMachine):
    """A device that gives up, parks, fetches and pulls blocks, over tiers that are small, late and fail."""

    @initialize()
    def begin(self) -> None:
        self.memory, self.disk, self.journal = Blocks(), FailingDisk(), Journal()
        arena = self.memory.new_rows(NUM_SLOTS)
        carrier = Carrier(self.memory, arena, self.disk, lambda: 0.0)  # type: ignore[arg-type]
        self.mover = LooseMover(carrier)
        self.lower = LowerTiers(
            self.journal, carrier, prices=MeasuredPrices(NBYTES), mover=self.mover
        )
        self.free = set(range(NUM_BLOCKS))  # device blocks that nothing reads or writes
        self.held: list[list[int]] = []  # keys that parks brought
        self.told: list[set[int]] = [set(), set(), set()]  # by tier, as events tell
        self.num_open = 0  # ends that have not come
        self.num_records = 0

    def computed(self, keys: Sequence[int]) -> list[int]:
        """Device blocks with the bytes of `keys`."""
        blocks = [self.free.pop() for _ in keys]
        for key, block in zip(keys, blocks, strict=True):
            self.memory.bytes[block] = bytes_of(key)
        return blocks

    def given_up(self, blocks: Sequence[int]) -> Callable[..., None]:
        """The end of a move that reads or writes `blocks`: it comes once, and they get others' bytes."""
        self.num_open += 1
        open_ends = [1]

        def end(*_: object) -> None:
            open_ends.pop()
            self.num_open -= 1
            self.memory.bytes[list(blocks)] = GARBAGE
            self.free.update(blocks)

        return end

    @precondition(lambda self: len(self.free) >= 5)
    @rule(keys=KEYS)
    def offload(self, keys: list[int]) -> None:
        blocks = self.computed(keys)
        self.lower.offload(keys, blocks, self.given_up(blocks))

    @precondition(lambda self: len(self.free) >= 5)
    @rule(keys=KEYS)
    def park(self, keys: list[int]) -> None:
        blocks = self.computed(keys)
        end = self.given_up(blocks)

        def ended(moved: Moved) -> None:
            end()
            if moved.error is None:
                self.held.append(keys)

        try:
            self.lower.park(keys, blocks, ended, num_private=0)
        except TierFull:
            end()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.lower.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: len(self.free) >= 5)
    @rule(keys=KEYS)
    def fetch(self, keys: list[int]) -> None:
        """The leading blocks of one tier, if any is there: what arrives has the right bytes."""
        found = self.lower.find(keys, 0)
        if found is not None:
            self._fetch(found, keys[: len(found.at)])

    @precondition(lambda self: len(self.free) >= 5)
    @rule(keys=KEYS, num_good=st.integers(0, 5))
    def pull(self, keys: list[int], num_good: int) -> None:
        loan = PeerLoan(keys, num_good)
        self._fetch(Part(Place(PEER, tuple(range(len(keys))), loan), range(len(keys))), keys)

    def _fetch(self, part: Part, keys: list[int]) -> None:
        blocks = [self.free.pop() for _ in keys]
        end = self.given_up(blocks)
        num_failed = self.lower.stats().num_failed

        def ended(num: int) -> None:
            for key, block in list(zip(keys, blocks, strict=True))[:num]:
                assert (self.memory.bytes[block] == key).all(), f"stale bytes under key {key}"
            is_told = self.lower.stats().num_failed > num_failed or part.source.tier == DISK
            assert num == len(keys) or is_told
            end()

        assert self.lower.fetch([part], lambda: blocks, ended)

    @precondition(lambda self: len(self.free) >= 5)
    @rule(keys=KEYS)
    def commit(self, keys: list[int]) -> None:
        self.num_records += 1
        blocks = self.computed(keys)
        name = f"c{self.num_records % 2}"  # few are there at once
        self.lower.commit(name, b"", keys, blocks, self.given_up(blocks), num_private=0)

    @rule(name=st.sampled_from(["c0", "c1"]))
    def forget(self, name: str) -> None:
        self.lower.forget(name)

    # What goes on beside

    @rule(num=st.integers(0, 2))
    def exhaust(self, num: int) -> None:
        """A copy of the device will fail, after so many that succeed."""
        self.memory.fails_in = num

    @rule()
    def break_disk(self) -> None:
        self.disk.fails = True

    @precondition(lambda self: self.disk.blocks)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.disk.broken.add(data.draw(st.sampled_from(sorted(self.disk.blocks))))

    @precondition(lambda self: self.mover.lanes)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        self.mover.advance(data.draw(st.sampled_from(self.mover.lanes)))

    @precondition(lambda self: self.mover.num_untold)
    @rule(data=st.data())
    def tell(self, data: st.DataObject) -> None:
        self.mover.tell(data.draw(st.integers(0, self.mover.num_untold - 1)))

    @rule()
    def take_ended(self) -> None:
        self.lower.take_ended()

    @invariant()
    def books_are_true(self) -> None:
        """Every block of host memory that may be lent has its bytes, and events tell of just those."""
        self.lower.check()
        for event in self.journal.drain():
            match event:
                case Stored(tier=tier):
                    new = set(unpack_hashes(event.hashes).tolist())
                    assert not new & self.told[tier], "stored twice"
                    self.told[tier] |= new
                case Removed(tier=tier):
                    gone = set(unpack_hashes(event.hashes).tolist())
                    assert gone <= self.told[tier], "removed, and was not there"
                    self.told[tier] -= gone
        for tier in (HOST, DISK):
            assert set(self.lower.keys(tier)) == self.told[tier]
        for key in self.lower.keys(HOST):
            assert self.lower.hold([key])
            assert (self.lower.rows([key])[0] == key).all(), f"other bytes under key {key}"
            self.lower.release([key])
        for keys in self.held:
            assert self.lower.num_leading(keys) == len(keys), "a held block is gone"

    def teardown(self) -> None:
        """Every end comes; what was released is held no more."""
        while self.mover.lanes or self.mover.num_untold or self.mover.has_done:
            for lane in self.mover.lanes:
                self.mover.advance(lane)
            while self.mover.num_untold:
                self.mover.tell(0)
            self.lower.take_ended()
            self.books_are_true()
        assert self.num_open == len(self.lower.under_way) == 0
        assert self.free == set(range(NUM_BLOCKS))
        assert self.lower.stats().host_held == len({key for keys in self.held for key in keys})


@pytest.mark.slow
def test_no_failure_and_no_order_of_ends_leaves_other_bytes_under_a_key() -> None:
    """S8, part, I26, part: evictions, parks, fetches, spills and pulls of blocks whose bytes are known."""
    bounds = settings(examples(100), stateful_step_count=60)
    run_state_machine_as_test(TransferMachine, settings=bounds)
