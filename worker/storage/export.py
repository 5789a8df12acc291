"""A capsule as a stream of bytes: its record, then its blocks in runs, each a checked header and a body.

    offset   bytes
    0        8   magic "mallee" 0x0d 0x0a
    8        2   version
    10       2   kind: 1 run of blocks, 2 capsule record
    12       4   h, bytes of the header
    16       8   b, bytes of the body
    24       h   header: a msgpack array
    24 + h   8   XXH3-64 of all the bytes before
    32 + h   b   body: the blocks of a run one after the other, or a record's payload

All numbers are little-endian. The header holds the XXH3-64 of the payload, or of every block, so that a block
is verified without its neighbours, and the sizes let a reader know its next piece. The record's header names
every block in order, so the stream knows its own end: it is a file, or a body of HTTP, alike.
"""

import struct
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from mallee.protocol.errors import CorruptExport, CorruptStorage, IncompatibleCapsule
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

VERSION: Final = 1
RUN: Final = 1
RECORD: Final = 2
MAX_HEADER_NBYTES: Final = 64 << 20  # of a run of four million blocks

_MAGIC: Final = b"mallee\r\n"
_PREFIX: Final = struct.Struct("<8sHHIQ")
_SUM: Final = struct.Struct("<Q")
PREFIX_NBYTES: Final = _PREFIX.size
SUM_NBYTES: Final = _SUM.size
_Reads = Generator[int, bytes]  # yields how many bytes it needs, and is sent them
_RUN_SLACK: Final = 1 << 16  # bytes of a header beside its keys and sums


class Prefix(NamedTuple):
    """Sizes of a file's parts."""

    kind: int
    header_nbytes: int
    body_nbytes: int

    @property
    def body_offset(self) -> int:
        return PREFIX_NBYTES + self.header_nbytes + SUM_NBYTES

    @property
    def nbytes(self) -> int:
        return self.body_offset + self.body_nbytes


class RunHeader(msgspec.Struct, frozen=True, array_like=True):
    """`keys` and `checksums`: little-endian u64, one a block."""

    identity: bytes  # digest
    block_nbytes: int
    keys: bytes
    checksums: bytes


class RecordHeader(msgspec.Struct, frozen=True, array_like=True):
    """`keys`: little-endian u64 of the blocks that the capsule is made of, in order."""

    capsule: str
    owner: str
    is_kept: bool
    identity: dict[str, str]
    keys: bytes
    checksum: int  # of the payload


Header = TypeVar("Header", RunHeader, RecordHeader)


class PackedRun(NamedTuple):
    """A run, as pieces to be written one after the other."""

    pieces: list[Piece]
    checksums: list[int]
    nbytes: int


def pack_run(
    identity: Identity, block_nbytes: int, keys: Sequence[int], rows: Sequence[Piece]
) -> PackedRun:
    """`rows` are read once, and not copied."""
    sums = [checksum(row) for row in rows]
    header = RunHeader(identity.digest, block_nbytes, as_bytes(keys), as_bytes(sums))
    nbytes = len(rows) * block_nbytes
    head = _pack(RUN, header, nbytes)
    return PackedRun([head, *rows], sums, len(head) + nbytes)


def run_head_nbytes(identity: Identity, block_nbytes: int, num_blocks: int) -> int:
    """Bytes of a run before its blocks."""
    words = bytes(8 * num_blocks)
    return len(_pack(RUN, RunHeader(identity.digest, block_nbytes, words, words), 0))


def pack_record(header: RecordHeader, payload: Piece) -> list[Piece]:
    return [_pack(RECORD, header, len(payload)), payload]


def _pack(kind: int, header: RunHeader | RecordHeader, body_nbytes: int) -> bytes:
    packed = msgspec.msgpack.encode(header)
    head = _PREFIX.pack(_MAGIC, VERSION, kind, len(packed), body_nbytes) + packed
    return head + _SUM.pack(checksum(head))


