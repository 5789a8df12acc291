"""K28, X5, X8: workers crash, come back, drain, join and slow down, and the broker goes, in mid-run.

No request is lost, every index ends up with the truth, capsules that died are built again and counted.
"""

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from mallee.mocker.replay.fleet.faults import Crash, Drain, Fault, Join, Outage, Restart, Slow
from mallee.mocker.timing import Fixed, Timing
from mallee.traces.workload import Request
from support.examples import examples
from support.faults import random_faults
from support.fleets import (
    SIZE,
    TIMING,
    assert_indexes_are_true,
    digest,
    named,
    simulate,
    traffic,
    workload,
)

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a story that fails is told by its seed


@settings(examples(25), phases=QUICK)
@example(seed=33554432, gateways=2, lag=0.0, detect=0.0, startup=0.2)  # waited for the dead
@given(
    seed=st.integers(0, 1 << 32),
    gateways=st.sampled_from([1, 1, 2]),
    lag=st.sampled_from([0.0, 0.05]),
    detect=st.sampled_from([0.0, 0.1]),
    startup=st.sampled_from([0.0, 0.2]),
)
def test_whatever_happens_nobody_is_lost_and_the_indexes_are_true(
    seed: int, gateways: int, lag: float, detect: float, startup: float
) -> None:
    """K28, part, X5, X8: random stories over random traffic; the same story twice is the same to the bit."""
    timing = Timing(TIMING.model, TIMING.overhead_s, startup_s=startup)
    more = {"gateways": gateways, "event_lag_s": lag, "detect_s": detect, "timing": timing}
    load, faults = traffic(seed, num=30), random_faults(seed)
    simulation = simulate(load, *faults, **more)
    assert_indexes_are_true(simulation)
    if seed % 3 == 0:
        assert digest(simulate(load, *faults, **more)) == digest(simulation)


def test_requests_of_a_worker_that_dies_go_on_elsewhere_after_their_last_token() -> None:
    """K28, part: what was told is not told again, and the retry is counted."""
    load = workload([Request(0, 0.0, (1, 2), 8, 40)], "mooncake")
    simulation = simulate(load, Crash(0.1022, "w0"), timing=Timing(Fixed(0.01, 0.005)))
    (gateway,) = simulation.gateways
    assert gateway.num_retries == 1
    columns = simulation.rows.columns()
    assert columns.output_tokens.tolist() == [40]
    # 19 tokens were told; the others begin with a prompt again.
    assert columns.end_s[0] == pytest.approx(0.1022 + 0.01 + 20 * 0.005)


@settings(examples(15), phases=QUICK)
@given(
    seed=st.integers(0, 1 << 32), gateways=st.sampled_from([1, 2]), lag=st.sampled_from([0.0, 0.05])
)
def test_forks_of_drained_workers_capsules_have_the_texts_of_an_undisturbed_run(
    seed: int, gateways: int, lag: float
) -> None:
    """K28, part, X4, part: among other faults; no block has another text, no answer fewer tokens.

    All workers that drained have left.
    """
    load = workload(named(traffic(seed, num=30, kept=0.7, sessions=4 * gateways - 3)))
    more = {"gateways": gateways, "kv_tokens": 1024 * SIZE, "event_lag_s": lag}
    texts: list[set[int]] = [set(), set()]
    simulate(load, blocks=texts[0], **more)
    simulation = simulate(load, *random_faults(seed, drains=4), blocks=texts[1], **more)
    assert texts[1] <= texts[0]
    assert not any(worker.is_draining for worker in simulation.fleet.workers.values())
    assert_indexes_are_true(simulation)


def test_who_drains_ends_what_it_has_and_gets_nothing_new() -> None:
    """K28, part: nothing is retried, and nothing is begun there after."""
    load = traffic(4, num=80)
    simulation = simulate(load, Drain(0.5, "w1"))
    assert simulation.gateways[0].num_retries == 0
    (left,) = [w for w in simulation.fleet.lives.values() if w.name == "w1"]
    assert 0.5 <= left.left_s < 2.0
    columns = simulation.rows.columns()
    routed_late = columns.routed_s > 0.5
    assert not (columns.worker[routed_late] == 1).any()
    assert_indexes_are_true(simulation)


STARTS_SLOWLY = Timing(TIMING.model, TIMING.overhead_s, startup_s=0.3)


def test_what_happens_to_a_worker_that_is_still_starting() -> None:
    """K28, part: it crashes or is drained before it ever was; a restart begins the start-up anew."""
    load = traffic(9, num=60)
    joins: list[Fault] = [Join(0.1, name) for name in ("w3", "w4", "w5", "w6")]
    faults = [*joins, Crash(0.2, "w3"), Drain(0.2, "w4"), Restart(0.2, "w5"), Slow(0.2, "w6", 3, 9)]
    simulation = simulate(load, *faults, timing=STARTS_SLOWLY)
    began = {w.name: w.joined_s for w in simulation.fleet.lives.values() if w.index > 2}
    assert began == {"w5": pytest.approx(0.5), "w6": pytest.approx(0.4)}
    assert_indexes_are_true(simulation)


def test_a_slow_spell_slows_the_steps_that_begin_in_it() -> None:
    """K28, part: 20 tokens at 5 ms, those that begin from 30 to 60 ms at 15 ms."""
    load = workload([Request(0, 0.0, (1,), 4, 20)], "mooncake")
    timing = Timing(Fixed(0.01, 0.005))
    faults = (Slow(0.0299, "w0", 3.0, 0.03),)
    simulation = simulate(load, *faults, engines=1, timing=timing)
    (end,) = simulation.rows.columns().end_s.tolist()
    assert end == pytest.approx(0.01 + 19 * 0.005 + 2 * 0.01)


def test_without_anybody_alive_requests_wait_for_who_comes_back() -> None:
    """K28, part: a fleet that dies whole loses time, not requests."""
    load = traffic(6, num=40)
    dead = [Crash(0.4, f"w{i}") for i in range(3)]
    simulation = simulate(load, *dead, Restart(2.0, "w1"))
    assert simulation.clock.now > 2.0
    assert list(simulation.fleet.workers) == ["w1"]
    assert_indexes_are_true(simulation)


@pytest.mark.parametrize("gateways", [1, 2])
def test_without_a_broker_routing_goes_on_and_the_index_catches_up(gateways: int) -> None:
    """X8: what was published meanwhile is lost; the next lease tells of the gap, a snapshot closes it."""
    load = traffic(7, num=120)
    simulation = simulate(load, Outage(0.5, 1.0), gateways=gateways)
    assert simulation.num_lost_events > 0
    columns = simulation.rows.columns()
    meanwhile = (columns.arrival_s > 0.5) & (columns.arrival_s < 1.4)
    assert meanwhile.sum() > 10
    assert (columns.routed_s[meanwhile] < 1.5).any(), "requests were routed while it was gone"
    assert sum(g.router.stats().gaps for g in simulation.gateways) > 0
    assert all(g.router.stats().is_broker_up for g in simulation.gateways)
    assert_indexes_are_true(simulation)
