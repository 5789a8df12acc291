"""Bookings that gateways tell each other on a bad bus, against what each of them really booked."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mallee.protocol.bookings import (
    Booked,
    BookingBatch,
    BookingOp,
    BookingSnapshot,
    Freed,
    Lag,
    PrefillDone,
)
from mallee.protocol.codec import encode
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.router.sync.outbox import Outbox
from mallee.router.sync.replicas import Replicas
from support.examples import examples

LEASE_S = 3.0
names = st.sampled_from(("g0", "g0", "g1", "g1", "g2"))
fates = st.lists(st.sampled_from(("now", "later", "twice", "lost", "lost")), min_size=3, max_size=3)
workers = st.integers(0, 2)
picks = st.integers(0, 1000)
Message = BookingBatch | BookingSnapshot


class Books:
    """The remote half of a router: knows some workers, counts bookings on them. And a waiting room."""

    def __init__(self, lives: dict[str, int]) -> None:
        self.lives = lives  # worker -> incarnation
        self.booked: dict[str, Booked] = {}
        self.claims: set[tuple[str, str]] = set()  # gateways, and tenants that wait there
        self.adopted: list[tuple[Lag, ...]] = []

    def queued_elsewhere(self, gateway: str, tenant: str, cost: float, *, waits: bool) -> None:
        self.claims.discard((gateway, tenant))
        if waits:
            self.claims.add((gateway, tenant))

    def left(self, gateway: str) -> None:
        self.claims = {claim for claim in self.claims if claim[0] != gateway}

    def lags(self) -> tuple[Lag, ...]:
        return ()

    def adopt(self, lags: Iterable[Lag]) -> None:
        self.adopted.append(tuple(lags))

    def book_remote(self, booking: Booked) -> bool:
        if self.lives.get(booking.worker) != booking.incarnation:
            return False
        self.booked.setdefault(booking.request, booking)
        return True

    def prefill_done_remote(self, request: RequestId) -> bool:
        booking = self.booked.get(request)
        if booking is None:
            return False
        self.booked[request] = msgspec.structs.replace(booking, prefill_tokens=0)
        return True

    def free_remote(self, request: RequestId) -> bool:
        return self.booked.pop(request, None) is not None

    def forget(self, worker: str) -> None:
        self.lives.pop(worker, None)
        self.booked = {r: b for r, b in self.booked.items() if b.worker != worker}


@dataclass
class Gateway:
    """One life of a gateway: what it booked, what it heard, what is on its way to it."""

    outbox: Outbox
    replicas: Replicas
    books: Books
    live: dict[str, Booked] = field(default_factory=dict)
    waits: set[str] = field(default_factory=set)  # tenants
    inbox: list[Message] = field(default_factory=list)
    wants: set[str] = field(default_factory=set)  # gateways to ask for a snapshot


class ReplicaMachine(RuleBasedStateMachine):
    """K10, X7, X8: after quiescence every ledger holds the bookings of all other live gateways."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lives = 0
        self.requests = 0
        self.is_up = True
        self.gateways: dict[str, Gateway] = {}

    @initialize()
    def two_gateways(self) -> None:
        self.start("g0")
        self.start("g1")

    def start(self, name: str) -> None:
        """A gateway begins, or is killed and begins anew under its name; it joins late."""
        self.lives += 1
        books = Books({f"w{i}": 1 for i in range(3)})
        self.gateways[name] = Gateway(
            Outbox(name, Incarnation(self.lives), max_pending=4),
            Replicas(books, gateway=name, clock=lambda: self.now, lease_s=LEASE_S, room=books),
            books,
        )

    @rule(name=names, is_end=st.booleans())
    def kill(self, name: str, is_end: bool) -> None:
        """It is gone, or it starts anew."""
        if not is_end:
            self.start(name)
        elif len(self.gateways) > 1:
            self.gateways.pop(name, None)

    @rule(
        name=names,
        worker=workers,
        life=st.sampled_from((1, 1, 1, 2)),
        tokens=st.integers(0, 2),
        fates=fates,
    )
    def book(self, name: str, worker: int, life: int, tokens: int, fates: list[str]) -> None:
        gateway = self.gateways.get(name)
        if gateway is None:
            return
        self.requests += 1
        request = f"r{self.requests}"
        gateway.live[request] = Booked(request, f"w{worker}", life, b"", 1, 1, tokens, 1, 1)
        gateway.outbox.booked(gateway.live[request])
        self.flush(name, 3, fates)

    @rule(name=names, pick=picks, is_end=st.booleans(), max_ops=st.integers(0, 3), fates=fates)
    def go_on(self, name: str, pick: int, is_end: bool, max_ops: int, fates: list[str]) -> None:
        gateway = self.gateways.get(name)
        if gateway is None or not gateway.live:
            return
        request = sorted(gateway.live)[pick % len(gateway.live)]
        booking = gateway.live.pop(request)
        if is_end:
            gateway.outbox.freed(RequestId(request))
        else:
            gateway.live[request] = msgspec.structs.replace(booking, prefill_tokens=0)
            gateway.outbox.prefill_done(RequestId(request))
        self.flush(name, max_ops, fates)

    @rule(name=names, tenant=st.sampled_from("ab"), waits=st.booleans(), fates=fates)
    def queue(self, name: str, tenant: str, waits: bool, fates: list[str]) -> None:
        gateway = self.gateways.get(name)
        if gateway is not None:
            (gateway.waits.add if waits else gateway.waits.discard)(tenant)
            gateway.outbox.queued(tenant, 1.0, waits=waits)
            self.flush(name, 1, fates)

    def flush(self, name: str, max_ops: int, fates: list[str]) -> None:
        gateway = self.gateways.get(name)
        batch = gateway.outbox.take(max_ops) if gateway is not None else None
        if batch is not None:
            self.publish(batch, fates)

    @rule(name=names, fates=fates)
    def heartbeat(self, name: str, fates: list[str]) -> None:
        if name in self.gateways:
            self.publish(self.gateways[name].outbox.heartbeat(), fates)

    def publish(self, message: Message, fates: list[str]) -> None:
        """To each gateway, the sender too: now, later, now and once more later, or never."""
        if not self.is_up:
            return
        for gateway, fate in zip(self.gateways.values(), fates, strict=False):
            if fate in ("now", "twice"):
                self.deliver(gateway, message)
            if fate in ("later", "twice"):
                gateway.inbox.append(message)

    @rule(name=names, pick=picks)
    def carry(self, name: str, pick: int) -> None:
        """Any message on its way arrives next."""
        gateway = self.gateways.get(name)
        if gateway is not None and gateway.inbox:
            self.deliver(gateway, gateway.inbox.pop(pick % len(gateway.inbox)))

    @rule(name=names, pick=picks)
    def ask(self, name: str, pick: int) -> None:
        """A snapshot is made now and arrives whenever."""
        gateway = self.gateways.get(name)
        if gateway is not None and gateway.wants and self.is_up:
            of = sorted(gateway.wants)[pick % len(gateway.wants)]
            gateway.wants.discard(of)
            if of in self.gateways:
                gateway.inbox.append(self.gateways[of].outbox.snapshot())

    @rule(name=names, worker=workers, life=st.integers(0, 2))
    def move_worker(self, name: str, worker: int, life: int) -> None:
        """One router loses a worker (0), or meets a life of it (anew)."""
        gateway = self.gateways.get(name)
        if gateway is None:
            return
        gateway.books.forget(f"w{worker}")
        if life:
            gateway.books.lives[f"w{worker}"] = life
            gateway.replicas.worker_joined(WorkerId(f"w{worker}"), Incarnation(life))

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.0, 5.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for gateway in self.gateways.values():
            gateway.replicas.expire()

    @rule(is_up=st.sampled_from((True, True, False)))
    def break_or_mend_the_broker(self, is_up: bool) -> None:
        self.is_up = is_up

    @rule()
    def settle(self) -> None:
        """K10, X8: calm; all arrives, heartbeats go round for two leases, snapshots are given."""
        self.break_or_mend_the_broker(True)
        for _ in range(8):
            self.now += 1.0
            for gateway in self.gateways.values():
                while (batch := gateway.outbox.take()) is not None:
                    self.publish(batch, ["later"] * 3)
                self.publish(gateway.outbox.heartbeat(), ["later"] * 3)
            for gateway in self.gateways.values():
                while gateway.inbox:
                    self.deliver(gateway, gateway.inbox.pop(0))
                for of in gateway.wants & self.gateways.keys():
                    self.deliver(gateway, self.gateways[of].outbox.snapshot())
                gateway.wants.clear()
                gateway.replicas.expire()
        for name, gateway in self.gateways.items():
            others = [g for n, g in self.gateways.items() if n != name]
            truth = {r: b for g in others for r, b in g.live.items()}
            lives = gateway.books.lives
            known = {r: b for r, b in truth.items() if lives.get(b.worker) == b.incarnation}
            assert gateway.books.booked == known, name
            waits = {(n, t) for n, g in self.gateways.items() if n != name for t in g.waits}
            assert gateway.books.claims == waits, name
            stats = gateway.replicas.stats()
            assert stats.gateways == len(others)
            assert stats.bookings == len(truth)
            assert stats.waiting <= len(truth) - len(known)
            assert stats.incomplete == 0

    def deliver(self, gateway: Gateway, message: Message) -> None:
        match message:
            case BookingBatch():
                needs = gateway.replicas.on_batch(message)
            case BookingSnapshot():
                needs = gateway.replicas.on_snapshot(message)
        if needs:
            gateway.wants.add(message.gateway)

    @invariant()
    def parts_agree(self) -> None:
        for gateway in self.gateways.values():
            gateway.replicas.check()
            gateway.outbox.check()
            assert {b.request: b for b in gateway.outbox.snapshot().bookings} == gateway.live
            assert set(gateway.outbox.snapshot().waits) == gateway.waits

    def teardown(self) -> None:
        if self.gateways:
            self.settle()


