"""A volume's promises: what is stored comes back, and nothing else does."""

import resource
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from errno import EIO, ENOSPC
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mallee.protocol.errors import (
    BlocksMissing,
    IncompatibleCapsule,
    MalleeError,
    StorageError,
    StorageFailed,
    StorageFull,
)
from mallee.worker.storage import volume as volumes
from mallee.worker.storage.files import CATALOGUE, Directory, has_slots, owned_capsules
from mallee.worker.storage.objects import ObjectStore
from mallee.worker.storage.volume import Record, Volume, VolumeConfig
from support.disks import BLOCK, IDENTITY, Disk, Killed, check, opened, read, rows

SMALL = VolumeConfig(9 * BLOCK)
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


def stored(keys: list[int], files: Any = None) -> Any:
    """The files of a volume with a capsule `a` of `keys`; it is closed."""
    files = files or Disk()
    volume = opened(files)
    volume.put(keys, rows(keys))
    volume.commit("a", b"payload of the capsule", keys)
    volume.close()
    return files


def test_blocks_and_records_come_back_after_a_restart(files: Any) -> None:
    """From rows that lie anywhere; a record takes the place of an older one."""
    keys = [3, 1 << 63, 7, 9]
    volume = opened(files)
    scattered = np.zeros((9, BLOCK), np.uint8)
    scattered[1::2] = rows(keys)
    assert volume.put(keys, scattered[1::2]) == 4
    assert volume.put([9, 11], rows([9, 11])) == 1  # each is stored once
    volume.commit("r1.0", b"first", keys[:1])
    volume.commit("r1.0", b"tokens" * 50, keys, owner="tenant", is_kept=False)
    check(volume)
    volume.close()
    volume = opened(files)
    assert read(volume, keys) == (4, None)
    num, error = read(volume, [11, 7, 4, 9, 5])
    assert num == 2
    assert isinstance(error, BlocksMissing)
    assert error.fields == {"missing": 2, "asked": 5, "key": 4}
    into = [bytearray(BLOCK) for _ in keys]
    assert volume.get(keys, into) == (4, None)
    assert [bytes(each) for each in into] == [bytes(each) for each in rows(keys)]
    assert volume.load("r1.0") == Record("r1.0", b"tokens" * 50, keys, "tenant", False)
    assert volume.load("r1.1") is None
    assert volume.capsules() == ["r1.0"]
    assert volume.unreadable() == []
    assert sorted(volume.keys()) == sorted([*keys, 11])
    check(volume)
    assert volume.drop("r1.0")
    assert not volume.drop("r1.0")
    volume.close()
    volume = opened(files)
    assert volume.load("r1.0") is None
    assert read(volume, keys) == (4, None)
    volume.clear()
    assert volume.keys() == []
    volume.close()


def test_an_object_store_is_as_durable_as_its_last_acknowledged_capsule() -> None:
    """A worker that is killed leaves what was acknowledged, and may lose what was cached since then."""
    url = f"memory://volume{next(_PREFIXES)}"
    volume = opened(ObjectStore.at(url))
    volume.put([1, 2], rows([1, 2]))
    volume.commit("a", b"", [1, 2])
    volume.put([3], rows([3]))
    volume = opened(ObjectStore.at(url))
    assert read(volume, [1, 2]) == (2, None)
    assert volume.load("a") is not None
    assert volume.keys() == [1, 2]
    fsspec.filesystem("memory").store.clear()


class Throttled(MemoryFileSystem):  # type: ignore[misc]
    """A store whose library has an error of its own."""

    protocol = "throttled"
    cachable = False
    is_throttled = False

    def pipe_file(self, *args: Any, **kwargs: Any) -> None:
        if self.is_throttled:
            raise LookupError("slow down")
        super().pipe_file(*args, **kwargs)

    def cat_file(self, *args: Any, **kwargs: Any) -> bytes:
        if self.is_throttled:
            raise LookupError("slow down")
        return bytes(super().cat_file(*args, **kwargs))


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
    with pytest.raises(StorageFailed, match="LookupError: slow down"):
        opened(ObjectStore(store, "/throttled"))
    store.is_throttled = False
    volume.put([1], rows([1]))
    volume.commit("a", b"", [1])
    assert opened(ObjectStore(store, "/throttled")).capsules() == ["a"]
    store.store.clear()