def read_prefix(data: Piece, kind: int, file: str) -> Prefix:
    """Raises CorruptStorage; IncompatibleCapsule if it is of another version of this format."""
    if len(data) < PREFIX_NBYTES:
        raise CorruptStorage(file, "prefix", f"{len(data)} of {PREFIX_NBYTES} bytes")
    magic, version, found, header_nbytes, body_nbytes = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptStorage(file, "prefix", f"it begins with {magic!r}")
    if version != VERSION:
        raise IncompatibleCapsule(file, [(LAYOUT, str(version), str(VERSION))])
    if found != kind:
        raise CorruptStorage(file, "prefix", f"kind {found}, not {kind}")
    if header_nbytes > MAX_HEADER_NBYTES:
        raise CorruptStorage(file, "prefix", f"a header of {header_nbytes} bytes")
    return Prefix(found, header_nbytes, body_nbytes)


def read_header(data: Piece, type_: type[Header], file: str) -> Header:
    """The header of `data`, which begins with the prefix and ends with the header's sum.

    Raises CorruptStorage.
    """
    (expected,) = _SUM.unpack_from(data, len(data) - SUM_NBYTES)
    view = memoryview(data)[:-SUM_NBYTES]
    if checksum(view) != expected:
        raise CorruptStorage(file, "header", "its sum differs")
    try:
        return msgspec.msgpack.decode(view[PREFIX_NBYTES:], type=type_)
    except msgspec.DecodeError as error:
        raise CorruptStorage(file, "header", str(error)) from error


class Block(NamedTuple):
    """A verified block of an export."""

    key: int
    data: bytes


def write_export(
    identity: Mapping[str, str],
    block_nbytes: int,
    *,
    capsule: str,
    payload: Piece,
    keys: Keys,
    rows: Iterable[Rows],
) -> Iterator[Piece]:
    """The stream, piece by piece. `rows`: the blocks of `keys`, in order, in batches; each becomes a run.

    A batch is let go when the next is asked for, so memory holds one.
    """
    who = Identity(with_block_nbytes(identity, block_nbytes))
    names = [int(key) for key in keys]
    header = RecordHeader(capsule, "", True, who.fields, as_bytes(names), checksum(payload))
    yield from pack_record(header, payload)
    done = 0
    for batch in rows:
        views = [memoryview(row) for row in batch]
        yield from pack_run(who, block_nbytes, names[done : done + len(views)], views).pieces
        done += len(views)
    assert done == len(names), f"{done} rows for {len(names)} blocks"


def export_nbytes(
    identity: Mapping[str, str],
    block_nbytes: int,
    *,
    capsule: str,
    payload: Piece,
    num_blocks: int,
    batch: int,
) -> int:
    """Bytes of the stream, if each of its runs but the last has `batch` blocks."""
    who = Identity(with_block_nbytes(identity, block_nbytes))
    keys = as_bytes(range(num_blocks))
    header = RecordHeader(capsule, "", True, who.fields, keys, checksum(payload))
    nbytes = sum(len(piece) for piece in pack_record(header, payload))
    full, rest = divmod(num_blocks, batch)
    for num, size in ((full, batch), (1, rest)):
        if size:
            nbytes += num * (run_head_nbytes(who, block_nbytes, size) + size * block_nbytes)
    return nbytes


