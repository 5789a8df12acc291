"""The one format of files and streams: a checked header, then a body.

    offset   bytes
    0        8   magic "mallee" 0x0d 0x0a
    8        2   version
    10       2   kind: 1 run of blocks, 2 capsule record
    12       4   h, bytes of the header
    16       8   b, bytes of the body
    24       h   header: a msgpack array
    24 + h   8   XXH3-64 of all the bytes before
    32 + h   b   body: the blocks of a run one after the other, or a record's payload

All numbers are little-endian. The header holds the XXH3-64 of the payload, or of every block, so that
a block is verified without its neighbours. The sizes let a reader of a stream know its next piece, and
a reader of a file see from the length alone that it was cut.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from mallee.protocol.errors import CorruptStorage, IncompatibleCapsule
from mallee.protocol.hashing import Hashes

VERSION: Final = 1
RUN: Final = 1
RECORD: Final = 2
MAX_HEADER_NBYTES: Final = 64 << 20  # of a run of four million blocks

_MAGIC: Final = b"mallee\r\n"
_PREFIX: Final = struct.Struct("<8sHHIQ")
_SUM: Final = struct.Struct("<Q")
PREFIX_NBYTES: Final = _PREFIX.size
SUM_NBYTES: Final = _SUM.size
LAYOUT: Final = "storage_version"  # the field by which files of other versions are refused

Piece = bytes | bytearray | memoryview
Keys = Hashes | Sequence[int]
Rows = npt.NDArray[np.uint8] | Sequence[Piece]  # a block each, every one contiguous

checksum = xxhash.xxh3_64_intdigest


class Identity:
    """The fields by which KV fits or doesn't: name to value."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields = dict(sorted(fields.items()))
        self.digest: bytes = xxhash.xxh3_128_digest(json.dumps(self.fields).encode())

    def check(self, capsule: str, theirs: Mapping[str, str]) -> None:
        """Raises IncompatibleCapsule if `theirs` differ in any field."""
        if theirs == self.fields:
            return
        names = sorted(self.fields.keys() | theirs.keys())
        both = [(name, theirs.get(name, ""), self.fields.get(name, "")) for name in names]
        raise IncompatibleCapsule(capsule, [each for each in both if each[1] != each[2]])


def with_block_nbytes(fields: Mapping[str, str], block_nbytes: int) -> dict[str, str]:
    """The fields of an identity, with the size of its blocks among them."""
    return {**fields, "block_nbytes": str(block_nbytes)}


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


def as_bytes(keys: Keys) -> bytes:
    return np.asarray(keys, dtype="<u8").tobytes()


def as_keys(packed: bytes) -> list[int]:
    found: list[int] = np.frombuffer(packed, dtype="<u8").tolist()
    return found
