"""K26, K18: what a replay reports adds up, also where branches are left out, preempted, lost or fail."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.workloads import made
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faults import Crash, Join, Restart
from mallee.mocker.replay.result import Wall, summarise
from mallee.mocker.replay.simulation import Simulation
from mallee.mocker.sweeps.pool import keep
from mallee.mocker.sweeps.sweep import Fleet, Sweep
from mallee.mocker.timing import ClosedForm, Plane, Timing
from mallee.router.dispatch.recovery.quarantine import QUIET_S
from mallee.traces.workload import Request, Workload
from support.examples import examples

TIMING = Timing(ClosedForm(0.0, 1e-3, 0.0, 0.0, (Plane(8e-3, 1e-3, 0.0),)), overhead_s=0.5e-3)


def run(workload: Workload, **options: Any) -> Simulation:
    settings: dict[str, Any] = {"engines": 1, "kv_tokens": 256, "timing": TIMING} | options
    simulation = Simulation(workload, ReplayConfig(**settings))
    simulation.run()
    simulation.check()
    return simulation


def asked(*requests: Request) -> Workload:
    return made(requests, name="test", id_tokens=4)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=14),
    num_sessions=st.integers(1, 3),
    kv_tokens=st.sampled_from([72, 160, 1600]),
    max_rows=st.sampled_from([2, 5, 64]),
    max_step_tokens=st.sampled_from([6, 64]),
    jitter=st.sampled_from([0.0, 0.3]),
)
@examples(40)
def test_gaps_are_the_time_from_first_tokens_to_last_ones(
    lengths: list[tuple[int, int]], num_sessions: int, jitter: float, **options: Any
) -> None:
    """A request that is preempted or left out of a step has a longer gap; every gap is counted once."""
    requests = [
        Request(
            i, 0.003 * i, [10 * i + k for k in range(ids)], 4 * ids, output, f"s{i % num_sessions}"
        )
        for i, (ids, output) in enumerate(lengths)
    ]
    timing = Timing(TIMING.model, overhead_s=TIMING.overhead_s, jitter=jitter)
    simulation = run(asked(*requests), timing=timing, **options)
    assert not simulation.errors
    columns, gaps = simulation.rows.columns(), simulation.gaps
    num = int(gaps.histogram().counts.sum())
    assert num == int((columns.output_tokens - 1).sum())
    spans = float((columns.end_s - columns.first_s).sum())
    assert num == 0 or gaps.mean_s * num == pytest.approx(spans, rel=1e-9, abs=1e-9)


def test_a_preempted_branch_has_one_long_gap() -> None:
    """Two answers of 10 blocks each in a pool of 16: one stops till the other is over."""
    simulation = run(asked(*(Request(i, 0.0, [9 * i], 4, 36) for i in range(2))), kv_tokens=64)
    (worker,) = simulation.fleet.workers.values()
    assert worker.engine.engine.stats().sched.num_preemptions == 1
    histogram = simulation.gaps.histogram()
    assert int(histogram.counts.sum()) == 2 * 35
    assert histogram.percentile(1.0) > 5 * histogram.percentile(0.5)


def test_a_crash_right_after_a_first_token_leaves_a_gap_too() -> None:
    """The first token is there at 4.5 ms, the next after the prompt and it were computed elsewhere."""
    simulation = run(
        asked(Request(0, 0.0, [1], 4, 2)),
        engines=2,
        policy="round_robin",
        faults=(Crash(at_s=0.006, worker="w0"),),
    )
    columns = simulation.rows.columns()
    assert columns.retries.tolist() == [1]
    assert int(simulation.gaps.histogram().counts.sum()) == 1
    assert simulation.gaps.mean_s == pytest.approx(columns.end_s[0] - columns.first_s[0])
    dead, _ = simulation.fleet.lives.values()
    assert dead.busy_s == pytest.approx(0.006)  # in the middle of a step


def test_that_an_idle_worker_died_is_noticed_as_late_as_of_any_other() -> None:
    """K28, part: what is sent there meanwhile is sent again, once that is known and it is quiet again."""
    simulation = run(
        asked(Request(0, 0.0, [1], 4, 1), Request(1, 1.1, [2], 4, 1)),
        engines=2,
        policy="round_robin",
        faults=(Crash(at_s=1.0, worker="w1"),),
        detect_s=0.5,
    )
    columns = simulation.rows.columns()
    assert columns.retries.tolist() == [0, 1]
    assert columns.first_s[1] == pytest.approx(1.0 + 0.5 + QUIET_S + 4.5e-3)


def test_any_jitter_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the greatest and the least draw."""
    for bits in (0, (1 << 64) - 1):
        monkeypatch.setattr("mallee.mocker.passes.mixed", lambda value, bits=bits: bits)
        timing = Timing(TIMING.model, jitter=0.5)
        columns = run(asked(Request(0, 0.0, [1], 4, 3)), timing=timing).rows.columns()
        assert 0.0 < columns.first_s[0] < columns.end_s[0] < 10.0


