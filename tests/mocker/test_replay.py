"""K26, K21: small replays, worked out by hand; the same seed gives the same log of events.

Here a prompt token takes 1 ms, a decode step 10 ms however many rows it has, and nothing else any time.
A block has four tokens, as an id has. The last token of a prompt is always computed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.workloads import made
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.result import Result
from mallee.mocker.replay.run import replay
from mallee.mocker.replay.simulation import Simulation
from mallee.mocker.timing import ClosedForm, Plane, Timing
from mallee.traces.workload import Request, Workload
from support.examples import examples

TIMING = Timing(ClosedForm(0.0, 1e-3, 0.0, 0.0, (Plane(10e-3, 0.0, 0.0),)))
ONE = ReplayConfig(engines=1, kv_tokens=256, timing=TIMING, policy="round_robin")


def ask(number: int, ids: Sequence[int], output: int, at: float = 0.0, **more: Any) -> Request:
    """A request of whole ids."""
    tokens = more.pop("tokens", 4 * len(ids))
    return Request(number, at, list(ids), tokens, output, **more)


def play(requests: Sequence[Request], config: ReplayConfig = ONE, kind: str = "made") -> Result:
    """Replayed and checked; the rows are in the order of the requests."""
    simulation = Simulation(made(requests, name="test", id_tokens=4, kind=kind), config)
    simulation.run()
    simulation.check()
    result = replay(made(requests, name="test", id_tokens=4, kind=kind), config)
    assert result.summary["digest"] == simulation.log.digest()
    columns = result.columns
    return replace(result, columns=columns.picked(columns.number.argsort()))


def ms(times: Any) -> list[float]:
    """Milliseconds, without the noise of floats."""
    return [round(float(time) * 1e3, 6) for time in times]


def test_a_request_alone_waits_for_its_own_prompt_and_no_longer() -> None:
    result = play([ask(0, [1, 2], 5)])
    assert ms(result.columns.first_s) == [8]
    assert ms(result.columns.end_s) == [8 + 4 * 10]
    assert result.summary["ttft_ms"]["p50"] == pytest.approx(8)
    assert result.summary["itl_ms"]["p99"] == pytest.approx(10, rel=2e-3)
    assert result.summary["queue_ms"]["p99"] == pytest.approx(0, abs=1e-6)
    assert result.summary["hit_rate"] == 0.0


@pytest.mark.parametrize(
    ("requests", "more", "expected"),
    [
        # Two arrive together; both prompts fit into one step, so both get their first token after it.
        ([ask(0, [1, 2], 3), ask(1, [3], 3)], {}, {"first_s": [12, 12], "end_s": [32, 32]}),
        # At 9 ms the second token of the first is under way until 18: then prompt and token share a step.
        (
            [ask(0, [1, 2], 3), ask(1, [3], 2, at=0.009)],
            {},
            {"first_s": [8, 18 + 4 + 10], "end_s": [18 + 14, 32 + 10]},
        ),
        # One row at a time: three requests of 14 ms each, one after another.
        (
            [ask(i, [i], 2) for i in range(3)],
            {"max_rows": 1},
            {"end_s": [14, 28, 42], "routed_s": [0, 14, 28]},
        ),
        # Who waits for others starts when the last has ended, at 48 ms, and its tool has.
        (
            [
                *(ask(0, [1], 2), ask(1, [2], 4, at=0.001)),
                ask(2, [3], 1, at=9.0, wait_for=(0, 1), tool_wait_s=0.5),
            ],
            {},
            {"arrival_s": [0, 1, 548]},
        ),
        # In an open loop arrival times count, whatever waits.
        (
            [ask(0, [1], 100), ask(1, [3], 1, at=0.2, wait_for=(0,), tool_wait_s=0.5)],
            {"keeps_order": False},
            {"arrival_s": [0, 200]},
        ),
        (
            [ask(i, [i], 1, at=float(i)) for i in range(4)],
            {"speedup": 4.0},
            {"arrival_s": [0, 250, 500, 750]},
        ),
    ],
)
def test_times_are_those_worked_out(
    requests: list[Request], more: dict[str, Any], expected: dict[str, list[float]]
) -> None:
    columns = play(requests, replace(ONE, **more)).columns
    assert {name: ms(getattr(columns, name)) for name in expected} == expected


def test_siblings_wait_for_the_prefix_that_the_first_computes() -> None:
    """X2, part: 8 tokens at once; the sibling then needs its last block only, beside the first's decode."""
    result = play([ask(0, [1, 2], 3), ask(1, [1, 2], 3)])
    assert ms(result.columns.first_s) == [8, 8 + 4 + 10]
    assert result.columns.cached_tokens.tolist() == [0, 4]
    assert result.columns.computed_tokens.tolist() == [8, 4]
    assert result.summary["prefix_copies"] == 1.0
    branches = play([ask(0, [1, 2], 3, branches=4)]).columns
    assert ms(branches.first_s) == [8]
    assert (branches.computed_tokens.tolist(), branches.output_tokens.tolist()) == ([8], [12])


