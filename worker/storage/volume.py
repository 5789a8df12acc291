"""One worker's durable KV blocks and capsule records.

Blocks are opaque bytes of one size under their chain hash, each stored once, in *slots* of that size; the
catalogue says which block lies in which slot. A record names the blocks of its capsule by hash: one that went
bad is written anew elsewhere, and every record that names it is whole again without being touched. A record
lies in blocks too, its *body*, which nothing else names.

There is one rule of durability. `commit` writes the body, syncs the slots, and then commits a transaction of
the catalogue. When it is back, the capsule outlives whatever ends the process or cuts the power; before, it
may or may not be there, but never in part. Every transaction is durable but one that adds cached blocks: so a
slot is written again only when nothing can bring back the block that was there.

A sync that fails may have thrown away what it did not write, and the next one would find nothing to do:
all that had no sync is forgotten. Cached blocks are synced now and then, so that a commit never waits for
many. Those that were not when the process ended are read when the volume is opened, for a loss of power may
have cut them; all others are verified when they are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from mallee.protocol.errors import (
    BlocksMissing,
    CorruptStorage,
    IncompatibleCapsule,
    MalleeError,
    StorageError,
    StorageFailed,
    StorageFull,
)
from mallee.worker.storage import catalogue
from mallee.worker.storage.catalogue import Catalogue, packed, signed, unsigned
from mallee.worker.storage.files import Directory, named, told
from mallee.worker.storage.format import (
    LAYOUT,
    Identity,
    Keys,
    Piece,
    Rows,
    as_bytes,
    as_keys,
    checksum,
    with_block_nbytes,
)
from mallee.worker.storage.objects import ObjectStore

Files: TypeAlias = Directory | ObjectStore

_SCRATCH_NBYTES: Final = 4 << 20
_UNSYNCED_NBYTES: Final = 128 << 20  # at most, of cached blocks

# Parts of statements.
_LISTED: Final = "IN (SELECT value FROM json_each(:list))"
_HOLDS: Final = "SELECT 1 FROM holds WHERE identity = :me AND key"
_CACHED: Final = f"NOT EXISTS ({_HOLDS} = blocks.key)"
_SLOTS: Final = "SELECT COALESCE(MAX(slot) + 1, 0) FROM blocks WHERE identity = identities.id"
_FREE: Final = "SELECT COUNT(*) FROM blocks WHERE identity = identities.id AND key IS NULL"
_TOTAL: Final = f"SELECT TOTAL(block_nbytes * (({_SLOTS}) - ({_FREE}))) FROM identities"
_SYNCED: Final = "UPDATE blocks SET is_synced = 1 WHERE is_synced = 0 AND identity = :me"


@dataclass(frozen=True, slots=True)
class VolumeConfig:
    """Limits in bytes.

    A volume that is full gives up cached blocks, least recently used first, until it is down to
    `low_watermark` of its budget, then, and only as far as it must, records that are not kept. `owner_nbytes`
    limits what the records of one owner hold; 0 is no limit. The catalogue comes on top: some hundred bytes
    for each block.
    """

    budget_nbytes: int
    owner_nbytes: int = 0
    low_watermark: float = 0.9


class Read(NamedTuple):
    """`num_blocks` leading blocks were read and verified. `error` stopped it; None if they are all."""

    num_blocks: int
    error: StorageError | None


class Record(NamedTuple):
    """A committed capsule: opaque bytes, and the blocks that it is made of."""

    capsule: str
    payload: bytes
    keys: list[int]
    owner: str
    is_kept: bool


class Lost(NamedTuple):
    """Blocks and capsules that are not stored any more: evicted, or found bad."""

    keys: list[int]
    capsules: list[str]


class _Place(NamedTuple):
    """A block that is stored."""

    key: int
    slot: int
    checksum: int
    is_body: int


class _Entry(NamedTuple):
    """A row of `records`, with the fields of its identity. The last `num_body` of the blocks are the body."""

    capsule: str
    identity: int
    fields: str  # JSON
    owner: str
    blocks: bytes
    num_body: int

    @property
    def body(self) -> list[int]:
        return as_keys(self.blocks[len(self.blocks) - 8 * self.num_body :])


class Volume:
    """Blocks and records in `files`, by one thread at a time. `open` makes one.

    Errors are StorageErrors and IncompatibleCapsule; after any of them the volume goes on. Ask `take_lost`
    after each call, also after one that raised.
    """

    def __init__(
        self, files: Files, identity: Identity, block_nbytes: int, config: VolumeConfig
    ) -> None:
        """As `open`, of files that are acquired."""
        self._files = files
        self._identity = identity
        self._seed = int.from_bytes(identity.digest[:8], "little")
        self._block_nbytes = block_nbytes
        self._config = config
        self._lost = Lost([], [])
        # The reason for each record that was there and is of none of the `capsules`.
        self._unreadable: list[MalleeError] = [
            IncompatibleCapsule(name, [(LAYOUT, "1", str(catalogue.VERSION))])
            for name in files.earlier()
        ]
        try:
            self._catalogue = Catalogue(files, identity, block_nbytes)
        except (CorruptStorage, IncompatibleCapsule) as error:
            self._unreadable.append(error)
            files.set_aside()
            self._catalogue = Catalogue(files, identity, block_nbytes)
        self._run, self._me = self._catalogue.run, self._catalogue.identity
        if self._catalogue.is_new and next(files.read(self._me, [0], [memoryview(bytearray(1))])):
            self._unreadable.append(CorruptStorage(files.place, "the catalogue", "it is missing"))
        for entry in self._entries("identity != :me"):
            self._unreadable.append(self._refusal(entry))
        scratch = [bytearray(block_nbytes)]
        unsynced = self._places("is_synced = 0")
        for place in unsynced.values():
            if next(self._read([place], scratch)) is not None:
                self._forget(place.key)
        self._num_unsynced = len(unsynced)
        self._lost = Lost([], [])

    @classmethod
    def open(
        cls, files: Files, identity: Mapping[str, str], block_nbytes: int, config: VolumeConfig
    ) -> "Volume":
        """The volume in `files`, new if there is none. Reads the catalogue.

        `identity`: every field that decides whether KV fits this worker; `block_nbytes` is added to it.
        Blocks of another one are never found, and go first when room is needed; their records answer
        IncompatibleCapsule. A catalogue that is damaged, or of another version, is set aside.
        Raises StorageBusy, StorageFull, StorageFailed.
        """
        who = Identity(with_block_nbytes(identity, block_nbytes))
        with told("open", files.place):
            files.acquire()
            try:
                return cls(files, who, block_nbytes, config)
            except BaseException:
                files.release()
                raise

    def close(self) -> None:
        """Let other processes in."""
        with suppress(StorageError), self._catalogue.transaction():
            pass  # it has the last uses
        self._files.release()

    # Blocks.

    def keys(self) -> Sequence[int]:
        """All blocks that are stored."""
        return list(self._places("NOT is_body"))

    def put(self, keys: Keys, rows: Rows) -> int:
        """Write those of `keys` that are not stored, from their `rows`; how many that were.

        Blocks that a record names are durable at once, for it was promised them.
        Raises StorageFull, StorageFailed.
        """
        return self._put(as_keys(as_bytes(keys)), rows)

    def _put(
        self, keys: Sequence[int], rows: Rows, *, spared: Sequence[int] = (), body_of: str = ""
    ) -> int:
        """As `put`, of blocks or of the body of a record. For them no `spared` blocks go."""
        found = self._find(keys)
        fresh = {key: i for i, key in enumerate(keys) if key not in found}
        if not fresh:
            return 0
        self._make_room(len(fresh), [*keys, *spared], body_of)
        pieces = [rows[i] for i in fresh.values()]
        assert all(len(row) == self._block_nbytes for row in pieces), "rows of another size"
        with self._catalogue.transaction(is_durable=False):
            slots = self._free_slots(len(fresh))
            with told("write", self._files.place, len(fresh) * self._block_nbytes):
                self._files.write(self._me, slots, pieces)
            written = list(zip(fresh, slots, pieces, strict=True))
            for key, slot, row in reversed(written):  # of a text the last ones are to go first
                self._run(
                    "REPLACE INTO blocks VALUES (:me, :slot, :key, :sum, 0, :is_body, :now)",
                    slot=slot,
                    key=signed(key),
                    sum=signed(self._sum(key, row)),
                    is_body=bool(body_of),
                    now=self._catalogue.tick(),
                )
        self._num_unsynced += len(fresh)
        is_promised = self._run(f"{_HOLDS} {_LISTED} LIMIT 1", list=packed(fresh))
        if is_promised or self._num_unsynced * self._block_nbytes >= _UNSYNCED_NBYTES:
            self._sync()
            with self._changing():
                self._run(_SYNCED)
        return len(fresh)

    def _free_slots(self, num: int) -> list[int]:
        free = "SELECT slot FROM blocks WHERE identity = :me AND key IS NULL LIMIT :num"
        slots = [slot for (slot,) in self._run(free, num=num)]
        end = "SELECT MAX(slot) + 1 FROM blocks WHERE identity = :me"
        begin = self._catalogue.value(end) if len(slots) < num else 0
        return [*slots, *range(begin, begin + num - len(slots))]

    def get(self, keys: Keys, rows: Rows) -> Read:
        """Read the leading blocks of `keys` into `rows` until one is missing or bad. Never raises.

        Of the row after the last good one the bytes are undefined. Blocks that could not be read, or
        are not what was written, are forgotten.
        """
        names = as_keys(as_bytes(keys))
        try:
            found = self._find(names)
        except StorageError as error:
            return Read(0, error)
        missing = _missing(names, found)
        num = names.index(missing.fields["key"]) if missing is not None else len(names)
        for i, bad in enumerate(self._read([found[key] for key in names[:num]], rows)):
            if bad is not None:
                self._forget(names[i])
                return Read(i, bad)
        return Read(num, missing)

    def _read(self, places: Sequence[_Place], rows: Rows) -> Iterator[StorageError | None]:
        """Read and verify blocks into `rows`, one at a time: why each can't be used, if so."""
        into = [memoryview(rows[i]).cast("B") for i in range(len(places))]
        counts = self._files.read(self._me, [place.slot for place in places], into)
        for place, row, count in zip(places, into, counts, strict=True):
            name = f"block {place.key:016x}"
            if isinstance(count, OSError):
                yield named(count, "read", name)
            elif count < len(row):
                yield CorruptStorage(self._files.place, name, f"{count} of {len(row)} bytes")
            elif self._sum(place.key, row) != place.checksum:
                yield CorruptStorage(self._files.place, name, "its sum differs")
            else:
                yield None

    def _find(self, keys: Sequence[int]) -> dict[int, _Place]:
        """Those of `keys` that are stored, which are used now: of a text the last ones are to go first."""
        found = self._places(f"key {_LISTED}", list=packed(keys))
        for key in reversed(keys):
            if key in found:
                sql = "UPDATE blocks SET used = :now WHERE identity = :me AND key = :row"
                self._catalogue.use(sql, signed(key))
        return found

    def _places(self, where: str, **given: Any) -> dict[int, _Place]:
        columns = "key, slot, checksum, is_body"
        sql = f"SELECT {columns} FROM blocks WHERE identity = :me AND key NOT NULL AND {where}"
        return {
            unsigned(key): _Place(unsigned(key), slot, unsigned(sum_), is_body)
            for key, slot, sum_, is_body in self._run(sql, **given)
        }

    # Records.

    def commit(
        self, capsule: str, payload: Piece, keys: Keys, *, owner: str = "", is_kept: bool = True
    ) -> None:
        """The capsule is durable when this is back, and its blocks stay with it.

        An earlier record of that capsule counts until then. Records that are not `is_kept` go, least recently
        used first, when there is no other room. Raises BlocksMissing (write them again), StorageFull,
        StorageFailed.
        """
        names = as_keys(as_bytes(keys))
        if (missing := _missing(names, self._find(names))) is not None:
            raise missing
        self._write_record(Record(capsule, bytes(payload), names, owner, is_kept))

    def _write_record(self, record: Record) -> None:
        """As `commit`; blocks that are not stored are missing to the capsule."""
        raw, size = msgspec.msgpack.encode(record), self._block_nbytes
        raw = len(raw).to_bytes(8, "little") + raw
        rows = [raw[i : i + size].ljust(size, b"\0") for i in range(0, len(raw), size)]
        body = [checksum(row, self._seed ^ i) for i, row in enumerate(rows)]
        blocks = [*record.keys, *body]
        self._put(body, rows, spared=blocks, body_of=record.capsule)
        self._sync()
        with self._changing() as lost:
            self._run(_SYNCED)
            sql = "INSERT INTO holds SELECT :me, value, :owner, 1 FROM json_each(:list) WHERE true"
            sql += " ON CONFLICT DO UPDATE SET num = num + 1"
            self._run(sql, owner=record.owner, list=packed(set(blocks)))
            for old in self._entries("capsule = :capsule", capsule=record.capsule):
                self._drop(old, lost)
            self._run(
                "INSERT INTO records VALUES (:capsule, :me, :owner, :is_kept, :blocks, :num, :now)",
                capsule=record.capsule,
                owner=record.owner,
                is_kept=record.is_kept,
                blocks=as_bytes(blocks),
                num=len(body),
                now=self._catalogue.tick(),
            )
            if self._config.owner_nbytes:
                self._make_owner_room(record, size * len(set(blocks)), lost)

    def _make_owner_room(self, record: Record, nbytes: int, lost: Lost) -> None:
        """Evict other records of the owner until all fit. Raises StorageFull."""
        limit, size, owner = self._config.owner_nbytes, self._block_nbytes, record.owner
        victims = self._give_up_records(record.capsule, lost, "owner = :owner", owner=owner)
        sql = "SELECT COUNT(*) FROM holds WHERE identity = :me AND owner = :owner"
        while (used := size * self._catalogue.value(sql, owner=owner)) > limit:
            if next(victims, None) is None:
                raise StorageFull("its owner's share of the volume", nbytes, used - nbytes, limit)

    def load(self, capsule: str) -> Record | None:
        """The record of the capsule, verified; its blocks are not looked at. None if there is none.

        Raises IncompatibleCapsule, CorruptStorage (the record is gone then), StorageFailed.
        """
        for entry in self._entries("capsule = :capsule", capsule=capsule):
            if entry.identity != self._me:
                raise self._refusal(entry)
            places = self._find(entry.body)
            rows = [bytearray(self._block_nbytes) for _ in entry.body]
            missing = _missing(entry.body, places)
            reads = (missing,) if missing else self._read([places[key] for key in entry.body], rows)
            error = next(filter(None, reads), None)
            if isinstance(error, StorageFailed):  # another time it may be read
                raise error
            record = None if error else _decoded(rows)
            if record is not None and record.capsule == capsule:
                self._catalogue.use("UPDATE records SET used = :now WHERE capsule = :row", capsule)
                return record
            with self._changing() as lost:
                self._drop(entry, lost)
                lost.capsules.append(capsule)
            reason = str(error or "it is of another capsule")
            raise CorruptStorage(f"capsule {capsule}", "record", reason)
        return None

    def drop(self, capsule: str) -> bool:
        """Forget the capsule, also after a loss of power; whether there was one. Its blocks are a cache then.

        Raises StorageFailed: it is still there.
        """
        found = self._entries("capsule = :capsule", capsule=capsule)
        for entry in found:
            with self._changing() as lost:
                self._drop(entry, lost)
        return bool(found)

    def capsules(self) -> Sequence[str]:
        """Committed capsules, the least recently used first; without those of another identity."""
        return [entry.capsule for entry in self._entries("identity = :me ORDER BY used")]

    def unreadable(self) -> Sequence[MalleeError]:
        """The reason for each record that was there when this was opened and is of none of the `capsules`."""
        return self._unreadable

    def _entries(self, where: str, **given: Any) -> list[_Entry]:
        fields = "iif(json_valid(fields), fields, '{}')"
        columns = f"capsule, identity, {fields}, owner, blocks, num_body"
        sql = f"SELECT {columns} FROM records LEFT JOIN identities ON id = identity WHERE {where}"
        return [_Entry(*row) for row in self._run(sql, **given)]

    def _refusal(self, entry: _Entry) -> IncompatibleCapsule:
        """The error that names the fields in which the identity of `entry` differs."""
        return self._identity.refusal(entry.capsule, msgspec.json.decode(entry.fields))

    # Other volumes.

    def take(self, other: "Volume", capsule: str) -> Record | None:
        """Move `capsule` of `other` here, with its blocks; None if it was here already, or is not there.

        It is durable here before it is gone there. Damaged blocks of it stay behind. Raises as `load`, `put`
        and `commit`; then it is still there.
        """
        record = other.load(capsule)
        if record is None:
            return None
        if is_new := not self._entries("capsule = :capsule", capsule=capsule):
            found = self._find(record.keys)
            todo = [key for key in record.keys if key not in found]
            self._make_room(len(todo), record.keys)  # for all of it, or for nothing
            num = max(1, _SCRATCH_NBYTES // self._block_nbytes)
            rows = [memoryview(bytearray(self._block_nbytes)) for _ in todo[:num]]
            while todo:
                done, error = other.get(todo[:num], rows)
                if isinstance(error, StorageFailed):  # another time it may be read
                    raise error
                self.put(todo[:done], rows[:done])
                todo = todo[done + (error is not None) :]
            self._write_record(record)
        other.drop(capsule)
        return record if is_new else None

    def beside(self, files: Files) -> "Volume":
        """Another volume for this model, to be adopted. Raises as `open`."""
        return Volume.open(files, self._identity.fields, self._block_nbytes, self._config)

    def adopt(self, other: "Volume") -> list[MalleeError]:
        """Take all capsules of `other`; the reasons for what stays there. Without any its cache goes too."""
        left = list(other.unreadable())
        for capsule in other.capsules():
            try:
                self.take(other, capsule)
            except MalleeError as error:
                left.append(error)
        if not left:
            try:
                other.clear()
            except MalleeError as error:
                left.append(error)
        return left

    def clear(self) -> None:
        """Remove all cached blocks. Raises StorageFailed."""
        with self._changing() as lost:
            self._delete(_CACHED, lost)
            sql = "SELECT id FROM identities WHERE id NOT IN (SELECT identity FROM records)"
            empty = self._run(sql)
            for (identity,) in empty:
                self._run("DELETE FROM blocks WHERE identity = :id", id=identity)
        self._remove_slots(empty)

    # What goes on behind.

    def take_lost(self) -> Lost:
        """Losses since the last call."""
        lost, self._lost = self._lost, Lost([], [])
        return lost

    @property
    def budget_nbytes(self) -> int:
        """The bytes that it may hold."""
        return self._config.budget_nbytes

    @contextmanager
    def _changing(self) -> Iterator[Lost]:
        """A durable transaction; what is lost with it is told when it has ended."""
        lost = Lost([], [])
        with self._catalogue.transaction():
            yield lost
        self._lost.keys.extend(lost.keys)
        self._lost.capsules.extend(lost.capsules)

    def _remove_slots(self, identities: Sequence[tuple[int]]) -> None:
        """Nothing in them is stored; those that stay are written again."""
        for (identity,) in identities:
            with suppress(OSError):
                self._files.remove(identity)

    def _sync(self) -> None:
        """Have all slots outlive a loss of power. Raises StorageFailed: what had no sync is forgotten."""
        try:
            self._files.sync(self._me)
        except OSError as error:
            with self._changing() as lost:
                self._delete("is_synced = 0", lost)
            raise named(error, "sync", self._files.place) from error
        finally:
            self._num_unsynced = 0

    def _forget(self, key: int) -> None:
        """A block that can't be trusted is not found any more."""
        with suppress(StorageError), self._changing() as lost:
            self._delete("key = :key", lost, key=signed(key))

    def _delete(self, where: str, lost: Lost, **given: Any) -> int:
        """Blocks are not stored any more; how many."""
        found = self._places(where, **given)
        sql = f"UPDATE blocks SET key = NULL, is_synced = 1 WHERE identity = :me AND key {_LISTED}"
        self._run(sql, list=packed(found))
        lost.keys.extend(place.key for place in found.values() if not place.is_body)
        return len(found)

    def _drop(self, entry: _Entry, lost: Lost) -> int:
        """Delete a record, and its body; how many blocks that has."""
        theirs = f"WHERE identity = :identity AND owner = :owner AND key {_LISTED}"
        blocks = packed(set(as_keys(entry.blocks)))
        given = {"identity": entry.identity, "owner": entry.owner, "list": blocks}
        self._run("DELETE FROM records WHERE capsule = :capsule", capsule=entry.capsule)
        self._run(f"UPDATE holds SET num = num - 1 {theirs}", **given)
        self._run(f"DELETE FROM holds {theirs} AND num <= 0", **given)
        return self._delete(f"is_body AND key {_LISTED} AND {_CACHED}", lost, list=blocks)

    def _make_room(self, num_blocks: int, spared: Sequence[int], capsule: str = "") -> None:
        """Evict until as many blocks more fit. `spared` blocks and the record of `capsule` stay.

        Raises StorageFull, with nothing evicted; StorageFailed.
        """
        limit, size = self._config.budget_nbytes, self._block_nbytes
        used = self._catalogue.value(_TOTAL) + num_blocks * size
        if used <= limit:
            return
        with self._changing() as lost:
            others = self._run("SELECT id FROM identities WHERE id != :me")
            for (identity,) in others:
                self._remove(identity, lost)
            used = self._catalogue.value(_TOTAL) + num_blocks * size
            if used > limit:
                low = int(self._config.low_watermark * limit)
                used -= size * self._evict(ceil((used - low) / size), spared, lost)
            victims, needed = self._give_up_records(capsule, lost), num_blocks * size
            while used > limit:
                if (freed := next(victims, None)) is None:
                    raise StorageFull("the volume", needed, used - needed, limit)
                used -= size * freed
                used -= size * self._evict(ceil((used - limit) / size), spared, lost)
        self._remove_slots(others)

    def _give_up_records(
        self, spared: str, lost: Lost, where: str = "true", **given: Any
    ) -> Iterator[int]:
        """Drop records that are not kept, the least recently used first; the blocks that each frees."""
        where = f"NOT is_kept AND identity = :me AND capsule != :spared AND {where} ORDER BY used"
        for entry in self._entries(where, spared=spared, **given):
            lost.capsules.append(entry.capsule)
            yield self._drop(entry, lost)

    def _evict(self, num: int, spared: Sequence[int], lost: Lost) -> int:
        """Give up the `num` oldest cached blocks, or as many as there are; how many."""
        where = f"{_CACHED} AND key NOT {_LISTED} ORDER BY used LIMIT MAX(:num, 0)"
        return self._delete(where, lost, list=packed(spared), num=num)

    def _remove(self, identity: int, lost: Lost) -> None:
        """Give up all that is of another identity."""
        sql = "DELETE FROM records WHERE identity = :id RETURNING capsule"
        lost.capsules.extend(capsule for (capsule,) in self._run(sql, id=identity))
        for table, column in (("blocks", "identity"), ("holds", "identity"), ("identities", "id")):
            self._run(f"DELETE FROM {table} WHERE {column} = :id", id=identity)

    def _sum(self, key: int, row: Piece) -> int:
        """The checksum of a block, which fits no other key or identity."""
        return checksum(row, self._seed ^ key)


def _missing(keys: Sequence[int], found: Mapping[int, _Place]) -> BlocksMissing | None:
    """The error that tells of those of `keys` that are not among the `found`."""
    missing = [key for key in keys if key not in found]
    return BlocksMissing(len(missing), len(keys), missing[0]) if missing else None


def _decoded(rows: Sequence[bytearray]) -> Record | None:
    """The record in a body that was verified; None if that is no body."""
    raw = b"".join(rows)
    with suppress(ValueError):
        return msgspec.msgpack.decode(raw[8 : 8 + int.from_bytes(raw[:8], "little")], type=Record)
    return None
