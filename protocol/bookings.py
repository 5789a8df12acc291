"""Bookings that a gateway broadcasts to the other gateways, so that they don't all choose one worker.

A stream like a worker's events (`protocol.events`): operations are numbered from 0 in each life of a
gateway, a batch carries `first_seq`; an empty one is the heartbeat and carries the stream's position.
Counts are checked while decoding: they end up in fixed-width sums.
"""

from typing import Annotated, Final, TypeAlias

import msgspec

from mallee.protocol.codec import Decoder
from mallee.protocol.errors import CodecError

MAX_COUNT: Final = (1 << 31) - 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Seq: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


WAYPOINT_STRIDE: Final = 16
"""A prompt is named by every 16th chain hash of its full blocks, and the last one."""


class _Op(msgspec.Struct, frozen=True, array_like=True):
    pass


class Booked(_Op, frozen=True, tag="b"):
    """`request` counts on this life of `worker` until freed.

    `waypoints`: chain hashes (packed u64) of every 16th full block of the prompt and of the last one,
    `num_blocks` how many full blocks it has. `steps`: decode steps expected.
    """

    request: str
    worker: str
    incarnation: Seq
    waypoints: bytes
    num_blocks: Count
    own_blocks: Count
    prefill_tokens: Count
    rows: Count
    steps: Count


class PrefillDone(_Op, frozen=True, tag="p"):
    """The prompt of `request` is computed."""

    request: str


class Freed(_Op, frozen=True, tag="f"):
    """`request` is booked nowhere any more."""

    request: str


class Queued(_Op, frozen=True, tag="q"):
    """Requests of `tenant` that cost so many tokens left this gateway's waiting room for workers.

    `waits`: whether more of it waits there for any worker.
    """

    tenant: str
    cost: Count
    waits: bool


BookingOp: TypeAlias = Booked | PrefillDone | Freed | Queued

Lag: TypeAlias = tuple[str, float]
"""A tenant that waits, and how far it is ahead of the one that is served next, in tokens by its weight."""


class BookingBatch(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive operations of one life of a gateway: numbers first_seq .. first_seq + len - 1.

    Heartbeats say where it serves its metrics, if it does, `metrics_at`: host and port; and the `lags` of
    tenants that wait, as it sees them, if they wait at other gateways too.
    """

    gateway: str
    incarnation: Seq
    first_seq: Seq
    ops: tuple[BookingOp, ...]
    metrics_at: str = ""
    lags: tuple[Lag, ...] = ()

    @property
    def next_seq(self) -> int:
        return self.first_seq + len(self.ops)

    @property
    def items(self) -> tuple[BookingOp, ...]:
        """The operations, under the name that all numbered streams share."""
        return self.ops


class BookingSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """All live bookings of a gateway just before operation `next_seq`; 0 prefill tokens: computed.

    `waits`: the tenants that wait there for any worker.
    """

    gateway: str
    incarnation: Seq
    next_seq: Seq
    bookings: tuple[Booked, ...]
    waits: tuple[str, ...] = ()


_decode_batch: Final = Decoder(BookingBatch, "a batch of bookings")
_decode_snapshot: Final = Decoder(BookingSnapshot, "a snapshot of bookings")


def decode_bookings(raw: bytes) -> BookingBatch:
    """Raises CodecError if `raw` is not a BookingBatch, or waypoints are not whole numbers long."""
    batch = _decode_batch(raw)
    for op in batch.ops:
        if isinstance(op, Booked):
            _check_waypoints(op)
    return batch


def decode_booking_snapshot(raw: bytes) -> BookingSnapshot:
    """The snapshot in `raw`. Raises CodecError as `decode_bookings`."""
    snapshot = _decode_snapshot(raw)
    for booking in snapshot.bookings:
        _check_waypoints(booking)
    return snapshot


def _check_waypoints(booking: Booked) -> None:
    num_waypoints, rest = divmod(len(booking.waypoints), 8)
    if rest or num_waypoints != -(-booking.num_blocks // WAYPOINT_STRIDE):
        raise CodecError(
            f"{num_waypoints} waypoints for {booking.num_blocks} blocks: one is for"
            f" {WAYPOINT_STRIDE}; run one version of Mallee in all gateways",
            num_waypoints=num_waypoints,
            num_blocks=booking.num_blocks,
        )
