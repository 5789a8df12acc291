"""A small fleet and its routers on a bad bus: what each router holds of each worker, against the worker.

And what each has booked, against a list.
"""

from dataclasses import dataclass, field

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mallee.protocol.errors import KVMemoryExceeded, NoWorker, UnknownCapsule
from mallee.protocol.events import (
    CapsuleStored,
    Cleared,
    Event,
    EventBatch,
    Lease,
    Removed,
    Snapshot,
    Stored,
    pack_hashes,
)
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId
from mallee.router.config import RouterConfig
from mallee.router.index.index import PrefixIndex
from mallee.router.router import Router
from support.examples import examples

WORKERS = ("w0", "w1")
ROUTERS = 3
LEASE_S = 3.0
workers = st.sampled_from(WORKERS)
routers = st.integers(0, ROUTERS - 1)
picks = st.integers(0, 1000)
blocks = st.lists(st.integers(0, 7), min_size=1, max_size=5)
fates = st.lists(
    st.sampled_from(("now", "later", "twice", "lost", "lost")), min_size=ROUTERS, max_size=ROUTERS
)
Message = EventBatch | Lease | Snapshot


@dataclass
class Worker:
    """One life of a worker, as it really is. Numbers start at 0 in each life."""

    name: str
    life: int
    seq: int = 0
    held: set[int] = field(default_factory=set)
    capsules: list[CapsuleStored] = field(default_factory=list)

    def batch(self, *events: Event) -> EventBatch:
        batch = EventBatch(self.name, self.life, self.seq, events)
        self.seq += len(events)
        return batch

    def lease(self) -> Lease:
        lease = Lease(self.name, self.life, "a", "m", "f", 4, 100, 8, 99, self.seq)
        return msgspec.structs.replace(lease, serves_kv=self.seq % 2 == 1)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.name, self.life, self.seq, run(self.held), tuple(self.capsules))


@dataclass
class Gateway:
    """One life of a router, what is on its way to it, whom it wants to ask, and what it has booked."""

    router: Router
    inbox: list[Message] = field(default_factory=list)
    wants: set[str] = field(default_factory=set)
    booked: set[str] = field(default_factory=set)


def hashes(blocks: set[int]) -> Hashes:
    return np.array(sorted(blocks), dtype=np.uint64)


def run(blocks: set[int]) -> bytes:
    return pack_hashes(hashes(blocks))


def chain(num: int) -> set[int]:
    """Blocks of a path, of which all others are beginnings or continuations."""
    return set(range(101, 101 + num))


