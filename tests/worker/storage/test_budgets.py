"""Budgets, pins and the order of eviction, against a model that counts anew each time."""

from dataclasses import dataclass, field
from random import Random

import pytest

from mallee.protocol.errors import BlocksMissing, StorageFull
from mallee.worker.storage.volume import Volume, VolumeConfig
from support.disks import BLOCK, Disk, opened, read, rows


@dataclass
class ModelRun:
    keys: list[int]
    nbytes: int
    used: int


@dataclass
class ModelRecord:
    keys: list[int]
    nbytes: int
    owner: str
    is_kept: bool
    used: int


@dataclass
class Model:
    """A volume's rules, by brute force."""

    config: VolumeConfig
    now: int = 0
    runs: list[ModelRun] = field(default_factory=list)
    records: dict[str, ModelRecord] = field(default_factory=dict)

    def tick(self) -> int:
        self.now += 1
        return self.now

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs) + sum(r.nbytes for r in self.records.values())

    def touch(self, keys: list[int]) -> list[ModelRun]:
        """The runs of `keys`, used in the order of their first key."""
        found: list[ModelRun] = []
        for key in keys:
            found += [run for run in self.runs if key in run.keys and run not in found]
        for run in found:
            run.used = self.tick()
        return found

    def pinned(self, records: list[ModelRecord]) -> list[ModelRun]:
        keys = {key for record in records for key in record.keys}
        return [run for run in self.runs if keys & set(run.keys)]

    def evictable(self, spared: list[ModelRun]) -> list[ModelRun]:
        busy = self.pinned(list(self.records.values())) + spared
        return sorted((run for run in self.runs if run not in busy), key=lambda run: run.used)

    def make_room(self, nbytes: int, spared: list[ModelRun], capsule: str = "") -> bool:
        limit = self.config.budget_nbytes
        if self.nbytes + nbytes <= limit:
            return True
        stay = [r for name, r in self.records.items() if r.is_kept or name == capsule]
        runs = [*spared, *(run for run in self.pinned(stay) if run not in spared)]
        fixed = sum(r.nbytes for r in stay) + sum(run.nbytes for run in runs)
        if fixed + nbytes > limit:
            return False
        for run in self.evictable(spared):
            if self.nbytes + nbytes <= self.config.low_watermark * limit:
                return True
            self.runs.remove(run)
        by_use = sorted(self.records, key=lambda name: self.records[name].used)
        for name in by_use:
            if self.nbytes + nbytes <= limit:
                return True
            if self.records[name].is_kept or name == capsule:
                continue
            del self.records[name]
            for run in self.evictable(spared):
                if self.nbytes + nbytes <= limit:
                    return True
                self.runs.remove(run)
        return True

    def owned(self, records: list[ModelRecord]) -> int:
        keys = {key for record in records for key in record.keys}
        return sum(record.nbytes for record in records) + len(keys) * BLOCK

    def make_owner_room(self, capsule: str, new: ModelRecord) -> bool:
        theirs = {n: r for n, r in self.records.items() if r.owner == new.owner and n != capsule}
        limit = self.config.owner_nbytes
        if self.owned([new, *theirs.values()]) <= limit:
            return True
        if self.owned([new, *(r for r in theirs.values() if r.is_kept)]) > limit:
            return False
        for name in sorted(theirs, key=lambda name: theirs[name].used):
            if self.owned([new, *theirs.values()]) <= limit:
                break
            if not theirs[name].is_kept:
                del theirs[name], self.records[name]
        return True


def test_evictions_are_those_of_the_model() -> None:
    told = [story(seed) for seed in range(12)]
    blocks, records, refused = (sum(each) for each in zip(*told, strict=True))
    assert blocks > 1000
    assert records > 100
    assert refused > 10


