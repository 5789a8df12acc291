"""The format of a session's record: what one client's session asked, and what it got, as a gateway saw it.

A gateway records because a session is whole there: a worker sees some shards of it, and none of a failover,
a stop string or a client that hung up. A request is written as the one command that would ask for all its
branches, whatever shards it was divided into and wherever they went; draws follow from (seed, position), so
that any engine with the same weights answers alike. So a record needs no state of a worker but the texts
of capsules that were there before it began (`Manifest`).

A record is a run of frames, each an entry with a checksum:

    offset  bytes
    0       4   "mses"
    4       4   n, bytes of the entry
    8       4   CRC-32 of the entry
    12      n   a msgpack array, its first element the entry's kind

It is only ever appended to, and what comes after its last whole frame is ignored and told: a gateway that
was killed leaves a record that is shorter, not one that can't be read. Records of several gateways, or of
several lives of one, are parts of one session: put one after the other they are its record, too. Each begins
with `Opened`, and its other times are seconds since that one's. Numbers are little-endian.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

import msgspec

from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import CodecError
from mallee.protocol.messages import (
    Continuation,
    FinishReason,
    Fork,
    Generate,
    Grammar,
    Prefill,
    TokenLogprobs,
)
from mallee.protocol.model import ModelSpec, WeightVersion

FORMAT: Final = 1

_MAGIC: Final = b"mses"
_HEAD: Final = struct.Struct("<4sII")


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    pass


class Opened(_Entry, frozen=True, tag="opened"):
    """The beginning of a part: `began` in seconds since the epoch, the model that the gateway served."""

    format: int
    began: float
    gateway: str
    session: str
    model: ModelSpec


class Manifest(_Entry, frozen=True, tag="manifest"):
    """A capsule from before this part, as text: `tokens` None if its text was known to no gateway.

    `grammar` and `continuation` are those of the branch that left it, as in a `Prefill`.
    """

    capsule: str
    tokens: bytes | None
    grammar: Grammar | None = None
    continuation: Continuation | None = None


class Asked(_Entry, frozen=True, tag="asked"):
    """A request: the command for all its branches, while `weights` served. Later entries have its number.

    The command has neither a scope's salt nor a share of a worker: both change no token.
    """

    number: int
    at_s: float
    command: Generate | Fork | Prefill
    weights: WeightVersion


class Placed(_Entry, frozen=True, tag="placed"):
    """Branches from `first` on, `count` of them, went to `worker`, as it is called in this record alone.

    Once more, if `is_moved`.
    """

    number: int
    at_s: float
    first: int
    count: int
    worker: str
    weights: WeightVersion
    is_moved: bool


class Got(_Entry, frozen=True, tag="got"):
    """Tokens of a branch (raw u32), and its end, as `protocol.messages.Update` has them.

    `error` is an error's code.
    """

    number: int
    at_s: float
    branch: int
    tokens: bytes
    finish: FinishReason | None = None
    capsule: str | None = None
    boundary: int = 0
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


class GivenUp(_Entry, frozen=True, tag="given up"):
    """The client left a branch, or the gateway ended it for the client."""

    number: int
    at_s: float
    branch: int


class CutShort(_Entry, frozen=True, tag="cut"):
    """The client saw a branch's text up to `at` and `residue` alone; `capsule` is that text's.

    As `protocol.messages.Cut`.
    """

    number: int
    at_s: float
    branch: int
    at: int
    residue: bytes
    capsule: str | None


class Captured(_Entry, frozen=True, tag="captured"):
    """`capsule` was taken of a running branch, when its text had `boundary` tokens."""

    number: int
    at_s: float
    branch: int
    capsule: str
    boundary: int


class Rewound(_Entry, frozen=True, tag="rewound"):
    """`capsule` was made of the first `boundary` tokens of `source`."""

    at_s: float
    capsule: str
    source: str
    boundary: int


class Stopped(_Entry, frozen=True, tag="stopped"):
    """The record ends here, and the session went on."""

    at_s: float
    reason: str


Entry: TypeAlias = (
    Opened | Manifest | Asked | Placed | Got | GivenUp | CutShort | Captured | Rewound | Stopped
)

_decode: Final = Decoder[Entry](Entry, "an entry of a session's record")  # type: ignore[arg-type]


def frame(entry: Entry) -> bytes:
    """`entry` as it is appended to a record."""
    raw = encode(entry)
    return _HEAD.pack(_MAGIC, len(raw), zlib.crc32(raw)) + raw


class Contents(NamedTuple):
    """The entries of a record up to its last whole frame; `num_ignored` bytes come after that."""

    entries: list[Entry]
    nbytes: int
    num_ignored: int


def read(raw: bytes) -> Contents:
    """The contents of a record.

    Raises CodecError if it is none: it does not begin with `Opened`, or has another format.
    """
    entries: list[Entry] = []
    end = 0
    for at, body in _frames(raw):
        entries.append(_decode(body))
        end = at
    if not entries or not isinstance(entries[0], Opened):
        raise CodecError("not a session's record: its beginning is missing", nbytes=len(raw))
    for entry in entries:
        if isinstance(entry, Opened) and entry.format != FORMAT:
            raise CodecError(
                f"a record of format {entry.format}; this version reads {FORMAT}", nbytes=len(raw)
            )
    return Contents(entries, end, len(raw) - end)


def whole_nbytes(raw: bytes) -> int:
    """The bytes of `raw` up to the end of its last whole frame."""
    return max((end for end, _ in _frames(raw)), default=0)


def _frames(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The end of each whole frame and its entry, up to the first that is torn or damaged."""
    at = 0
    while at + _HEAD.size <= len(raw):
        magic, nbytes, checksum = _HEAD.unpack_from(raw, at)
        begin = at + _HEAD.size
        at = begin + nbytes
        if magic != _MAGIC or at > len(raw):
            return
        body = raw[begin:at]
        if zlib.crc32(body) != checksum:
            return
        yield at, body