class FleetMachine(RuleBasedStateMachine):
    """K2, K5, X5, X8: after quiescence every router holds of every worker exactly what that holds.

    Its bookings are live or orphaned until they are freed, and leave no load anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.is_up = True
        self.num_steps = 0
        self.workers: dict[str, Worker] = {}
        self.gateways: list[Gateway] = []

    @initialize()
    def begin(self) -> None:
        self.workers = {name: Worker(name, 1) for name in WORKERS}
        self.gateways = [self.gateway() for _ in range(ROUTERS)]
        for name in WORKERS:
            self.publish(self.workers[name].lease(), ["now", "now", "lost"])

    def gateway(self) -> Gateway:
        config = RouterConfig(block_size=4, max_workers=4, lease_s=LEASE_S)
        router = Router(config, clock=lambda: self.now)
        router._fleet.members._max_buffered = 3  # so that it overflows
        return Gateway(router)

    @rule(name=workers, stored=blocks, fates=fates)
    def store(self, name: str, stored: list[int], fates: list[str]) -> None:
        worker = self.workers[name]
        # Names carry the life: what is left of a dead one is recognised wherever it turns up.
        new = {1 + worker.life * 100 + block for block in stored}
        worker.held |= new
        capsule = CapsuleStored(f"c{stored[0]}", 4 * stored[0], run(chain(stored[0])))
        worker.capsules.append(capsule)
        self.publish(worker.batch(Stored(run(new)), capsule), fates)

    @rule(name=workers, pick=picks, fates=fates)
    def change(self, name: str, pick: int, fates: list[str]) -> None:
        """Two events in one batch: something goes, something comes."""
        worker = self.workers[name]
        gone = set(sorted(worker.held)[: 1 + pick % 4])
        new = {1 + worker.life * 100 + pick % 8}
        worker.held = (worker.held - gone) | new
        self.publish(worker.batch(Removed(run(gone)), Stored(run(new))), fates)

    @rule(name=workers, fates=fates)
    def clear(self, name: str, fates: list[str]) -> None:
        self.workers[name].held.clear()
        self.workers[name].capsules.clear()
        self.publish(self.workers[name].batch(Cleared()), fates)

    @rule(name=workers, fates=fates)
    def lease(self, name: str, fates: list[str]) -> None:
        self.publish(self.workers[name].lease(), fates)

    @rule(name=workers)
    def restart_worker(self, name: str) -> None:
        """A younger life: numbers begin again, and may be past those of the old one soon."""
        self.workers[name] = Worker(name, self.workers[name].life + 1)

    @rule(which=routers)
    def restart_router(self, which: int) -> None:
        self.gateways[which] = self.gateway()

    @rule(is_up=st.sampled_from((True, True, False)))
    def break_or_mend_the_broker(self, is_up: bool) -> None:
        """Messages on their way through a broker that goes down are lost."""
        self.is_up = is_up
        for gateway in self.gateways:
            gateway.router.set_broker_up(is_up)
            if not is_up:
                gateway.inbox.clear()

    @rule(which=routers, pick=picks)
    def carry(self, which: int, pick: int) -> None:
        """Any message on its way arrives next."""
        gateway = self.gateways[which]
        if gateway.inbox:
            self.deliver(gateway, gateway.inbox.pop(pick % len(gateway.inbox)))

    @rule(which=routers, pick=picks, is_late=st.booleans())
    def ask(self, which: int, pick: int, is_late: bool) -> None:
        """A snapshot is made now and arrives now or whenever."""
        gateway = self.gateways[which]
        if gateway.wants and self.is_up:
            name = sorted(gateway.wants)[pick % len(gateway.wants)]
            gateway.wants.discard(name)
            if is_late:
                gateway.inbox.append(self.workers[name].snapshot())
            else:
                self.deliver(gateway, self.workers[name].snapshot())

    @rule(which=routers, name=workers, is_final=st.booleans())
    def lose_the_link(self, which: int, name: str, is_final: bool) -> None:
        """This router can't reach the worker, or was told that its life before this is over."""
        router, life = self.gateways[which].router, Incarnation(self.workers[name].life)
        if is_final:
            lost = router.lose_worker(WorkerId(name), Incarnation(life - 1))
        else:
            lost = router.detach_worker(WorkerId(name), life)
        assert set(lost) <= self.gateways[which].booked
        self.gateways[which].booked -= set(lost)

    @rule(which=routers, number=st.integers(0, 3), num=st.integers(0, 7), is_fork=st.booleans())
    def route(self, which: int, number: int, num: int, is_fork: bool) -> None:
        gateway, request = self.gateways[which], RequestId(f"r{number}")
        if request in gateway.booked:
            return
        given = {
            "prompt_tokens": 0 if is_fork else 4 * num + 1,
            "max_tokens": 5,
            "suffix_tokens": [1, 2] if is_fork else [0],
            "capsule": CapsuleId(f"c{num}") if is_fork else None,
        }
        try:
            (part,) = gateway.router.route_fanout([request], hashes(chain(num)), **given)
        except (KVMemoryExceeded, NoWorker, UnknownCapsule):
            return
        gateway.booked.add(request)
        placement = part.placement
        alive = {view.worker: view.incarnation for view in gateway.router.workers()}
        assert alive[placement.worker] == placement.incarnation
        assert placement.overlap_blocks <= placement.best_overlap_blocks <= num

    @rule(
        which=routers,
        number=st.integers(0, 3),
        what=st.sampled_from(("first token", "hit", "end")),
        hit=st.integers(0, 5),
    )
    def go_on(self, which: int, number: int, what: str, hit: int) -> None:
        """Of a request that may not be there."""
        gateway, request = self.gateways[which], RequestId(f"r{number}")
        if what == "first token":
            gateway.router.first_token(request)
        elif what == "hit":
            gateway.router.observe_hit(request, 4 * hit)
        else:
            gateway.router.free(request)
            gateway.booked.discard(request)

    @rule(seconds=st.sampled_from((0.5, 5.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for gateway in self.gateways:
            gateway.router.expire_leases()

    @rule()
    def settle(self) -> None:
        """K8, K2, X5, X8: calm; the broker is up, all arrives, leases come, snapshots are given."""
        self.break_or_mend_the_broker(True)
        for _ in range(3):
            self.now += 1.0
            for worker in self.workers.values():
                self.publish(worker.lease(), ["later"] * ROUTERS)
            for gateway in self.gateways:
                while gateway.inbox:
                    self.deliver(gateway, gateway.inbox.pop(0))
                for name in sorted(gateway.wants):
                    self.deliver(gateway, self.workers[name].snapshot())
                gateway.wants.clear()
        for gateway in self.gateways:
            while gateway.router.work():
                pass
            views = {view.worker: view for view in gateway.router.workers()}
            assert views.keys() == set(WORKERS)
            assert all(view.is_whole for view in views.values())
        for name, worker in self.workers.items():
            truth = PrefixIndex(1)
            truth.store(0, hashes(worker.held))
            found = {gateway.router.digest(WorkerId(name)) for gateway in self.gateways}
            assert found == {truth.digest(0)}, name

    def publish(self, message: Message, fates: list[str]) -> None:
        """To each router: now, later, now and once more later, or never."""
        if not self.is_up:
            return
        for gateway, fate in zip(self.gateways, fates, strict=True):
            if fate in ("now", "twice"):
                self.deliver(gateway, message)
            if fate in ("later", "twice"):
                gateway.inbox.append(message)

    def deliver(self, gateway: Gateway, message: Message) -> None:
        match message:
            case EventBatch():
                needs = gateway.router.on_events(message)
            case Lease():
                needs = gateway.router.on_lease(message)
            case Snapshot():
                needs = gateway.router.on_snapshot(message, asked_at=self.now)
        if needs:
            gateway.wants.add(message.worker)

    @invariant()
    def books_are_kept(self) -> None:
        """Of one gateway after each second step: of all, each time, it takes long."""
        self.num_steps += 1
        if self.gateways and self.num_steps % 2:
            gateway = self.gateways[self.num_steps % ROUTERS]
            gateway.router.check()
            stats = gateway.router.stats()
            assert stats.booked_requests + stats.num_orphans == len(gateway.booked)

    def teardown(self) -> None:
        if self.gateways:
            self.settle()
        for gateway in self.gateways:
            for request in gateway.booked:
                gateway.router.free(RequestId(request))
            for view in gateway.router.workers():
                assert (view.rows, view.prefill_tokens, view.active_blocks) == (0, 0, 0)
            assert gateway.router.stats().num_orphans == 0


FleetMachine.TestCase.settings = settings(examples(80), stateful_step_count=40)
TestFleet = FleetMachine.TestCase
