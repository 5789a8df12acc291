"""The admission queue: its bounds one by one, and its order against a model that keeps plain lists."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mallee.protocol.errors import Overloaded, TenantQueueFull
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.router.dispatch.elsewhere import Elsewhere
from mallee.router.dispatch.fairness import Ticket
from mallee.router.dispatch.queue import RATE_WINDOW_S, AdmissionConfig, AdmissionQueue, DrainRate
from mallee.router.sync.outbox import Outbox
from support.examples import examples

MANY = AdmissionConfig(max_waiting=100_000, max_waiting_per_tenant=100_000)


class Bench:
    """A queue and a clock; tickets are offered with one call and served with another."""

    def __init__(self, config: AdmissionConfig = MANY) -> None:
        self.queue = AdmissionQueue(config)
        self.now = 0.0
        self.keys = count()

    def offer(self, tenant: str = "a", cost: float = 1.0, **terms: object) -> Ticket:
        terms.setdefault("arrival", self.now)
        ticket = Ticket(key=next(self.keys), tenant=tenant, cost=cost, **terms)  # type: ignore[arg-type]
        self.queue.offer(ticket)
        return ticket

    def serve(self, worker: WorkerId | None = None) -> Ticket | None:
        ticket = self.queue.pop(self.now, worker)
        if ticket is not None:
            self.queue.settle(ticket, ticket.cost, self.now)
        return ticket

    def drain(self) -> Iterator[Ticket]:
        while (ticket := self.serve()) is not None:
            yield ticket


def test_a_key_waits_once() -> None:
    bench = Bench()
    ticket = bench.offer()
    with pytest.raises(ValueError, match="waits already"):
        bench.queue.offer(ticket)
    assert bench.queue.pop(0.0) is ticket
    with pytest.raises(ValueError, match="waits already"):
        bench.queue.offer(ticket)
    assert not bench.queue.cancel(ticket.key)
    assert not bench.queue.cancel("nobody")


def test_retry_after_follows_the_drain_rate_and_the_tenants_share() -> None:
    bench = Bench(AdmissionConfig(max_waiting=10_000, max_waiting_per_tenant=10_000))
    assert bench.queue.retry_after_s(0.0) == 1.0
    for _ in range(600):
        bench.offer("a")
    for _ in range(300):  # ten a second, for as long as the average looks back and longer
        bench.now += 0.1
        bench.serve()
    assert bench.queue.retry_after_s(bench.now) == pytest.approx(30.0, rel=0.05)
    for _ in range(20):
        bench.offer("b")
    # 20 of b's drain at half the rate: 4 s, though 320 wait in all.
    assert bench.queue.retry_after_s(bench.now, "b") == pytest.approx(4.0, rel=0.05)
    assert bench.queue.retry_after_s(bench.now + 1000.0) == 60.0


def test_a_drain_rate_is_right_before_its_window_is_full() -> None:
    rate = DrainRate()
    for i in range(20):
        rate.departed(i * 0.1)
    assert rate.retry_after_s(100.0, 2.0) == pytest.approx(10.0, rel=0.1)
    assert rate.retry_after_s(0.0, 2.0) == 1.0
    assert rate.retry_after_s(1.0, 2.0 + 100 * RATE_WINDOW_S) == 60.0


def test_cancelled_tickets_take_no_room_for_long() -> None:
    """However many come and go behind one that stays."""
    bench = Bench()
    bench.offer("a", priority=-1)
    for _ in range(5000):
        bench.queue.cancel(bench.offer("a").key)
    bench.queue.check()
    assert len(bench.queue._deadlines) < 200
    (lane,) = bench.queue._lanes.values()
    (tenant,) = lane._tenants.values()
    assert max(len(tenant.by_age), len(tenant.by_rank), len(lane._waiting)) < 200


def test_tenants_that_come_once_are_forgotten() -> None:
    """A million names must not fill the memory, even while somebody always waits."""
    bench = Bench(AdmissionConfig(max_idle_tenants=10))
    bench.offer("t", 100.0)
    for i in range(3000):
        bench.offer(f"t{i}", 100.0)  # before the one ahead is served: the queue is never empty
        bench.serve()
    bench.queue.check()
    (lane,) = bench.queue._lanes.values()
    assert (len(lane), len(lane._tenants)) == (1, 12)
    assert len(bench.queue._per_tenant) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_waiting": -1},
        {"max_waiting_per_tenant": -1},
        {"max_wait_s": 0.0},
        {"weights": {"a": 0.0}},
        {"weights": {"a": float("inf")}},
    ],
)
def test_settings_that_can_not_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AdmissionConfig(**wrong)  # type: ignore[arg-type]


# Powers of two: sums and quotients of whole costs are exact, so model and queue agree on every tie.
WEIGHTS = {"a": 2.0, "b": 0.5, "c": 1.0}
MAX_OVERTAKES = 2
MAX_WAIT_S = 32.0
LANES = (None, WorkerId("w0"))


@dataclass
class Waiting:
    """A ticket as the model sees it."""

    ticket: Ticket
    number: int
    before: int  # overtakes of its tenant when it came
    overtaken: int = 0  # times that a younger one of its tenant was taken for good
    is_overtaking: bool = False

    @property
    def deadline(self) -> float:
        latest = self.ticket.arrival + MAX_WAIT_S
        return min(latest, self.ticket.deadline if self.ticket.deadline is not None else latest)


@dataclass
class Tenant:
    tag: float = 0.0
    turn: int = 0
    overtakes: int = 0
    elsewhere: set[str] = field(default_factory=set)  # other gateways at which it waits
    returned: list[Waiting] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)  # by age

    @property
    def everyone(self) -> list[Waiting]:
        return self.returned + self.waiting

    @property
    def is_idle(self) -> bool:
        return not (self.everyone or self.elsewhere)


class Lane:
    """One lane: who is next is found by looking at all tenants and all tickets."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self.turns = 0

    @property
    def everyone(self) -> list[Waiting]:
        return [w for tenant in self.tenants.values() for w in tenant.everyone]

    def tenant(self, name: str) -> Tenant:
        """One that begins to wait, unless it does."""
        tags = [t.tag for t in self.tenants.values() if not t.is_idle]
        if not tags:
            self.tenants.clear()
        tenant = self.tenants.setdefault(name, Tenant())
        if tenant.is_idle:
            tenant.tag = max([tenant.tag, *([min(tags)] if tags else [])])
        return tenant

    def hear(self, gateway: str, name: str, cost: int, *, waits: bool) -> None:
        """Another gateway served something of a tenant's, of which more waits there or not."""
        if cost and any(not t.is_idle for t in self.tenants.values()):
            self.tenant(name).tag += cost / WEIGHTS[name]
            self.turns += 1
            self.tenants[name].turn = self.turns
        if waits:
            self.tenant(name).elsewhere.add(gateway)
        elif name in self.tenants:
            self.tenants[name].elsewhere.discard(gateway)

    def push(self, waiting: Waiting) -> None:
        tenant = self.tenant(waiting.ticket.tenant)
        if not tenant.everyone:
            self.turns += 1
            tenant.turn = self.turns
        waiting.before = tenant.overtakes
        tenant.waiting.append(waiting)

    def pop(self) -> tuple[Waiting, float, int] | None:
        """The next one, and its tenant's tag and turn until then."""
        busy = [(t.tag, t.turn, name) for name, t in self.tenants.items() if t.everyone]
        if not busy:
            return None
        tag, turn, name = min(busy)
        tenant = self.tenants[name]
        if tenant.returned:
            chosen = tenant.returned.pop(0)
        else:
            oldest = tenant.waiting[0]
            chosen = max(tenant.waiting, key=lambda w: (w.ticket.priority, -w.number))
            if tenant.overtakes - oldest.before >= MAX_OVERTAKES:
                chosen = oldest
            chosen.is_overtaking = chosen is not oldest
            tenant.waiting.remove(chosen)
        tenant.overtakes += chosen.is_overtaking
        tenant.tag += chosen.ticket.cost / WEIGHTS[name]
        self.turns += 1
        tenant.turn = self.turns
        return chosen, tag, turn

    def push_back(self, chosen: Waiting, turn: int) -> None:
        tenant = self.tenants[chosen.ticket.tenant]
        tenant.tag -= chosen.ticket.cost / WEIGHTS[chosen.ticket.tenant]
        tenant.turn = turn
        tenant.overtakes -= chosen.is_overtaking
        tenant.returned.insert(0, chosen)

    def settle(self, chosen: Waiting, cost: float) -> None:
        name = chosen.ticket.tenant
        self.tenants[name].tag += (cost - chosen.ticket.cost) / WEIGHTS[name]
        for other in self.tenants[name].everyone:
            other.overtaken += other.number < chosen.number

    def remove(self, waiting: Waiting) -> None:
        tenant = self.tenants[waiting.ticket.tenant]
        (tenant.returned if waiting in tenant.returned else tenant.waiting).remove(waiting)


