"""Messages on a stream of bytes: length (u32, little-endian), kind (one byte), then the bytes."""

import struct
from collections.abc import Iterator

from mallee.protocol.errors import CodecError

GREETING = 1  # both ways, until the connection is open
BATCH = 2  # from a gateway: commands, or none as a sign of life
TAKEN = 3  # from a host: receipt for so many bytes of batches
REPORTS = 4  # from a host: frames, or none as a sign of life
REFUSED = 5  # from a host, the last: the reason

MAX_MESSAGE_NBYTES = 256 << 20
MAX_GREETING_NBYTES = 1024
_HEAD = struct.Struct("<IB")
_RECEIPT = struct.Struct("<Q")


def message(kind: int, raw: bytes) -> bytes:
    """`raw` with its head. It is at most MAX_MESSAGE_NBYTES long."""
    return _HEAD.pack(len(raw), kind) + raw


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
            while len(buffer) - begin >= _HEAD.size:
                size, kind = _HEAD.unpack_from(buffer, begin)
                if size > self.max_nbytes:
                    raise CodecError(
                        f"a message of {size} bytes: at most {self.max_nbytes}", nbytes=size
                    )
                end = begin + _HEAD.size + size
                if len(buffer) < end:
                    return
                raw = bytes(memoryview(buffer)[begin + _HEAD.size : end])
                begin = end
                yield kind, raw
        finally:
            del buffer[:begin]
