"""A router fed from a bus: gaps, overflow, cold joins."""

import time

import msgspec
import numpy as np

from bench.doubles.bus import LocalBus, LocalHub
from bench.doubles.members import Members
from mallee.gateway.fleet.feed import SWEEP_PERIOD_S, FleetFeed
from mallee.gateway.metrics import GatewayMetrics
from mallee.mocker.passes import mock_spec
from mallee.protocol.codec import encode
from mallee.protocol.events import EventBatch, Lease, Snapshot, Stored, pack_hashes
from mallee.protocol.ids import WorkerId
from mallee.protocol.subjects import Subjects
from mallee.router.config import RouterConfig
from mallee.router.dispatch.dispatcher import DispatchStats
from mallee.router.router import Router
from mallee.runtime.transport.link import LATE_S
from support.virtual.loop import virtual_loop
from support.waiting import elapse, until

SPEC = mock_spec()
SUBJECTS = Subjects.of("test")


class Place:
    """One gateway's feed, and a bus that speaks for the workers."""

    def __init__(self, *, lease_s: float = 3.0) -> None:
        self.hub = LocalHub()
        self.bus = LocalBus(self.hub)
        self.router = Router(RouterConfig(max_workers=64, lease_s=lease_s), clock=time.monotonic)
        self.metrics = GatewayMetrics()
        self.members = Members()
        self.heard = LocalBus(self.hub)
        self.feed = FleetFeed(
            self.heard,
            self.router,
            model=SPEC,
            fleet="test",
            metrics=self.metrics,
            members=self.members,
            clock=time.monotonic,
        )
        self.under_way = self.most_under_way = self.answered = 0

    async def __aenter__(self) -> "Place":
        await self.bus.connect()
        await self.heard.connect()
        await self.feed.start_up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.feed.close()
        await self.heard.close()
        await self.bus.close()

    def lease(self, worker: str, next_seq: int) -> None:
        lease = Lease(worker, 1, "a", SPEC.name, SPEC.fingerprint, 16, 1000, 8, 4096, next_seq)
        self.bus.publish(SUBJECTS.lease(worker), encode(lease))

    def store(self, worker: str, seq: int, *blocks: int) -> None:
        batch = EventBatch(worker, 1, seq, (Stored(run(*blocks)),))
        self.bus.publish(SUBJECTS.events(worker), encode(batch))

    async def hold(self, worker: str, next_seq: int, *blocks: int) -> None:
        """`worker` answers with these blocks, after a moment."""

        async def answer(_: bytes) -> bytes:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            await elapse(0.001)
            self.under_way -= 1
            self.answered += 1
            return encode(Snapshot(worker, 1, next_seq, run(*blocks), ()))

        await self.bus.serve(SUBJECTS.host(worker), answer)

    def sizes(self) -> dict[str, int]:
        """Blocks known of each worker of which nothing is missing."""
        return {
            str(view.worker): view.indexed_blocks for view in self.router.workers() if view.is_whole
        }


def run(*blocks: int) -> bytes:
    return pack_hashes(np.array(blocks, dtype=np.uint64))


async def test_a_lease_that_overtook_the_events_sent_before_it_is_no_gap() -> None:
    async with Place() as place:
        place.lease("w0", 0)
        await until(lambda: place.members.joined == ["w0"])
        for seq in range(20):
            place.lease("w0", seq + 1)
            place.store("w0", seq, seq + 1)
            await until(lambda n=seq + 1: place.sizes() == {"w0": n})
        assert place.router.stats().gaps == 0


async def test_what_an_overflow_dropped_comes_back_by_snapshot() -> None:
    """K2, X8: the index is right again, and the drop is counted and shown."""
    async with Place() as place:
        place.feed.pump._max_messages = 8
        await place.hold("w0", 20, *range(1, 21))
        place.lease("w0", 0)
        for seq in range(20):
            place.store("w0", seq, seq + 1)
        await until(lambda: place.sizes() == {"w0": 20})
        assert place.feed.pump.num_dropped > 0
        assert place.router.stats().gaps == 1
        place.metrics.show_router(place.router.stats, lambda: DispatchStats({}, 0))
        shown = place.metrics.registry.get_sample_value
        dropped = place.feed.pump.num_dropped
        assert shown("mallee_event_messages_dropped_total") == dropped
        assert shown("mallee_event_gaps_total") == 1
        assert shown("mallee_resyncs_total") == 1


async def test_a_cold_join_asks_a_few_workers_at_a_time() -> None:
    """K8, part: a router that joins late gets everything, and floods nobody."""
    async with Place() as place:
        for i in range(40):
            await place.hold(f"w{i}", 7, *range(100 * i + 1, 100 * i + 11))
            place.lease(f"w{i}", 7)
        await until(lambda: len(place.sizes()) == 40)
        assert set(place.sizes().values()) == {10}
        assert place.most_under_way <= 8
        assert place.answered == 40
        place.feed._fetcher.check()
        assert place.router.digest(WorkerId("w3")) != place.router.digest(WorkerId("w4"))


async def test_a_snapshot_that_never_comes_is_asked_for_again_at_the_next_lease() -> None:
    async with Place() as place:
        place.lease("w0", 3)
        await until(lambda: place.feed._fetcher.num_failed == 1)
        assert place.sizes() == {}
        await place.hold("w0", 3, 1, 2, 3)
        place.lease("w0", 3)
        await until(lambda: place.sizes() == {"w0": 3})


async def test_malformed_messages_are_refused_and_the_rest_goes_on() -> None:
    async with Place() as place:
        place.bus.publish(SUBJECTS.lease("w0"), b"\xc1")
        place.bus.publish(SUBJECTS.events("w0"), b"\xc1")
        place.lease("w0", 0)
        bad = ("w0", 1, 0, (("s", b"123"),))
        place.bus.publish(SUBJECTS.events("w0"), msgspec.msgpack.encode(bad))
        place.store("w0", 0, 1)
        await until(lambda: place.sizes() == {"w0": 1})
        assert place.feed.pump.num_failed == 0


async def test_a_loop_that_was_held_up_ends_no_lease_before_it_has_read_the_next() -> None:
    """Leases of all workers wait in its sockets: none of them is silent."""
    async with Place(lease_s=0.2) as place:
        place.lease("w0", 0)
        await until(lambda: place.members.joined == ["w0"])
        virtual_loop().fall_behind(SWEEP_PERIOD_S + 2 * LATE_S)
        await elapse(0.05)  # its timers ran, and nothing was read yet
        assert len(place.router.workers()) == 1
        await until(lambda: not place.router.workers())
