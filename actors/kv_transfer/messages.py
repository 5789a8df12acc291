"""Messages of KV transfers, framed as all are (`runtime.transport.wire`).

    client                       server
    ASK: holder, keys, model     GRANTED: record, number and size of blocks; or REFUSED: the error
    READ: places                 BLOCKS, as often as it takes: a checksum of each, then their bytes

A connection carries one transfer, and ends with it. Checksums are XXH3-64, seeded with a block's place: a bit
that flips in a question gives no wrong block.
"""

import struct
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import CodecError
from mallee.worker.transfer.values import Ask, Loan

ASK: Final = 16
GRANTED: Final = 17
READ: Final = 18
BLOCKS: Final = 19

CHECKSUM: Final = struct.Struct("<Q")

MAX_ASK_NBYTES: Final = 2 << 20
MAX_BLOCKS: Final = 1 << 18
MAX_READ_NBYTES: Final = 4 * MAX_BLOCKS
MAX_RECORD_NBYTES: Final = 256 << 20
MAX_BLOCK_NBYTES: Final = 64 << 20
CHUNK_BLOCKS: Final = 16
CHUNK_NBYTES: Final = 1 << 20
"""A message of blocks has at most so many of either, but one block at least."""


class KvTimes(NamedTuple):
    """Seconds."""

    connect_s: float = 5.0
    greeting_s: float = 5.0
    answer_s: float = 12.0  # until an answer begins: a capsule may have to come from disk first
    message_s: float = 10.0  # for a message that has begun, and each MiB of it may take one more
    unread_s: float = 30.0  # for which granted blocks may lie without being read


class Granted(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that are held for the client."""

    record: bytes
    num_blocks: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
    block_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_NBYTES)]
    checksum: int  # of the record, seeded with `num_blocks`


def checksum(raw: bytes | memoryview, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(raw, seed)


read_ask: Final = Decoder(Ask, "a question for blocks")
_decode_granted: Final = Decoder(Granted, "a grant of blocks")


def pack_granted(loan: Loan) -> bytes:
    record, num_blocks = loan.record, loan.num_blocks
    return encode(Granted(record, num_blocks, loan.block_nbytes, checksum(record, num_blocks)))


def read_granted(raw: bytes, ask: Ask) -> Granted:
    """The answer to `ask`. Raises CodecError."""
    granted, num_asked = _decode_granted(raw), len(ask.keys)
    if granted.num_blocks and not granted.block_nbytes:
        raise CodecError("blocks without bytes were granted", nbytes=0)
    if checksum(granted.record, granted.num_blocks) != granted.checksum:
        raise CodecError("the record is not what was sent", nbytes=len(raw))
    if not ask.holder.capsule and granted.num_blocks > num_asked:
        raise CodecError(
            f"{granted.num_blocks} blocks were granted, and {num_asked} asked for", nbytes=len(raw)
        )
    return granted


def pack_places(places: Sequence[int]) -> bytes:
    return np.array(places, dtype="<u4").tobytes()


def read_places(raw: bytes, num_blocks: int) -> list[int]:
    """Places among `num_blocks`. Raises CodecError unless they are there, and rise."""
    if len(raw) % 4:
        raise CodecError(f"{len(raw)} bytes of places of 4", nbytes=len(raw))
    found = np.frombuffer(raw, dtype="<u4").astype(np.int64)
    if len(found) and (found[-1] >= num_blocks or (np.diff(found) <= 0).any()):
        raise CodecError(
            f"places that don't rise, or are not among the {num_blocks} granted", nbytes=len(raw)
        )
    places: list[int] = found.tolist()
    return places


def blocks_a_chunk(block_nbytes: int) -> int:
    """Blocks of one message, at most."""
    return max(1, min(CHUNK_BLOCKS, CHUNK_NBYTES // block_nbytes))