def test_a_prefix_on_two_workers_is_two_copies() -> None:
    config = replace(ONE, engines=2)
    result = play([ask(0, [1, 2, 3], 3), ask(1, [1, 2, 3], 3)], config)
    assert result.columns.worker.tolist() == [0, 1]
    # Of 12 shared tokens 8 are in blocks that could have been found; both computed those.
    assert result.summary["prefix_copies"] == pytest.approx((12 + 8) / 12)
    together = play([ask(0, [1, 2, 3], 3), ask(1, [1, 2, 3], 3)], replace(config, policy="cost"))
    assert together.columns.worker.tolist() == [0, 0]
    assert together.summary["prefix_copies"] == 1.0


@given(concurrency=st.integers(1, 6), num=st.integers(1, 30), seed=st.integers(0, 99))
@examples(10)
def test_a_closed_loop_never_has_more_under_way(concurrency: int, num: int, seed: int) -> None:
    requests = [ask(i, [i % 7, 100 + i], 1 + (i * seed) % 5, at=99.0 * i) for i in range(num)]
    result = play(requests, replace(ONE, concurrency=concurrency, engines=2))
    columns = result.columns
    points = [(at, 1) for at in columns.arrival_s] + [(at, -1) for at in columns.end_s]
    running = most = 0
    for _, change in sorted(points):
        running += change
        most = max(most, running)
    assert most == min(concurrency, num)
    assert len(columns.number) == num


def test_a_fork_computes_its_suffix_alone() -> None:
    """The root's capsule has its logits: a branch without a suffix draws at once."""
    root = ask(0, [1, 2, 3, 4], 0, num_children=2)
    empty = Request(1, 0.0, (), 0, 2, parent=0, branches=3)
    asking = Request(2, 0.0, (), 4, 2, parent=0)
    result = play([root, empty, asking])
    assert result.columns.input_tokens.tolist() == [16, 16, 20]
    assert result.columns.computed_tokens.tolist() == [16, 0, 4]
    assert result.columns.cached_tokens.tolist() == [0, 16, 16]
    assert result.summary["rebuilt_capsules"] == 0
    assert result.columns.output_tokens.tolist() == [0, 6, 2]


def test_a_fork_of_an_answer_continues_prompt_and_answer() -> None:
    first = ask(0, [1, 2], 5, num_children=1)
    result = play([first, Request(1, 0.0, (), 3, 2, parent=0)])
    # The answer's last token was drawn, not computed: the fork computes it with its own three.
    assert result.columns.input_tokens.tolist() == [8, 8 + 5 + 3]
    assert result.columns.cached_tokens.tolist() == [0, 12]
    assert result.columns.computed_tokens.tolist() == [8, 4]


def test_a_fork_whose_capsule_was_pushed_out_brings_its_text() -> None:
    first = ask(0, [1, 2], 5, num_children=1)
    others = [ask(i, [10 * i], 2, wait_for=(0,)) for i in range(1, 4)]
    late = Request(4, 0.0, (), 3, 2, parent=0, wait_for=(1, 2, 3), tool_wait_s=1.0)
    result = play([first, *others, late], replace(ONE, answer_capsules=1))
    assert result.summary["rebuilt_capsules"] == 1
    assert result.summary["errors"] == {}
    assert result.columns.input_tokens.tolist()[4] == 16
    assert result.columns.output_tokens.tolist()[4] == 2


