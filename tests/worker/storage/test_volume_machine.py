"""A volume against a dict and two sets: calls, restarts, losses of power, damage and calls that fail."""

from collections.abc import Container
from errno import EIO, ENOSPC

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mallee.protocol.errors import BlocksMissing, CorruptStorage, StorageFailed, StorageFull
from mallee.worker.storage.volume import Record
from support.disks import Disk, check, opened, read, rows
from support.examples import examples

KEYS = st.lists(st.integers(0, 20), unique=True, max_size=7)
CAPSULES = st.sampled_from("abcd")


def leading(keys: list[int], held: Container[int]) -> int:
    return next((i for i, key in enumerate(keys) if key not in held), len(keys))


class VolumeMachine(RuleBasedStateMachine):
    """`sure` blocks must be there; those in `maybe` were cached when power was lost, and may be."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.volume = opened(self.disk)
        self.records: dict[str, Record] = {}
        self.sure: set[int] = set()
        self.maybe: set[int] = set()

    @rule(keys=KEYS)
    def put(self, keys: list[int]) -> None:
        fresh = set(keys) - self.sure
        assert len(fresh - self.maybe) <= self.volume.put(keys, rows(keys)) <= len(fresh)
        self.written(keys)
        assert read(self.volume, keys) == (len(keys), None)

    @rule(keys=KEYS, capsule=CAPSULES, payload=st.binary(max_size=150), is_kept=st.booleans())
    def commit(self, keys: list[int], capsule: str, payload: bytes, is_kept: bool) -> None:
        try:
            self.volume.commit(capsule, payload, keys, is_kept=is_kept)
        except BlocksMissing:
            assert set(keys) - self.sure
            return
        assert set(keys) <= self.sure | self.maybe
        self.written(keys)
        self.records[capsule] = Record(capsule, payload, keys, "", is_kept)

    @rule(capsule=CAPSULES)
    def drop(self, capsule: str) -> None:
        assert self.volume.drop(capsule) == (self.records.pop(capsule, None) is not None)

    @rule(capsule=CAPSULES)
    def load(self, capsule: str) -> None:
        assert self.volume.load(capsule) == self.records.get(capsule)

    @rule(keys=KEYS)
    def get(self, keys: list[int]) -> None:
        num, _ = read(self.volume, keys)
        assert leading(keys, self.sure) <= num <= leading(keys, self.sure | self.maybe)

    @rule(loses_power=st.booleans())
    def restart(self, loses_power: bool) -> None:
        if loses_power:
            self.disk.lose_power()
            promised = {key for record in self.records.values() for key in record.keys}
            self.maybe |= self.sure - promised
            self.sure &= promised
        self.volume = opened(self.disk)
        assert self.sure <= set(self.volume.keys()) <= self.sure | self.maybe
        assert set(self.volume.capsules()) == self.records.keys()
        assert self.volume.unreadable() == []

    @rule(pick=st.integers(0, 1 << 20), at=st.integers(0, 1 << 20), cuts=st.booleans())
    def damage(self, pick: int, at: int, cuts: bool) -> None:
        slots = sorted(self.disk.slots)
        if not slots:
            return
        name = slots[pick % len(slots)]
        data = bytearray(self.disk.slots[name] or b"\0")
        at %= len(data)
        data[at] ^= 16
        self.disk.slots[name] = self.disk.durable[name] = bytes(data[:at] if cuts else data)
        self.volume = opened(self.disk)
        good = {key for key in range(21) if read(self.volume, [key])[0]}
        lost = [capsule for capsule in self.records if not self.is_loaded(capsule)]
        assert good <= self.sure | self.maybe
        assert len(self.sure - good) + len(lost) <= 1
        self.sure, self.maybe = good, set()
        for capsule in lost:
            del self.records[capsule]

    @rule(errno=st.sampled_from((EIO, ENOSPC)), after=st.integers(0, 30), keys=KEYS, name=CAPSULES)
    def fail(self, errno: int, after: int, keys: list[int], name: str) -> None:
        self.disk.fail_next(errno, after)
        kind = StorageFull if errno == ENOSPC else StorageFailed
        try:
            self.volume.put(keys, rows(keys))
            self.volume.commit(name, b"failing", keys)
        except (kind, BlocksMissing):
            held = set(self.volume.keys())
            self.maybe &= held
            self.sure = held - self.maybe
        else:
            self.written(keys)
            self.records[name] = Record(name, b"failing", keys, "", True)
        self.disk.fails.clear()

    @invariant()
    def nothing_is_miscounted(self) -> None:
        self.volume.take_lost()
        check(self.volume)

    def written(self, keys: list[int]) -> None:
        self.sure |= set(keys)
        self.maybe -= set(keys)

    def is_loaded(self, capsule: str) -> bool:
        try:
            return self.volume.load(capsule) == self.records[capsule]
        except CorruptStorage:
            return False


TestVolumeMachine = VolumeMachine.TestCase
TestVolumeMachine.settings = examples(100)
