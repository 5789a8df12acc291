"""A volume's promises: what is stored comes back, and nothing else does."""

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from errno import EIO
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mallee.protocol.errors import (
    BlocksMissing,
    CorruptStorage,
    IncompatibleCapsule,
    StorageError,
    StorageFailed,
    StorageFull,
)
from mallee.worker.storage.files import Directory
from mallee.worker.storage.objects import ObjectStore
from mallee.worker.storage.volume import Record, Volume, VolumeConfig
from support.disks import BLOCK, IDENTITY, Disk, opened, read, rows

STORES = ("directory", "memory", "file", "disk")
_PREFIXES = count()


@pytest.fixture(params=STORES)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    match request.param:
        case "directory":
            yield Directory(tmp_path / "volume")
        case "disk":
            yield Disk()
        case "file":
            yield ObjectStore.at(f"file://{tmp_path}/volume")
        case "memory":
            yield ObjectStore.at(f"memory://volume{next(_PREFIXES)}")
            fsspec.filesystem("memory").store.clear()


def test_blocks_and_records_come_back_after_a_restart(files: Any) -> None:
    """From rows that lie anywhere; a record takes the place of an older one."""
    keys = [3, 1 << 63, 7, 9]
    volume = opened(files, VolumeConfig(1 << 20, run_nbytes=3 * BLOCK))
    scattered = np.zeros((9, BLOCK), np.uint8)
    scattered[1::2] = rows(keys)
    assert volume.put(keys, scattered[1::2]) == 4
    assert volume.put([9, 11], rows([9, 11])) == 1  # each is stored once
    assert volume.stats().num_runs == 3
    volume.commit("r1.0", b"first", keys[:1])
    volume.commit("r1.0", b"tokens", keys, owner="tenant", is_kept=False)
    volume.check()
    volume.close()
    volume = opened(files)
    assert read(volume, keys) == (4, None)
    assert read(volume, [11, 7, 9]) == (3, None)
    into = [bytearray(BLOCK) for _ in keys]
    assert volume.get(keys, into) == (4, None)
    assert [bytes(each) for each in into] == [bytes(each) for each in rows(keys)]
    assert volume.load("r1.0") == Record("r1.0", b"tokens", keys, "tenant", False)
    assert volume.load("r1.1") is None
    assert volume.capsules() == ["r1.0"]
    assert sorted(volume.keys()) == sorted([*keys, 11])
    volume.check()
    assert volume.drop("r1.0")
    assert not volume.drop("r1.0")
    volume.close()
    volume = opened(files)
    assert volume.load("r1.0") is None
    assert read(volume, keys) == (4, None)
    volume.close()


class Throttled(MemoryFileSystem):  # type: ignore[misc]
    """A store whose library has an error of its own."""

    protocol = "throttled"
    cachable = False
    is_throttled = False

    def pipe_file(self, *args: Any, **kwargs: Any) -> None:
        if self.is_throttled:
            raise LookupError("slow down")
        super().pipe_file(*args, **kwargs)

    cat_file_of_memory = MemoryFileSystem.cat_file

    def cat_file(self, *args: Any, **kwargs: Any) -> bytes:
        if self.is_throttled:
            raise LookupError("slow down")
        return bytes(self.cat_file_of_memory(*args, **kwargs))


def test_errors_of_a_store_s_own_library_are_named() -> None:
    store = Throttled()
    volume = opened(ObjectStore(store, "/throttled"))
    volume.put([1], rows([1]))
    store.is_throttled = True
    with pytest.raises(StorageFailed, match="LookupError: slow down"):
        volume.put([2], rows([2]))
    num, error = read(volume, [1])
    assert num == 0
    assert isinstance(error, StorageFailed)
    volume = opened(ObjectStore(store, "/throttled"))
    assert [type(each) for each in volume.problems] == [StorageFailed]
    store.is_throttled = False
    volume = opened(ObjectStore(store, "/throttled"))
    assert read(volume, [1]) == (1, None)
    store.store.clear()


def test_a_run_of_more_blocks_than_one_call_takes_is_whole(tmp_path: Path) -> None:
    keys = list(range(2500))
    volume = opened(Directory(tmp_path))
    volume.put(keys, list(rows(keys)))
    assert volume.stats().num_runs == 1
    assert read(volume, keys) == (2500, None)
    volume.close()


