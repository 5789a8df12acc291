"""The admission queue against a model that keeps plain lists and looks at everything each time."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mallee.protocol.errors import Overloaded, TenantQueueFull
from mallee.protocol.ids import WorkerId
from mallee.router.dispatch.fairness import Ticket
from mallee.router.dispatch.queue import AdmissionConfig, AdmissionQueue
from support.examples import examples

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
    returned: list[Waiting] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)  # by age

    @property
    def everyone(self) -> list[Waiting]:
        return self.returned + self.waiting


class Lane:
    """One lane: who is next is found by looking at all tenants and all tickets."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self.turns = 0

    @property
    def everyone(self) -> list[Waiting]:
        return [w for tenant in self.tenants.values() for w in tenant.everyone]

    def push(self, waiting: Waiting) -> None:
        tags = [t.tag for t in self.tenants.values() if t.everyone]
        if not tags:
            self.tenants.clear()
        tenant = self.tenants.setdefault(waiting.ticket.tenant, Tenant())
        if not tenant.everyone:
            tenant.tag = max([tenant.tag, *([min(tags)] if tags else [])])
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
        self.queue = AdmissionQueue(self.config)
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
        assert len(self.queue) == len(self.everyone)
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
