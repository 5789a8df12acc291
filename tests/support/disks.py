"""A disk in memory that loses power and fails on request, and blocks whose bytes follow from their key."""

import random
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from errno import EIO, ENOSPC
from typing import Any

import numpy as np
import numpy.typing as npt

from mallee.worker.storage.catalogue import signed
from mallee.worker.storage.format import Piece, as_keys
from mallee.worker.storage.volume import Volume, VolumeConfig

BLOCK = 64
IDENTITY = {"weights": "abc", "weight_version": "1", "kv_dtype": "bf16", "rope": "10000"}
ROOMY = VolumeConfig(1 << 30)


def row(key: int, size: int = BLOCK) -> bytes:
    return random.Random(key).randbytes(size)


def rows(keys: Sequence[int], size: int = BLOCK) -> npt.NDArray[np.uint8]:
    found = np.empty((len(keys), size), np.uint8)
    for i, key in enumerate(keys):
        found[i] = np.frombuffer(row(key, size), np.uint8)
    return found


def read(volume: Volume, keys: Sequence[int]) -> tuple[int, Exception | None]:
    """`get`, with the bytes of the blocks that it says are good checked."""
    into = np.zeros((len(keys), BLOCK), np.uint8)
    num, error = volume.get(keys, into)
    assert (into[:num] == rows(keys[:num])).all(), "a wrong block was accepted"
    assert (error is None) == (num == len(keys))
    return num, error


def check(volume: Volume) -> None:
    """Raise AssertionError on a broken invariant."""
    rows = volume._run("SELECT identity, owner, key, num FROM holds")
    entries = volume._entries("true")
    names = [(e.identity, e.owner, signed(k)) for e in entries for k in {*as_keys(e.blocks)}]
    assert Counter(names) == {tuple(name): num for *name, num in rows}, "holds miscounted"
    free, end = "SELECT COUNT(*) FROM blocks WHERE key IS NULL", "SELECT MAX(slot) + 1 FROM blocks"
    if volume._catalogue.value("SELECT COUNT(*) FROM identities") == 1:
        num_stored = len(volume._places("true"))
        assert num_stored + volume._catalogue.value(free) == volume._catalogue.value(end)


def opened(files: Any, config: VolumeConfig = ROOMY, **changed: str) -> Volume:
    return Volume.open(files, {**IDENTITY, **changed}, BLOCK, config)


class Killed(BaseException):
    """The process ends here."""


class Disk:
    """The files of a volume in memory, with a number for each call and each statement.

    After `lose_power` slots that had no sync may be as before, cut or new, and transactions that were not
    durable may be undone, the last ones first.
    """

    place = "a disk in memory"

    def __init__(self, seed: int = 0) -> None:
        self.slots: dict[tuple[int, int], bytes] = {}
        self.durable: dict[tuple[int, int], bytes] = {}
        self.catalogues = [b""]  # a durable one, and those after it
        self.calls: list[str] = []
        self.fails: dict[int, int | str] = {}  # call by number -> errno, or "a kill"
        self.refuses: dict[str, int] = {}  # operation -> errno
        self._random = random.Random(seed)

    def acquire(self) -> None:
        self.call("acquire")

    def release(self) -> None:
        """Nothing is kept out."""

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:", isolation_level=None, factory=_Connection)
        if self.catalogues[-1]:
            stored = sqlite3.connect(":memory:")
            try:
                stored.deserialize(self.catalogues[-1])
                stored.backup(connection)
            finally:
                stored.close()
        connection.disk = self
        return connection

    def save(self, catalogue: sqlite3.Connection) -> None:
        """The connection tells of its commits."""

    def set_aside(self) -> None:
        self.catalogues, self.slots, self.durable = [b""], {}, {}

    def earlier(self) -> list[str]:
        return []

    def write(self, identity: int, slots: Sequence[int], rows: Sequence[Piece]) -> None:
        for slot, piece in zip(slots, rows, strict=True):
            self.call("write")
            self.slots[identity, slot] = bytes(piece)

    def sync(self, identity: int) -> None:
        self.call("sync")
        self.durable = dict(self.slots)

    def read(
        self, identity: int, slots: Sequence[int], into: Sequence[memoryview]
    ) -> Iterator[int | OSError]:
        for slot, piece in zip(slots, into, strict=True):
            try:
                self.call("read")
            except OSError as error:
                yield error
            else:
                data = self.slots.get((identity, slot), b"")[: len(piece)]
                piece[: len(data)] = data
                yield len(data)

    def remove(self, identity: int) -> None:
        self.call("remove")
        for there in (self.slots, self.durable):
            for name in [name for name in there if name[0] == identity]:
                del there[name]

    def lose_power(self) -> None:
        self.catalogues = [self._random.choice(self.catalogues)]
        for name, new in list(self.slots.items()):
            old = self.durable.get(name, b"")
            if new != old:
                at = self._random.randrange(len(new))
                cut = new[:at] + (old[at:] or bytes(self._random.choice((0, len(new) - at))))
                self.slots[name] = self._random.choice((old, cut, new))
        self.durable = dict(self.slots)

    def call(self, operation: str) -> None:
        self.calls.append(operation)
        errno = self.fails.pop(len(self.calls) - 1, self.refuses.get(operation))
        if isinstance(errno, int):
            raise OSError(errno, "injected")
        if errno is not None:
            raise Killed

    def fail_next(self, errno: int | str = EIO, after: int = 0) -> None:
        self.fails[len(self.calls) + after] = errno


class _Connection(sqlite3.Connection):
    """Its statements are calls of `disk`, but for those that can't fail."""

    disk: Disk | None = None
    _is_durable = False

    def execute(self, sql: str, *given: Any) -> sqlite3.Cursor:
        assert self.disk is not None
        operation, *words = sql.split()
        if operation == "PRAGMA":
            self._is_durable = words[-1] == "FULL"
        elif operation != "ROLLBACK":
            try:
                self.disk.call(operation)
            except OSError as error:
                failed = sqlite3.OperationalError("injected")
                is_full = error.errno == ENOSPC
                failed.sqlite_errorcode = sqlite3.SQLITE_FULL if is_full else sqlite3.SQLITE_IOERR
                raise failed from error
        found = super().execute(sql, *given)
        if operation == "COMMIT":
            kept = [] if self._is_durable else self.disk.catalogues
            self.disk.catalogues = [*kept, self.serialize()]
        return found
