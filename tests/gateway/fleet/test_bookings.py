"""Two gateways and their routers tell each other what they book, over a bus in memory."""

import time

import pytest

from bench.doubles.bus import LocalBus, LocalHub
from mallee.gateway.fleet.bookings import BookingFeed
from mallee.protocol.bookings import decode_bookings
from mallee.protocol.errors import ConfigError
from mallee.protocol.events import Lease
from mallee.protocol.hashing import NO_HASHES, block_hashes
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId
from mallee.protocol.subjects import Subjects
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from mallee.router.sync.outbox import Outbox
from mallee.runtime.bus.inbox import Pump
from support.waiting import until

LEASE_S = 0.2


class Gateway:
    """A router with two workers, and its share in the broadcast."""

    def __init__(self, hub: LocalHub, name: str, life: int = 1) -> None:
        self.name = name
        self.bus = LocalBus(hub)
        self.router = Router(
            RouterConfig(block_size=4, max_workers=8),
            clock=time.monotonic,
            outbox=Outbox(name, Incarnation(life)),
        )
        self.pump = Pump(work=self.router.work, clock=time.monotonic)
        assert self.router.outbox is not None
        self.feed = BookingFeed(
            self.bus,
            self.router,
            self.router.outbox,
            pump=self.pump,
            fleet="test",
            clock=time.monotonic,
            heartbeat_s=0.02,
            lease_s=LEASE_S,
        )
        for worker in ("w0", "w1"):
            self.meet(worker)

    async def __aenter__(self) -> "Gateway":
        await self.bus.connect()
        await self.feed.start_up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.feed.close()
        self.pump.close()
        await self.bus.close()

    async def die(self) -> None:
        """Without a word."""
        await self.feed.tasks.close()
        self.bus._subscriptions.clear()
        self.bus._servers.clear()
        self.bus._hub.buses.remove(self.bus)

    def meet(self, worker: str, life: int = 1) -> None:
        self.router.on_lease(Lease(worker, life, "a", "m", "f", 4, 1000, 8, 4096, 0))
        self.feed.replicas.worker_joined(WorkerId(worker), Incarnation(life))

    def book(self, request: str, tokens: int = 40, *, worker: str = "w0") -> None:
        """Books a prompt on `worker`: as a fork of an empty capsule there."""
        capsule = CapsuleId("empty")
        self.router.learn_capsule(capsule, WorkerId(worker), 0, NO_HASHES)
        self.router.route_fanout(
            [RequestId(request)],
            block_hashes(range(tokens), 4),
            prompt_tokens=0,
            max_tokens=8,
            suffix_tokens=[tokens],
            capsule=capsule,
            can_recompute=False,
        )

    def loads(self) -> dict[str, tuple[int, int, int]]:
        return {
            str(view.worker): (view.rows, view.active_blocks, view.prefill_tokens > 0)
            for view in self.router.workers()
        }


async def test_a_gateway_alone_publishes_no_booking_and_one_that_comes_learns_of_all() -> None:
    """K10, part."""
    hub, told = LocalHub(), list[bytes]()
    async with Gateway(hub, "g0") as one:
        await one.bus.subscribe(Subjects.of("test").bookings(), told.append)
        for name in ("a", "b", "c"):
            one.book(name)
        one.router.free(RequestId("a"))
        await until(lambda: len(told) > 2)  # heartbeats
        assert not any(decode_bookings(raw).ops for raw in told)
        async with Gateway(hub, "g1") as two:
            await until(lambda: one.loads() == two.loads())
            assert two.loads()["w0"][0] == 2
            one.router.free(RequestId("b"))
            await until(lambda: two.loads()["w0"][0] == 1)


async def test_loads_agree_within_one_message() -> None:
    """K10: with sync, replicas' loads agree within one message; own messages are not applied twice."""
    hub = LocalHub()
    async with Gateway(hub, "g0") as one, Gateway(hub, "g1") as two:
        one.book("a")
        one.book("b")
        two.book("c", worker="w1")
        before = one.bus.num_published
        await until(lambda: one.loads() == two.loads())
        assert one.loads()["w0"][0] == 2
        assert one.bus.num_published - before <= 3  # a flush, and heartbeats
        assert one.feed.replicas.stats().own_messages > 0
        one.router.first_token(RequestId("a"))
        one.router.first_token(RequestId("b"))
        await until(lambda: not two.loads()["w0"][2])
        for name in ("a", "b"):
            one.router.free(RequestId(name))
        two.router.free(RequestId("c"))
        await until(lambda: {rows for rows, _, _ in two.loads().values()} == {0})
        assert two.loads()["w0"][:2] == (0, 0)
        for gateway in (one, two):
            gateway.router.check()
            gateway.feed.replicas.check()


async def test_gateways_know_where_others_serve_their_metrics_until_they_die() -> None:
    """K10, X7: by their heartbeats; what a dead one told is forgotten, and its load expires."""
    hub = LocalHub()
    async with Gateway(hub, "g0") as one:
        other = Gateway(hub, "g1")
        one.feed.metrics_at = "10.0.0.2:9400"
        await other.__aenter__()
        other.feed.metrics_at = "10.0.0.1:9400"
        await until(lambda: one.feed.others_metrics == {"g1": "10.0.0.1:9400"})
        await until(lambda: other.feed.others_metrics == {"g0": "10.0.0.2:9400"})
        one.book("a")
        other.book("b")
        await until(lambda: one.loads()["w0"][0] == 2)
        await other.die()
        await until(lambda: not one.feed.others_metrics)
        await until(lambda: one.loads()["w0"][0] == 1)
        assert one.feed.replicas.stats().expired_gateways == 1


async def test_what_was_booked_while_the_broker_was_away_is_told_afterwards() -> None:
    """K10, X8: load that can't be heard of runs out, and the broker's return brings it back."""
    hub = LocalHub()
    async with Gateway(hub, "g0") as one, Gateway(hub, "g1") as two:
        one.book("a")
        await until(lambda: two.loads()["w0"][0] == 1)
        hub.set_up(False)
        one.book("b")
        await until(lambda: two.loads()["w0"][0] == 0)
        assert two.feed.replicas.stats().expired_gateways == 1
        assert sum(rows for rows, *_ in one.loads().values()) == 2
        hub.set_up(True)
        await until(lambda: two.loads() == one.loads())


async def test_malformed_messages_are_refused_and_the_rest_goes_on() -> None:
    hub = LocalHub()
    async with Gateway(hub, "g0") as one, Gateway(hub, "g1") as two:
        one.bus.publish(Subjects.of("test").bookings("g0"), b"\xc1")
        one.book("a")
        await until(lambda: two.loads()["w0"][0] == 1)
        assert two.pump.num_failed == 0


def test_a_gateway_whose_name_breaks_a_subject_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gateway='a\.b'"):
        Gateway(LocalHub(), "a.b")
