"""Feeds a router from the bus: leases, cache events, snapshots, and whether the broker is there.

Reports the workers that join and leave, without a view of requests. The bus's callbacks only queue: a
pump takes messages in, a little per turn of the loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from mallee.gateway.metrics import GatewayMetrics
from mallee.protocol.errors import CodecError
from mallee.protocol.events import (
    AskSnapshot,
    Lease,
    decode_batch,
    decode_leases,
    decode_snapshot,
    encode_host_ask,
)
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import ModelSpec
from mallee.protocol.subjects import Subjects
from mallee.router.router import Router
from mallee.runtime.bus.bus import Bus
from mallee.runtime.bus.inbox import WORK_BLOCKS, Pump
from mallee.runtime.bus.snapshots import Fetcher
from mallee.runtime.tasks import Tasks
from mallee.runtime.telemetry.logs import ids
from mallee.runtime.transport.link import LATE_S

log = logging.getLogger(__name__)

SWEEP_PERIOD_S = 0.5


class Members(Protocol):
    """Is told of workers that serve the gateway's model."""

    def join(self, lease: Lease) -> None:
        """The first lease of a new life."""
        ...

    def on_lease(self, lease: Lease) -> None:
        """Any lease, after the router took it in."""
        ...

    def drain(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """It takes no new requests any more."""
        ...

    def leave(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """It is going."""
        ...

    def is_heard(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether a life without a lease has shown otherwise that it is there."""
        ...


class FleetFeed:
    """Subscriptions of one gateway. Belongs to one event loop.

    A lease that runs out is no leaving: unless `members` say that it is heard, the router sends nothing
    there until the next one, and what runs there goes on.
    """

    def __init__(
        self,
        bus: Bus,
        router: Router,
        *,
        model: ModelSpec,
        fleet: str,
        metrics: GatewayMetrics,
        members: Members,
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._router = router
        self._model = model
        self._subjects = Subjects.of(fleet)
        self._metrics = metrics
        self._members = members
        self._draining: dict[WorkerId, Incarnation] = {}
        self._lives: dict[WorkerId, Incarnation] = {}
        self._clock = clock  # the router's
        self._refused: dict[str, int] = {}  # the last life of workers that serve another model
        self._not_before: dict[WorkerId, tuple[Incarnation, float]] = {}
        self.pump = Pump(
            work=lambda: router.work(WORK_BLOCKS),
            clock=clock,
            on_turn=metrics.pumped,
            on_drop=metrics.dropped_events.inc,
        )
        self._hosts: dict[str, str] = {}  # that answer for a worker
        self.tasks = Tasks("the fleet's feed")
        self._fetcher = Fetcher(
            self.pump, self.tasks, ask=self._ask_snapshot, take=self._on_snapshot, clock=clock
        )

    async def start_up(self) -> None:
        """Subscribe, and sweep leases from now on. Doesn't wait for the broker."""
        put = self.pump.put
        self._bus.on_state(self._router.set_broker_up)
        await self._bus.subscribe(
            self._subjects.events(), lambda raw: put(self._on_events, raw, is_loose=True)
        )
        await self._bus.subscribe(
            self._subjects.lease(), lambda raw: put(self._on_leases, raw, is_patient=True)
        )
        self._router.set_broker_up(self._bus.is_up)
        self.tasks.spawn(self._sweep())

    async def close(self) -> None:
        """End every task; nothing is taken in any more. The bus belongs to the caller."""
        self.pump.close()
        self._fetcher.close()
        await self.tasks.close()

    @property
    def hosts(self) -> set[str]:
        """The hosts of all workers."""
        return {*self._hosts.values()}

    def host_of(self, worker: WorkerId) -> str | None:
        """The host of a worker that has joined."""
        return self._hosts.get(worker) if worker in self._lives else None

    def forget(self, worker: WorkerId, incarnation: Incarnation, *, retry_s: float) -> None:
        """The caller can't reach this life: its first lease after `retry_s` is a new join."""
        if self._lives.get(worker) == incarnation:
            del self._lives[worker]
            self._hosts.pop(worker, None)
        self._not_before[worker] = (incarnation, self._clock() + retry_s)

    def _on_leases(self, raw: bytes) -> None:
        try:
            leases = decode_leases(raw)
        except CodecError:
            log.exception("lease refused")
            return
        fresh = [lease for lease in leases if self._is_fresh(lease)]
        for lease in fresh:
            self._on_lease(lease)
        if len(fresh) < len(leases):
            # A bus keeps the order of each subscription, not between them: events that were sent before
            # a lease arrive in the same turn of the loop at the latest, and must be taken in first.
            asyncio.get_running_loop().call_soon(self.pump.put, self._on_renewals, raw)

    def _on_renewals(self, raw: bytes) -> None:
        for lease in decode_leases(raw):
            if not lease.is_leaving:
                self._on_lease(lease)

    def _is_fresh(self, lease: Lease) -> bool:
        return lease.is_leaving or self._lives.get(lease.worker) != lease.incarnation

    def _on_lease(self, lease: Lease) -> None:
        if lease.fingerprint != self._model.fingerprint:
            self._refuse(lease)
            return
        worker, incarnation = lease.worker, lease.incarnation
        if not lease.is_leaving and self._is_too_soon(worker, incarnation):
            return
        needs_snapshot = self._router.on_lease(lease)
        self._members.on_lease(lease)
        known = self._lives.get(worker)
        if lease.is_leaving:
            if known == incarnation:
                del self._lives[worker]
                self._hosts.pop(worker, None)
                self._draining.pop(worker, None)
                self._members.leave(worker, incarnation)
            return
        is_told = self._draining.get(worker) == incarnation
        if lease.is_draining and known == incarnation and not is_told:
            self._draining[worker] = incarnation
            self._members.drain(worker, incarnation)
        if known is None or known < incarnation:
            if not self._router.is_routable(worker, incarnation):
                return  # a life that the router knows to be over, or has no room for
            self._lives[worker] = incarnation
            self._hosts[worker] = lease.host or worker
            self._members.join(lease)
        if needs_snapshot:
            self._fetcher.want(worker)

    def _is_too_soon(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether this life was unreachable a moment ago."""
        broken, until = self._not_before.get(worker, (incarnation, 0.0))
        if broken == incarnation and self._clock() < until:
            return True
        self._not_before.pop(worker, None)
        return False

    def _refuse(self, lease: Lease) -> None:
        if self._refused.get(lease.worker) != lease.incarnation:
            self._refused[lease.worker] = lease.incarnation
            log.error(
                "worker %s serves model %s, this gateway %s: it gets no requests",
                lease.worker,
                lease.fingerprint,
                self._model.fingerprint,
            )

    def _on_events(self, raw: bytes) -> None:
        try:
            batch = decode_batch(raw)
            needs_snapshot = self._router.on_events(batch)
        except CodecError:
            log.exception("event batch refused")
            return
        if needs_snapshot:
            self._fetcher.want(batch.worker)

    def _ask_snapshot(self, worker: str, timeout_s: float) -> Awaitable[bytes]:
        subject = self._subjects.host(self._hosts.get(WorkerId(worker), worker))
        asked = encode_host_ask(AskSnapshot(WorkerId(worker)))
        return self._bus.request(subject, asked, timeout_s)

    def _on_snapshot(self, raw: bytes, asked_at: float) -> bool:
        """Whether it was too old. Raises CodecError."""
        is_old = self._router.on_snapshot(decode_snapshot(raw), asked_at=asked_at)
        self._metrics.resyncs.inc()
        return is_old

    async def _sweep(self) -> None:
        while True:
            due = self._clock() + SWEEP_PERIOD_S
            await asyncio.sleep(SWEEP_PERIOD_S)
            if self._clock() > due + LATE_S:
                continue  # this loop was held up: leases may wait to be read
            for worker in self._router.expire_leases(self._members.is_heard):
                text = "worker %s is silent, on the bus and by its link: it gets no new requests"
                log.warning(text, worker, extra=ids(worker=worker))
            self.pump.poke()
