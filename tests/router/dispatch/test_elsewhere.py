"""Fair shares of the waiting room over all gateways: several of them over the same rows, in virtual time."""

import math
from collections.abc import Mapping, Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.protocol.bookings import BookingBatch
from mallee.protocol.ids import Incarnation
from mallee.router.dispatch.elsewhere import MAX_TURNS, PASSED_S, YIELD_S, Elsewhere
from mallee.router.dispatch.fairness import Ticket
from mallee.router.dispatch.queue import AdmissionConfig, AdmissionQueue
from mallee.router.sync.outbox import Outbox
from mallee.router.sync.replicas import Ledger, Replicas
from support.examples import examples
from support.waiting_rooms import Crowd, Fleet

ONE, TWO, FOUR = 1.0, 2.0, 4.0


def everywhere(gateways: int, num: int) -> dict[int, int]:
    return dict.fromkeys(range(gateways), max(1, num // gateways))


def off_by(shares: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The largest part by which a tenant's share differs from its weight's."""
    return max(
        abs(shares[t] * sum(weights.values()) / weight - 1.0) for t, weight in weights.items()
    )


def scene(name: str, gateways: int) -> tuple[list[Crowd], dict[str, float]]:
    rest = list(range(1, gateways)) or [0]
    elsewhere = {number: max(1, 120 // len(rest)) for number in rest}
    one = Crowd("a", {0: 80})
    if name == "one gateway and the rest":
        return [one, Crowd("b", elsewhere)], {"a": ONE, "b": ONE}
    if name == "weights":
        return [one, Crowd("b", elsewhere, tokens=800)], {"a": FOUR, "b": ONE}
    crowds = [
        Crowd("a", {0: 80}, tokens=200),
        Crowd("b", {gateways - 1: 90}, tokens=800),
        Crowd("c", everywhere(gateways, 120)),
        Crowd("d", dict.fromkeys(range(0, gateways, 2), 50)),
    ]
    return crowds, {"a": ONE, "b": TWO, "c": FOUR, "d": ONE}


@pytest.mark.parametrize("name", ["one gateway and the rest", "weights", "mixed"])
def test_tenants_that_wait_get_their_weights_share_at_1_to_8_gateways(name: str) -> None:
    """Within 10 %, whichever gateways they reach; and no row is idle for it."""
    alone = 0
    for gateways in (1, 2, 4, 8):
        crowds, weights = scene(name, gateways)
        fleet = Fleet(gateways, crowds, weights)
        fleet.run_until(4.0)
        shares = fleet.shares(24.0)
        assert off_by(shares, weights) < 0.1, gateways
        alone = alone or fleet.total
        assert fleet.total > 0.97 * alone, gateways
        assert fleet.most_queued <= 2 * gateways  # rows that two gateways took at once
        fleet.check()


def test_without_a_word_between_gateways_the_same_shares_are_wrong() -> None:
    """The scene can tell: rows stay where they are freed."""
    crowds, weights = scene("one gateway and the rest", 8)
    fleet = Fleet(8, crowds, weights)
    for gateway in fleet.gateways:
        gateway.replicas._room = None
    fleet.run_until(4.0)
    assert off_by(fleet.shares(24.0), weights) > 0.2


@given(
    gateways=st.integers(2, 6),
    sizes=st.lists(st.integers(50, 800), min_size=2, max_size=4),
    powers=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    spread=st.integers(0, 1 << 32),
)
@settings(examples(3))
def test_shares_hold_for_any_crowds(
    gateways: int, sizes: Sequence[int], powers: Sequence[int], spread: int
) -> None:
    """Against the plain model: one queue with a share by weight for each tenant that always waits."""
    weights = {t: 2.0**power for t, power in zip("abcd", powers[: len(sizes)], strict=False)}
    crowds = []
    for k, size in enumerate(sizes):
        # Each at a set of gateways of its own, enough clients to wait always.
        at = [g for g in range(gateways) if spread >> (8 * k + g) & 1] or [k % gateways]
        crowds.append(Crowd("abcd"[k], dict.fromkeys(at, 64 // len(at) + 1), tokens=size))
    fleet = Fleet(gateways, crowds, weights, rows=16, seed=spread)
    fleet.run_until(8.0)
    shares = fleet.shares(40.0)  # enough requests of each for their sizes to even out
    assert off_by(shares, weights) < 0.1
    fleet.check()


def test_shares_outlive_the_death_of_a_gateway() -> None:
    """X7: what waited there waits no more, and rows that it had booked are given out after its lease."""
    weights = {"a": ONE, "b": ONE, "c": TWO}
    crowds = [Crowd("a", {0: 80}), Crowd("b", {1: 60, 2: 60}), Crowd("c", everywhere(4, 120))]
    fleet = Fleet(4, crowds, weights)
    fleet.run_until(4.0)
    fleet.at(14.0, lambda: fleet.kill(2))
    fleet.at(19.0, lambda: fleet.restart(2, 9, crowds))
    assert off_by(fleet.shares(34.0), weights) < 0.1
    fleet.check()


def test_after_the_broker_was_away_nobody_keeps_a_wrong_debt() -> None:
    """Nobody heard of what was served meanwhile; the gateways agree again with the next heartbeats."""
    weights = {"a": ONE, "b": ONE, "c": ONE}
    crowds = [Crowd("a", {0: 80}), Crowd("b", {1: 80}), Crowd("c", everywhere(4, 120))]
    fleet = Fleet(4, crowds, weights)
    fleet.run_until(4.0)
    fleet.is_cut = True
    fleet.run_until(9.0)
    fleet.is_cut = False
    fleet.run_until(11.5)
    lags = [dict(gateway.waiting.elsewhere.lags()) for gateway in fleet.gateways]
    steps = 12 * 400.0
    for each in lags:
        assert all(abs(each[t] - lags[0][t]) < steps for t in weights)
    fleet.run_until(16.0)
    assert off_by(fleet.shares(36.0), weights) < 0.1


def test_room_is_left_to_no_gateway_that_can_not_take_it() -> None:
    """Its requests fit nowhere: the others go on, and share what is there."""
    crowds = [Crowd("a", {0: 80}), Crowd("b", {1: 80}), Crowd("big", {2: 5, 3: 5})]
    fleet = Fleet(4, crowds, {})
    fleet.stuck = {"big"}
    fleet.run_until(4.0)
    shares = fleet.shares(24.0)
    assert off_by(shares, {"a": ONE, "b": ONE}) < 0.1
    assert fleet.total * fleet.token_s > 0.97 * 20.0 * fleet.rows


def test_a_gateway_without_a_row_gets_some_of_its_tenants() -> None:
    """One tenant at two gateways: rows don't stay where they came free first."""
    fleet = Fleet(2, [Crowd("a", {0: 80, 1: 0})], {}, rows=8)
    fleet.run_until(3.0)
    for _ in range(80):
        fleet.ask(Crowd("a", {1: 1}), 1)
    fleet.run_until(20.0)
    assert len(fleet.gateways[1].open) >= 2


class Room:
    """A waiting room of gateway g1, and what it hears of g2 and g3."""

    def __init__(self) -> None:
        self.queue = AdmissionQueue(AdmissionConfig(), lambda *told: self.elsewhere.tell(*told))
        self.elsewhere = Elsewhere(self.queue, Outbox("g1", Incarnation(1)))
        self.num = 0

    def offer(self, tenant: str) -> None:
        self.num += 1
        self.queue.offer(Ticket(self.num, tenant, 0.0, 10.0))

    def serve(self, num: int = 1) -> None:
        for _ in range(num):
            ticket = self.queue.pop(0.0)
            assert ticket is not None
            self.queue.settle(ticket, 10.0, 0.0)

    def hear(self, gateway: str, tenant: str, cost: float = 0, *, waits: bool = True) -> None:
        self.elsewhere.queued_elsewhere(gateway, tenant, cost, waits=waits)
        self.elsewhere.check()

    def yields(self, now: float, has_room: bool = True) -> bool:
        return self.elsewhere.must_yield(now, lambda: has_room)


def room_that_is_ahead() -> Room:
    room = Room()
    for _ in range(200):
        room.offer("a")
    room.hear("g2", "b")
    room.serve(20)
    return room


def test_one_that_is_clearly_ahead_leaves_room_for_a_bounded_time() -> None:
    room = room_that_is_ahead()
    assert room.yields(1.0, has_room=False)
    assert room.elsewhere.yields_until == math.inf  # no room, no time of it
    assert room.yields(2.0)
    assert room.yields(2.0 + YIELD_S / 2)
    room.hear("g2", "b", 10)  # it takes its turn: the next one has as long
    assert room.yields(2.0 + YIELD_S)
    assert not room.yields(2.0 + 2 * YIELD_S)
    shortest, longest = PASSED_S
    now = 2.0 + 2 * YIELD_S
    for passed_s in (shortest, 2 * shortest, 4 * shortest, 8 * shortest, longest, longest):
        room.serve(10)
        assert not room.yields(now + 0.9 * passed_s)
        now += passed_s
        assert not room.yields(now)  # it begins to wait again, without a credit
        room.serve(6)
        assert room.yields(now)
        now += YIELD_S
        assert not room.yields(now)
    room.hear("g2", "b", 10)  # it is there after all
    room.serve(6)
    assert room.yields(now)


def test_nothing_is_left_to_a_gateway_where_nobody_waits_any_more() -> None:
    for end in ("served", "given up", "silent"):
        room = room_that_is_ahead()
        assert room.yields(1.0)
        if end == "silent":
            room.elsewhere.left("g2")
        else:
            room.hear("g2", "b", 10 if end == "served" else 0, waits=False)
        assert not room.yields(1.0)
        assert not room.elsewhere.claims
        room.elsewhere.check()


def test_one_gateway_at_a_time_has_the_turn() -> None:
    """Of those at which the next tenant waits: the one that had fewest of its turns."""
    room = Room()
    room.offer("a")
    room.offer("a")
    room.offer("a")
    assert room.elsewhere.is_turn()
    room.hear("g2", "a")
    room.hear("g3", "b")
    assert room.elsewhere.is_turn()  # g1 before g2
    room.serve()
    assert not room.elsewhere.is_turn()  # b is behind
    room.hear("g3", "b", 10)
    assert not room.elsewhere.is_turn()  # g2 had none yet
    room.hear("g2", "a", 10)
    assert not room.elsewhere.is_turn()
    room.hear("g3", "b", 10)
    assert room.elsewhere.is_turn()


def test_a_request_that_comes_while_others_wait_elsewhere_does_not_push_in() -> None:
    fleet = Fleet(2, [], {}, rows=1)
    one, two = fleet.gateways
    fleet.ask(Crowd("a", {}), 0)
    fleet.ask(Crowd("a", {}), 0)
    fleet.run_until(0.02)
    assert not two.waiting.is_free(None)
    fleet.ask(Crowd("b", {}), 1)
    assert [len(one.waiting), len(two.waiting)] == [1, 1]
    fleet.run_until(0.04)
    assert set(one.waiting.elsewhere.claims) == {"b"}


def test_one_that_was_passed_over_has_no_turns_to_catch_up_with() -> None:
    """One tenant at two gateways: it pauses at the other one, and then they take turns again."""
    room = Room()
    for _ in range(200):
        room.offer("a")
    room.hear("g2", "a")
    room.serve(MAX_TURNS)
    assert room.yields(1.0)
    assert not room.yields(1.0 + YIELD_S)
    room.serve(100)
    again = 1.0 + YIELD_S + PASSED_S[0]
    assert not room.yields(again)
    room.serve(MAX_TURNS)
    assert room.yields(again)
    room.hear("g2", "a", 10)
    assert not room.yields(again)


@pytest.mark.parametrize("own", [3, 9])
def test_lags_are_taken_over_from_the_gateway_that_runs_longest(own: int) -> None:
    """A picker that runs longer knows of none: it has no waiting room."""
    room = room_that_is_ahead()
    room.hear("g4", "b")
    replicas = Replicas(
        cast(Ledger, None),
        gateway="g1",
        clock=lambda: 0.0,
        room=room.elsewhere,
        incarnation=own,
    )
    lags = (("b", 0.0), ("a", 7.0))
    before = room.elsewhere.lags()
    for name, life, told in (("picker", 1, ()), ("g3", 7, (("a", 5.0),)), ("g2", 5, lags)):
        replicas.on_batch(BookingBatch(name, life, 0, (), lags=told))
    replicas.on_batch(BookingBatch("g3", 7, 0, (), lags=(("a", 5.0),)))
    assert room.elsewhere.lags() == (lags if own == 9 else before)


def test_room_is_left_anew_to_those_that_wait_when_others_come() -> None:
    """The one that left room gave up meanwhile; no time passed for the next one."""
    fleet = Fleet(2, [], {}, rows=1)
    waiting = fleet.gateways[0].waiting
    waiting.elsewhere.yields_until = 0.01
    fleet.now = 5.0
    waiting.elsewhere.queued_elsewhere("g1", "b", 0, waits=True)
    fleet.ask(Crowd("a", {}), 0)
    assert waiting.elsewhere.yields_until == math.inf


def test_where_none_may_wait_nobody_is_refused_for_those_that_wait_elsewhere() -> None:
    """There is room, which those that wait can not take."""
    fleet = Fleet(1, [], {}, rows=1)
    waiting = fleet.gateways[0].waiting
    waiting.queue.config = AdmissionConfig(max_waiting=0)
    waiting.elsewhere.queued_elsewhere("g1", "big", 0, waits=True)
    fleet.ask(Crowd("a", {}), 0)
    assert len(fleet.gateways[0].open) == 1


def test_what_others_say_costs_no_placement_while_there_is_no_room() -> None:
    fleet = Fleet(2, [], {}, rows=1)
    one = fleet.gateways[0]
    for _ in range(2):
        fleet.ask(Crowd("a", {}), 0)
    tried: list[object] = []
    one.waiting._place = lambda dispatch, may_wait: tried.append(dispatch)
    one.waiting.on_heard()
    assert not tried
    one.booked.clear()
    one.waiting.on_heard()
    assert len(tried) == 1