class AdmissionMachine(RuleBasedStateMachine):
    """Queue and model are told the same and have to answer the same."""

    @initialize(max_waiting=st.sampled_from([8, 100]), per_tenant=st.sampled_from([5, 100]))
    def start(self, max_waiting: int, per_tenant: int) -> None:
        self.config = AdmissionConfig(
            max_waiting=max_waiting,
            max_waiting_per_tenant=per_tenant,
            max_wait_s=MAX_WAIT_S,
            weights=WEIGHTS,
            max_overtakes=MAX_OVERTAKES,
        )
        self.queue = AdmissionQueue(self.config, lambda *told: self.elsewhere.tell(*told))
        self.outbox = Outbox("g0", Incarnation(1))
        self.elsewhere = Elsewhere(self.queue, self.outbox)
        self.lanes = {lane: Lane() for lane in LANES}
        self.now = 0.0
        self.number = 0

    @property
    def everyone(self) -> list[Waiting]:
        return [w for lane in self.lanes.values() for w in lane.everyone]

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.integers(0, 2),
        cost=st.integers(1, 64),
        patience=st.none() | st.integers(0, 40),
        lane=st.sampled_from(LANES),
        times=st.integers(1, 4),
    )
    def offer(
        self,
        tenant: str,
        priority: int,
        cost: int,
        patience: int | None,
        lane: WorkerId | None,
        times: int,
    ) -> None:
        self.expire()
        for _ in range(times):
            self.offer_one(tenant, priority, cost, patience, lane)

    def offer_one(
        self, tenant: str, priority: int, cost: int, patience: int | None, lane: WorkerId | None
    ) -> None:
        deadline = None if patience is None else self.now + patience
        key = f"r{self.number}"
        ticket = Ticket(key, tenant, self.now, float(cost), priority, deadline, lane)
        of_tenant = sum(w.ticket.tenant == tenant for w in self.everyone)
        if len(self.everyone) >= self.config.max_waiting:
            with pytest.raises(Overloaded):
                self.queue.offer(ticket)
        elif of_tenant >= self.config.max_waiting_per_tenant:
            with pytest.raises(TenantQueueFull) as refused:
                self.queue.offer(ticket)
            assert 1.0 <= refused.value.fields["retry_after_s"] <= 60.0
        else:
            self.queue.offer(ticket)
            self.number += 1
            self.lanes[lane].push(Waiting(ticket, self.number, 0))

    @rule(
        lane=st.sampled_from(LANES),
        outcomes=st.lists(st.none() | st.integers(0, 64), min_size=1, max_size=4),
    )
    def attempt(self, lane: WorkerId | None, outcomes: list[int | None]) -> None:
        """Pop some; each is settled at a cost, or (None) pushed back at the end."""
        self.expire()
        model = self.lanes[lane]
        refused = []
        for cost in outcomes:
            ticket, chosen = self.queue.pop(self.now, lane), model.pop()
            assert (ticket is None) == (chosen is None)
            if ticket is None or chosen is None:
                break
            assert ticket is chosen[0].ticket
            if cost is None:
                refused.append(chosen)
            else:
                self.queue.settle(ticket, float(cost), self.now)
                model.settle(chosen[0], float(cost))
        for chosen in reversed(refused):
            self.queue.push_back(chosen[0].ticket)
            model.push_back(chosen[0], chosen[2])

    @rule(
        gateway=st.sampled_from(["g1", "g2"]),
        tenant=st.sampled_from("abc"),
        cost=st.integers(0, 64),
        waits=st.booleans(),
    )
    def hear(self, gateway: str, tenant: str, cost: int, waits: bool) -> None:
        """Another gateway tells of its waiting room."""
        self.elsewhere.queued_elsewhere(gateway, tenant, cost, waits=waits)
        self.lanes[None].hear(gateway, tenant, cost, waits=waits)

    @rule(gateway=st.sampled_from(["g1", "g2"]))
    def lose(self, gateway: str) -> None:
        self.elsewhere.left(gateway)
        for tenant in self.lanes[None].tenants.values():
            tenant.elsewhere.discard(gateway)

    @rule(lags=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=3))
    def adopt(self, lags: list[tuple[str, float]]) -> None:
        self.elsewhere.adopt(lags)
        model = self.lanes[None]
        if any(tenant.elsewhere for tenant in model.tenants.values()):
            lowest = min(t.tag for t in model.tenants.values() if not t.is_idle)
            for name, lag in lags:
                if name in model.tenants and not model.tenants[name].is_idle:
                    model.tenants[name].tag = lowest + lag

    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        everyone = self.everyone
        if everyone:
            chosen = everyone[pick % len(everyone)]
            self.lanes[chosen.ticket.worker].remove(chosen)
            assert self.queue.cancel(chosen.ticket.key)
            assert not self.queue.cancel(chosen.ticket.key)

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        due = [w for w in self.everyone if w.deadline <= self.now]
        for waiting in due:
            self.lanes[waiting.ticket.worker].remove(waiting)
        expired = {t.key for t in iter(lambda: self.queue.expire(self.now), None)}
        assert expired == {w.ticket.key for w in due}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.check()
        self.elsewhere.check()
        assert len(self.queue) == len(self.everyone)
        common = self.lanes[None].tenants.items()
        told = set(self.outbox.snapshot().waits)
        assert told == {name for name, tenant in common if tenant.everyone}
        tags = {name: tenant.tag for name, tenant in common if not tenant.is_idle}
        lags = {name: tag - min(tags.values()) for name, tag in tags.items()}
        assert dict(self.queue.shared.lags(99)) == lags
        assert self.queue.next_deadline() == min((w.deadline for w in self.everyone), default=None)
        for lane, model in self.lanes.items():
            assert self.queue.waiting(lane) == len(model.everyone)
        assert all(w.overtaken <= MAX_OVERTAKES for w in self.everyone)
        assert sum(self.queue._per_tenant.values()) == len(self.everyone)

    def teardown(self) -> None:
        """Everybody left is served, in the model's order."""
        if hasattr(self, "queue"):
            self.expire()
            for lane in LANES:
                self.attempt(lane, [1] * len(self.lanes[lane].everyone) + [1])
            assert not self.queue


AdmissionMachine.TestCase.settings = settings(examples(200), stateful_step_count=50)
TestAdmissionQueueEqualsItsModel = AdmissionMachine.TestCase