def test_a_commit_is_one_sync_and_one_durable_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of cached blocks each hundred megabytes are synced."""
    disk = Disk()
    volume = opened(disk)
    volume.put([1, 2, 3, 4, 5], rows([1, 2, 3, 4, 5]))
    assert "sync" not in disk.calls
    del disk.calls[:]
    volume.commit("a", b"", [1, 2, 3, 4, 5])
    assert disk.calls.count("sync") == 1
    assert len(disk.catalogues) == 1, "nothing of it can be undone"
    assert disk.calls.count("COMMIT") == 2, "the other one adds its body"
    disk.lose_power()
    volume = opened(disk)
    assert volume.load("a") is not None
    assert read(volume, [1, 2, 3, 4, 5]) == (5, None)
    monkeypatch.setattr(volumes, "_UNSYNCED_NBYTES", 3 * BLOCK)
    volume.put([6, 7], rows([6, 7]))
    assert disk.calls.count("sync") == 1
    volume.put([8], rows([8]))
    assert disk.calls.count("sync") == 2
    assert len(disk.catalogues) == 1


@pytest.mark.parametrize(
    ("changed", "block", "says"),
    [
        *(({name: "other"}, BLOCK, [name, old, "other"]) for name, old in IDENTITY.items()),
        ({"tokenizer": "t"}, BLOCK, ["tokenizer", "", "t"]),
        ({}, 128, ["block_nbytes", "64", "128"]),
    ],
)
def test_a_changed_field_is_named_with_both_values(
    changed: dict[str, str], block: int, says: list[str]
) -> None:
    """F24, part: the record of another model or layout is refused by field, until room is needed."""
    disk: Any = stored([1, 2])
    volume = Volume.open(disk, {**IDENTITY, **changed}, block, VolumeConfig(6 * block))
    with pytest.raises(IncompatibleCapsule) as caught:
        volume.load("a")
    (reason,) = volume.unreadable()
    assert reason.fields["differences"] == caught.value.fields["differences"] == [says]
    assert volume.get([1], rows([1])).num_blocks == 0
    assert volume.capsules() == volume.keys() == []
    volume.put([1], rows([1], block))
    volume.commit("b", b"", [1])
    assert opened(disk).capsules() == ["a"], "a roll-back finds it again"
    volume = Volume.open(disk, {**IDENTITY, **changed}, block, VolumeConfig(4 * block))
    volume.commit("a", b"made again", [1])
    assert volume.load("a") is not None
    volume.put([2], rows([2], block))
    assert volume.capsules() == ["b", "a"]
    assert opened(disk).capsules() == []


KEYS = [1, 2, 3]


def is_right_or_told(disk: Disk) -> bool:
    """Whether all of the damaged volume that `stored` made is there; what is not there is told, and heals."""
    volume = opened(disk)
    num, error = read(volume, KEYS)
    errors: list[Exception | None] = [*volume.unreadable(), error]
    record = None
    try:
        record = volume.load("a")
    except (StorageError, IncompatibleCapsule) as caught:
        errors.append(caught)
    assert record in (None, Record("a", b"payload of the capsule", KEYS, "", True))
    assert any(errors) or (num == 3 and (record is not None or volume.capsules() == []))
    with suppress(MalleeError):
        volume.put(KEYS, rows(KEYS))  # the cold path
        volume.commit("a", b"again", KEYS)
        assert read(volume, KEYS) == (3, None)
        assert volume.load("a") == Record("a", b"again", KEYS, "", True)
        return num == 3 and record is not None
    volume = opened(disk)  # a page that broke while it was open: the next life sets it aside
    volume.put(KEYS, rows(KEYS))
    volume.commit("a", b"again", KEYS)
    return False


def test_no_flipped_byte_and_no_cut_slot_is_accepted() -> None:
    """F24, part: at every byte of every slot, of blocks and of records."""
    good = stored(KEYS)
    for name, data in good.slots.items():
        for i in range(len(data)):
            flipped = data[:i] + bytes([data[i] ^ (1 << i % 8)]) + data[i + 1 :]
            for damaged in (flipped, data[:i]):
                disk = Disk()
                disk.slots, disk.catalogues = {**good.slots, name: damaged}, good.catalogues
                assert not is_right_or_told(disk), (name, i)


def test_no_flipped_byte_of_a_catalogue_is_taken_for_another_block() -> None:
    """F24, part: at every 53rd byte; what is damaged is told, or is of no use to what was stored."""
    good = stored(KEYS)
    (catalogue,) = good.catalogues
    num_right = 0
    for i in range(0, len(catalogue), 53):
        data = bytearray(catalogue)
        data[i] ^= 1 << i % 8
        disk = Disk()
        disk.slots, disk.catalogues = dict(good.slots), [bytes(data)]
        num_right += is_right_or_told(disk)
    assert num_right < i // 53, "some of it counts"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_bytes(b"no catalogue" * 999), "not a database"),
        (lambda path: path.write_bytes(path.read_bytes()[:4096]), "a page of the catalogue"),
        (lambda path: path.unlink(), "it is missing"),
        (lambda path: path.write_bytes(b""), "it is missing"),
        (lambda path: as_of_version(path, 3), "storage_version was '3' and is '2'"),
    ],
)
def test_a_catalogue_that_can_t_be_used_is_set_aside_and_told(
    tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    files = stored([1], Directory(tmp_path))
    spoil(tmp_path / CATALOGUE)
    volume = opened(files)
    (reason,) = volume.unreadable()
    assert says in str(reason)
    assert volume.keys() == volume.capsules() == []
    volume.put([1], rows([1]))
    volume.commit("b", b"", [1])
    volume.close()
    volume = opened(files)
    assert volume.capsules() == ["b"]
    assert volume.unreadable() == []
    volume.close()


def as_of_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as catalogue:
        catalogue.execute(f"PRAGMA user_version = {version}")


def test_records_of_the_first_version_are_told_and_left(tmp_path: Path) -> None:
    (tmp_path / "capsules").mkdir()
    (tmp_path / "capsules" / "00ab").write_bytes(b"mallee")
    volume = opened(Directory(tmp_path))
    (error,) = volume.unreadable()  # which has the middle of a long path cut out
    assert "/capsules/00ab' does not fit this worker: storage_version was '1' and is '2'" in str(
        error
    )
    volume.close()
    assert (tmp_path / "capsules" / "00ab").exists()


def test_a_read_error_costs_the_block_and_not_the_volume() -> None:
    disk = stored([1, 2, 3])
    volume = opened(disk)
    disk.fail_next(EIO, after=1)  # after the statement that finds it
    num, error = read(volume, [1, 2])
    assert num == 0
    assert isinstance(error, StorageFailed)
    assert error.fields["errno"] == EIO
    assert volume.take_lost().keys == [1]
    assert read(volume, [2, 3]) == (2, None)
    disk.fail_next(EIO, after=2)
    with pytest.raises(StorageFailed, match="read block"):
        volume.load("a")
    assert volume.load("a") is not None, "another time it may be read"


@pytest.mark.parametrize("loses_power", [False, True])
@pytest.mark.parametrize("ends_by", [EIO, ENOSPC, "a kill"])
def test_what_ends_a_call_or_statement_undoes_nothing_that_was_acknowledged(
    ends_by: int | str, loses_power: bool
) -> None:
    """F24, part: at any of them, of writing, evicting and deleting; and what is there is there whole."""
    for nth in count():
        disk = Disk(nth)
        volume = opened(disk, SMALL)
        disk.fail_next(ends_by, after=nth)
        told: dict[str, bool] = {}  # whether it is there, by capsule; it is not known of others
        with suppress(StorageError, Killed):
            for number in range(4):
                keys = [number, number + 1]
                volume.put([90 + number, *keys], rows([90 + number, *keys]))
                volume.commit(str(number), b"tokens", keys)
                told[str(number)] = True
                if number % 2:
                    del told[str(number - 1)]
                    volume.drop(str(number - 1))
                    told[str(number - 1)] = False
        was_reached = not disk.fails
        disk.fails.clear()
        if loses_power:
            disk.lose_power()
        if loses_power or ends_by == "a kill":
            volume = opened(disk, SMALL)
        found = volume.capsules()
        assert {name for name, is_there in told.items() if is_there} <= set(found)
        for name in found:  # also one that was not acknowledged any more
            assert told.get(name, True), "a deletion was acknowledged, and its capsule is there"
            assert volume.load(name) is not None
            assert read(volume, [int(name), int(name) + 1]) == (2, None)
        assert volume.unreadable() == []
        check(volume)
        volume.put([3, 4], rows([3, 4]))
        volume.commit("after it", b"", [3, 4])
        if not was_reached:
            break
    assert nth > 100


def test_a_log_whose_sync_failed_is_emptied_before_it_goes_on() -> None:
    disk = stored([1])
    volume = opened(disk)
    statements: list[str] = []
    disk.refuses["COMMIT"] = EIO
    with pytest.raises(StorageFailed):
        volume.drop("a")
    del disk.refuses["COMMIT"]
    volume._catalogue._connection.set_trace_callback(statements.append)
    volume.drop("a")
    assert statements.index("PRAGMA wal_checkpoint(TRUNCATE)") < statements.index("BEGIN IMMEDIATE")


def test_a_disk_that_is_full_keeps_nothing_of_what_did_not_fit(tmp_path: Path) -> None:
    """F24, part: the limit of file sizes stops a write in its middle, as a full disk does."""
    keys = list(range(2000))
    volume = opened(Directory(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 * BLOCK, hard))
    try:
        with pytest.raises(StorageFull, match="no room in the disk"):
            volume.put(keys, rows(keys))
        assert volume.keys() == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert volume.put(keys, rows(keys)) == 2000
    assert read(volume, keys) == (2000, None)
    volume.close()


def test_a_directory_that_can_t_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "volume").write_text("a file where a folder should be")
    with pytest.raises(StorageFailed, match=f"open {tmp_path}/volume"):
        opened(Directory(tmp_path / "volume"))


def test_what_a_volume_has_is_seen_from_beside(tmp_path: Path) -> None:
    """Without its lock: of one that is in use nothing is read, and of one that was killed all."""
    volume = opened(Directory(tmp_path / "w0"))
    volume.put([1], rows([1]))
    volume.commit("a", b"", [1], owner="o")
    assert has_slots(tmp_path / "w0")
    assert owned_capsules(tmp_path) == []
    shutil.copytree(tmp_path / "w0", tmp_path / "w1")  # as a kill leaves it: with a log
    assert (tmp_path / "w1" / f"{CATALOGUE}-wal").stat().st_size > 0
    volume.close()
    assert owned_capsules(tmp_path) == [("a", "o"), ("a", "o")]
    volume = opened(Directory(tmp_path / "w1"))
    assert volume.adopt(volume.beside(Directory(tmp_path / "w0"))) == []
    assert not has_slots(tmp_path / "w0")
    volume.close()


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
            volume.adopt(volume.beside(theirs))  # type: ignore[arg-type]
        was_reached = len(failing.calls) > num_calls
        for disk in (ours, theirs):
            disk.fails.clear()
            disk.lose_power()
        volume = opened(ours)
        assert volume.adopt(volume.beside(theirs)) == []  # type: ignore[arg-type]
        for capsule, payload, keys in (
            ("a", b"a", [1, 2]),
            ("b", b"b", [2, 3]),
            ("ours", b"newer", [4]),
        ):
            assert volume.load(capsule) == Record(capsule, payload, keys, "o", True)
            num, _ = read(volume, keys)
            assert num == len(keys) or not is_ours, "a block that could not be read stays behind"
        assert not theirs.slots, "what is adopted is there once"
        check(volume)
        if not was_reached:
            break
    assert nth > 50


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


def test_of_a_part_without_capsules_nothing_is_left_also_of_other_weights() -> None:
    theirs = Disk()
    opened(theirs, weights="other").put([1], rows([1]))
    opened(theirs).put([1], rows([1]))
    volume = opened(Disk())
    assert volume.adopt(volume.beside(theirs)) == []  # type: ignore[arg-type]
    assert not theirs.slots
