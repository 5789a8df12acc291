"""Batches between a gateway and a host, which is a process with one engine or many.

A gateway's commands to all engines of a host travel in ordered batches of parcels, one batch in flight;
all updates come back as one stream of reports. Each parcel and each report names the life of
its worker, so no message reaches another engine or life.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from mallee.protocol.codec import Decoder
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


LEAVING: Final = "it is leaving"
"""The reason of a life's end that killed nothing: it was drained."""
CHANGED: Final = "its weights were changed"
"""The reason of a life's end that another life with other weights follows."""
REFUSED: Final = "it refused: "
"""Beginning of the reason for which a link is lost, if the host closed it of its own will."""

decode_parcels: Final = Decoder(tuple[Parcel, ...], "a batch of commands")
"""An ordered batch; an empty one is the gateway's sign of life."""
decode_reports: Final = Decoder(tuple[Report, ...], "a run of reports")
"""Reports in order; none at all is the host's sign of life."""


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


def is_death(reason: str) -> bool:
    """Whether a worker that was lost for `reason` may have died of what it did."""
    return reason not in (LEAVING, CHANGED) and not reason.startswith(REFUSED)
