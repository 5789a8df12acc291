"""Messages on a stream of bytes: length (u32, little-endian), kind (one byte), then the bytes.

All kinds of connections share it. Kinds from 16 on are of KV transfers (`actors.kv_transfer.messages`).
"""

import struct
from collections.abc import Iterator
from typing import Any, Final

from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import CodecError, MalleeError, from_wire

GREETING: Final = 1  # both ways, until the connection is open
BATCH: Final = 2  # from a gateway: commands, or none as a sign of life
TAKEN: Final = 3  # from a host: receipt for so many bytes of batches
REPORTS: Final = 4  # from a host: frames, or none as a sign of life
REFUSED: Final = 5  # from the end that listens: an error

MAX_MESSAGE_NBYTES: Final = 256 << 20
MAX_GREETING_NBYTES: Final = 1024
MAX_REFUSAL_NBYTES: Final = 64 << 10
HEAD: Final = struct.Struct("<IB")
_RECEIPT: Final = struct.Struct("<Q")
_decode_refusal: Final = Decoder(tuple[str, str, dict[str, Any]], "a refusal")


def message(kind: int, raw: bytes) -> bytes:
    """`raw` with its head. It is at most MAX_MESSAGE_NBYTES long."""
    return HEAD.pack(len(raw), kind) + raw


def too_long(size: int, limit: int) -> CodecError:
    return CodecError(f"a message of {size} bytes: at most {limit}", nbytes=size)


def refusal(error: MalleeError) -> bytes:
    """The bytes of a refusal: `error`, in short if it is long."""
    raw = encode(error.to_wire())
    if len(raw) > MAX_REFUSAL_NBYTES:
        raw = encode((error.code, error.message[:1000], {}))
    return raw


def read_refusal(raw: bytes) -> MalleeError:
    """The error of a refusal. Raises CodecError."""
    return from_wire(_decode_refusal(raw))


def receipt(nbytes: int) -> bytes:
    """The message that `nbytes` of batches were taken."""
    return message(TAKEN, _RECEIPT.pack(nbytes))


def read_receipt(raw: bytes) -> int:
    """The bytes of batches that a receipt is for. Raises CodecError."""
    if len(raw) != _RECEIPT.size:
        raise CodecError(f"a receipt of {len(raw)} bytes, not {_RECEIPT.size}", nbytes=len(raw))
    nbytes: int = _RECEIPT.unpack(raw)[0]
    return nbytes


class Messages:
    """Cuts a stream into messages. One that is too long is refused before its bytes are kept."""

    __slots__ = ("_buffer", "max_nbytes")

    def __init__(self) -> None:
        self.max_nbytes = MAX_GREETING_NBYTES  # until the other end is known
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Kind and bytes of each message that is whole with `data`. Raises CodecError."""
        buffer = self._buffer
        buffer += data
        begin = 0
        try:
            while len(buffer) - begin >= HEAD.size:
                size, kind = HEAD.unpack_from(buffer, begin)
                if size > self.max_nbytes:
                    raise too_long(size, self.max_nbytes)
                end = begin + HEAD.size + size
                if len(buffer) < end:
                    return
                raw = bytes(memoryview(buffer)[begin + HEAD.size : end])
                begin = end
                yield kind, raw
        finally:
            del buffer[:begin]