ReplicaMachine.TestCase.settings = settings(examples(200), stateful_step_count=50)
TestReplicas = ReplicaMachine.TestCase


def booking(request: str, *, prefill_tokens: int = 32, waypoints: bytes = bytes(8)) -> Booked:
    return Booked(request, "w0", 1, waypoints, 2, 1, prefill_tokens, 1, 8)


class Bench:
    """Gateway g0, which hears of others."""

    def __init__(self, **options: int) -> None:
        self.now = 0.0
        self.books = Books({"w0": 1})
        self.replicas = Replicas(
            self.books, gateway="g0", clock=lambda: self.now, lease_s=LEASE_S, **options
        )

    def hear(self, first_seq: int, *ops: BookingOp, gateway: str = "g1", life: int = 1) -> None:
        self.replicas.on_batch(BookingBatch(gateway, life, first_seq, ops))
        self.replicas.check()


def test_only_the_youngest_life_keeps_a_gateway_alive_and_its_own_messages_none() -> None:
    """K10: a dead replica's load expires when its lease is over; own messages are counted."""
    bench = Bench()
    bench.hear(7, booking("own"), gateway="g0")
    bench.hear(0, booking("a"), life=2)
    assert set(bench.books.booked) == {"a"}
    assert bench.replicas.stats().own_messages == 1
    bench.now = 2.0
    bench.hear(0, booking("b"), life=1)
    bench.now = 2.9
    assert bench.replicas.expire() == []
    bench.now = 3.0
    assert bench.replicas.expire() == ["g1"]
    assert not bench.books.booked


