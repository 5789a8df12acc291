"""A volume against a dict and two sets: calls, restarts, losses of power, damage and calls that fail."""

from collections.abc import Container
from errno import EIO, ENOSPC

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mallee.protocol.errors import BlocksMissing, CorruptStorage, StorageFailed, StorageFull
from mallee.worker.storage.volume import Record, VolumeConfig
from support.disks import BLOCK, Disk, opened, read, rows
from support.examples import examples

KEYS = st.lists(st.integers(0, 20), unique=True, max_size=7)
CAPSULES = st.sampled_from("abcd")
CONFIG = VolumeConfig(1 << 30, run_nbytes=3 * BLOCK)


def leading(keys: list[int], held: Container[int]) -> int:
    return next((i for i, key in enumerate(keys) if key not in held), len(keys))


class VolumeMachine(RuleBasedStateMachine):
    """`sure` blocks must be there; those in `maybe` were cached when power was lost, and may be."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.volume = opened(self.disk, CONFIG)
        self.records: dict[str, Record] = {}
        self.acknowledged: list[Record] = []
        self.revived: set[str] = set()
        self.refused: set[str] = set()  # capsules of which a record was damaged
        self.sure: set[int] = set()
        self.maybe: set[int] = set()
        self.destroyed: set[int] = set()  # by damage; records may name them
        self.unread: set[int] = set()  # since a call failed; a restart may bring them back

    @rule(keys=KEYS)
    def put(self, keys: list[int]) -> None:
        fresh = set(keys) - self.sure
        assert len(fresh - self.maybe) <= self.volume.put(keys, rows(keys)) <= len(fresh)
        self.written(keys)
        assert read(self.volume, keys) == (len(keys), None)

    @rule(keys=KEYS, capsule=CAPSULES, payload=st.binary(max_size=20), is_kept=st.booleans())
    def commit(self, keys: list[int], capsule: str, payload: bytes, is_kept: bool) -> None:
        try:
            self.volume.commit(capsule, payload, keys, is_kept=is_kept)
        except BlocksMissing:
            assert set(keys) - self.sure
            return
        assert set(keys) <= self.sure | self.maybe
        self.committed(Record(capsule, payload, keys, "", is_kept))

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
        self.volume = opened(self.disk, CONFIG)
        named = self.named()
        if loses_power:
            self.maybe |= self.sure - named
            self.sure &= named
        self.sure |= named - self.destroyed  # also those that could not be read
        self.maybe = (self.maybe | self.destroyed | self.unread) - self.sure
        assert self.sure <= set(self.volume.keys()) <= self.sure | self.maybe
        back = set(self.volume.capsules()) - set(self.records)
        assert back <= self.refused, "only where a record was damaged its removal was not synced"
        self.settle(back)
        assert set(self.volume.capsules()) == set(self.records)

    @rule(pick=st.integers(0, 1 << 20), at=st.integers(0, 1 << 20), cuts=st.booleans())
    def damage(self, pick: int, at: int, cuts: bool) -> None:
        names = sorted(self.disk.contents)
        if not names:
            return
        name = names[pick % len(names)]
        data = bytearray(self.disk.contents[name])
        at %= len(data)
        data[at] ^= 16
        damaged = bytes(data[:at] if cuts else data)
        self.disk.contents[name] = damaged
        self.disk.durable[name] = damaged
        self.volume = opened(self.disk, CONFIG)
        before = self.sure | self.maybe | self.unread | self.destroyed | self.named()
        good = {key for key in range(21) if read(self.volume, [key])[0]}
        self.destroyed |= before - good
        assert good <= before
        assert self.sure <= good or name.startswith("runs/")
        self.sure, self.maybe = good, set()
        lost = [capsule for capsule in self.records if not self.is_loaded(capsule)]
        assert len(lost) <= name.startswith("capsules/")
        self.refused |= set(lost)
        self.settle(set(lost))

    @rule(errno=st.sampled_from((EIO, ENOSPC)), after=st.integers(0, 4), keys=KEYS, name=CAPSULES)
    def fail(self, errno: int, after: int, keys: list[int], name: str) -> None:
        self.disk.fail_next(errno, after)
        kind = StorageFull if errno == ENOSPC else StorageFailed
        try:
            self.volume.put(keys, rows(keys))
            self.volume.commit(name, b"failing", keys)
        except (kind, BlocksMissing):
            held = set(self.volume.keys())
            self.unread |= (self.sure | self.maybe) - held
            self.maybe &= held
            self.sure = held - self.maybe
        else:
            self.committed(Record(name, b"failing", keys, "", True))
        self.disk.fails.clear()

    @invariant()
    def files_are_those_that_are_known(self) -> None:
        self.volume.take_lost()
        self.volume.check()

    def written(self, keys: list[int]) -> None:
        self.sure |= set(keys)
        self.maybe -= set(keys)
        self.destroyed -= set(keys)

    def settle(self, capsules: set[str]) -> None:
        """Of damaged records nothing is left, or an older one."""
        for capsule in capsules:
            self.records.pop(capsule, None)
            try:
                found = self.volume.load(capsule)
            except CorruptStorage:
                continue
            if found is not None:
                assert found in self.acknowledged
                self.records[capsule] = found
                self.revived.add(capsule)

    def named(self) -> set[int]:
        """Blocks that records promise; those of revived ones were a cache meanwhile."""
        promised = [r for name, r in self.records.items() if name not in self.revived]
        return {key for record in promised for key in record.keys}

    def committed(self, record: Record) -> None:
        self.revived.discard(record.capsule)
        self.written(record.keys)
        self.records[record.capsule] = record
        self.acknowledged.append(record)

    def is_loaded(self, capsule: str) -> bool:
        try:
            return self.volume.load(capsule) == self.records.get(capsule)
        except CorruptStorage:
            return False


TestVolumeMachine = VolumeMachine.TestCase
TestVolumeMachine.settings = examples(100)