def test_a_block_that_is_not_stored_ends_a_read() -> None:
    volume = opened(Disk())
    volume.put([1, 2, 3], rows([1, 2, 3]))
    num, error = read(volume, [1, 2, 4, 3, 5])
    assert num == 2
    assert isinstance(error, BlocksMissing)
    assert error.fields == {"missing": 2, "asked": 5, "key": 4}
    assert read(volume, []) == (0, None)


def test_one_sync_makes_a_capsule_durable_and_no_block_is_synced_on_its_own() -> None:
    disk = Disk()
    volume = opened(disk, VolumeConfig(1 << 20, run_nbytes=2 * BLOCK))
    volume.put([1, 2, 3, 4, 5], rows([1, 2, 3, 4, 5]))
    assert disk.calls.count("sync") == 0
    volume.commit("a", b"", [1, 2, 3, 4, 5])
    assert disk.calls.count("sync") == 1
    volume.commit("b", b"", [1, 2])
    assert disk.calls.count("sync") == 1
    disk.lose_power()
    volume = opened(disk)
    assert volume.load("a") is not None
    assert read(volume, [1, 2, 3, 4, 5]) == (5, None)


@pytest.mark.parametrize("fsync", ["always", "never"])
def test_the_policy_says_what_outlives_a_loss_of_power(fsync: Any) -> None:
    disk = Disk()
    volume = opened(disk, VolumeConfig(1 << 20, fsync=fsync))
    volume.put([1, 2], rows([1, 2]))
    volume.commit("a", b"x", [1, 2])
    assert "sync" not in disk.calls
    assert len(disk.durable) == (2 if fsync == "always" else 0)


@pytest.mark.parametrize("field", sorted(IDENTITY))
def test_a_changed_field_is_named_with_both_values(field: str) -> None:
    """F24, part: the record of another model or layout is refused by field."""
    disk = Disk()
    volume = opened(disk)
    volume.put([1, 2], rows([1, 2]))
    volume.commit("a", b"x", [1, 2])
    volume = opened(disk, **{field: "other"})
    with pytest.raises(
        IncompatibleCapsule, match=f"{field} was '{IDENTITY[field]}' and is 'other'"
    ):
        volume.load("a")
    assert read(volume, [1])[0] == 0
    assert volume.capsules() == []
    assert volume.stats().num_stale_runs == volume.stats().num_stale_records == 1
    volume.check()
    volume.put([1], rows([1]))
    volume.commit("a", b"y", [1])  # made again
    assert read(volume, [1]) == (1, None)
    volume.check()


def test_an_added_field_and_another_block_size_are_named_too() -> None:
    disk = Disk()
    volume = opened(disk)
    volume.commit("a", b"x", [])
    volume = opened(disk, tokenizer="t")
    with pytest.raises(IncompatibleCapsule) as caught:
        volume.load("a")
    assert caught.value.fields["differences"] == [["tokenizer", "", "t"]]
    volume = Volume.open(disk, IDENTITY, 128, VolumeConfig(1 << 20))
    with pytest.raises(IncompatibleCapsule) as caught:
        volume.load("a")
    assert caught.value.fields["differences"] == [["block_nbytes", "64", "128"]]


def stored(keys: list[int]) -> Disk:
    disk = Disk()
    volume = opened(disk)
    volume.put(keys, rows(keys))
    volume.commit("a", b"payload of the capsule", keys)
    return disk


def test_no_flipped_byte_and_no_cut_file_is_accepted() -> None:
    """F24, part: at every byte of a run and of a record, found when it is opened or when it is read."""
    keys = [1, 2, 3]
    good = stored(keys).contents
    for name, data in good.items():
        for i in range(len(data)):
            flipped = data[:i] + bytes([data[i] ^ (1 << i % 8)]) + data[i + 1 :]
            for damaged in (flipped, data[:i]):
                disk = Disk()
                disk.contents = {**good, name: damaged}
                volume = opened(disk)
                num, error = read(volume, keys)
                errors: list[Exception | None] = [*volume.problems, error]
                try:
                    is_loaded = volume.load("a") is not None
                except (CorruptStorage, IncompatibleCapsule) as caught:
                    errors.append(caught)
                    is_loaded = False
                assert (num < 3) if name.startswith("runs/") else not is_loaded, f"{name} {i}"
                assert any(isinstance(e, StorageError | IncompatibleCapsule) for e in errors) or (
                    volume.stats().num_stale_runs == 1  # the version was flipped
                )
                volume.check()
                volume.put(keys, rows(keys))  # the cold path
                volume.commit("a", b"again", keys)
                assert read(volume, keys) == (3, None)


