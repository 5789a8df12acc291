"""The workers that a gateway can send to: their leases and events from the bus, and a link to each."""

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from mallee.gateway.fleet.bookings import BookingFeed
from mallee.gateway.fleet.feed import FleetFeed
from mallee.gateway.fleet.weights import FleetWeights
from mallee.gateway.metrics import GatewayMetrics
from mallee.protocol.errors import CodecError, NotFound, Unavailable, shown
from mallee.protocol.events import AskDrain, AskLoads, Lease, Load, decode_loads, encode_host_ask
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command, Frame
from mallee.protocol.model import ModelSpec, WeightVersion
from mallee.protocol.parcels import CHANGED, LEAVING
from mallee.protocol.subjects import Subjects
from mallee.router.dispatch.elsewhere import Elsewhere
from mallee.router.router import Router
from mallee.router.sync.replicas import ReplicaStats
from mallee.runtime.bus.bus import Bus
from mallee.runtime.tasks import Tasks
from mallee.runtime.telemetry.logs import ids
from mallee.runtime.transport.link import Link, Transport

log = logging.getLogger(__name__)

ADMIN_S = 5.0  # for a host's answer
LOADS_S = 1.0  # for a host's answer to what its workers hold
RELINK_S = 2.0  # a worker whose link broke is tried again no sooner


