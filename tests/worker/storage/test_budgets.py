"""Budgets, holds and the order of eviction, against a model that counts anew each time."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import NamedTuple, TypeAlias

import msgspec
import pytest

from mallee.protocol.errors import BlocksMissing, StorageFull
from mallee.worker.storage.volume import Record, Volume, VolumeConfig
from support.disks import BLOCK, Disk, check, opened, read, rows

Key: TypeAlias = int | tuple[bytes, int]
"""Of a block; of one of a body: its bytes, and its place there."""


class ModelRecord(NamedTuple):
    keys: list[int]
    body: list[Key]
    owner: str
    is_kept: bool

    @property
    def blocks(self) -> set[Key]:
        return {*self.keys, *self.body}


@dataclass
class Model:
    """A volume's rules, by brute force. Blocks and records are in order of use, the oldest first."""

    config: VolumeConfig
    stored: list[Key] = field(default_factory=list)
    records: dict[str, ModelRecord] = field(default_factory=dict)

    def touch(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            if key in self.stored:
                self.stored.remove(key)
                self.stored.append(key)

    def add(self, keys: Sequence[Key], spared: Sequence[Key] = (), capsule: str = "") -> int | None:
        """The number of new blocks; None if there was no room."""
        self.touch(keys)
        fresh = [key for key in keys if key not in self.stored]
        if fresh and not self.make_room(len(fresh), [*keys, *spared], capsule):
            return None
        self.stored += reversed(fresh)
        return len(fresh)

    def make_room(self, num: int, spared: Sequence[Key], capsule: str) -> bool:
        def over(limit: int) -> int:
            return ceil(((len(self.stored) + num) * BLOCK - limit) / BLOCK)

        limit, before = self.config.budget_nbytes, deepcopy((self.stored, self.records))
        if over(limit) > 0:
            self.evict(over(int(self.config.low_watermark * limit)), spared)
            for name, record in list(self.records.items()):
                if over(limit) > 0 and not record.is_kept and name != capsule:
                    self.drop(name)
                    self.evict(over(limit), spared)
        if over(limit) > 0:
            self.stored, self.records = before
        return over(limit) <= 0

    def evict(self, num: int, spared: Sequence[Key]) -> None:
        busy = {*spared}.union(*(record.blocks for record in self.records.values()))
        gone = [key for key in self.stored if key not in busy][: max(num, 0)]
        self.stored = [key for key in self.stored if key not in gone]

    def drop(self, name: str) -> None:
        body = self.records.pop(name).body
        held = set[Key]().union(*(record.blocks for record in self.records.values()))
        self.stored = [key for key in self.stored if key in held or key not in body]

    def put_record(self, name: str, new: ModelRecord) -> bool:
        before = deepcopy((self.stored, self.records))
        old = self.records.pop(name, None)
        self.records[name] = new
        if old is not None:
            self.stored = [key for key in self.stored if key in new.body or key not in old.body]
        theirs = [n for n, r in self.records.items() if r.owner == new.owner and not r.is_kept]
        for victim in [*(each for each in theirs if each != name), None]:
            owned = [r.blocks for r in self.records.values() if r.owner == new.owner]
            if len(set[Key]().union(*owned)) * BLOCK <= self.config.owner_nbytes:
                return True
            if victim is not None:
                self.drop(victim)
        self.stored, self.records = before
        return False


def test_evictions_are_those_of_the_model() -> None:
    told = [story(seed) for seed in range(8)]
    blocks, records, refused = (sum(each) for each in zip(*told, strict=True))
    assert blocks > 1000
    assert records > 40
    assert refused > 3


def story(seed: int) -> tuple[int, int, int]:
    """Random calls on a volume and on the model; evicted blocks and records, and refusals."""
    rng = Random(seed)
    config = VolumeConfig(
        rng.choice([4000, 8000]),
        owner_nbytes=rng.choice([2500, 5000]),
        low_watermark=rng.choice([0.5, 0.9, 1.0]),
    )
    volume, model = opened(Disk(), config), Model(config)
    blocks = records = refused = 0
    for _ in range(250):
        first = rng.randrange(150)
        keys = list(range(first, first + rng.randrange(1, 11)))
        capsule = f"c{rng.randrange(9)}"
        before = set(volume.keys()), set(volume.capsules())
        match rng.randrange(6):
            case 0 | 1:
                refused += put(volume, model, keys)
            case 2 | 3:
                refused += put(volume, model, keys)
                payload, is_kept = capsule.encode() * rng.choice((9, 90)), rng.random() < 0.3
                record = Record(capsule, payload, keys, rng.choice("xy"), is_kept)
                refused += commit(volume, model, record)
            case 4:
                held = [key for key in keys if key in before[0]]
                read(volume, held)
                model.touch(held)
            case _ if rng.random() < 0.5:
                assert volume.drop(capsule) == (capsule in model.records)
                if capsule in model.records:
                    model.drop(capsule)
                before[1].discard(capsule)
            case _:
                assert (volume.load(capsule) is None) == (capsule not in model.records)
                if (found := model.records.pop(capsule, None)) is not None:
                    model.records[capsule] = found
                    model.touch(found.body)
        lost = volume.take_lost()
        assert before[0] - set(volume.keys()) <= set(lost.keys) <= before[0] | set(keys)
        assert before[1] - set(volume.capsules()) == set(lost.capsules) - set(volume.capsules())
        check(volume)
        assert sorted(volume.keys()) == sorted(key for key in model.stored if isinstance(key, int))
        assert set(volume.capsules()) == model.records.keys()
        num = volume._catalogue.value("SELECT COUNT(*) FROM blocks WHERE key NOT NULL")
        assert num * BLOCK == len(model.stored) * BLOCK <= config.budget_nbytes
        blocks, records = blocks + len(lost.keys), records + len(lost.capsules)
    return blocks, records, refused


def put(volume: Volume, model: Model, keys: list[int]) -> int:
    """The same in both; whether it was refused."""
    num = model.add(keys)
    if num is None:
        with pytest.raises(StorageFull, match="no room in the volume"):
            volume.put(keys, rows(keys))
        return 1
    assert volume.put(keys, rows(keys)) == num
    return 0


def commit(volume: Volume, model: Model, record: Record) -> int:
    def call() -> None:
        capsule, payload, keys, owner, is_kept = record
        volume.commit(capsule, payload, keys, owner=owner, is_kept=is_kept)

    raw = msgspec.msgpack.encode(record)
    raw = len(raw).to_bytes(8, "little") + raw
    body: list[Key] = [(raw[i : i + BLOCK], i) for i in range(0, len(raw), BLOCK)]
    new = ModelRecord(record.keys, body, record.owner, record.is_kept)
    model.touch(record.keys)
    if not set(record.keys) <= set(model.stored):
        with pytest.raises(BlocksMissing):
            call()
        return 1
    if model.add(body, [*record.keys, *body], record.capsule) is None:
        with pytest.raises(StorageFull, match="no room in the volume"):
            call()
        return 1
    if not model.put_record(record.capsule, new):
        with pytest.raises(StorageFull, match="its owner's share"):
            call()
        return 1
    call()
    return 0