def test_memory_is_bounded_in_gateways_and_in_bookings_of_each() -> None:
    bench = Bench(max_gateways=1, max_bookings=2)
    bench.hear(0, booking("a"), booking("b"), booking("c"))
    bench.hear(0, booking("d"), gateway="g2")
    assert set(bench.books.booked) == {"a", "b"}
    stats = bench.replicas.stats()
    assert (stats.bookings, stats.refused, stats.strangers) == (2, 1, 1)
    bench.hear(3, Freed("c"), Freed("a"), booking("e"))
    assert set(bench.books.booked) == {"b", "e"}


def test_lags_are_taken_over_from_the_gateway_that_runs_longest() -> None:
    """Nobody else's count: gateways that begin later know less of what was served."""
    books = Books({})
    replicas = Replicas(
        books, gateway="g0", clock=lambda: 0.0, lease_s=LEASE_S, room=books, incarnation=5
    )
    for gateway, life, lag in (("g1", 7, 1.0), ("g2", 3, 2.0), ("g3", 4, 3.0), ("g2", 3, 4.0)):
        replicas.on_batch(BookingBatch(gateway, life, 0, (), lags=(("a", lag),)))
    assert books.adopted == [(("a", 2.0),), (("a", 4.0),)]


def test_a_lease_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="lease_s=0"):
        Replicas(Books({}), gateway="g", clock=lambda: 0.0, lease_s=0)


