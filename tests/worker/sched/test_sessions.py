"""Weighted fair shares between sessions."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mallee.worker.sched.sessions import Sessions
from support.examples import examples


def keep_busy(rig: Any, kinds: list[tuple[str, float]], turn: int) -> None:
    """Every session has more to do than a step holds."""
    for i, (kind, weight) in enumerate(kinds):
        pending = 0
        for name, sequence in rig.branches.items():
            if name.startswith(f"s{i}-") and not sequence.is_over:
                pending += sequence.num_pending
        size = {"decodes": 1, "short": 3, "long": 90}[kind]
        outputs = 1 << 30 if kind == "decodes" else 1
        for n in range(max(0, 40 - pending) // size + 1):
            name = f"s{i}-{turn}.{n}"
            rig.add(name, size, outputs=outputs, session=f"s{i}", weight=weight)


@examples(25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["decodes", "short", "long"]), st.sampled_from([0.5, 1.0, 3.0])),
        min_size=2,
        max_size=4,
    ),
    st.sampled_from([4, 16, 40]),
)
@example(kinds=[("decodes", 3.0), ("long", 0.5), ("long", 0.5), ("long", 3.0)], rows=16)
@example(kinds=[("decodes", 3.0), ("short", 1.0), ("long", 3.0)], rows=16)
def test_the_share_error_is_bounded_by_two_steps(
    make_rig: Any, kinds: list[tuple[str, float]], rows: int
) -> None:
    """S13, part: tokens by weight never differ by more than two steps' tokens of each, by weight."""
    rig = make_rig(max_rows=rows, max_step_tokens=16, ageing_steps=0, num_blocks=8192)
    total = [0] * len(kinds)
    for turn in range(60):
        keep_busy(rig, kinds, turn)
        for name, n in rig.step(is_checked=False).items():
            total[int(name[1 : name.index("-")])] += n
        for i, j in combinations(range(len(kinds)), 2):
            allowed = sum(2 * 16 / kinds[k][1] for k in (i, j))
            apart = abs(total[i] / kinds[i][1] - total[j] / kinds[j][1])
            assert apart <= allowed, (turn, total)
    rig.check()


def test_a_session_that_was_away_banks_nothing(make_rig: Any) -> None:
    """S13, part: nor one that asked for less than its share."""
    rig = make_rig(max_rows=4, max_step_tokens=8, ageing_steps=0, num_blocks=4096)
    for i in range(8):
        rig.add(f"a{i}", session="a")
    rig.add("b-one", session="b")
    rig.run(50)
    for i in range(8):
        rig.add(f"b{i}", session="b")
        rig.add(f"c{i}", session="c")
    begin = len(rig.served)
    rig.run(30)
    total = rig.total(lambda name: name[0], begin)
    assert max(total.values()) - min(total.values()) <= 8, total


def test_leaving_and_coming_back_loses_no_debt(make_rig: Any) -> None:
    """S13, part: one request at a time gets no more than an endless queue does."""
    rig = make_rig(max_rows=4, max_step_tokens=8, ageing_steps=0, num_blocks=8192)
    rig.add("b", 4000, session="b")
    for i in range(40):
        rig.add(f"a{i}", 24, outputs=1, session="a")
        while not rig.branches[f"a{i}"].is_over:
            rig.step(is_checked=False)
    total = rig.total(lambda name: name[0])
    assert abs(total["a"] - total["b"]) <= 16 + 24


def test_sessions_of_different_tenants_are_different(make_rig: Any) -> None:
    """S13, part: the salt is part of a session's name."""
    sessions = Sessions()
    one = sessions.join(("t1", "s"), 1.0)
    assert sessions.join(("t2", "s"), 1.0) is not one
    assert sessions.join(("t1", "s"), 2.0) is one
    assert one.weight == 2.0
    sessions.check()


@pytest.mark.parametrize("num", [1000])
def test_debts_of_sessions_that_left_are_forgotten_once_paid(num: int) -> None:
    """S13, part: memory is bounded by the sessions that live."""
    sessions = Sessions()
    busy = sessions.join(("", "busy"), 1.0)
    for i in range(num):
        each = sessions.join(("", f"s{i}"), 1.0)
        sessions.charge(each, 10)
        sessions.charge(busy, 10)
        sessions.leave(each)
        sessions.close(sessions.level(busy))
        sessions.check()
    assert len(sessions._left) <= 200
    sessions.close(None)
    assert not sessions._left
    assert sessions.num_live == 1
