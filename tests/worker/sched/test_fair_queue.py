"""Lines, gates and the states of a branch, against plain models."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.messages import Generate, Limits
from mallee.worker.sched.branch import Branch, FairQueue, ForkPoint, Job, Phase
from mallee.worker.sched.sessions import Sessions
from mallee.worker.sched.waiting import PrefixWaits
from support.examples import examples

STARTS = {
    "gated": ("gated",),
    "waiting": (),
    "ready": ("ready",),
    "prefill": ("prefill",),
    "decode": ("prefill", "decode"),
    "finished": ("finished",),
    "failed": ("failed",),
}
ARROWS = {
    "gated": {"waiting", "finished", "failed"},
    "waiting": {"gated", "ready", "prefill", "finished", "failed"},
    "ready": {"waiting", "decode", "finished", "failed"},
    "prefill": {"waiting", "decode", "finished", "failed"},
    "decode": {"waiting", "prefill", "finished", "failed"},  # prefill: injected tokens
    "finished": set(),
    "failed": set(),
}


def branch(ticket: int) -> Branch:
    job = Job(Generate("r", b"", Limits(1)), "g", "")
    return Branch(job, (0,), ticket, [1], ForkPoint(0, 0, []), None)


@pytest.mark.parametrize(("before", "after"), list(product(STARTS, repeat=2)))
def test_a_branch_moves_along_the_arrows_only(before: Phase, after: Phase) -> None:
    """I19: an illegal transition raises."""
    one = branch(1)
    for phase in STARTS[before]:
        one.move(phase)
    assert one.phase is before
    if after in ARROWS[before]:
        one.move(after)
        assert one.phase is after
    else:
        with pytest.raises(AssertionError, match=f"{before} -> {after}"):
            one.move(after)
        assert one.phase is before


@examples(80)
@given(st.data())
def test_a_line_serves_in_the_order_of_a_full_search(data: Any) -> None:
    """S13, part, D15: lowest tag of tenants and sessions, then rank, then arrival; and who waits longest."""
    sessions = Sessions()
    queue = FairQueue(sessions)
    inside: list[Branch] = []
    for step in range(data.draw(st.integers(1, 60))):
        act = data.draw(st.sampled_from(["push", "push", "rank", "remove", "serve", "charge"]))
        if act == "push":
            one = branch(step)
            key = data.draw(st.sampled_from("abc"))
            weight, tenant = (
                data.draw(st.sampled_from([1.0, 2.0])),
                data.draw(st.sampled_from("tu")),
            )
            tenant = "" if key == "c" else tenant
            one.job.session = sessions.join(("", key), weight, tenant=tenant)
            queue.push(one, float(data.draw(st.integers(0, 2))))
            queue.serve(one, step)
            inside.append(one)
        elif inside:
            one = data.draw(st.sampled_from(inside))
            if act == "rank":
                queue.push(one, float(data.draw(st.integers(0, 2))))
            elif act == "remove":
                queue.remove(one)
                inside.remove(one)
            elif act == "serve":
                queue.serve(one, step)
            else:
                sessions.charge(one.job.session, data.draw(st.integers(1, 5)))
        queue.check()
        expected = min(
            inside, key=lambda s: (sessions.order(s.job.session), s.rank, s.ticket), default=None
        )
        assert queue.first() is expected
        assert set(queue) == set(inside)
        oldest = queue.oldest()
        assert (oldest is None) is (not inside)
        if oldest is not None:
            assert oldest.last_step == min(s.last_step for s in inside)


def test_a_line_forgets_entries_that_are_out_of_date() -> None:
    """D15: changing a priority again and again takes no memory."""
    sessions = Sessions()
    queue = FairQueue(sessions)
    sequences = [branch(i) for i in range(3)]
    for one in sequences:
        one.job.session = sessions.join(("", ""), 1.0)
        queue.push(one, 0.0)
    for i in range(5000):
        queue.push(sequences[i % 3], float(i))
        queue.serve(sequences[i % 3], i)
    assert sum(map(len, queue._by_session.values())) < 200
    assert len(queue._by_age) < 200
    assert queue.first() is sequences[4997 % 3]


def test_gates_let_through_in_the_order_of_what_is_needed() -> None:
    """S6: whoever needs no more than is there, and everybody when it is over."""
    waits = PrefixWaits()
    producer = branch(0)
    gated = {n: branch(n) for n in (30, 10, 20)}
    for n, one in gated.items():
        waits.hold(one, producer, n)
        waits.check()
    assert waits.num == 3
    assert waits.passed(producer, 9) == []
    assert waits.passed(producer, 20) == [gated[10], gated[20]]
    for n in (10, 20):
        gated[n].move("waiting")
    waits.check()
    gated[30].producer = producer
    assert waits.dropped(producer) == []
    assert waits.stranded(producer) == [gated[30]]
    assert waits.num == 1
    waits.left()
    gated[30].move("failed")
    waits.check()
