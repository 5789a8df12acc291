"""Whole files by name: the calls that a volume makes, and the directory of this machine that takes them."""

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Final, Protocol

from mallee.protocol.errors import StorageBusy, StorageError, StorageFailed, StorageFull
from mallee.worker.storage.format import Piece

FOLDERS: Final = ("runs", "capsules")
_UNFINISHED: Final = ".tmp"
_MAX_PIECES: Final = os.sysconf("SC_IOV_MAX")
_READ_NBYTES: Final = 1 << 19  # what the second-level cache holds beside other things
_WRITE_NBYTES: Final = 1 << 26


class Files(Protocol):
    """Files by `folder/name`, with the folders that FOLDERS names. All calls but `acquire` raise OSError.

    A file is written once, whole, and never changed. `is_durable` and `sync`: after the call it outlives
    a loss of power. Stores that promise so for every file have nothing to do for them.
    """

    @property
    def place(self) -> str:
        """For messages."""
        ...

    def acquire(self) -> None:
        """Make the folders, keep other processes out, remove what a process that died left unfinished.

        Raises StorageBusy, OSError.
        """
        ...

    def release(self) -> None:
        """Let other processes in."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each file of a folder, by its name with the folder."""
        ...

    def heads(self, names: Sequence[str], nbytes: int) -> Iterator[bytes | OSError]:
        """The first `nbytes` of each file, or the error that reading it met."""
        ...

    def write(self, name: str, pieces: Sequence[Piece], *, is_durable: bool) -> None:
        """The file is there with all its bytes, or not at all; an error leaves nothing behind."""
        ...

    def sync(self, names: Sequence[str]) -> None:
        """The files `names`, of one folder, outlive a loss of power."""
        ...

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> Iterator[int]:
        """Fill `into` one after the other from `offset`; yields the bytes read so far.

        In steps that suit the store: the caller looks at what was read while it is in the processor's cache,
        and while the disk reads on. Ends early where the file ends.
        """
        ...

    def remove(self, name: str, *, is_durable: bool) -> None:
        """A file that is not there is no error."""
        ...


def last(counts: Iterable[int]) -> int:
    """The bytes that a whole read read."""
    return max(counts, default=0)


@contextmanager
def told(operation: str, file: str, needed: int = 0) -> Iterator[None]:
    """An OSError inside is raised as StorageFull or StorageFailed."""
    try:
        yield
    except OSError as error:
        raise named(error, operation, file, needed) from error


def named(error: OSError, operation: str, file: str, needed: int = 0) -> StorageError:
    if error.errno in (ENOSPC, EDQUOT, EFBIG):
        return StorageFull("the disk", needed)
    return StorageFailed(operation, file, error.errno or 0, error.strerror or str(error))


class Directory:
    """A directory of a local file system, for one process at a time.

    Written to a temporary, which gets its name when all bytes are there: so nobody ever sees a part of a
    file, whenever the process is killed. Durable: the bytes are synced before the name is given, and
    then the folder, whose name it is.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock: int | None = None

    @property
    def place(self) -> str:
        return str(self._root)

    def acquire(self) -> None:
        for folder in FOLDERS:
            (self._root / folder).mkdir(parents=True, exist_ok=True)
        lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise StorageBusy(self.place, holder or "unknown") from None
        self._lock = lock
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            for folder in FOLDERS:
                for left in (self._root / folder).glob(f"*{_UNFINISHED}"):
                    left.unlink()
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def sizes(self, folder: str) -> dict[str, int]:
        with os.scandir(self._root / folder) as entries:
            files = [each for each in entries if not each.name.endswith(_UNFINISHED)]
            return {f"{folder}/{each.name}": each.stat().st_size for each in files}

    def heads(self, names: Sequence[str], nbytes: int) -> Iterator[bytes | OSError]:
        for name in names:
            try:
                yield self._head(name, nbytes)
            except OSError as error:
                yield error

    def _head(self, name: str, nbytes: int) -> bytes:
        file = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(file, nbytes, 0)
        finally:
            os.close(file)

    def write(self, name: str, pieces: Sequence[Piece], *, is_durable: bool) -> None:
        path = self._root / name
        unfinished = path.with_name(path.name + _UNFINISHED)
        try:
            file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_all(file, pieces)
                if is_durable:
                    os.fdatasync(file)
            finally:
                os.close(file)
            os.rename(unfinished, path)
            if is_durable:
                self._sync_folder(path.parent)
        except OSError:
            for each in (unfinished, path):  # a name that may not last was never given
                with suppress(OSError):
                    each.unlink()
            raise

    def sync(self, names: Sequence[str]) -> None:
        for name in names:
            _sync(self._root / name, os.O_RDONLY)
        for folder in {(self._root / name).parent for name in names}:
            self._sync_folder(folder)

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> Iterator[int]:
        file = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            for some in _batches(into, _READ_NBYTES):
                wanted = sum(map(len, some))
                count = _read_all(file, offset + done, some)
                done += count
                yield done
                if count < wanted:
                    return
        finally:
            os.close(file)

    def remove(self, name: str, *, is_durable: bool) -> None:
        path = self._root / name
        path.unlink(missing_ok=True)
        if is_durable:
            self._sync_folder(path.parent)

    def _sync_folder(self, folder: Path) -> None:
        _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, pieces: Sequence[Piece]) -> None:
    for left in _batches((memoryview(piece).cast("B") for piece in pieces), _WRITE_NBYTES):
        while left:
            left = _after(left, os.writev(file, left))


def _read_all(file: int, offset: int, into: list[memoryview]) -> int:
    """Bytes read; fewer than `into` has where the file ends."""
    done = 0
    while into:
        count = os.preadv(file, into, offset + done)
        if count == 0:
            break
        done += count
        into = _after(into, count)
    return done


def _after(pieces: list[memoryview], count: int) -> list[memoryview]:
    """`pieces` without their first `count` bytes."""
    for i, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[i + 1 :]]
        count -= len(piece)
    return []


def _batches(pieces: Iterable[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """`pieces` in batches that one call takes, each ended by the piece that brings it to `nbytes`."""
    batch: list[memoryview] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= nbytes or len(batch) == _MAX_PIECES:
            yield batch
            batch, size = [], 0
    if size:
        yield batch
