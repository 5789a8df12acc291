"""The admission queue's promises, one by one: shares, order, bounds, limits, deadlines."""

from collections.abc import Iterator
from itertools import count

import pytest

from mallee.protocol.errors import Overloaded, TenantQueueFull
from mallee.protocol.ids import WorkerId
from mallee.router.dispatch.fairness import Entry, FairQueue, Ticket
from mallee.router.dispatch.queue import RATE_WINDOW_S, AdmissionConfig, AdmissionQueue, DrainRate

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


def test_a_tenant_is_refused_beyond_its_limit_and_others_are_not() -> None:
    bench = Bench(AdmissionConfig(max_waiting=5, max_waiting_per_tenant=2))
    bench.offer("a")
    kept = bench.offer("a")
    with pytest.raises(TenantQueueFull) as full:
        bench.offer("a")
    assert full.value.status == 429
    assert full.value.fields == {"waiting": 2, "limit": 2, "retry_after_s": 1.0}
    for tenant in "bcd":
        bench.offer(tenant)
    with pytest.raises(Overloaded) as refused:
        bench.offer("e")
    assert (refused.value.status, refused.value.fields["waiting"]) == (503, 5)
    assert bench.queue.cancel(kept.key)
    bench.offer("a")
    assert len(bench.queue) == 5


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


def test_too_many_debts_are_dropped_smallest_first() -> None:
    queue = FairQueue({}, max_overtakes=4, max_idle_tenants=2)
    entries = [Entry(Ticket(i, f"t{i}", 0.0, 10.0 * (i + 1)), i, 0) for i in range(5)]
    for entry in entries:
        queue.push(entry)
    for _ in range(4):
        queue.pop()
    queue.push(Entry(Ticket(9, "late", 0.0, 1.0), 9, 0))
    queue.check()
    assert set(queue._tenants) == {"t2", "t3", "t4", "late"}


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