class ExportReader:
    """Verifies an export as its bytes come, in pieces of any size. Holds one block at a time.

    Nothing of it may be used before `finish` is back: until then only the pieces are known to be right, not
    that they are all.
    """

    def __init__(
        self,
        identity: Mapping[str, str],
        block_nbytes: int,
        *,
        max_payload_nbytes: int,
        max_blocks: int,
    ) -> None:
        """Memory holds a block, or `max_payload_nbytes`, and the keys of `max_blocks`."""
        self._identity = Identity(with_block_nbytes(identity, block_nbytes))
        self._block_nbytes = block_nbytes
        self._max_payload_nbytes = max_payload_nbytes
        self._max_header_nbytes = 16 * max_blocks + _RUN_SLACK
        self._max_blocks = max_blocks
        self._buffer = bytearray()
        self._blocks: list[Block] = []
        self._num_blocks = 0
        self._reads = self._read()
        self._needed = next(self._reads)
        self.capsule = ""
        self.payload = b""
        self.keys: list[int] | None = None
        """None until the record is here whole; then `capsule` and `payload` are set too."""

    def feed(self, data: Piece) -> list[Block]:
        """The blocks that `data` completes. Raises CorruptExport, IncompatibleCapsule."""
        self._buffer += data
        try:
            while self._needed and len(self._buffer) >= self._needed:
                piece = bytes(memoryview(self._buffer)[: self._needed])
                del self._buffer[: self._needed]
                self._needed = self._reads.send(piece)
        except CorruptStorage as error:
            raise CorruptExport(error.fields["region"], error.fields["reason"]) from error
        if not self._needed and self._buffer:
            raise CorruptExport("end", f"{len(self._buffer)} bytes more than it has")
        blocks, self._blocks = self._blocks, []
        return blocks

    def finish(self) -> None:
        """Raises CorruptExport if the stream ended too early."""
        if self._needed:
            keys = self.keys
            told = "no record" if keys is None else f"{self._num_blocks} of {len(keys)} blocks"
            raise CorruptExport("end", f"cut after {told}")

    def _read(self) -> _Reads:
        keys = yield from self._record()
        self.keys = keys
        while self._num_blocks < len(keys):
            yield from self._run(keys[self._num_blocks :])
        yield 0  # nothing more

    def _record(self) -> Generator[int, bytes, list[int]]:
        prefix, header = yield from self._header(RECORD, RecordHeader)
        self._identity.check(header.capsule, header.identity)
        if prefix.body_nbytes > self._max_payload_nbytes:
            told = f"{prefix.body_nbytes} of at most {self._max_payload_nbytes} bytes"
            raise CorruptStorage("", "record", told)
        payload = (yield prefix.body_nbytes) if prefix.body_nbytes else b""
        if checksum(payload) != header.checksum:
            raise CorruptStorage("", "record", "its sum differs")
        num_blocks, rest = divmod(len(header.keys), 8)
        if rest or num_blocks > self._max_blocks:
            raise CorruptStorage("", "record", f"{num_blocks} of at most {self._max_blocks} blocks")
        self.capsule, self.payload = header.capsule, payload
        return as_keys(header.keys)

    def _run(self, expected: list[int]) -> _Reads:
        prefix, header = yield from self._header(RUN, RunHeader)
        if len(header.keys) % 8 or len(header.checksums) != len(header.keys):
            raise CorruptStorage("", "header", f"{len(header.keys)} bytes of keys")
        keys, sums = as_keys(header.keys), as_keys(header.checksums)
        if header.identity != self._identity.digest or not keys or keys != expected[: len(keys)]:
            raise CorruptStorage("", "header", "a run of another capsule")
        if prefix.body_nbytes != len(keys) * self._block_nbytes:
            raise CorruptStorage("", "header", f"{len(keys)} blocks, {prefix.body_nbytes} bytes")
        for key, expected_sum in zip(keys, sums, strict=True):
            data = yield self._block_nbytes
            if checksum(data) != expected_sum:
                raise CorruptStorage("", f"block {self._num_blocks}", "its sum differs")
            self._num_blocks += 1
            self._blocks.append(Block(key, data))

    def _header(
        self, kind: int, type_: type[Header]
    ) -> Generator[int, bytes, tuple[Prefix, Header]]:
        head = yield PREFIX_NBYTES
        prefix = read_prefix(head, kind, "the export")
        if prefix.header_nbytes > self._max_header_nbytes:
            raise CorruptStorage("", "prefix", f"a header of {prefix.header_nbytes} bytes")
        head += yield prefix.header_nbytes + SUM_NBYTES
        return prefix, read_header(head, type_, "the export")
