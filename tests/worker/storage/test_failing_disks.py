"""Disks that lose power, are full or take no writes: nothing acknowledged is lost, nothing torn accepted."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from mallee.protocol.errors import StorageFailed, StorageFull
from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import VolumeConfig
from support.disks import BLOCK, opened, read, rows


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


def test_a_folder_that_went_read_only_costs_the_call_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = opened(Directory(tmp_path))
    volume.put([1], rows([1]))
    volume.commit("a", b"", [1])
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", read_only)
        patched.setattr(os, "unlink", read_only)
        with pytest.raises(StorageFailed, match=r"write runs/.*Read-only"):
            volume.put([2], rows([2]))
        with pytest.raises(StorageFailed, match=r"remove capsules/.*Read-only"):
            volume.drop("a")
    assert volume.load("a") is not None
    assert read(volume, [1, 2])[0] == 1
    volume.close()
    opened(Directory(tmp_path)).check()  # what could not be removed then is removed now


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
