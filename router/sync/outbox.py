"""Bookings of this gateway and its waiting tenants, told to the others: numbered, bounded, in snapshots."""

from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Final

import msgspec

from mallee.protocol.bookings import (
    MAX_COUNT,
    Booked,
    BookingBatch,
    BookingOp,
    BookingSnapshot,
    Freed,
    Lag,
    PrefillDone,
    Queued,
)
from mallee.protocol.ids import Incarnation, RequestId

MAX_WAITS_NBYTES: Final = 256 << 10  # of tenants' names in a snapshot: a message of NATS has 1 MiB


class Outbox:
    """The bookings of this life of `gateway`, in order.

    At most `max_pending` operations wait; then the oldest are given up, which the others see as a gap.
    Live bookings are as many as the gateway has requests. `on_filled`, if set, is called when the
    first operation begins to wait. Unless it `is_heard` none waits: a gateway that comes takes a snapshot.
    """

    def __init__(self, gateway: str, incarnation: Incarnation, *, max_pending: int = 8192) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending={max_pending}: must be at least 1")
        self.gateway = gateway
        self.incarnation = incarnation
        self.on_filled: Callable[[], None] | None = None
        self.is_heard = True
        self._max_pending = max_pending
        self._pending: deque[BookingOp] = deque()
        self._first_seq = 0  # of the oldest that waits, or of the next to come
        self._live: dict[str, Booked] = {}
        self._waits: dict[str, None] = {}  # tenants

    def __len__(self) -> int:
        return len(self._pending)

    def booked(self, booking: Booked) -> None:
        """Record a live booking. Raises ValueError if its request has one already."""
        if booking.request in self._live:
            raise ValueError(f"request {booking.request} is booked already; free it first")
        self._live[booking.request] = booking
        self._record(booking)

    def prefill_done(self, request: RequestId) -> bool:
        """Record a computed prompt. False, and nothing recorded, if it is not live or was before."""
        booking = self._live.get(request)
        if booking is None or not booking.prefill_tokens:
            return False
        self._live[request] = msgspec.structs.replace(booking, prefill_tokens=0)
        self._record(PrefillDone(request))
        return True

    def freed(self, request: RequestId) -> bool:
        """Record the end of a booking. False, and nothing recorded, if it was not live."""
        if self._live.pop(request, None) is None:
            return False
        self._record(Freed(request))
        return True

    def queued(self, tenant: str, cost: float, *, waits: bool) -> None:
        """Record what of a tenant's left the waiting room for workers, and whether more of it waits."""
        if waits:
            self._waits[tenant] = None
        else:
            self._waits.pop(tenant, None)
        self._record(Queued(tenant, min(int(cost), MAX_COUNT), waits))

    def take(self, max_ops: int = 256, max_nbytes: int = 256 << 10) -> BookingBatch | None:
        """The oldest operations that wait, at least one; None if none does."""
        if not self._pending:
            return None
        ops: list[BookingOp] = []
        nbytes = 0
        while self._pending and len(ops) < max_ops:
            op = self._pending[0]
            nbytes += len(op.waypoints) if isinstance(op, Booked) else 0
            if ops and nbytes > max_nbytes:
                break
            ops.append(self._pending.popleft())
        batch = BookingBatch(self.gateway, self.incarnation, self._first_seq, tuple(ops))
        self._first_seq = batch.next_seq
        return batch

    def heartbeat(self, metrics_at: str = "", lags: tuple[Lag, ...] = ()) -> BookingBatch:
        """The batch without operations, with the stream's position."""
        return BookingBatch(self.gateway, self.incarnation, self._first_seq, (), metrics_at, lags)

    def snapshot(self, max_waypoints_nbytes: int = 4 << 20) -> BookingSnapshot:
        """All live bookings, those that still wait included.

        With more waypoints than a message can carry, all go without: their blocks count as their own.
        Tenants that wait are named in their order, as far as MAX_WAITS_NBYTES allows.
        """
        bookings = tuple(self._live.values())
        if sum(len(booking.waypoints) for booking in bookings) > max_waypoints_nbytes:
            bookings = tuple(map(_without_waypoints, bookings))
        next_seq = self._first_seq + len(self._pending)
        ends = accumulate(len(tenant.encode()) for tenant in self._waits)
        named = zip(self._waits, ends, strict=True)
        waits = tuple(tenant for tenant, end in named if end <= MAX_WAITS_NBYTES)
        return BookingSnapshot(self.gateway, self.incarnation, next_seq, bookings, waits)

    def check(self) -> None:
        """Raises AssertionError unless bookings are filed by request, and bounds hold."""
        assert len(self._pending) <= self._max_pending, f"{len(self._pending)} operations wait"
        for request, booking in self._live.items():
            assert request == booking.request, f"{request} is misfiled"

    def _record(self, op: BookingOp) -> None:
        if not self.is_heard and not self._pending:
            self._first_seq += 1
            return
        self._pending.append(op)
        if len(self._pending) > self._max_pending:
            self._pending.popleft()
            self._first_seq += 1
        if len(self._pending) == 1 and self.on_filled is not None:
            self.on_filled()


def _without_waypoints(booking: Booked) -> Booked:
    return msgspec.structs.replace(
        booking, waypoints=b"", num_blocks=0, own_blocks=booking.own_blocks + booking.num_blocks
    )
