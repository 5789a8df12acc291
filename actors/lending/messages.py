"""Messages between a borrower and a lender: length (u32, little-endian), kind (one byte), then the bytes.

    borrower                     lender
    ASK: holder, keys, model     LENT: record, number and size of blocks; or REFUSED: the error
    READ: places                 BLOCKS, as often as it takes: a checksum of each, then their bytes
    END                          nothing: the next ASK may follow

The greeting of `transport.greeting` comes first. After REFUSED the lender closes, unless it answers ASK.
Checksums are XXH3-64, seeded with a block's place: a bit that flips in a question gives no wrong block.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import CodecError, MalleeError, from_wire
from mallee.protocol.messages import Holder
from mallee.worker.transfer.peers import Ask, Loan

GREETING: Final = 1
REFUSED: Final = 2
ASK: Final = 3
LENT: Final = 4
READ: Final = 5
BLOCKS: Final = 6
END: Final = 7

HEAD: Final = struct.Struct("<IB")
CHECKSUM: Final = struct.Struct("<Q")
CHECKSUM_NBYTES: Final = CHECKSUM.size

MAX_GREETING_NBYTES: Final = 1024
MAX_REFUSAL_NBYTES: Final = 64 << 10
MAX_ASK_NBYTES: Final = 2 << 20
MAX_LOAN_BLOCKS: Final = 1 << 18
MAX_READ_NBYTES: Final = 4 * MAX_LOAN_BLOCKS
MAX_RECORD_NBYTES: Final = 256 << 20
MAX_BLOCK_NBYTES: Final = 64 << 20
CHUNK_BLOCKS: Final = 16
CHUNK_NBYTES: Final = 1 << 20
"""A message of blocks has at most so many of either, but one block at least."""


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """An `Ask`; `keys` are u64, little-endian."""

    holder: Holder
    keys: bytes
    identity: str


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """A loan that was granted."""

    record: bytes
    num_blocks: int
    block_nbytes: int
    checksum: int  # of the record, seeded with `num_blocks`

    @classmethod
    def of(cls, loan: Loan) -> "Lent":
        """The answer that grants `loan`. Raises CodecError if it is beyond what a loan may be."""
        record, num_blocks = loan.record, loan.num_blocks
        found = cls(record, num_blocks, loan.block_nbytes, checksum(record, num_blocks))
        _check_lent(found)
        return found


def checksum(raw: bytes | memoryview, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(raw, seed)


_decode_asked: Final = Decoder(Asked, "a question for blocks")
_decode_lent: Final = Decoder(Lent, "a loan")
_decode_refusal: Final = Decoder(tuple[str, str, dict[str, Any]], "a refusal")


def pack_ask(ask: Ask) -> bytes:
    """Raises CodecError if it is too long for a lender."""
    keys = np.array(ask.keys, dtype="<u8").tobytes()
    raw = encode(Asked(ask.holder, keys, ask.identity))
    if len(raw) > MAX_ASK_NBYTES:
        raise CodecError(
            f"a question for {len(ask.keys)} blocks takes {len(raw)} bytes: at most {MAX_ASK_NBYTES}",
            nbytes=len(raw),
        )
    return raw


def read_ask(raw: bytes) -> Ask:
    """Raises CodecError."""
    asked = _decode_asked(raw)
    if len(asked.keys) % 8:
        raise CodecError(f"{len(asked.keys)} bytes of keys of 8", nbytes=len(raw))
    keys = tuple(np.frombuffer(asked.keys, dtype="<u8").tolist())
    return Ask(asked.holder, keys, asked.identity)


def _check_lent(lent: Lent) -> None:
    """Raises CodecError if it is beyond what a loan may be."""
    for what, value, limit in (
        ("a record of so many bytes", len(lent.record), MAX_RECORD_NBYTES),
        ("so many blocks", lent.num_blocks, MAX_LOAN_BLOCKS),
        ("blocks of so many bytes", lent.block_nbytes, MAX_BLOCK_NBYTES),
    ):
        if not 0 <= value <= limit:
            raise CodecError(f"a loan of {what}: {value}, at most {limit}", nbytes=value)
    if lent.num_blocks and not lent.block_nbytes:
        raise CodecError("a loan of blocks without bytes", nbytes=0)


def read_lent(raw: bytes, ask: Ask) -> Lent:
    """The answer to `ask`. Raises CodecError."""
    lent = _decode_lent(raw)
    _check_lent(lent)
    if checksum(lent.record, lent.num_blocks) != lent.checksum:
        raise CodecError("a loan whose record is not what was sent", nbytes=len(raw))
    if not ask.holder.capsule and lent.num_blocks > len(ask.keys):
        raise CodecError(
            f"{lent.num_blocks} blocks were lent, and {len(ask.keys)} asked for", nbytes=len(raw)
        )
    return lent


def pack_places(places: Sequence[int]) -> bytes:
    return np.array(places, dtype="<u4").tobytes()


def read_places(raw: bytes, num_blocks: int) -> list[int]:
    """Places among `num_blocks`. Raises CodecError unless they are there, and rise."""
    if len(raw) % 4:
        raise CodecError(f"{len(raw)} bytes of places of 4", nbytes=len(raw))
    found = np.frombuffer(raw, dtype="<u4").astype(np.int64)
    if len(found) and (found[-1] >= num_blocks or (np.diff(found) <= 0).any()):
        raise CodecError(
            f"places that don't rise, or are not among the {num_blocks} lent", nbytes=len(raw)
        )
    places: list[int] = found.tolist()
    return places


def pack_refusal(error: MalleeError) -> bytes:
    """`error` in short, if it is long."""
    raw = encode(error.to_wire())
    if len(raw) > MAX_REFUSAL_NBYTES:
        raw = encode((error.code, error.message[:1000], {}))
    return raw


def read_refusal(raw: bytes) -> MalleeError:
    """The error that is told. Raises CodecError."""
    return from_wire(_decode_refusal(raw))


def blocks_a_chunk(block_nbytes: int) -> int:
    """Blocks of one message, at most."""
    return max(1, min(CHUNK_BLOCKS, CHUNK_NBYTES // block_nbytes))
