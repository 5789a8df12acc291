"""Weighted fair shares between tenants, and between the sessions of each; lines, gates and states."""

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from mallee.protocol.messages import Generate, Limits
from mallee.worker.sched.branch import Branch, ForkPoint, Job, Phase
from mallee.worker.sched.gates import Gates
from mallee.worker.sched.policy import Order
from mallee.worker.sched.queue import FairQueue
from mallee.worker.sched.sessions import Account, Sessions
from support.examples import examples

NO_ONE: dict[int, tuple[str, float]] = {}


def keep_busy(
    rig: Any,
    kinds: list[tuple[str, float]],
    turn: int,
    tenants: dict[int, tuple[str, float]] = NO_ONE,
) -> None:
    """Every session has more to do than a step holds, but those of kind "one", which decode one branch."""
    for i, (kind, weight) in enumerate(kinds):
        pending, (tenant, tenant_weight) = 0, tenants.get(i, ("", 1.0))
        share = {"session": f"s{i}", "weight": weight}
        share |= {"tenant": tenant, "tenant_weight": tenant_weight}
        if kind == "one":
            if turn == 0:
                rig.add(f"s{i}-one", **share)
            continue
        for name, sequence in rig.branches.items():
            if name.startswith(f"s{i}-") and not sequence.is_over:
                pending += sequence.num_pending
        size = {"decodes": 1, "short": 3, "long": 90}[kind]
        outputs = 1 << 30 if kind == "decodes" else 1
        for n in range(max(0, 40 - pending) // size + 1):
            name = f"s{i}-{turn}.{n}"
            rig.add(name, size, outputs=outputs, **share)


KINDS = st.tuples(
    st.sampled_from(["decodes", "short", "long", "one"]), st.sampled_from([0.5, 1.0, 3.0])
)


@examples(50)
@given(
    st.lists(KINDS, min_size=1, max_size=5),
    st.sampled_from([None, 0.5, 1.0, 2.0]),
    st.sampled_from([4, 16, 40]),
)
@example(kinds=[("decodes", 3.0), ("long", 0.5), ("long", 0.5)], weight=None, rows=16)
@example(kinds=[("decodes", 3.0), ("short", 1.0)], weight=None, rows=16)
@example(kinds=[("long", 1.0)] * 6, weight=1.0, rows=4)
@example(kinds=[("long", 0.5), *[("one", 3.0)] * 5], weight=2.0, rows=40)
def test_the_share_error_is_bounded_by_two_steps(
    make_rig: Any, kinds: list[tuple[str, float]], weight: float | None, rows: int
) -> None:
    """S13, part: of what is held back: tokens by weight never differ by more than two steps' of each.

    Sessions of a tenant of some `weight` get together what one gets, also where some of them want little, and
    each its part of that. Without a tenant each stands for itself.
    """
    assume(any(kind != "one" for kind, _ in kinds))
    rig = make_rig(max_rows=rows, max_step_tokens=16, ageing_steps=0, num_blocks=8192)
    kinds = [*kinds, ("long", 3.0)]
    last = len(kinds) - 1
    tenants = {last: ("last", 1.0)}
    if weight is not None:
        tenants |= dict.fromkeys(range(last), ("many", weight))
    total = [0] * len(kinds)
    busy = [i for i, (kind, _) in enumerate(kinds[:-1]) if kind != "one"]
    for turn in range(60):
        keep_busy(rig, kinds, turn, tenants)
        served = rig.step(is_checked=False)
        for name, n in served.items():
            total[int(name[1 : name.index("-")])] += n
        assert sum(served.values()) >= min(rows, 16), "something waits, and the step has room"
        shares = [(total[i] / kinds[i][1], 2 * 16 / kinds[i][1]) for i in busy]
        others = [(float(total[-1]), 2 * 16.0)]
        if weight is not None:
            others.append((sum(total[:-1]) / weight, 2 * 16 / weight))
        for group in (shares, others) if weight is not None else (shares + others,):
            for (one, bound), (other, other_bound) in combinations(group, 2):
                assert abs(one - other) <= bound + other_bound, (turn, total)
    rig.check()


@pytest.mark.parametrize("is_new", [True, False])
def test_one_request_at_a_time_gains_nothing(make_rig: Any, is_new: bool) -> None:
    """S13, part: no more than an endless queue does; the debt is the session's, and the tenant's."""
    rig = make_rig(max_rows=4, max_step_tokens=8, ageing_steps=0, num_blocks=8192)
    rig.add("b", 4000, session="b", tenant="u" if is_new else "")
    for i in range(40):
        whose = {"session": f"a{i}", "tenant": "t"} if is_new else {"session": "a"}
        rig.add(f"a{i}", 24, outputs=1, **whose)
        while not rig.branches[f"a{i}"].is_over:
            rig.step(is_checked=False)
    total = rig.total(lambda name: name[0])
    assert abs(total["a"] - total["b"]) <= 16 + 24


@pytest.mark.parametrize("is_held_back", [False, True])
def test_a_session_that_was_away_banks_nothing(make_rig: Any, is_held_back: bool) -> None:
    """S13, part: nor one that asked for less than its share; also while its tenant is held back."""
    rig = make_rig(max_rows=4, max_step_tokens=8, ageing_steps=0, num_blocks=4096)
    tenant = "t" if is_held_back else ""
    if is_held_back:
        rig.add("x", 4000, session="x", tenant="u")
    for i in range(8):
        rig.add(f"a{i}", session="a", tenant=tenant)
    rig.add("b-one", session="b", tenant=tenant, priority=float(is_held_back))
    rig.run(50)
    for i in range(8):
        rig.add(f"b{i}", session="b", tenant=tenant)
        rig.add(f"c{i}", session="c", tenant=tenant)
    begin = len(rig.served)
    rig.run(60 if is_held_back else 30)
    total = rig.total(lambda name: name[0], begin)
    total.pop("x", None)
    assert max(total.values()) - min(total.values()) <= 8, total


@pytest.mark.parametrize("tenant", ["", "t"])
@pytest.mark.parametrize("weight", [1e-18, 1e-320])
def test_a_tiny_weight_takes_nothing_from_those_that_come_later(
    make_rig: Any, tenant: str, weight: float
) -> None:
    """S13, part: a token of it is a leap of virtual time, beside which theirs must not be lost."""
    rig = make_rig(max_rows=4, max_step_tokens=8, ageing_steps=0, num_blocks=4096)
    rig.add("tiny", 20, outputs=1, session="tiny", weight=weight, tenant=tenant)
    rig.add("b0", session="b", tenant=tenant)
    rig.run(20)
    for name in ("a", "b", "c"):
        for i in range(1, 8):
            rig.add(f"{name}{i}", session=name, tenant=tenant)
    begin = len(rig.served)
    rig.run(60)
    total = rig.total(lambda name: name[0], begin)
    assert max(total.values()) - min(total[name] for name in "abc") <= 16, total


def test_sessions_of_different_tenants_are_different(make_rig: Any) -> None:
    """S13, part: the salt is part of a session's name."""
    sessions = Sessions()
    one = sessions.join(("t1", "s"), 1.0)
    assert sessions.join(("t2", "s"), 1.0) is not one
    assert sessions.join(("t1", "s"), 2.0) is one
    assert one.weight == 2.0
    whose = sessions.join(("t1", "s"), 1.0, tenant="acme", tenant_weight=3.0)
    other = sessions.join(("t2", "s"), 5.0, tenant="acme", tenant_weight=3.0)
    assert len({one, whose, other}) == 3
    assert whose.parent is other.parent is not one.parent
    assert (whose.parent.weight, whose.weight, other.weight) == (3.0, 1.0, 5.0)
    sessions.check()


class PlainAccounts:
    """Virtual times of two levels, of which none is forgotten: all are moved up at each step's end."""

    def __init__(self) -> None:
        self.tags: dict[tuple[str, ...], float] = {}

    def charge(self, key: tuple[str, ...], num_tokens: int, weight: float) -> None:
        self.tags[key] += num_tokens / weight

    def close(self, held_back: set[tuple[str, ...]]) -> None:
        """`held_back`: sessions that had more to do."""
        tenants = {key[:1] for key in held_back}
        for level, lagging in ((1, tenants), (2, held_back)):
            for owner in {key[: level - 1] for key in self.tags if len(key) == level}:
                own = {
                    k: tag for k, tag in self.tags.items() if len(k) == level and k[:-1] == owner
                }
                due = [own[key] for key in own if key in lagging]
                now = min(due) if due else max(own.values())
                self.tags |= {key: max(tag, now) for key, tag in own.items()}


@examples(60)
@given(st.data())
def test_accounts_keep_what_a_list_of_all_would(data: Any) -> None:
    """S13, part: no banked credit, no debt lost by leaving; memory is bounded by those that live."""
    sessions, plain = Sessions(), PlainAccounts()
    live: dict[tuple[str, str], Account] = {}
    for turn in range(data.draw(st.integers(1, 40))):
        key = (data.draw(st.sampled_from("tuv")), data.draw(st.sampled_from("abc")))
        if key in live and data.draw(st.booleans()):
            sessions.leave(live.pop(key))
        elif key not in live:
            live[key] = sessions.join(("", key[1]), 1.0, tenant=key[0], tenant_weight=2.0)
            for each in (key[:1], key):
                own = [tag for k, tag in plain.tags.items() if k[:-1] == each[:-1]]
                plain.tags.setdefault(each, min(own, default=0.0))
        for key in sorted(live):
            num = data.draw(st.integers(0, 9))
            sessions.charge(live[key], num)
            plain.charge(key[:1], num, 2.0)
            plain.charge(key, num, 1.0)
        held_back = {key for key in live if data.draw(st.booleans())}

        accounts = [each for key in held_back for each in (live[key], live[key].parent)]

        def lowest_of(of: Account, accounts: list[Account] = accounts) -> float | None:
            return min((each.level for each in accounts if each.parent is of), default=None)

        sessions.advance(lowest_of)
        plain.close(held_back)
        for key, other in product(live, repeat=2):
            if key[0] == other[0]:
                apart = live[key].level - live[other].level
                assert apart == pytest.approx(plain.tags[key] - plain.tags[other]), turn
            apart = live[key].parent.level - live[other].parent.level
            assert apart == pytest.approx(plain.tags[key[:1]] - plain.tags[other[:1]]), turn
        sessions.check()


def test_sessions_that_left_are_forgotten_once_they_are_not_ahead() -> None:
    """S13, part: memory is bounded by the sessions that live."""
    sessions = Sessions()
    busy = sessions.join(("", "busy"), 1.0)
    for i in range(1000):
        each = sessions.join(("", f"s{i}"), 1.0, tenant="t" if i % 2 else "")
        sessions.charge(each, 10)
        sessions.charge(busy, 10)
        sessions.leave(each)
        sessions.advance(lambda of: busy.level if of is sessions.root else None)
        sessions.check()
    assert len(sessions._accounts) <= 200
    assert sessions.num_live == 1


# Lines, gates and the states of a branch, against plain models

ARROWS: dict[Phase, set[Phase]] = {
    "gated": {"waiting", "finished", "failed"},
    "waiting": {"gated", "ready", "prefill", "finished", "failed"},
    "ready": {"waiting", "decode", "finished", "failed"},
    "fetching": {"prefill", "finished", "failed"},
    "prefill": {"waiting", "fetching", "decode", "finished", "failed"},
    "decode": {"waiting", "prefill", "finished", "failed"},  # prefill: injected tokens
    "finished": set(),
    "failed": set(),
}


def branch(ticket: int) -> Branch:
    job = Job(Generate("r", b"", Limits(1)), "g", "")
    return Branch(job, (0,), ticket, [1], ForkPoint(0, 0, []), None)


@pytest.mark.parametrize(("before", "after"), list(product(ARROWS, repeat=2)))
def test_a_branch_moves_along_the_arrows_only(before: Phase, after: Phase) -> None:
    """I19: an illegal transition raises."""
    one = branch(1)
    one.phase = before
    if after in ARROWS[before]:
        one.move(after)
        assert one.phase is after
    else:
        with pytest.raises(AssertionError, match=f"{before} -> {after}"):
            one.move(after)
        assert one.phase is before


@examples(80)
@given(st.data())
def test_a_queue_serves_in_the_order_of_a_full_search(data: Any) -> None:
    """S13, part, D15, S6: virtual times of tenants and sessions, then rank, then arrival; each branch by
    the best claim of its own and of those that wait for it; and the one that waits longest.
    """
    sessions, gates = Sessions(), Gates()
    queue = FairQueue(Order(), sessions.root, gates)
    inside: list[Branch] = []
    gated: list[Branch] = []
    acts = ["push", "push", "gate", "rank", "remove", "serve", "charge", "leave"]
    for step in range(data.draw(st.integers(1, 60))):
        act = data.draw(st.sampled_from(acts))
        if act in ("push", "gate"):
            one = branch(step)
            key = data.draw(st.sampled_from("abc"))
            weight, tenant = (
                data.draw(st.sampled_from([1.0, 2.0])),
                data.draw(st.sampled_from("tu")),
            )
            tenant = "" if key == "c" else tenant
            one.job.session = sessions.join(("", key), weight, tenant=tenant)
            one.priority = float(data.draw(st.integers(0, 2)))
            producers = [*inside, *gated]
            if act == "push":
                queue.push(one, step)
                inside.append(one)
            elif producers:
                gates.hold(one, data.draw(st.sampled_from(producers)), 1)
                gated.append(one)
                for each in inside:
                    if gates.waits(one, each):
                        queue.claim(each, [one, *gates.waiters(one)])
        elif act == "leave" and gated:
            leaves = [one for one in gated if not gates.waiters(one)]
            one = data.draw(st.sampled_from(leaves))
            gates.leave(one)
            one.move("finished")
            gated.remove(one)
        elif inside and act != "leave":
            one = data.draw(st.sampled_from(inside))
            if act == "rank":
                one.priority = float(data.draw(st.integers(0, 2)))
                queue.rerank(one)
            elif act == "remove" and not gates.waiters(one):
                queue.remove(one)
                inside.remove(one)
            elif act == "serve":
                queue.serve(one, step)
            else:
                sessions.charge(one.job.session, data.draw(st.integers(1, 5)))
        queue.check()
        claims = [(by, one) for one in inside for by in (one, *gates.waiters(one))]
        by, expected = min(
            claims,
            key=lambda c: (c[0].job.session.order, -c[0].priority, c[1].ticket),
            default=(None, None),
        )
        first = queue.first()
        if by is None or first is None:
            assert (by, first) == (None, None)
        else:
            assert first.branch is expected
            assert (first.payer, first.rank) == (by.job.session, -by.priority)
        assert set(queue.members) == set(inside)
        oldest = queue.oldest
        assert (oldest is None) is (not inside)
        if oldest is not None:
            assert oldest.last_step == min(s.last_step for s in inside)


def test_a_queue_forgets_claims_that_are_out_of_date() -> None:
    """D15: changing a priority again and again takes no memory."""
    sessions = Sessions()
    queue = FairQueue(Order(), sessions.root, Gates())
    sequences = [branch(i) for i in range(3)]
    for one in sequences:
        one.job.session = sessions.join(("", ""), 1.0)
        queue.push(one, 0)
    for i in range(5000):
        sequences[i % 3].priority = -float(i)
        queue.rerank(sequences[i % 3])
        queue.serve(sequences[i % 3], i)
    assert sum(map(len, queue._claims.values())) < 200
    first = queue.first()
    assert first is not None
    assert first.branch is sequences[4997 % 3]


def test_gates_let_through_in_the_order_of_what_is_needed() -> None:
    """S6: those that need no more than is there, and all when their producer is over."""
    gates = Gates()
    producer = branch(0)
    gated = {n: branch(n) for n in (30, 10, 20)}
    for n, one in gated.items():
        gates.hold(one, producer, n)
        gates.check()
    assert gates.num == 3
    assert gates.passed(producer, 9) == []
    assert gates.passed(producer, 20) == [gated[10], gated[20]]
    for n in (10, 20):
        gated[n].move("waiting")
    gates.check()
    gated[30].producer = producer
    assert gates.dropped(producer) == []
    assert gates.stranded(producer) == [gated[30]]
    assert gates.num == 1
    gates.leave(gated[30])
    gated[30].move("failed")
    gates.check()
