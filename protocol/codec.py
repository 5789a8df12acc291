"""Messages as bytes of msgpack, or of JSON: one coder per type, which checks what it decodes."""

from typing import Generic, TypeVar

import msgspec

from mallee.protocol.errors import CodecError

T = TypeVar("T")

# msgspec reports bad UTF-8 and bottomless nesting with the builtin errors.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()

encode = _encoder.encode
"""Any message as msgpack bytes."""


class Decoder(Generic[T]):
    """Decodes messages of one type, called `name` in errors."""

    __slots__ = ("_decode", "_name")

    def __init__(self, kind: type[T], name: str, *, is_json: bool = False) -> None:
        made = msgspec.json.Decoder(kind) if is_json else msgspec.msgpack.Decoder(kind)
        self._decode = made.decode
        self._name = name

    def __call__(self, raw: bytes) -> T:
        """Raises CodecError if `raw` is no such message."""
        try:
            return self._decode(raw)
        except _MALFORMED as error:
            raise CodecError(f"not {self._name}: {error}", nbytes=len(raw)) from error
