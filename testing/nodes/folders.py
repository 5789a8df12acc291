"""The folder of a running `mallee up`, and what one that was killed left of its own."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from mallee.actors.local import remove_folder
from mallee.protocol.errors import ConfigError

_PREFIX = "mup-"
_LOCK = "owner"
_MAX_CHARS = 20
"""Of the folder: HAProxy has sockets 77 characters below it, behind a node's id, and takes 97."""
_YOUNG_S = 60.0
_STOP_S = 5.0


class Folder:
    """A new private folder, owned by this process while it lives."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(str(self.path)) > _MAX_CHARS:
            self.path.rmdir()
            raise ConfigError(f"{self.path} is too long for sockets below it: set TMPDIR=/tmp")
        # Locked before it has its name, which others look for.
        self._lock = (self.path / "new").open("ab")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "new").rename(self.path / _LOCK)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def made(self, name: str) -> Path:
        """A folder in it."""
        path = self.path / name
        path.mkdir(mode=0o700, parents=True)
        return path

    def secret(self, name: str, text: str) -> str:
        """The path of a new file that only this user can read."""
        path = self.path / name
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        return str(path)

    def remove(self) -> None:
        remove_folder(self.path)
        self._lock.close()


def clear_abandoned() -> list[str]:
    """End processes and remove folders of those whose `mallee up` is gone; a sentence for each."""
    told = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        with suppress(OSError):
            if path.lstat().st_uid != os.getuid() or (lock := _locked(path)) is None:
                continue
            num = _end_processes(path)
            remove_folder(path)
            lock.close()
            told.append(
                f"removed {path} of a `mallee up` that was killed"
                + (f", and ended {num} processes of it" if num else "")
            )
    return told


def _locked(folder: Path) -> IO[bytes] | None:
    """The lock of an abandoned folder, or None if its owner lives, or has just made it."""
    path = folder / _LOCK
    if not path.exists() and time.time() - folder.stat().st_mtime < _YOUNG_S:
        return None
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _end_processes(folder: Path) -> int:
    """End the processes that name a file of `folder` in their commands."""
    found = list(_processes(folder))
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, _STOP_S)
    return len(found)


def _processes(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid() and f"{folder}/" in " ".join(process.cmdline()):
                yield process
