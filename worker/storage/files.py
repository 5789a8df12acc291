"""The files of a volume, its catalogue and slots for blocks, in a directory of this machine."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Final

from mallee.protocol.errors import (
    CorruptStorage,
    StorageBusy,
    StorageError,
    StorageFailed,
    StorageFull,
)
from mallee.worker.storage.format import Piece

CATALOGUE: Final = "catalogue.sqlite"
ASIDE: Final = "catalogue.aside"
BLOCKS: Final = "blocks-"
EARLIER: Final = "capsules"
"""The folder of volumes of the first version, with a file for each record."""


@contextmanager
def told(operation: str, file: str, needed: int = 0) -> Iterator[None]:
    """An OSError inside is raised as StorageFull or StorageFailed."""
    try:
        yield
    except OSError as error:
        raise named(error, operation, file, needed) from error


def named(
    error: OSError | sqlite3.Error, operation: str, file: str, needed: int = 0
) -> StorageError:
    """The StorageError for an error of the file system, of an object store, or of SQLite."""
    if isinstance(error, OSError):
        if error.errno in (ENOSPC, EDQUOT, EFBIG):
            return StorageFull("the disk", needed)
        return StorageFailed(operation, file, error.errno or 0, error.strerror or str(error))
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return StorageFull("the disk", needed)
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StorageBusy(file, "unknown")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_FORMAT:
            return CorruptStorage(file, "a page", str(error))
        case _:
            return StorageFailed(operation, file, 0, str(error))


class Directory:
    """A directory of a local file system, for one process at a time. An identity's slots are one file.

    Methods raise OSError, and `connect` SQLite's errors too. Stores of other kinds have the same ones.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock: int | None = None
        self._catalogue: sqlite3.Connection | None = None
        self._open: dict[int, int] = {}  # files of slots, by identity

    @property
    def place(self) -> str:
        """For messages."""
        return str(self._root)

    def acquire(self) -> None:
        """Keep other processes out. Raises StorageBusy."""
        self._root.mkdir(parents=True, exist_ok=True)
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
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Close all, and let other processes in."""
        if self._catalogue is not None:
            self._catalogue.close()
        for file in self._open.values():
            os.close(file)
        if self._lock is not None:
            os.close(self._lock)
        self._catalogue, self._open, self._lock = None, {}, None

    def connect(self) -> sqlite3.Connection:
        """The catalogue as it was left, empty if there is none; no transaction begins by itself.

        It is exclusive, so that its log needs no memory that processes share: network file systems have none.
        """
        path = self._root / CATALOGUE
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # for this user alone
        self._catalogue = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._catalogue.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._catalogue.execute("PRAGMA journal_mode = WAL")
        self._catalogue.execute(f"PRAGMA journal_size_limit = {16 << 20}")
        return self._catalogue

    def save(self, catalogue: sqlite3.Connection) -> None:
        """Called before a durable transaction commits; SQLite itself makes it so."""

    def set_aside(self) -> None:
        """Give the catalogue, which can't be used, another name, and remove all slots."""
        assert self._catalogue is not None
        self._catalogue.close()
        (self._root / CATALOGUE).replace(self._root / ASIDE)
        for path in (self._root / f"{CATALOGUE}-wal", *self._root.glob(f"{BLOCKS}*")):
            path.unlink(missing_ok=True)

    def earlier(self) -> list[str]:
        """Records of a volume of the first version."""
        return [str(path) for path in sorted((self._root / EARLIER).glob("*"))]

    def write(self, identity: int, slots: Sequence[int], rows: Sequence[Piece]) -> None:
        """Fill slots, with rows of one size."""
        file = self._file(identity)
        for slot, row in zip(slots, rows, strict=True):
            left, end = memoryview(row).cast("B"), (slot + 1) * len(row)
            while left:
                left = left[os.pwrite(file, left, end - len(left)) :]

    def sync(self, identity: int) -> None:
        """All that was written to slots of `identity` outlives a loss of power."""
        os.fdatasync(self._file(identity))

    def read(
        self, identity: int, slots: Sequence[int], into: Sequence[memoryview]
    ) -> Iterator[int | OSError]:
        """Fill `into`, one row after the other: the bytes that there were for each, or the error.

        The caller looks at a row while it is in the processor's cache, and while the disk reads on.
        """
        for slot, row in zip(slots, into, strict=True):
            try:
                yield os.preadv(self._file(identity), [row], slot * len(row))
            except OSError as error:
                yield error

    def remove(self, identity: int) -> None:
        """Remove all slots of an identity, if there are any."""
        if identity in self._open:
            os.close(self._open.pop(identity))
        (self._root / f"{BLOCKS}{identity}").unlink(missing_ok=True)

    def _file(self, identity: int) -> int:
        """The file of an identity's slots, whose name outlives a loss of power."""
        if identity not in self._open:
            path = self._root / f"{BLOCKS}{identity}"
            self._open[identity] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return self._open[identity]


def owned_capsules(folder: Path) -> list[tuple[str, str]]:
    """Capsules with their owners, in the volumes in folders of `folder` that no process has open."""
    found: list[tuple[str, str]] = []
    for path in sorted(folder.glob(f"*/{CATALOGUE}")):
        with suppress(sqlite3.Error):
            connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0)
            try:
                found += connection.execute("SELECT capsule, owner FROM records").fetchall()
            finally:
                connection.close()
    return found


def has_slots(folder: Path) -> bool:
    """Whether something may be stored in the volume in `folder`. Raises OSError."""
    return any(path.stat().st_size for path in folder.glob(f"{BLOCKS}*"))