class LinkOwner(Protocol):
    """Is told what comes over links, and of workers that come and go.

    `room` is told of tenants that wait at other gateways.
    """

    room: Elsewhere

    def on_frame(self, worker: WorkerId, frame: Frame) -> None: ...

    def on_join(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """A life of a worker can be sent to."""
        ...

    def on_drain(self, worker: WorkerId) -> None:
        """It takes no new requests any more."""
        ...

    def on_change(self, worker: WorkerId) -> None:
        """It can be given requests, or no more."""
        ...

    def on_loss(self, worker: WorkerId, reason: str) -> None:
        """Its link is over."""
        ...

    def on_heard(self) -> None:
        """Other gateways said what they booked and freed."""
        ...

    def is_busy(self, worker: WorkerId) -> bool:
        """Whether something runs there. A worker that leaves keeps its link meanwhile.

        For its leases overtake the last frames, which end what runs there.
        """
        ...


class _Link(NamedTuple):
    """One life of a worker and the link to it."""

    incarnation: Incarnation
    link: Link
    weights: WeightVersion


class WorkerLinks:
    """Membership of one gateway's fleet, which the router learns of here. Belongs to one event loop."""

    def __init__(
        self,
        bus: Bus,
        transport: Transport,
        router: Router,
        *,
        owner: LinkOwner,
        model: ModelSpec,
        fleet: str,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._transport = transport
        self._router = router
        self._owner = owner
        self._subjects = Subjects.of(fleet)
        self._links: dict[WorkerId, _Link] = {}
        self._has_joined = asyncio.Event()
        self._closing = Tasks("the links to workers")
        self.weights = FleetWeights(bus, router, fleet=fleet)
        self._feed = FleetFeed(
            bus,
            router,
            model=model,
            fleet=fleet,
            metrics=metrics,
            members=self,
            clock=clock,
        )
        self._bookings: BookingFeed | None = None
        if router.outbox is not None:
            self._bookings = BookingFeed(
                bus,
                router,
                router.outbox,
                pump=self._feed.pump,
                fleet=fleet,
                clock=clock,
                room=owner.room,
                on_heard=owner.on_heard,
            )

    async def start_up(self, metrics_at: str) -> None:
        """Listen to the fleet. Workers join as their leases arrive.

        `metrics_at`: host and port of this gateway's own metrics, for the others; "" if it has none.
        """
        await self._feed.start_up()
        if self._bookings is not None:
            await self._bookings.start_up(metrics_at)

    async def wait_for_worker(self, timeout_s: float) -> bool:
        """Whether a worker has joined by then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_joined.wait()
        return self._has_joined.is_set()

    async def stop_listening(self) -> None:
        """No worker joins or leaves any more; links stay."""
        await self.weights.close()
        await self._feed.close()

    async def close(self) -> None:
        """End every link, after the last booking was freed and broadcast."""
        if self._bookings is not None:
            await self._bookings.close()
        for each in self._links.values():
            self._closing.spawn(each.link.close())
        self._links.clear()
        await self._closing.finish()

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended a background task; membership can't be relied upon then."""
        sharing = None if self._bookings is None else self._bookings.tasks.failure
        own = self._feed.tasks.failure or sharing or self._closing.failure
        own = own or self.weights.tasks.failure
        return own or self._transport.failure or self._bus.failure

    def send(self, worker: WorkerId, command: Command) -> None:
        """Queue a command; it goes nowhere if the worker is lost."""
        found = self._links.get(worker)
        if found is not None:
            found.link.send(command)

    @property
    def replica_stats(self) -> Callable[[], ReplicaStats] | None:
        """Counts of other gateways' bookings; None if they are not shared."""
        return None if self._bookings is None else self._bookings.replicas.stats

    @property
    def other_gateways(self) -> Collection[str] | None:
        """Their names; None if bookings are not shared, so that there is none."""
        return None if self._bookings is None else self._bookings.replicas.names

    @property
    def others_metrics(self) -> dict[str, str]:
        """Addresses of other gateways' metrics, as far as bookings are shared."""
        return {} if self._bookings is None else self._bookings.others_metrics

    def on_lease(self, lease: Lease) -> None:
        self.weights.on_lease(lease)

    def join(self, lease: Lease) -> None:
        worker, incarnation = lease.worker, lease.incarnation
        if (last := self._links.get(worker)) is not None:
            self._router.lose_worker(worker, last.incarnation)
            is_changed = lease.weights != last.weights
            self._drop(worker, last.incarnation, CHANGED if is_changed else "it was restarted")
        link = self._transport.link(
            worker,
            incarnation,
            lease.address,
            partial(self._owner.on_frame, worker),
            partial(self._unlink, worker, incarnation),
        )
        self._links[worker] = _Link(incarnation, link, lease.weights)
        if self._bookings is not None:
            self._bookings.replicas.worker_joined(worker, incarnation)
        self._has_joined.set()
        self._owner.on_join(worker, incarnation)
        log.info("worker %s joined at %s", worker, lease.address, extra=ids(worker=worker))

    async def ask_drain(self, worker: WorkerId) -> None:
        """Have `worker` drain. Raises NotFound, and Unavailable if its host can't be asked now."""
        host = self._feed.host_of(worker)
        if host is None:
            raise NotFound(f"no worker {shown(worker)} here", param="worker")
        subject, asked = self._subjects.host(host), encode_host_ask(AskDrain(worker))
        try:
            answer = await self._bus.request(subject, asked, ADMIN_S)
        except (ConnectionError, TimeoutError) as error:
            raise Unavailable(f"worker {worker} can't be told to drain: {error}") from error
        if not answer:
            raise NotFound(f"no worker {shown(worker)} any more", param="worker")

    async def loads(self) -> dict[str, Load]:
        """The loads of workers with their engines' use, now: of hosts that answer within `LOADS_S`."""
        found: dict[str, Load] = {}
        for each in await asyncio.gather(*map(self._loads_of, self._feed.hosts)):
            found |= each
        return found

    async def _loads_of(self, host: str) -> dict[str, Load]:
        subject, asked = self._subjects.host(host), encode_host_ask(AskLoads())
        try:
            return decode_loads(await self._bus.request(subject, asked, LOADS_S))
        except (ConnectionError, TimeoutError):  # its leases say whether it is there
            return {}
        except CodecError:
            log.exception("loads of host %s refused", host)
            return {}

    def let_go(self, worker: WorkerId) -> None:
        """Nothing of this gateway's is left on `worker`, which drains: it need not wait for us."""
        found = self._links.get(worker)
        if found is not None and not self._owner.is_busy(worker):
            self.leave(worker, found.incarnation)

    def is_heard(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether this life has sent something over its link within the time of a lease."""
        found = self._links.get(worker)
        if found is None or found.incarnation != incarnation:
            return False
        return found.link.silence_s < self._router.config.lease_s

    def drain(self, worker: WorkerId, incarnation: Incarnation) -> None:
        found = self._links.get(worker)
        if found is not None and found.incarnation == incarnation:
            log.info("worker %s drains: it gets no new requests", worker, extra=ids(worker=worker))
            self._owner.on_drain(worker)

    def leave(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """Route nothing there any more, and forget what the life held."""
        self._router.lose_worker(worker, incarnation)
        self._owner.on_change(worker)  # requests that wait for it alone must end
        if not self._owner.is_busy(worker):
            self._drop(worker, incarnation, LEAVING)

    def _unlink(self, worker: WorkerId, incarnation: Incarnation, reason: str) -> None:
        """The link broke. If the worker lives, it joins again with its next lease."""
        self._feed.forget(worker, incarnation, retry_s=RELINK_S)
        self._router.detach_worker(worker, incarnation)
        self._drop(worker, incarnation, reason)

    def _drop(self, worker: WorkerId, incarnation: Incarnation, reason: str) -> None:
        found = self._links.get(worker)
        if found is None or found.incarnation != incarnation:
            return
        del self._links[worker]
        log.log(
            logging.INFO if reason in (LEAVING, CHANGED) else logging.WARNING,
            "worker %s lost: %s",
            worker,
            reason,
            extra=ids(worker=worker),
        )
        self._closing.spawn(found.link.close())
        self._owner.on_loss(worker, reason)