def test_a_run_that_is_cut_while_it_is_open_costs_what_was_cut() -> None:
    """F24, part."""
    keys = [1, 2, 3]
    good = stored(keys).contents
    (name,) = (each for each in good if each.startswith("runs/"))
    for length in range(len(good[name])):
        disk = Disk()
        disk.contents = dict(good)
        volume = opened(disk)
        disk.contents[name] = good[name][:length]
        num, error = read(volume, keys)
        assert num < 3
        assert isinstance(error, StorageError)
        assert volume.take_lost().keys == keys[num:]


def test_a_dropped_capsule_does_not_come_back_as_an_older_record() -> None:
    disk = stored([1])
    volume = opened(disk)
    disk.refuses["remove"] = EIO
    volume.commit("a", b"newer", [1])
    with pytest.raises(StorageFailed, match="remove capsules/"):
        volume.drop("a")
    assert volume.load("a") is not None
    del disk.refuses["remove"]
    assert volume.drop("a")
    assert opened(disk).load("a") is None


def test_a_run_that_is_gone_takes_no_copy_of_its_blocks_with_it() -> None:
    keys = [1, 2]
    disk = stored(keys)
    (run,) = disk.sizes("runs")
    good = disk.contents[run]
    disk.contents[run] = good[:-1] + bytes([good[-1] ^ 1])
    volume = opened(disk)
    assert read(volume, keys)[0] == 1
    volume.put(keys, rows(keys))
    assert volume.stats().num_runs == 2
    del disk.contents[run]
    num, error = read(volume, keys)
    assert num == 0
    assert isinstance(error, StorageFailed)
    assert volume.take_lost().keys == [2, 1]
    assert read(volume, [2]) == (1, None)
    volume.check()


def test_a_read_error_costs_the_blocks_and_not_the_volume() -> None:
    disk = stored([1, 2, 3])
    volume = opened(disk)
    disk.fail_next(EIO)
    num, error = read(volume, [1, 2])
    assert num == 0
    assert isinstance(error, StorageFailed)
    assert error.fields["errno"] == EIO
    assert read(volume, [3]) == (1, None)
    disk.fail_next(EIO)
    with pytest.raises(StorageFailed, match="read capsules/"):
        volume.load("a")
    assert volume.load("a") is not None


def test_a_file_that_can_t_be_read_at_the_start_is_left_and_told() -> None:
    disk = stored([1, 2, 3])
    disk.fail_next(EIO, after=1)
    volume = opened(disk)
    assert [type(each) for each in volume.problems] == [StorageFailed]
    assert read(volume, [1])[0] == 0
    assert read(opened(disk), [1]) == (1, None)


def test_runs_whose_sync_failed_are_not_trusted() -> None:
    disk = Disk()
    volume = opened(disk)
    volume.put([1, 2], rows([1, 2]))
    disk.refuses["sync"] = EIO
    with pytest.raises(StorageFailed, match="sync runs/"):
        volume.commit("a", b"", [1, 2])
    assert volume.take_lost().keys == [1, 2]
    assert disk.contents == {}
    del disk.refuses["sync"]
    with pytest.raises(BlocksMissing):
        volume.commit("a", b"", [1, 2])


def test_a_disk_that_is_full_keeps_nothing_of_what_did_not_fit(tmp_path: Path) -> None:
    """F24, part: the limit of file sizes stops a write in its middle, as a full disk does."""
    keys = list(range(100))
    volume = opened(Directory(tmp_path), VolumeConfig(1 << 30, run_nbytes=10 * BLOCK))
    volume.put(keys[:5], rows(keys[:5]))
    volume.commit("a", b"small", keys[:5])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * BLOCK, hard))
    try:
        with pytest.raises(StorageFull, match="no room in the disk"):
            volume.put(keys, rows(keys))
        with pytest.raises(StorageFull, match="no room in the disk"):
            volume.commit("b", bytes(9 * BLOCK), keys[:5])
        assert volume.put([200], rows([200])) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    volume.check()
    assert volume.capsules() == ["a"]
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {
        *("runs", "capsules"),
        tmp_path.name,
    }
    assert len(list(tmp_path.rglob("*.tmp"))) == 0
    volume.close()


