"""Messages between gateways about records that each keeps in its memory, such as stored responses."""

from typing import Any, Final

import msgspec

from mallee.protocol.codec import Decoder


class RecordAsk(msgspec.Struct, frozen=True, array_like=True):
    """A question of `gateway`, its `number`th, to all others for the record `name` of `scope`.

    `given`: a change that the record's gateway makes before it tells it.
    """

    gateway: str
    number: int
    kind: str
    name: str
    scope: str
    given: bytes = b""


class RecordTold(msgspec.Struct, frozen=True, array_like=True):
    """The answer of `gateway` to question `number`, or a part of it, if it `has_more`.

    Without a record it is not known there, or the question led to an error.
    """

    number: int
    record: bytes | None = None
    gateway: str = ""
    has_more: bool = False
    error: tuple[str, str, dict[str, Any]] | None = None


class RecordForgotten(msgspec.Struct, frozen=True, array_like=True):
    """A client has deleted a record: no gateway may know it any more."""

    kind: str
    name: str
    scope: str


class RecordCopied(msgspec.Struct, frozen=True, array_like=True):
    """A record of `gateway`, or what is new in it, for all others (or `to` one) to keep if it dies."""

    gateway: str
    kind: str
    name: str
    scope: str
    record: bytes
    to: str = ""


decode_record_ask: Final = Decoder(RecordAsk, "a question for a record")
decode_record_told: Final = Decoder(RecordTold, "a record")
decode_record_forgotten: Final = Decoder(RecordForgotten, "a record's end")
decode_record_copied: Final = Decoder(RecordCopied, "a copy of a record")