def story(seed: int) -> tuple[int, int, int]:
    """Random calls on a volume and on the model; evicted blocks and records, and refusals."""
    rng = Random(seed)
    config = VolumeConfig(
        rng.choice([4000, 8000]),
        owner_nbytes=rng.choice([2500, 5000]),
        low_watermark=rng.choice([0.5, 0.9, 1.0]),
        run_nbytes=4 * BLOCK,
    )
    disk = Disk()
    volume = opened(disk, config)
    model = Model(config)
    refused = 0
    for _ in range(250):
        first = rng.randrange(150)
        keys = list(range(first, first + rng.randrange(1, 11)))
        capsule = f"c{rng.randrange(9)}"
        before = set(volume.keys()), set(volume.capsules())
        match rng.randrange(6):
            case 0 | 1:
                refused += put(volume, model, disk, keys)
            case 2 | 3:
                refused += put(volume, model, disk, keys)
                owner, is_kept = rng.choice("xy"), rng.random() < 0.2
                refused += commit(volume, model, capsule, keys, owner, is_kept=is_kept)
            case 4:
                held = [key for key in keys if key in volume]
                read(volume, held)
                for key in held:
                    model.touch([key])
            case _ if rng.random() < 0.5:
                assert volume.drop(capsule) == (model.records.pop(capsule, None) is not None)
                before[1].discard(capsule)
            case _:
                record = volume.load(capsule)
                assert (record is None) == (capsule not in model.records)
                if record is not None:
                    model.records[capsule].used = model.tick()
                    model.touch(record.keys)
        lost = volume.take_lost()
        assert before[0] - set(volume.keys()) == set(lost.keys)
        assert before[1] - set(volume.capsules()) == set(lost.capsules) - set(volume.capsules())
        volume.check()
        assert sorted(volume.keys()) == sorted(key for run in model.runs for key in run.keys)
        assert volume.capsules() == sorted(model.records, key=lambda n: model.records[n].used)
        assert volume.stats().nbytes == model.nbytes <= config.budget_nbytes
    stats = volume.stats()
    return stats.num_evicted_blocks, stats.num_evicted_records, refused


def put(volume: Volume, model: Model, disk: Disk, keys: list[int]) -> int:
    """The same in both; whether it was refused."""
    fresh = [key for key in keys if not any(key in run.keys for run in model.runs)]
    spared = model.touch(keys)
    parts = [fresh[i : i + 4] for i in range(0, len(fresh), 4)]
    sizes = [run_nbytes(len(part), part) for part in parts]
    fits = model.make_room(sum(sizes), spared)
    if not fits:
        with pytest.raises(StorageFull, match="no room in the volume"):
            volume.put(keys, rows(keys))
        return 1
    assert volume.put(keys, rows(keys)) == len(fresh)
    for part, nbytes in zip(parts, sizes, strict=True):
        model.runs.append(ModelRun(part, nbytes, model.tick()))
    return 0


def run_nbytes(num: int, keys: list[int]) -> int:
    """The bytes of a run, measured on a disk of its own."""
    disk = Disk()
    opened(disk).put(keys, rows(keys))
    return sum(disk.sizes("runs").values())


def record_nbytes(capsule: str, keys: list[int], owner: str, *, is_kept: bool) -> int:
    disk = Disk()
    volume = opened(disk)
    volume.put(keys, rows(keys))
    volume.commit(capsule, capsule.encode() * 9, keys, owner=owner, is_kept=is_kept)
    return sum(disk.sizes("capsules").values())


def commit(
    volume: Volume, model: Model, capsule: str, keys: list[int], owner: str, *, is_kept: bool
) -> int:
    def call() -> None:
        volume.commit(capsule, capsule.encode() * 9, keys, owner=owner, is_kept=is_kept)

    if not all(any(key in run.keys for run in model.runs) for key in keys):
        with pytest.raises(BlocksMissing):
            call()
        return 1
    nbytes = record_nbytes(capsule, keys, owner, is_kept=is_kept)
    new = ModelRecord(keys, nbytes, owner, is_kept, 0)
    spared = model.touch(keys)
    if not model.make_owner_room(capsule, new):
        with pytest.raises(StorageFull, match="its owner's share"):
            call()
        return 1
    if not model.make_room(nbytes, spared, capsule):
        with pytest.raises(StorageFull, match="no room in the volume"):
            call()
        return 1
    call()
    new.used = model.tick()
    model.records[capsule] = new
    return 0
