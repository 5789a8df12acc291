"""Choices of one step: priorities, gangs, chunks, turns, ageing."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.examples import examples

VICTIMS = ("least_due", "youngest", "oldest_decode")
POLICIES = ("fair", "fcfs", "prefill_first", "decode_round_robin")


def test_a_waiting_branch_of_higher_priority_takes_a_row(make_rig: Any) -> None:
    """D15: rows are as scarce as tokens; who loses its row keeps its blocks."""
    rig = make_rig(max_rows=2, ageing_steps=0)
    for name in ("a", "b"):
        rig.add(name, 5)
    rig.run(3)
    rig.add("high", 3, priority=1.0)
    rig.run(2)
    assert set(rig.served[-1]) == {"a", "high"}
    assert rig.branches["b"].node is not None
    assert rig.scheduler.stats().num_preemptions == 0


@examples(60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(1, 6),
)
def test_the_chosen_set_maximises_priority_and_groups_siblings(
    make_rig: Any, branches: list[tuple[int, int]], rows: int
) -> None:
    """D17: no one left out has a higher priority than one chosen; groups <= distinct prefixes."""
    rig = make_rig(max_rows=rows, max_step_tokens=64, ageing_steps=0, gang=True)
    capsules = [rig.capsule(n) for n in (9, 4, 17, 6)]
    for i, (priority, parent) in enumerate(branches):
        rig.add(f"{parent}-{i}", priority=float(priority), origin=capsules[parent])
    for _ in range(8 * len(branches)):
        rig.step()
    order = rig.order[-1]
    assert len(order) == min(rows, len(branches))
    chosen = sorted(branches[int(name.split("-")[1])][0] for name in order)
    assert chosen == sorted(priority for priority, _ in branches)[-len(order) :]
    groups = [name.split("-")[0] for name in order]
    changes = 1 + sum(a != b for a, b in pairwise(groups))
    assert changes <= len(set(groups))


def test_without_gangs_a_batch_stands_in_order_of_arrival(make_rig: Any) -> None:
    """D17, I20: the switch."""
    names = [f"{i % 2}-{i}" for i in range(6)]
    for gang, expected in ((False, names), (True, sorted(names, key=lambda n: n[0]))):
        rig = make_rig(gang=gang)
        capsules = [rig.capsule(9), rig.capsule(9)]
        for i, name in enumerate(names):
            rig.add(name, origin=capsules[i % 2])
        rig.run(4)
        assert rig.order[-1] == expected


def test_round_robin_gives_every_decode_a_turn(make_rig: Any) -> None:
    """I21: with turns for 2 of 7 decodes each has one at least every 4 steps."""
    rig = make_rig(policy="decode_round_robin", max_decodes=2, ageing_steps=0)
    for i in range(7):
        rig.add(f"b{i}")
    rig.run(12)
    last = {f"b{i}": 0 for i in range(7)}
    for step in range(1, 30):
        served = rig.step()
        assert len(served) == 2
        for name in served:
            assert step - last[name] <= 4
            last[name] = step


def test_several_prompts_share_a_step(make_rig: Any) -> None:
    """I28, part: retire, admit and decode meet in one plan; the cap on chunks holds."""
    rig = make_rig(max_step_tokens=32)
    for i in range(3):
        rig.add(f"b{i}", 8, outputs=1)
    assert rig.step() == {"b0": 8, "b1": 8, "b2": 8}
    assert not rig.scheduler.has_work
    rig = make_rig(max_step_tokens=32, max_chunks=2)
    for i in range(3):
        rig.add(f"b{i}", 8)
    assert rig.step() == {"b0": 8, "b1": 8}
    assert rig.step() == {"b0": 1, "b1": 1, "b2": 8}


def test_an_uncut_prompt_runs_in_one_step_and_decodes_are_not_starved(make_rig: Any) -> None:
    """I11, part, I20: without chunks a prompt is whole or waits; decodes and prompts take turns."""
    rig = make_rig(chunked=False, max_step_tokens=16)
    rig.add("a", 3)
    rig.step()
    for i in range(4):
        rig.add(f"long{i}", 16, outputs=1)
    served = rig.run(9)
    assert [s["long0"] for s in served if "long0" in s] == [16]
    assert all(any("a" in s for s in served[i : i + 2]) for i in range(8))
    assert sum(name.startswith("long") for s in served for name in s) == 4


def test_without_continuous_batching_nobody_joins_those_that_run(make_rig: Any) -> None:
    """I8: static batches."""
    rig = make_rig(continuous=False)
    rig.add("a", 4, outputs=6)
    rig.step()
    rig.add("b", 4)
    assert all("b" not in s for s in rig.run(5))
    assert rig.step() == {"b": 4}


def test_a_short_prompt_does_not_wait_behind_a_long_one(make_rig: Any) -> None:
    """I11, part: it takes a part of the next step, and decodes go on; of a lower priority it waits."""
    rig = make_rig()
    rig.add("long", 400)
    rig.step()
    rig.add("short", 2)
    assert rig.step() == {"long": 14, "short": 2}
    assert rig.run(5) == [{"long": 15, "short": 1}] * 5
    rig.add("low", 2, priority=-1.0)
    assert set(rig.step()) == {"long", "short"}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bound", [8, 16])
def test_everybody_is_served_within_the_ageing_bound(
    make_rig: Any, policy: str, bound: int
) -> None:
    """I8, I21, part: a stream of higher priorities, long prompts and few rows starve nobody."""
    rig = make_rig(policy=policy, max_rows=4, ageing_steps=bound, num_blocks=4096)
    rig.add("low decode", priority=-5.0)
    rig.run(3)
    rig.add("low prompt", 40, priority=-5.0)
    added = {"low decode": 3, "low prompt": 3}
    last = dict(added)
    for step in range(4, 150):
        if step % 3 == 0:
            rig.add(f"high{step}", 1 + step % 30, outputs=7, priority=5.0, session=f"s{step % 2}")
        for name in rig.step():
            if name in last:
                assert step - last[name] <= bound, name
                last[name] = step
    assert all(step > 140 - bound for step in last.values())


# Blocks run out: who gives way, who comes back, and that everybody ends


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


def test_what_others_wait_for_keeps_their_priority_when_its_own_is_lowered(make_rig: Any) -> None:
    """D15, S6: also if theirs was the lower one till then."""
    rig = make_rig()
    text = list(range(1000, 1090))
    producer = rig.add("producer", text, priority=5.0)
    rig.step()
    waiter = rig.add("waiter", [*text, 1], priority=6.0)
    rig.step()
    assert waiter.phase == "gated"
    rig.add("other", 90, priority=1.0)
    rig.scheduler.prioritize(waiter, 3.0)
    rig.scheduler.prioritize(producer, -5.0)
    assert rig.step() == {"producer": 16}


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