def test_a_directory_that_can_t_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "volume").write_text("a file where a folder should be")
    with pytest.raises(StorageFailed, match=f"open {tmp_path}/volume"):
        opened(Directory(tmp_path / "volume"))


@pytest.mark.parametrize("is_ours", [True, False])
def test_no_failure_and_no_loss_of_power_while_capsules_are_adopted_loses_one(
    is_ours: bool,
) -> None:
    """X28, part: at every call of either disk; a capsule that both have is the adopter's."""
    for nth in count():
        theirs, ours = Disk(nth), Disk(nth)
        volume = opened(theirs)
        for capsule, keys in (("a", [1, 2]), ("b", [2, 3]), ("ours", [4])):
            volume.put(keys, rows(keys))
            volume.commit(capsule, capsule.encode(), keys, owner="o")
        volume.put([9], rows([9]))
        volume = opened(ours)
        volume.put([3, 4], rows([3, 4]))
        volume.commit("ours", b"newer", [4], owner="o")
        failing = ours if is_ours else theirs
        failing.fail_next(EIO, after=nth)
        num_calls = len(failing.calls) + nth
        with suppress(StorageError):
            volume.adopt(volume.beside(theirs))
        was_reached = len(failing.calls) > num_calls
        for disk in (ours, theirs):
            disk.fails.clear()
            disk.lose_power()
        volume = opened(ours)
        assert volume.adopt(volume.beside(theirs)) == []
        for capsule, payload, keys in (
            ("a", b"a", [1, 2]),
            ("b", b"b", [2, 3]),
            ("ours", b"newer", [4]),
        ):
            assert volume.load(capsule) == Record(capsule, payload, keys, "o", True)
            assert read(volume, keys) == (len(keys), None)
        assert not theirs.contents, "what is adopted is there once"
        volume.check()
        if not was_reached:
            break
    assert nth > 3


def test_capsules_without_room_stay_with_the_one_that_is_gone() -> None:
    theirs, ours = stored([1, 2, 3]), Disk()
    volume = opened(ours, VolumeConfig(2 * BLOCK))
    (error,) = volume.adopt(volume.beside(theirs))
    assert isinstance(error, StorageFull)
    assert volume.capsules() == []
    assert opened(theirs).capsules() == ["a"]
    volume = opened(Disk(), weights="other")
    assert volume.adopt(volume.beside(theirs))[0].code == "incompatible_capsule"
    volume = opened(Disk())
    assert volume.adopt(opened(theirs)) == []
    assert volume.capsules() == ["a"]


CHANGING = ("open", "writev", "rename", "fsync", "fdatasync", "unlink")  # calls of `os`


def test_a_kill_at_any_call_undoes_nothing_that_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F24, part: a copy of the folder before each call that changes files is what a kill there leaves."""
    told: dict[str, bool] = {}  # whether it is there, by capsule
    left: list[dict[str, bool]] = []

    def copying(name: str) -> Any:
        real = getattr(os, name)

        def run(*given: Any, **more: Any) -> Any:
            shutil.copytree(tmp_path / "disk", tmp_path / str(len(left)))
            left.append(dict(told))
            return real(*given, **more)

        return run

    volume = opened(Directory(tmp_path / "disk"), VolumeConfig(1 << 30, run_nbytes=BLOCK))
    with monkeypatch.context() as patched:
        for name in CHANGING:
            patched.setattr(os, name, copying(name))
        for number in range(5):
            keys = [number, number + 1]
            volume.put(keys, rows(keys))
            volume.commit(str(number), b"tokens", keys)
            told[str(number)] = True
            if number % 2:
                del told[str(number - 1)]  # until it is acknowledged it may be there or not
                volume.drop(str(number - 1))
                told[str(number - 1)] = False
    volume.close()
    assert len(left) > 30
    for nth, known in enumerate(left):
        volume = opened(Directory(tmp_path / str(nth)))
        assert {name for name, is_there in known.items() if is_there} <= set(volume.capsules())
        for name in volume.capsules():  # also one that was not acknowledged any more
            assert known.get(name, True), "a deletion was acknowledged, and its capsule is there"
            assert read(volume, [int(name), int(name) + 1]) == (2, None)
        volume.check()
        volume.close()
        assert not list((tmp_path / str(nth)).rglob("*.tmp"))