def test_a_prompt_that_nobody_forks_is_not_kept() -> None:
    """Four of 16 blocks each, in a pool of 40: the first ones are cache by then, and give way."""
    requests = [ask(i, range(100 * i, 100 * i + 16), 0, at=float(i)) for i in range(4)]
    simulation = Simulation(
        made(requests, name="prompts", id_tokens=4), replace(ONE, kv_tokens=160, engines=1)
    )
    simulation.run()
    simulation.check()
    assert not simulation.errors
    (worker,) = simulation.fleet.workers.values()
    assert worker.engine.engine.stats().capsules.kept == 0


def test_events_arrive_late_by_the_lag() -> None:
    """A prompt that comes before the news of its prefix finds its worker by the booking alone."""
    requests = [ask(0, [1, 2, 3], 1), ask(1, [1, 2, 4], 1, at=0.020)]
    config = replace(ONE, engines=2, policy="cost")
    soon = play(requests, config)
    late = play(requests, replace(config, event_lag_s=0.5))
    assert soon.columns.worker.tolist() == [0, 0]
    assert late.columns.worker.tolist() == [0, 1]
    assert late.summary["prefix_copies"] > soon.summary["prefix_copies"] == 1.0


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Requests that share text, wait for others, branch and fork, in any mixture."""
    requests: list[Request] = []
    children: dict[int, int] = {}
    for number in range(draw(st.integers(1, 14))):
        before = st.sampled_from(range(number)) if number else st.nothing()
        parent = draw(st.one_of(st.just(-1), before)) if number else -1
        children[parent] = children.get(parent, 0) + 1
        depth = draw(st.integers(1, 5))
        ids = [] if parent >= 0 else [draw(st.integers(0, 2)) + 3 * i for i in range(depth)]
        for i in range(1, len(ids)):  # equal id, equal text before it
            ids[i] += 100 * ids[i - 1] * i
        requests.append(
            Request(
                number,
                draw(st.floats(0, 0.2)),
                ids,
                draw(st.integers(0, 9)) if parent >= 0 else 4 * len(ids) - draw(st.integers(0, 3)),
                draw(st.integers(0 if parent < 0 else 1, 20)),
                session=draw(st.sampled_from(["", "a", "b"])),
                wait_for=tuple(draw(st.sets(before, max_size=2))) if number else (),
                tool_wait_s=draw(st.sampled_from([0.0, 0.03])),
                branches=draw(st.integers(1, 4)),
                parent=parent,
            )
        )
    given_children = [
        Request(
            **{
                **{f: getattr(r, f) for f in r.__struct_fields__},
                "num_children": children.get(r.number, 0),
            }
        )
        for r in sorted(requests, key=lambda r: r.number)
    ]
    return made(given_children, name="any", id_tokens=4)


@given(
    workload=workloads(),
    engines=st.integers(1, 3),
    policy=st.sampled_from(["cost", "round_robin", "least_loaded"]),
    concurrency=st.sampled_from([0, 0, 1, 3]),
    gateways=st.integers(1, 2),
    kv_tokens=st.sampled_from([160, 800]),
    max_rows=st.sampled_from([2, 64]),
    keeps_order=st.booleans(),
)
@examples(30)
def test_no_request_is_lost_and_every_answer_is_whole(workload: Workload, **options: Any) -> None:
    config = ReplayConfig(timing=TIMING, max_step_tokens=16, answer_capsules=2, **options)
    simulation = Simulation(workload, config)
    simulation.run()
    simulation.check()
    columns = simulation.rows.columns()
    requests = list(workload)
    assert sorted(columns.number.tolist()) == [r.number for r in requests]
    ended = dict(zip(columns.number.tolist(), columns.end_s.tolist(), strict=True))
    if not simulation.errors:
        told = dict(zip(columns.number.tolist(), columns.output_tokens.tolist(), strict=True))
        assert told == {r.number: r.output_tokens * r.branches for r in requests}
    for number, arrival in zip(columns.number.tolist(), columns.arrival_s.tolist(), strict=True):
        waits = [*requests[number].wait_for] if options["keeps_order"] else []
        waits += [requests[number].parent] if requests[number].parent >= 0 else []
        assert all(ended[name] <= arrival + 1e-9 for name in waits)
    assert simulation.sharing.copies >= 1.0
