"""One worker's durable KV blocks and capsule records.

Blocks are opaque bytes of one size under their chain hash, each stored once. They are written in *runs*, a
file for what one call brings, because a sync costs the same for one block as for a hundred. A capsule's
record names its blocks by hash and not by file: a block that went bad is written anew elsewhere, and every
record that names it is whole again without being touched.

Durability has one point. `commit` syncs the runs that have the capsule's blocks, then writes the record,
syncs it, gives it its name, and syncs the name. When it is back, the capsule outlives whatever ends the
process; before, it may or may not be there, but never in part. Nothing is ever changed in place. Files
have numbers that only grow; of two records of one capsule, or two copies of a block, the larger counts.

A sync that fails may have thrown away what it did not write, and the next one would find nothing to do:
runs whose sync failed are removed.

Bytes are verified when they are read, not when the volume is opened: that reads headers alone. A block of
which only the header is known may be one that a loss of power cut, for nobody synced cached blocks: before a
record names it, it is read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOENT
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np

from mallee.protocol.errors import (
    BlocksMissing,
    CorruptStorage,
    IncompatibleCapsule,
    MalleeError,
    StorageError,
    StorageFailed,
    StorageFull,
)
from mallee.worker.storage.catalogue import Catalogue, Entry, Run
from mallee.worker.storage.files import Files, last, named, told
from mallee.worker.storage.format import (
    RECORD,
    RUN,
    Header,
    Identity,
    Keys,
    PackedRun,
    Piece,
    Prefix,
    RecordHeader,
    Rows,
    RunHeader,
    as_bytes,
    as_keys,
    checksum,
    pack_record,
    pack_run,
    read_header,
    read_prefix,
    with_block_nbytes,
)

_SCRATCH_NBYTES: Final = 4 << 20
_FIRST_READ: Final = 4096  # has the whole header of most files


@dataclass(frozen=True, slots=True)
class VolumeConfig:
    """Limits in bytes, and the moment of syncs.

    fsync: `commit` syncs a capsule's runs and its record before it is acknowledged. `always` syncs each
    run as it is written too, so that cached blocks also outlive a loss of power. `never` syncs nothing:
    acknowledged capsules then outlive the process, not the machine's power; what is left of them after
    that is still verified.

    A volume that is full gives up cached runs until it is down to `low_watermark` of its budget, then, and
    only as far as it must, records that are not kept. `owner_nbytes` limits what the records of one owner
    hold; 0 is no limit.
    """

    budget_nbytes: int
    owner_nbytes: int = 0
    low_watermark: float = 0.9
    fsync: Literal["commit", "always", "never"] = "commit"
    run_nbytes: int = 64 << 20  # a run's blocks, at most


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
    """Blocks and capsules that are not stored any more: evicted, or found bad. In order."""

    keys: list[int]
    capsules: list[str]


class VolumeStats(NamedTuple):
    """Contents, and counts since the volume was opened."""

    nbytes: int
    num_blocks: int
    num_runs: int
    num_records: int
    num_stale_runs: int
    num_stale_records: int
    num_evicted_blocks: int
    num_evicted_records: int
    num_bad: int  # blocks, records and headers


class Volume:
    """Blocks and records in `files`, by one thread. `open` makes one.

    Errors are StorageErrors and IncompatibleCapsule; after any of them the volume goes on. Ask `take_lost`
    after each call, also after one that raised.
    """

    def __init__(
        self, files: Files, identity: Identity, block_nbytes: int, config: VolumeConfig
    ) -> None:
        self._files = files
        self._identity = identity
        self._block_nbytes = block_nbytes
        self._config = config
        self._catalogue = Catalogue(block_nbytes)
        self._next = 0  # number of the next file
        self._lost = Lost([], [])
        self._evicted_blocks = 0
        self._evicted_records = 0
        self._bad = 0
        self._left: set[str] = set()  # files that could not be removed
        self._unread: set[str] = set()  # files that `open` could not read
        self.problems: list[StorageError] = []
        """Found by `open`: files that could not be read, or were removed because they were damaged."""
        # The reasons for records of which no capsule is known.
        self._unknown: list[MalleeError] = []

    @classmethod
    def open(
        cls, files: Files, identity: Mapping[str, str], block_nbytes: int, config: VolumeConfig
    ) -> "Volume":
        """The volume in `files`, new if there is none. Reads the headers of all files.

        `identity`: every field that decides whether KV fits this worker; `block_nbytes` is added to it.
        Blocks of another one are never found, and go first when room is needed; their records answer
        IncompatibleCapsule. Raises StorageBusy, StorageFailed.
        """
        who = Identity(with_block_nbytes(identity, block_nbytes))
        volume = cls(files, who, block_nbytes, config)
        with told("open", files.place):
            files.acquire()
        try:
            volume._scan()
        except BaseException:
            files.release()
            raise
        return volume

    def close(self) -> None:
        """Let other processes in. Nothing is written."""
        self._files.release()

    # Blocks.

    def __contains__(self, key: int) -> bool:
        return key in self._catalogue

    def keys(self) -> Sequence[int]:
        """All blocks that are stored."""
        return list(self._catalogue.keys())

    def put(self, keys: Keys, rows: Rows) -> int:
        """Write those of `keys` that are not stored, from their `rows`; how many that were.

        Of the others those are read that this process has not seen yet, and written if they are bad. Blocks
        that a record names are durable at once, for it was promised them.
        With one file and at most one sync for each `run_nbytes`. What was written before an error stays.
        Raises StorageFull, StorageFailed.
        """
        names = _ints(keys)
        self._verify(names)
        fresh = {key: i for i, key in enumerate(names) if key not in self._catalogue}
        stored = self._catalogue.runs_of(names)
        self._catalogue.use(stored)
        if not fresh:
            return 0
        todo = list(fresh)
        size = max(1, self._config.run_nbytes // self._block_nbytes)
        parts = [todo[i : i + size] for i in range(0, len(todo), size)]
        runs = [self._pack(part, [rows[fresh[key]] for key in part]) for part in parts]
        self._make_room(sum(run.nbytes for run in runs), spared=stored)
        for part, run in zip(parts, runs, strict=True):
            self._write_run(part, run)
        return len(todo)

    def get(self, keys: Keys, rows: Rows) -> Read:
        """Read the leading blocks of `keys` into `rows` until one is missing or bad. Never raises.

        Of the row after the last good one the bytes are undefined. Blocks that could not be read, or
        are not what was written, are forgotten.
        """
        names = _ints(keys)
        done = 0
        while done < len(names):
            place = self._catalogue.place(names[done])
            if place is None:
                missing = sum(key not in self._catalogue for key in names[done:])
                return Read(done, BlocksMissing(missing, len(names), names[done]))
            run, slot = place
            rest = enumerate(names[done : done + len(run.keys)], slot)
            follows = (self._catalogue.place(key) == (run, i) for i, key in rest)
            count = sum(takewhile(bool, follows))
            into = [memoryview(rows[i]).cast("B") for i in range(done, done + count)]
            good, error = self._read(run, slot, into)
            done += good
            if error is not None:
                return Read(done, error)
        return Read(done, None)

    # Records.

    def commit(
        self, capsule: str, payload: Piece, keys: Keys, *, owner: str = "", is_kept: bool = True
    ) -> None:
        """The capsule is durable when this is back, in the sense of `fsync`; its blocks stay with it.

        An earlier record of that capsule counts until then. Records that are not `is_kept` go, least recently
        used first, when there is no other room. Raises BlocksMissing (write them again), StorageFull,
        StorageFailed.
        """
        names = _ints(keys)
        self._verify(names)
        missing = [key for key in names if key not in self._catalogue]
        if missing:
            raise BlocksMissing(len(missing), len(names), missing[0])
        self._write_record(capsule, payload, names, owner=owner, is_kept=is_kept)

    def _write_record(
        self, capsule: str, payload: Piece, names: list[int], *, owner: str, is_kept: bool
    ) -> None:
        """As `commit`; blocks that are not stored are missing to the capsule."""
        header = RecordHeader(
            capsule, owner, is_kept, self._identity.fields, as_bytes(names), checksum(payload)
        )
        pieces = pack_record(header, payload)
        nbytes = len(pieces[0]) + len(payload)
        name = self._new_name("capsules")
        entry = Entry(capsule, name, nbytes, len(pieces[0]), header.checksum, owner, is_kept, names)
        runs = self._catalogue.runs_of(names)
        self._catalogue.use(runs)
        self._make_owner_room(entry)
        self._make_room(nbytes, spared=runs, capsule=capsule)
        self._sync(runs)
        with told("write", name, nbytes):
            self._files.write(name, pieces, is_durable=self._config.fsync != "never")
        old = self._catalogue.record(capsule)
        self._catalogue.put(entry)
        if old is not None:
            self._discard(old.name)

    def load(self, capsule: str) -> Record | None:
        """The record of the capsule, verified; its blocks are not looked at. None if there is none.

        Raises IncompatibleCapsule, CorruptStorage (the record is gone then), StorageFailed.
        """
        entry = self._catalogue.record(capsule)
        if entry is None:
            return None
        if entry.identity is not None:
            self._identity.check(capsule, entry.identity)
        payload = bytearray(entry.nbytes - entry.offset)
        try:
            read = last(self._files.read(entry.name, entry.offset, [memoryview(payload)]))
        except OSError as error:
            if error.errno != ENOENT:
                raise named(error, "read", entry.name) from error
            read = 0
        if read < len(payload) or checksum(payload) != entry.checksum:
            self._bad += 1
            self._forget_record(entry)
            reason = f"{read} of {len(payload)} bytes" if read < len(payload) else "its sum differs"
            raise CorruptStorage(entry.name, "record", reason)
        self._catalogue.touch(capsule)
        self._catalogue.use(self._catalogue.runs_of(entry.keys))
        return Record(capsule, bytes(payload), list(entry.keys), entry.owner, entry.is_kept)

    def take(self, other: "Volume", capsule: str) -> Record | None:
        """Move `capsule` of `other` here, with its blocks; None if it was here already, or is not there.

        It is durable here before it is gone there. Damaged blocks of it stay behind. Raises as `load`, `put`
        and `commit`; then it is still there.
        """
        record = other.load(capsule)
        if record is None:
            return None
        if is_new := self._catalogue.record(capsule) is None:
            todo = [key for key in record.keys if key not in self._catalogue]
            size = max(1, _SCRATCH_NBYTES // self._block_nbytes)
            rows = [memoryview(bytearray(self._block_nbytes)) for _ in todo[:size]]
            self._make_room(
                len(todo) * self._block_nbytes, spared=self._catalogue.runs_of(record.keys)
            )
            while todo:
                done, error = other.get(todo[:size], rows)
                if isinstance(error, StorageFailed):  # another time it may be read
                    raise error
                self.put(todo[:done], rows[:done])
                todo = todo[done + (error is not None) :]
            self._write_record(
                capsule, record.payload, record.keys, owner=record.owner, is_kept=record.is_kept
            )
        other.drop(capsule)
        return record if is_new else None

    def beside(self, files: Files) -> "Volume":
        """Another volume for this model, to be adopted. Raises as `open`; also if a file can't be read."""
        other = Volume.open(files, self._identity.fields, self._block_nbytes, self._config)
        for problem in other.problems:
            if isinstance(problem, StorageFailed):  # another time it may be
                other.close()
                raise problem
        return other

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
        for run in self._catalogue.evictable(()):
            self._evict_run(run)

    def drop(self, capsule: str) -> bool:
        """Forget the capsule, also after a loss of power; whether there was one. Its blocks are a cache then.

        Raises StorageFailed: it is still there.
        """
        entry = self._catalogue.record(capsule)
        if entry is None:
            return False
        with told("remove", entry.name):
            for name in list(self._left):  # an older record of the capsule may be among them
                self._files.remove(name, is_durable=False)
                self._left.discard(name)
            self._files.remove(entry.name, is_durable=self._config.fsync != "never")
        self._catalogue.drop(capsule)
        return True

    def capsules(self) -> Sequence[str]:
        """Committed capsules, the least recently used first; without those of another identity."""
        return [e.capsule for e in self._catalogue.records() if e.identity is None]

    def unreadable(self) -> Sequence[MalleeError]:
        """The reason for each record that is, or was when this was opened, of none of the `capsules`."""
        found = list(self._unknown)
        for entry in self._catalogue.records():
            if entry.identity is not None:
                try:
                    self._identity.check(entry.capsule, entry.identity)
                except IncompatibleCapsule as error:
                    found.append(error)
        return found

    # What goes on behind.

    def take_lost(self) -> Lost:
        """Losses since the last call."""
        lost, self._lost = self._lost, Lost([], [])
        return lost

    @property
    def budget_nbytes(self) -> int:
        """The bytes that it may hold."""
        return self._config.budget_nbytes

    def stats(self) -> VolumeStats:
        runs = list(self._catalogue.runs())
        records = list(self._catalogue.records())
        stale_runs = sum(not run.keys for run in runs)
        stale_records = sum(entry.identity is not None for entry in records)
        return VolumeStats(
            nbytes=self._catalogue.nbytes,
            num_blocks=sum(run.num_live for run in runs),
            num_runs=len(runs) - stale_runs,
            num_records=len(records) - stale_records,
            num_stale_runs=stale_runs,
            num_stale_records=stale_records,
            num_evicted_blocks=self._evicted_blocks,
            num_evicted_records=self._evicted_records,
            num_bad=self._bad,
        )

    def check(self) -> None:
        """Raise AssertionError if the files are not those that are known, or on a broken invariant."""
        self._catalogue.check()
        found = {**self._files.sizes("runs"), **self._files.sizes("capsules")}
        known: list[Run | Entry] = [*self._catalogue.runs(), *self._catalogue.records()]
        others = self._left | self._unread
        found = {name: nbytes for name, nbytes in found.items() if name not in others}
        assert found == {each.name: each.nbytes for each in known}, "files and catalogue differ"

    def _scan(self) -> None:
        with told("open", self._files.place):
            files = {**self._files.sizes("runs"), **self._files.sizes("capsules")}
        numbered = sorted((number, name) for name in files if (number := _number(name)) is not None)
        self._next = numbered[-1][0] + 1 if numbered else 0
        names = [name for _, name in numbered]
        with told("open", self._files.place):
            for name, head in zip(names, self._files.heads(names, _FIRST_READ), strict=True):
                try:
                    self._find(name, files[name], head)
                except (CorruptStorage, StorageFailed) as error:
                    self.problems.append(error)
                    if not name.startswith("runs/"):
                        self._unknown.append(error)
                    if isinstance(error, StorageFailed):
                        self._unread.add(name)
                    else:
                        self._bad += 1
                        self._discard(name)
        for run in self._catalogue.empty_runs():
            self._forget_run(run)
        self._lost = Lost([], [])

    def _find(self, name: str, nbytes: int, head: bytes | OSError) -> None:
        """Take in a file that was there before. Raises CorruptStorage, StorageFailed."""
        if isinstance(head, OSError):
            raise named(head, "read", name) from head
        try:
            if name.startswith("runs/"):
                self._find_run(name, nbytes, head)
            else:
                self._find_record(name, nbytes, head)
        except IncompatibleCapsule as error:  # of another version: nothing of it can be read
            self._catalogue.add(Run(name, nbytes))
            if not name.startswith("runs/"):
                self._unknown.append(error)

    def _find_run(self, name: str, nbytes: int, head: bytes) -> None:
        prefix, header = self._read_header(name, nbytes, head, RUN, RunHeader)
        if header.identity != self._identity.digest:
            self._catalogue.add(Run(name, nbytes))
            return
        keys, sums = as_keys(header.keys), as_keys(header.checksums)
        if len(keys) * header.block_nbytes != prefix.body_nbytes or len(sums) != len(keys):
            raise CorruptStorage(name, "header", f"{len(keys)} blocks, {prefix.body_nbytes} bytes")
        verified = bytearray(len(keys))
        self._catalogue.add(Run(name, nbytes, prefix.body_offset, keys, sums, verified))

    def _find_record(self, name: str, nbytes: int, head: bytes) -> None:
        prefix, header = self._read_header(name, nbytes, head, RECORD, RecordHeader)
        old = self._catalogue.record(header.capsule)
        is_ours = header.identity == self._identity.fields
        entry = Entry(
            header.capsule,
            name,
            nbytes,
            prefix.body_offset,
            header.checksum,
            header.owner,
            header.is_kept,
            as_keys(header.keys),
            None if is_ours else header.identity,
        )
        self._catalogue.put(entry)
        if old is not None:
            self._discard(old.name)

    def _read_header(
        self, name: str, nbytes: int, head: bytes, kind: int, type_: type[Header]
    ) -> tuple[Prefix, Header]:
        """Raises CorruptStorage, also if the file's length is not what its prefix says; StorageFailed."""
        prefix = read_prefix(head, kind, name)
        if prefix.nbytes != nbytes:
            raise CorruptStorage(name, "end", f"{nbytes} of {prefix.nbytes} bytes")
        if prefix.body_offset > len(head):
            head += self._read_at(name, len(head), prefix.body_offset - len(head))
        if len(head) < prefix.body_offset:
            raise CorruptStorage(name, "header", f"{len(head)} of {prefix.body_offset} bytes")
        return prefix, read_header(memoryview(head)[: prefix.body_offset], type_, name)

    def _read_at(self, name: str, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        with told("read", name):
            count = last(self._files.read(name, offset, [memoryview(data)]))
        return bytes(data[:count])

    def _read(
        self, run: Run, slot: int, into: Sequence[memoryview]
    ) -> tuple[int, StorageError | None]:
        """Read and verify blocks of one run, from `slot` on; those that fail are forgotten."""
        size, good, nbytes = self._block_nbytes, 0, 0
        self._catalogue.use([run])
        try:
            for nbytes in self._files.read(run.name, run.offset + slot * size, into):
                for i in range(good, nbytes // size):
                    if checksum(into[i]) != run.checksums[slot + i]:
                        self._forget(run, [run.keys[slot + i]])
                        return i, CorruptStorage(run.name, f"block {slot + i}", "its sum differs")
                    run.verified[slot + i] = 1
                good = nbytes // size
        except OSError as error:
            is_gone = error.errno == ENOENT
            bad = run.keys if is_gone else run.keys[slot + good : slot + len(into)]
            self._forget(run, bad, may_come_back=not is_gone)
            return good, named(error, "read", run.name)
        if good < len(into):
            self._forget(run, run.keys[slot + good : slot + len(into)])
            reason = f"{nbytes - good * size} of {size} bytes"
            return good, CorruptStorage(run.name, f"block {slot + good}", reason)
        return good, None

    def _verify(self, keys: Sequence[int]) -> None:
        """Read blocks that an earlier process wrote and nobody read since; bad ones are forgotten."""
        todo = [key for key in keys if not self._catalogue.is_verified(key)]
        size = max(1, _SCRATCH_NBYTES // self._block_nbytes)
        scratch = [memoryview(bytearray(self._block_nbytes)) for _ in todo[:size]]
        while todo:
            done, error = self.get(todo[:size], scratch)
            todo = todo[done + (error is not None) :]

    def _pack(self, keys: Sequence[int], rows: Sequence[Piece]) -> PackedRun:
        assert all(len(row) == self._block_nbytes for row in rows), "rows of another size"
        return pack_run(self._identity, self._block_nbytes, keys, rows)

    def _write_run(self, keys: Sequence[int], run: PackedRun) -> None:
        name = self._new_name("runs")
        policy = self._config.fsync
        heals = any(self._catalogue.is_pinned(key) for key in keys)  # what a record was promised
        is_durable = policy == "always" or (policy == "commit" and heals)
        with told("write", name, run.nbytes):
            self._files.write(name, run.pieces, is_durable=is_durable)
        offset = len(run.pieces[0])
        verified = bytearray(b"\1") * len(keys)
        added = Run(name, run.nbytes, offset, keys, run.checksums, verified, is_durable)
        self._catalogue.add(added)

    def _sync(self, runs: Iterable[Run]) -> None:
        """Make `runs` durable, in the sense of `fsync`. Raises StorageFailed: those nobody pins are gone."""
        todo = [run for run in runs if not run.is_durable]
        if self._config.fsync == "never" or not todo:
            return
        try:
            self._files.sync([run.name for run in todo])
        except OSError as error:
            for run in todo:
                if not run.num_pinned:
                    self._forget(run, run.keys)
            raise named(error, "sync", todo[0].name) from error
        for run in todo:
            run.is_durable = True

    def _make_room(self, nbytes: int, *, spared: Mapping[Run, None], capsule: str = "") -> None:
        """Evict until `nbytes` more fit. Raises StorageFull, with nothing evicted; StorageFailed.

        `spared` runs and the record of `capsule` stay.
        """
        catalogue, limit = self._catalogue, self._config.budget_nbytes
        if catalogue.nbytes + nbytes <= limit:
            return
        runs = catalogue.evictable(spared)
        if catalogue.nbytes + nbytes - sum(run.nbytes for run in runs) > limit:
            fixed = catalogue.kept_nbytes(capsule, spared)
            if fixed + nbytes > limit:
                raise StorageFull("the volume", nbytes, fixed, limit)
        low = self._config.low_watermark * limit
        for run in runs:
            if catalogue.nbytes + nbytes <= low:
                return
            self._evict_run(run)
        for entry in catalogue.replaceable(capsule):
            if catalogue.nbytes + nbytes <= limit:
                return
            self._evict_record(entry)
            for run in catalogue.evictable(spared):  # that only this record pinned
                if catalogue.nbytes + nbytes <= limit:
                    return
                self._evict_run(run)

    def _make_owner_room(self, entry: Entry) -> None:
        """Evict records of the owner of `entry` until it fits. Raises StorageFull, with nothing evicted."""
        limit = self._config.owner_nbytes
        if not limit or self._catalogue.owner_nbytes_with(entry) <= limit:
            return
        victims = self._catalogue.replaceable(entry.capsule, entry.owner)
        fixed = self._catalogue.owner_nbytes_kept(entry)
        if fixed > limit:
            own = entry.nbytes + len(set(entry.keys)) * self._block_nbytes
            raise StorageFull("its owner's share of the volume", own, fixed - own, limit)
        for victim in victims:
            if self._catalogue.owner_nbytes_with(entry) <= limit:
                return
            self._evict_record(victim)

    def _evict_run(self, run: Run) -> None:
        with told("remove", run.name):
            self._files.remove(run.name, is_durable=False)
        gone = self._catalogue.remove(run)
        self._evicted_blocks += len(gone)
        self._lost.keys.extend(gone)

    def _evict_record(self, entry: Entry) -> None:
        with told("remove", entry.name):
            self._files.remove(entry.name, is_durable=False)
        self._catalogue.drop(entry.capsule)
        self._evicted_records += 1
        self._lost.capsules.append(entry.capsule)

    def _forget(self, run: Run, keys: Sequence[int], *, may_come_back: bool = False) -> None:
        """Blocks of `run` that can't be trusted are not found any more; without others it is removed.

        Not so if `may_come_back`: another process may be able to read what this one could not.
        """
        found = ((key, self._catalogue.place(key)) for key in keys)
        bad = [key for key, place in found if place is not None and place[0] is run]
        for key in bad:
            self._catalogue.forget(key)
        self._bad += len(bad)
        self._lost.keys.extend(bad)
        if not run.num_live and not may_come_back:
            self._forget_run(run)

    def _forget_run(self, run: Run) -> None:
        self._catalogue.remove(run)
        self._discard(run.name)

    def _forget_record(self, entry: Entry) -> None:
        self._catalogue.drop(entry.capsule)
        self._lost.capsules.append(entry.capsule)
        self._discard(entry.name)

    def _discard(self, name: str) -> None:
        """Remove a file that is of no use. If it stays, the next `open` finds it, and no worse."""
        try:
            self._files.remove(name, is_durable=False)
        except OSError:
            self._left.add(name)

    def _new_name(self, folder: str) -> str:
        self._next += 1
        return f"{folder}/{self._next - 1:016x}"


def read_records(folder: Path) -> Iterator[RecordHeader]:
    """The records in volumes below `folder` that can be read, which other processes may have open."""
    for path in sorted(folder.glob("*/capsules/*")):
        with suppress(OSError, CorruptStorage, IncompatibleCapsule), path.open("rb") as file:
            head = file.read(_FIRST_READ)
            offset = read_prefix(head, RECORD, str(path)).body_offset
            head += file.read(max(0, offset - len(head)))
            yield read_header(head[:offset], RecordHeader, str(path))


def _ints(keys: Keys) -> list[int]:
    found: list[int] = np.asarray(keys, dtype=np.uint64).tolist()
    return found


def _number(name: str) -> int | None:
    """The number of a file; None of one that is none of ours."""
    try:
        return int(name.rpartition("/")[2], 16)
    except ValueError:
        return None
