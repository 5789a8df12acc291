"""Blocks run out: who gives way, who comes back, and that everybody ends."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.examples import examples

VICTIMS = ("least_due", "youngest", "oldest_decode")


def preempted(rig: Any) -> list[str]:
    """Admitted and waiting branches."""
    return [
        n for n, s in rig.branches.items() if s.attached_tokens is not None and not s.is_running
    ]


@pytest.mark.parametrize(
    ("victims", "priorities", "victim"),
    [
        ("least_due", [2.0, 0.0, 1.0, 3.0], "b1"),
        ("least_due", [1.0, 1.0, 1.0, 1.0], "b3"),
        ("oldest_decode", [0.0, 1.0, 2.0, 3.0], "b0"),
    ],
)
def test_the_lowest_priority_gives_way(
    make_rig: Any, victims: str, priorities: list[float], victim: str
) -> None:
    """D16, K18: the victim is the minimum; among equals the youngest.

    If asked, it is the oldest decode: the order of Dynamo's mocker and vLLM.
    """
    rig = make_rig(num_blocks=12, victims=victims, ageing_steps=0)
    for i, priority in enumerate(priorities):
        rig.add(f"b{i}", 4, priority=priority)
    while not preempted(rig):  # they need a block each at the same time
        rig.step()
    assert preempted(rig) == [victim]


def test_the_session_over_its_share_gives_way(make_rig: Any) -> None:
    """S13, part, D16: before priorities are compared."""
    rig = make_rig(num_blocks=40, max_rows=4, max_step_tokens=4, ageing_steps=0)
    for i in range(4):
        rig.add(f"a{i}", 20, session="a")
        rig.add(f"b{i}", 20, session="b", weight=9.0, priority=-3.0)
    while not preempted(rig):
        rig.step()
    assert all(name.startswith("a") for name in preempted(rig))


def test_what_a_victim_shares_is_not_computed_again(make_rig: Any) -> None:
    """D16: it goes back to its origin; the trunk stays."""
    rig = make_rig(num_blocks=14, ageing_steps=0)
    trunk = rig.capsule(24)
    for i in range(3):
        rig.add(f"b{i}", 1, origin=trunk, outputs=16)
    while not preempted(rig):
        rig.step()
    (name,) = preempted(rig)
    assert trunk.live
    assert rig.branches[name].num_pending <= 16
    rig.drain()
    assert trunk.end == 24


def test_a_higher_priority_makes_room_for_itself(make_rig: Any) -> None:
    """D15, D16: it does not wait until those of lower priority have ended."""
    rig = make_rig(num_blocks=12, ageing_steps=0)
    for i in range(2):
        rig.add(f"low{i}", 16, priority=-1.0)
    rig.run(3)
    rig.add("high", 15, priority=1.0, outputs=2)
    rig.add("equal", 15, priority=-1.0, outputs=2)
    assert set(rig.step()) == {"low0", "high"}
    assert preempted(rig) == ["low1"]
    assert rig.branches["equal"].attached_tokens is None


def test_a_session_with_nothing_running_gets_room(make_rig: Any) -> None:
    """S13, part: it need not wait until a session that holds the whole pool is done."""
    rig = make_rig(num_blocks=16, ageing_steps=0)
    for i in range(3):
        rig.add(f"a{i}", 16, session="a")
    rig.run(4)
    rig.add("b0", 12, session="b")
    rig.add("b1", 12, session="b")
    rig.run(2)
    assert rig.branches["b0"].is_running
    assert not rig.branches["b1"].is_running
    assert sum(rig.branches[f"a{i}"].is_running for i in range(3)) >= 1


def test_admission_leaves_room_for_those_that_run(make_rig: Any) -> None:
    """D37, part, S3, part: promised blocks and the watermark are not given away."""
    rig = make_rig(num_blocks=20, watermark=0.2, max_step_tokens=8)
    rig.add("a", 36)  # 9 blocks, 2 of them reserved at once
    rig.step()
    rig.add("b", 28)  # 7 + 1 blocks, beside 7 promised and 4 to spare
    rig.step()
    assert not rig.branches["b"].is_running
    rig.add("c", 1)
    rig.step()
    assert not rig.branches["c"].is_running  # nobody overtakes who waits for room


@examples(60)
@given(st.data())
def test_everybody_ends_on_a_tiny_pool(make_rig: Any, data: Any) -> None:
    """I8, S13, part, D16: many sessions, all policies and victim orders, little room."""
    policy = data.draw(st.sampled_from(["fair", "fcfs", "prefill_first", "decode_round_robin"]))
    rig = make_rig(
        policy=policy,
        victims=data.draw(st.sampled_from(VICTIMS)),
        num_blocks=12,
        max_rows=data.draw(st.integers(1, 5)),
        max_step_tokens=data.draw(st.integers(1, 12)),
        ageing_steps=data.draw(st.sampled_from([0, 4, 20])),
        gang=data.draw(st.booleans()),
        watermark=data.draw(st.sampled_from([0.0, 0.1])),
    )
    trunk = rig.capsule(data.draw(st.integers(1, 9)))
    for i in range(data.draw(st.integers(2, 12))):
        rig.add(
            f"b{i}",
            data.draw(st.integers(1, 16)),
            outputs=data.draw(st.integers(1, 18)),
            session=data.draw(st.sampled_from("abc")),
            weight=data.draw(st.sampled_from([0.5, 1.0, 4.0])),
            priority=float(data.draw(st.integers(-1, 1))),
            origin=trunk if data.draw(st.booleans()) else None,
        )
        for _ in range(data.draw(st.integers(0, 3))):
            rig.step()
    rig.drain(3000)
    assert not rig.failed
    rig.check()
    assert rig.tree.holds() == {trunk: 1}


def test_a_branch_that_fails_takes_its_copy_along(make_rig: Any) -> None:
    """D16, part: a part of its prompt had room, and the next one not: nothing is copied for it."""
    rig = make_rig(num_blocks=3, max_step_tokens=16, ageing_steps=1)
    trunk = rig.capsule(2)
    for name in ("a", "b"):
        rig.add(name, 12, origin=trunk)
    plan = rig.scheduler.plan()
    assert [branch for branch, _ in plan.failed] == [rig.branches["a"]]
    assert not plan.chunks
    assert not plan.copies
