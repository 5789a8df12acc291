"""Batches between a gateway and a host, which is a process with one engine or many.

A gateway's commands to all engines of a host travel in ordered batches of parcels, one batch in flight;
all updates come back as one stream of reports. Each parcel and each report names the life of
its worker, so no message reaches another engine or life.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from mallee.protocol.errors import CodecError
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command, Frame


class Life(NamedTuple):
    """One life of one worker."""

    worker: WorkerId
    incarnation: Incarnation


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """Commands for one life of a worker, in order.

    `is_end`: after them the gateway gives this worker up; its requests there end.
    """

    worker: str
    incarnation: int
    commands: tuple[Command, ...]
    is_end: bool = False


class Report(msgspec.Struct, frozen=True, array_like=True):
    """Frames of one life of a worker. `lost` is the reason of its end: the report is its last."""

    worker: str
    incarnation: int
    frame: Frame
    lost: str | None = None


# msgspec reports bad UTF-8 and bottomless nesting with the builtin errors.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_parcels_decoder = msgspec.msgpack.Decoder(tuple[Parcel, ...])
_reports_decoder = msgspec.msgpack.Decoder(tuple[Report, ...])


def encode_parcels(parcels: Iterable[Parcel]) -> bytes:
    """An ordered batch as msgpack bytes. An empty one is a sign of life."""
    return _encoder.encode(tuple(parcels))


def decode_parcels(raw: bytes) -> tuple[Parcel, ...]:
    """Raises CodecError if `raw` is not a batch of parcels."""
    try:
        return _parcels_decoder.decode(raw)
    except _MALFORMED as e:
        raise CodecError(f"not a batch of commands: {e}", nbytes=len(raw)) from e


def encode_reports(reports: Sequence[Report]) -> bytes:
    """Reports in order. None at all is a sign of life."""
    return _encoder.encode(reports)


def decode_reports(raw: bytes) -> tuple[Report, ...]:
    """Raises CodecError if `raw` is not a run of reports."""
    try:
        return _reports_decoder.decode(raw)
    except _MALFORMED as e:
        raise CodecError(f"not a run of reports: {e}", nbytes=len(raw)) from e


def pack(items: Iterable[tuple[Life, Command | None]]) -> list[Parcel]:
    """Parcels for a queue of commands, in order for each life; None ends a life's commands."""
    parcels: list[Parcel] = []
    open_: dict[Life, list[Command]] = {}
    for life, command in items:
        if command is not None:
            open_.setdefault(life, []).append(command)
            continue
        parcels.append(Parcel(*life, tuple(open_.pop(life, ())), True))
    parcels += [Parcel(*life, tuple(commands)) for life, commands in open_.items()]
    return parcels
