"""The broadcast of bookings between gateways: this one's go out, the others' come in."""

import asyncio
import logging
from collections.abc import Callable

from mallee.protocol.bookings import (
    decode_booking_snapshot,
    decode_bookings,
)
from mallee.protocol.codec import encode
from mallee.protocol.errors import CodecError
from mallee.protocol.subjects import Subjects, check_token
from mallee.router.sync.outbox import Outbox
from mallee.router.sync.replicas import Ledger, Replicas, Room
from mallee.runtime.bus.bus import Bus
from mallee.runtime.bus.inbox import Pump
from mallee.runtime.bus.snapshots import Fetcher
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

FLUSH_S = 0.003  # how long a booking may wait for others to leave with
HEARTBEAT_S = 1.0
LEASE_S = 3.0  # a gateway silent for so long has nothing booked any more


class BookingFeed:
    """One gateway's share in the broadcast of bookings. Belongs to one event loop.

    While there are others, records of `outbox` leave within FLUSH_S, one message per flush; theirs go
    through `pump` into `ledger`. The broker away, nothing is lost for good: gaps in the numbers show.
    """

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        outbox: Outbox,
        *,
        pump: Pump,
        fleet: str,
        clock: Callable[[], float],
        heartbeat_s: float = HEARTBEAT_S,
        lease_s: float = LEASE_S,
        room: Room | None = None,
        on_heard: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_heard` is called once a message of another gateway was taken in, for `room` too.

        Raises ConfigError if the outbox's gateway can't be part of a subject."""
        check_token(outbox.gateway, "gateway")
        self._bus = bus
        self._outbox = outbox
        self._pump = pump
        self._subjects = Subjects.of(fleet)
        self._heartbeat_s = heartbeat_s
        self._room = room
        self._on_heard = on_heard
        self.replicas = Replicas(
            ledger,
            gateway=outbox.gateway,
            clock=clock,
            lease_s=lease_s,
            room=room,
            incarnation=outbox.incarnation,
        )
        self.tasks = Tasks("the broadcast of bookings")
        self._fetcher = Fetcher(
            pump,
            self.tasks,
            ask=lambda name, timeout_s: bus.request(
                self._subjects.bookings_snapshot(name), b"", timeout_s
            ),
            take=self._on_snapshot,
            clock=clock,
        )
        self._subject = self._subjects.bookings(outbox.gateway)
        self.metrics_at = ""  # where this gateway serves its metrics
        self.others_metrics: dict[str, str] = {}  # where the others do
        self._next_flush: asyncio.TimerHandle | None = None

    async def start_up(self, metrics_at: str = "") -> None:
        """Subscribe, answer, and publish from now on. Doesn't wait for the broker.

        `metrics_at`: host and port at which this gateway serves its metrics, for the others.
        """
        self.metrics_at = metrics_at
        self._outbox.on_filled = self._schedule
        self._outbox.is_heard = bool(self.replicas.names)
        self._bus.on_state(self._on_state)
        await self._bus.subscribe(
            self._subjects.bookings(),
            lambda raw: self._pump.put(self._on_bookings, raw, is_loose=True),
        )
        await self._bus.serve(
            self._subjects.bookings_snapshot(self._outbox.gateway), self._snapshot
        )
        self.tasks.spawn(self._beat())
        if len(self._outbox):
            self._schedule()

    async def close(self) -> None:
        """Publish everything recorded, then nothing more; the bus stays open."""
        self._outbox.on_filled = None
        if self._next_flush is not None:
            self._next_flush.cancel()
            self._next_flush = None
        self._fetcher.close()
        await self.tasks.close()
        while len(self._outbox):
            self._publish()

    def _schedule(self) -> None:
        if self._next_flush is None:
            loop = asyncio.get_running_loop()
            self._next_flush = loop.call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._next_flush = None
        self._publish()
        if len(self._outbox):
            self._schedule()

    def _publish(self) -> None:
        batch = self._outbox.take()
        if batch is not None:
            self._bus.publish(self._subject, encode(batch))

    async def _beat(self) -> None:
        while True:
            self._publish_beat()
            await asyncio.sleep(self._heartbeat_s)
            for gateway in self.replicas.expire():
                log.warning("gateway %s is silent: its bookings count no more", gateway)
                self.others_metrics.pop(gateway, None)
                self._on_heard()
            self._outbox.is_heard = bool(self.replicas.names)

    def _publish_beat(self) -> None:
        lags = () if self._room is None else self._room.lags()
        self._bus.publish(self._subject, encode(self._outbox.heartbeat(self.metrics_at, lags)))

    def _on_state(self, is_up: bool) -> None:
        if is_up and self._outbox.on_filled is not None:
            self._publish_beat()  # others may have forgotten this gateway meanwhile

    def _on_bookings(self, raw: bytes) -> None:
        try:
            batch = decode_bookings(raw)
        except CodecError:
            log.exception("a batch of bookings was refused")
            return
        if batch.metrics_at and batch.gateway != self._outbox.gateway:
            self.others_metrics[batch.gateway] = batch.metrics_at
        is_known = batch.gateway in self.replicas.names
        if self.replicas.on_batch(batch):
            self._fetcher.want(batch.gateway)
        if not is_known and batch.gateway in self.replicas.names:
            self._outbox.is_heard = True
            self._publish_beat()  # it has just come: it asks nobody for records before it knows of others
        if batch.ops and batch.gateway != self._outbox.gateway:
            self._on_heard()

    def _on_snapshot(self, raw: bytes, asked_at: float) -> bool:
        """Whether it was too old. Raises CodecError."""
        return self.replicas.on_snapshot(decode_booking_snapshot(raw))

    async def _snapshot(self, _: bytes) -> bytes:
        return encode(self._outbox.snapshot())