def test_who_failed_counts_in_no_latency() -> None:
    """Nothing has room for the first: it is an error at once, not a quick answer. Who waits goes on."""
    fits = Request(1, 0.0, [100], 4, 2, wait_for=(0,))
    workload = asked(Request(0, 0.0, list(range(80)), 320, 2), fits)
    simulation = run(workload)
    summary = summarise(workload, simulation, Wall(1.0, 0.0, 0.0, 0.0)).summary
    assert summary["errors"] == {"kv_memory_exceeded": 1}
    columns = simulation.rows.columns()
    assert columns.output_tokens[columns.number.argsort()].tolist() == [0, 2]
    assert summary["requests"] == 2
    assert summary["e2e_ms"]["p50"] == summary["e2e_ms"]["p99"] > 0
    assert summary["slo_share"] == 0.5


@pytest.mark.parametrize("concurrency", [0, 3])
def test_who_is_lost_missed_every_limit(concurrency: int) -> None:
    """A fleet that died is not enough for those that it served, whether the others came or not."""
    workload = asked(*(Request(i, 0.05 * i, [i], 4, 30) for i in range(40)))
    crashes = tuple(Crash(at_s=1.0 + i / 100, worker=f"w{i}") for i in range(2))
    config = ReplayConfig(
        engines=2, kv_tokens=256, timing=TIMING, faults=crashes, concurrency=concurrency
    )
    simulation = Simulation(workload, config)
    simulation.run()
    result = summarise(workload, simulation, Wall(1.0, 0.0, 0.0, 0.0))
    summary, num_ended = result.summary, len(result.columns.number)
    assert 0 < num_ended < 20
    assert summary["lost"] == 40 - num_ended
    assert summary["slo_share"] == pytest.approx(num_ended / 40)
    assert summary["goodput_per_s"] * summary["duration_s"] == pytest.approx(num_ended)
    assert summary["duration_s"] >= (1.01 if concurrency else 0.05 * 39)
    assert 0.9 < summary["utilisation"]["most"] <= 1.0
    kept = keep(result)
    assert kept.ttft_at(0.2) < kept.ttft_at(0.9) == float("inf")
    fleet = Fleet(2, "cost", 256, {0: kept})
    assert fleet.spread("failed_requests").median == 40 - num_ended
    assert Sweep((fleet,), {}, good_share=0.95).smallest_good(fleet.load) is None


def test_a_worker_that_came_back_is_another_life_in_the_rows() -> None:
    """Of each request the life that its first part went to, whatever joined before or after."""
    faults = (Join(0.5, "w8"), Restart(2.0, "w0"), Crash(3.0, "w8"))
    times = (0.0, 0.0, 1.0, 2.5, 2.5, 4.0, 4.0)
    workload = asked(*(Request(i, at, [i], 4, 2) for i, at in enumerate(times)))
    options = {"engines": 2, "faults": faults, "policy": "round_robin"}
    simulation = run(workload, **options)
    result = summarise(workload, simulation, Wall(1.0, 0.0, 0.0, 0.0))
    assert result.workers == ["w0", "w1", "w8", "w0#2"]
    columns = result.columns
    names = [result.workers[worker] for worker in columns.worker[columns.number.argsort()]]
    lives = {"w0": (0.0, 2.0), "w8": (0.5, 3.0), "w0#2": (2.0, 9.0), "w1": (0.0, 9.0)}
    assert all(lives[name][0] <= at < lives[name][1] for name, at in zip(names, times, strict=True))
    assert set(names) == set(lives)