A, B = RequestId("a"), RequestId("b")


def outbox(**options: int) -> Outbox:
    return Outbox("g0", Incarnation(1), **options)


def test_what_is_not_live_is_not_told() -> None:
    box = outbox()
    assert not box.freed(A)
    assert not box.prefill_done(A)
    box.booked(booking("a", prefill_tokens=0))
    assert not box.prefill_done(A)
    with pytest.raises(ValueError, match="booked already"):
        box.booked(booking("a"))
    assert len(box) == 1


def test_a_full_outbox_gives_up_the_oldest_and_leaves_a_gap_in_the_numbers() -> None:
    box = outbox(max_pending=2)
    for name in ("a", "b", "c"):
        box.booked(booking(name))
        box.check()
    assert box.take() == BookingBatch("g0", 1, 1, (booking("b"), booking("c")))
    assert len(box.snapshot().bookings) == 3


def test_a_batch_is_bounded_in_bytes_but_never_empty() -> None:
    box = outbox()
    for name in ("a", "b", "c"):
        box.booked(booking(name, waypoints=bytes(800)))
    assert [len(box.take(max_nbytes=n).ops) for n in (10, 1700)] == [1, 2]  # type: ignore[union-attr]


def test_a_snapshot_too_large_for_a_message_counts_shared_blocks_as_own() -> None:
    box = outbox()
    box.booked(booking("a", waypoints=bytes(800)))
    assert box.snapshot(800).bookings == (booking("a", waypoints=bytes(800)),)
    assert box.snapshot(799).bookings == (Booked("a", "w0", 1, b"", 0, 3, 32, 1, 8),)


def test_a_snapshot_of_many_waiting_tenants_fits_into_a_message() -> None:
    """In bytes: the first to come are told, in order."""
    box, names = (
        outbox(),
        [f"{number:04}".rjust(128, "\N{DECIDUOUS TREE}") for number in range(4096)],
    )
    for name in names:
        box.queued(name, 0, waits=True)
    told = box.snapshot()
    assert 400 < len(told.waits) < 4096
    assert list(told.waits) == names[: len(told.waits)]
    assert len(encode(told)) < 300_000
    for name in names[:4000]:
        box.queued(name, 0, waits=False)
    assert list(box.snapshot().waits) == names[4000:]


def test_whoever_empties_it_is_called_when_it_begins_to_fill() -> None:
    box, calls = outbox(), []
    box.on_filled = lambda: calls.append(len(box))
    box.booked(booking("a"))
    box.booked(booking("b"))
    box.take()
    box.freed(A)
    assert calls == [1, 1]


verbs = st.lists(st.tuples(st.sampled_from("bpft"), st.integers(0, 3)), max_size=60)


@examples(100)
@given(verbs)
def test_what_was_taken_replays_to_the_snapshot(script: list[tuple[str, int]]) -> None:
    """K10: the operations told and the bookings told are the same story."""
    box = outbox(max_pending=200)
    told: dict[str, Booked] = {}
    for verb, number in [*script, ("t", 99)]:
        request = RequestId(f"r{number}")
        if verb == "b" and request not in {b.request for b in box.snapshot().bookings}:
            box.booked(booking(request))
        elif verb == "p":
            box.prefill_done(request)
        elif verb == "f":
            box.freed(request)
        elif verb == "t":
            while (batch := box.take(1 + number)) is not None:
                for op in batch.ops:
                    match op:
                        case Booked():
                            told[op.request] = op
                        case PrefillDone():
                            told[op.request] = booking(op.request, prefill_tokens=0)
                        case Freed():
                            del told[op.request]
        box.check()
    assert told == {b.request: b for b in box.snapshot().bookings}
    assert box.heartbeat().next_seq == box.snapshot().next_seq
