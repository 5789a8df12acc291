"""The catalogue of a volume, in SQLite: blocks and records by name, and the slots that have their bytes.

It alone says which bytes count. Transactions are in order: if a durable one outlived a loss of power, all
before it did.

SQLite's pages have no checksums. Those of blocks cover their keys too, so a damaged row is taken for no other
block, and the structure of the pages is checked when the catalogue is opened. Integers are signed in the
tables; keys and checksums are not, outside.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np

from mallee.protocol.errors import CorruptStorage, IncompatibleCapsule, StorageFailed
from mallee.worker.storage.files import Directory, named, told
from mallee.worker.storage.format import LAYOUT, Identity
from mallee.worker.storage.objects import ObjectStore

VERSION: Final = 2
"""Of the tables; volumes of the first version had files with headers, and no catalogue."""

_TABLES: Final = f"""
CREATE TABLE identities (id INTEGER PRIMARY KEY, fields TEXT NOT NULL UNIQUE,
                         block_nbytes INT NOT NULL) STRICT;
CREATE TABLE blocks (identity INT NOT NULL, slot INT NOT NULL, key INT, checksum INT NOT NULL,
                     is_synced INT NOT NULL, is_body INT NOT NULL, used INT NOT NULL) STRICT;
CREATE UNIQUE INDEX blocks_by_slot ON blocks (identity, slot);
CREATE UNIQUE INDEX blocks_by_key ON blocks (identity, key);
CREATE INDEX blocks_by_use ON blocks (identity, used) WHERE key NOT NULL;
CREATE INDEX unsynced ON blocks (is_synced, identity) WHERE is_synced = 0;
CREATE TABLE records (capsule TEXT PRIMARY KEY, identity INT NOT NULL, owner TEXT NOT NULL,
                      is_kept INT NOT NULL, blocks BLOB NOT NULL, num_body INT NOT NULL,
                      used INT NOT NULL) STRICT;
CREATE TABLE holds (identity INT, key INT, owner TEXT, num INT NOT NULL,
                    PRIMARY KEY (identity, key, owner)) WITHOUT ROWID, STRICT;
CREATE INDEX holds_of_owner ON holds (identity, owner);
PRAGMA user_version = {VERSION}
"""
"""`blocks` has each slot that was used once; one without a key is free. The last `num_body` of the blocks of
a record are its body. `num`: records of the owner that name the block, which may not be stored."""

_STATEMENTS: Final = [statement.strip() for statement in _TABLES.split(";")]


class Catalogue:
    """The tables of the volume in `files`, as one identity sees them. Methods raise StorageErrors."""

    def __init__(
        self, files: Directory | ObjectStore, identity: Identity, block_nbytes: int
    ) -> None:
        """Raises CorruptStorage, IncompatibleCapsule if it is of another version, StorageFailed."""
        self._files = files
        self._file = f"the catalogue of {files.place}"
        self._distrusts_log = False
        self.identity = 0
        # Uses are written with the next transaction, so that reads write nothing.
        self._uses: dict[tuple[str, int | str], int] = {}
        self._now = 0
        try:
            self._connection = files.connect()
        except (sqlite3.Error, OSError) as error:
            raise named(error, "open", self._file) from error
        self._connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        self.is_new = self._is_made()
        given = {"fields": json.dumps(identity.fields), "nbytes": block_nbytes}
        if not self.run("SELECT 1 FROM identities WHERE fields = :fields", **given):
            with self.transaction():
                sql = "INSERT INTO identities (fields, block_nbytes) VALUES (:fields, :nbytes)"
                self.run(sql, **given)
        self.identity = self.value("SELECT id FROM identities WHERE fields = :fields", **given)
        self._now = max(self.value(f"SELECT MAX(used) FROM {t}") for t in ("blocks", "records"))

    def _is_made(self) -> bool:
        """Make the tables if there are none, else check those that are there; whether they are new."""
        version = self.value("PRAGMA user_version")
        if not version and not self.value("SELECT COUNT(*) FROM sqlite_master"):
            with self.transaction():
                for statement in _STATEMENTS:
                    self.run(statement)
            return True
        if version != VERSION:
            raise IncompatibleCapsule(self._file, [(LAYOUT, str(version), str(VERSION))])
        tables = {sql for (sql,) in self.run("SELECT sql FROM sqlite_master WHERE sql NOT NULL")}
        if tables != set(_STATEMENTS[:-1]):
            raise CorruptStorage(self._file, "a table", "it has other columns")
        if (found := self.run("PRAGMA integrity_check(1)")[0][0]) != "ok":
            raise CorruptStorage(self._file, "a page", found)
        return False

    def run(self, statement: str, **given: Any) -> list[Any]:
        """All rows of a statement, in which `:me` is the identity."""
        try:
            return self._connection.execute(statement, {"me": self.identity, **given}).fetchall()
        except sqlite3.Error as error:
            raise named(error, "use", self._file) from error
        except UnicodeDecodeError as error:  # in a message about damaged tables
            raise CorruptStorage(self._file, "a table", str(error)) from error

    def value(self, statement: str, **given: Any) -> int:
        """The one number that a statement finds; 0 where it finds none."""
        return int(self.run(statement, **given)[0][0] or 0)

    def use(self, statement: str, row: int | str) -> None:
        """Have `statement` say, in the next transaction, that `:row` is used at `:now`."""
        self._uses[statement, row] = self.tick()

    def tick(self) -> int:
        self._now += 1
        return self._now

    @contextmanager
    def transaction(self, *, is_durable: bool = True) -> Iterator[None]:
        """All changes in the block, or none: after an error in it, or in its end.

        A log that could not be synced may have lost what was in it before, so it is emptied first.
        """
        if self._distrusts_log:
            self._distrusts_log = bool(self.value("PRAGMA wal_checkpoint(TRUNCATE)"))
        self.run(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
        self.run("BEGIN IMMEDIATE")
        try:
            for (statement, row), now in self._uses.items():
                self.run(statement, row=row, now=now)
            yield
            if is_durable:
                with told("write", self._file):
                    self._files.save(self._connection)
            self._commit()
        except BaseException:
            if self._connection.in_transaction:
                self.run("ROLLBACK")
            raise
        self._uses = {}

    def _commit(self) -> None:
        try:
            self.run("COMMIT")
        except StorageFailed:
            self._distrusts_log = True
            raise


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    return value & (1 << 64) - 1


def packed(keys: Iterable[int]) -> str:
    """`keys` as one argument of a statement, for `IN (SELECT value FROM json_each(...))`."""
    return json.dumps(np.fromiter(keys, np.uint64).view(np.int64).tolist())
