"""Messages between gateways about records that each keeps in its memory, such as stored responses."""

from typing import Final

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
    """The answer to question `number`; None: not known here."""

    number: int
    record: bytes | None = None


class RecordForgotten(msgspec.Struct, frozen=True, array_like=True):
    """A client has deleted a record: no gateway may know it any more."""

    kind: str
    name: str
    scope: str


class RecordCopied(msgspec.Struct, frozen=True, array_like=True):
    """A record of `gateway`, or what is new in it, for all others to keep in case that it dies."""

    gateway: str
    kind: str
    name: str
    scope: str
    record: bytes


decode_record_ask: Final = Decoder(RecordAsk, "a question for a record")
decode_record_told: Final = Decoder(RecordTold, "a record")
decode_record_forgotten: Final = Decoder(RecordForgotten, "a record's end")
decode_record_copied: Final = Decoder(RecordCopied, "a copy of a record")
