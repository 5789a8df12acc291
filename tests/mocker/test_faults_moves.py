"""K27, X6, K15: KV that moves: from prefill to decode workers, to where a fan-out spills, from below."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faults import Crash, Restart
from mallee.mocker.replay.fleet.transfers import LinkConfig
from mallee.mocker.replay.simulation import Simulation
from mallee.mocker.tiers import TierConfig
from mallee.mocker.timing import ClosedForm, Fixed, Plane, Timing
from mallee.protocol.errors import ConfigError
from mallee.traces.workload import Request
from support.examples import examples
from support.fleets import assert_indexes_are_true, digest, simulate, traffic, workload

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a story that fails is told by its seed
FIXED = Timing(Fixed(0.01, 0.005))
LINK = LinkConfig(bytes_s=10_000.0, latency_s=0.002, token_nbytes=100)  # 10 ms a token


def ends(simulation: Simulation) -> list[float]:
    columns = simulation.rows.columns()
    by_number = dict(zip(columns.number.tolist(), columns.end_s.tolist(), strict=True))
    return [by_number[number] for number in sorted(by_number)]


def roles(load: Any, *faults: Any, **more: Any) -> Simulation:
    fixed: dict[str, Any] = {"engines": 2, "prefill_engines": 1, "timing": FIXED, "link": LINK}
    return simulate(load, *faults, **(fixed | more))


# Prefill and decode workers


def test_a_prompt_is_computed_moved_and_answered() -> None:
    """K27: 10 ms of prompt, 2 ms and 8 tokens at 10 ms on the link, then 5 ms a token after the first."""
    again = Request(1, 1.0, (1, 2), 8, 3)
    simulation = roles(workload([Request(0, 0.0, (1, 2), 8, 3), again], "mooncake"))
    first, second = ends(simulation)
    assert first == pytest.approx(0.01 + 0.002 + 0.08 + 2 * 0.005)
    # The same prompt again: its last block is computed for its logits; nothing is left to move.
    assert second == pytest.approx(1.0 + 0.01 + 2 * 0.005)
    stats = simulation.transfers
    assert (stats.num_moves, stats.num_tokens, stats.nbytes) == (1, 8, 800)
    columns = simulation.rows.columns()
    assert columns.computed_tokens.tolist() == [8, 4]
    assert columns.cached_tokens.tolist() == [0, 4]


def assert_roles(simulation: Simulation) -> None:
    """Prefill workers draw nothing; what decode workers had of prompts was moved there."""
    for worker in simulation.fleet.lives.values():
        stats = worker.engine.engine.stats()
        if worker.role == "prefill":
            assert stats.num_output_tokens == 0
            assert stats.capsules.kept == 0, "a prompt that was fetched is kept"
        else:
            assert worker.engine.num_moved == stats.num_prefill_tokens


def test_each_worker_does_what_its_role_says() -> None:
    """K27: over a longer run of plain prompts and fan-outs, on several workers of each kind."""
    load = workload([r for r in traffic(2, 120) if r.parent == -1])
    simulation = roles(load, engines=5, prefill_engines=2, kv_tokens=1600)
    assert_roles(simulation)
    assert_indexes_are_true(simulation)
    workers = simulation.rows.columns().worker
    assert set(workers.tolist()) == {0, 1}, "where the prompt went"
    assert simulation.transfers.num_moves > 20


@settings(examples(12), phases=QUICK)
@given(st.integers(0, 1 << 32))
def test_with_roles_too_nobody_is_lost_when_workers_die(seed: int) -> None:
    """K27, K28, part: prefill and decode workers crash and come back, with prompts on the link."""
    link = replace(LINK, bytes_s=100_000.0)
    faults = (Crash(0.2, "w0"), Crash(0.45, "w3"), Restart(0.7, "w0"), Restart(0.9, "w4"))
    simulation = roles(traffic(seed, 40), *faults, engines=5, prefill_engines=2, link=link)
    assert_indexes_are_true(simulation)
    again = roles(traffic(seed, 40), *faults, engines=5, prefill_engines=2, link=link)
    assert digest(again) == digest(simulation)


def test_a_move_whose_source_dies_brings_nothing() -> None:
    """K27, K28, part: the decode worker computes the prompt itself, at the time the KV would have come."""
    load = workload([Request(0, 0.0, (1, 2), 8, 3)], "mooncake")
    simulation = roles(load, Crash(0.05, "w0"))
    assert simulation.transfers.num_broken == 1
    (end,) = ends(simulation)
    assert end == pytest.approx(0.01 + 0.002 + 0.08 + 0.01 + 2 * 0.005)


def test_without_prefill_workers_decode_workers_compute() -> None:
    """K27: a fleet that lost one kind of workers is slower, not dead."""
    load = workload([Request(0, 0.1, (1, 2), 8, 3)], "mooncake")
    simulation = roles(load, Crash(0.05, "w0"))
    assert simulation.transfers.num_moves == 0
    assert ends(simulation) == [pytest.approx(0.1 + 0.01 + 2 * 0.005)]


def test_a_prompt_that_can_not_be_kept_is_computed_where_it_is_answered() -> None:
    """K27: a capsule beyond what a prefill worker may keep is refused there, not by the fleet."""
    load = workload([Request(0, 0.0, tuple(range(19)), 76, 2)], "mooncake")
    simulation = roles(load, kv_tokens=80)
    assert simulation.transfers.num_moves == 0
    assert simulation.rows.columns().computed_tokens.tolist() == [76]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prefill_engines": 2}, "leave at least one to decode"),
        ({"prefill_engines": 1, "gateways": 2}, "set gateways to 1"),
        ({"can_migrate": True, "tiers": TierConfig(host_tokens=4)}, "leave one out"),
        ({"link": LinkConfig(bytes_s=0.0)}, "bytes_s=0.0"),
    ],
)
def test_what_can_not_be_together_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ReplayConfig(**({"engines": 2} | settings)).validate()


# Pulls of a fan-out that spills

GPU = Timing(ClosedForm(2e-3, 2e-5, 0.0, 0.0, (Plane(4e-3, 1e-5, 0.0),)))


def fan_out(**more: Any) -> Simulation:
    """A capsule of 2048 tokens, and 64 branches of 200 tokens for workers with 16 rows."""
    parent = Request(0, 0.0, tuple(range(512)), 2048, 0, num_children=1)
    children = Request(1, 1.0, (), 4, 200, tool_wait_s=0.5, parent=0, branches=64)
    fixed: dict[str, Any] = {"engines": 4, "kv_tokens": 32_000, "max_rows": 16, "timing": GPU}
    return simulate(workload([parent, children]), **(fixed | more))


def test_a_fan_out_spills_to_workers_that_pull_the_capsule() -> None:
    """X6, part: bytes instead of compute; every byte is counted, and every branch is done sooner."""
    link = LinkConfig(bytes_s=25e9, latency_s=1e-3, token_nbytes=100_000)
    alone, computed, pulled = (
        fan_out(engines=1),
        fan_out(),
        fan_out(can_migrate=True, link=link),
    )
    assert pulled.gateways[0].router.stats().spilled["migrate"] == 3
    stats = pulled.transfers
    assert (stats.num_moves, stats.nbytes) == (3, 3 * 2048 * 100_000)
    assert ends(pulled)[1] < ends(computed)[1] < ends(alone)[1] / 2
    work = [
        sum(w.engine.engine.stats().num_prefill_tokens - w.engine.num_moved for w in lives)
        for lives in (s.fleet.lives.values() for s in (computed, pulled))
    ]
    assert work[0] > 4 * 2048
    assert work[1] < 2048 + 64 * 8
    assert_indexes_are_true(pulled)


def test_over_a_slow_link_nobody_pulls() -> None:
    """X6, part: the cheapest of waiting, moving and computing again is chosen by price."""
    link = LinkConfig(bytes_s=1e8, latency_s=1e-3, token_nbytes=100_000)
    simulation = fan_out(can_migrate=True, link=link)
    assert simulation.transfers.num_moves == 0
    assert simulation.gateways[0].router.stats().spilled.get("recompute", 0) == 3


# Lower tiers


LINEAR = Timing(ClosedForm(0.0, 1e-3, 0.0, 0.0, (Plane(0.0, 0.0, 0.0),)))  # 1 ms a token of prompt
# 0.2 ms, and 1 ms a block
TIERS = TierConfig(host_tokens=32, host_bytes_s=400_000.0, token_nbytes=100)


def test_what_was_evicted_comes_back_from_host_memory_in_bytes_not_compute() -> None:
    """K15, part: three prompts of two blocks take turns on a device that holds two of them."""
    ids = [(10 * (i % 3) + 1, 10 * (i % 3) + 2) for i in range(6)]
    prompts = [Request(i, float(i), ids[i], 8, 1) for i in range(6)]
    load = workload(prompts, "mooncake")
    without, within = (
        simulate(load, engines=1, kv_tokens=16, timing=LINEAR, tiers=each) for each in (None, TIERS)
    )
    took = [[end - i for i, end in enumerate(ends(each))] for each in (without, within)]
    computed = 8 * 1e-3
    fetched = (0.2 + 1 + 4) * 1e-3  # the first block; the last is computed, for its logits
    assert took[0] == [pytest.approx(computed)] * 6
    assert took[1] == [pytest.approx(computed)] * 3 + [pytest.approx(fetched)] * 3
    (worker,) = within.fleet.workers.values()
    stats = worker.engine.engine.stats().tiers
    assert stats is not None
    assert (stats.num_fetched_host, stats.num_declined) == (3, 0)
    assert_indexes_are_true(within)


def test_what_is_cheaper_to_compute_is_not_fetched() -> None:
    """K15, part: once moves and prompts are measured, blocks that take longer to come stay below."""
    ids = [(10 * (i % 3) + 1, 10 * (i % 3) + 2) for i in range(9)]
    load = workload([Request(i, float(i), ids[i], 8, 1) for i in range(9)], "mooncake")
    slow = replace(TIERS, host_bytes_s=40_000.0)  # 10 ms a block, which is computed in 4
    simulation = simulate(load, engines=1, kv_tokens=16, timing=LINEAR, tiers=slow)
    (worker,) = simulation.fleet.workers.values()
    stats = worker.engine.engine.stats().tiers
    assert stats is not None
    assert stats.num_fetched_host == 1  # the first tells the price
    assert stats.num_declined == 5
    assert [end - i for i, end in enumerate(ends(simulation))][6:] == [pytest.approx(8e-3)] * 3
    prices = worker.engine.engine.load().fetch
    assert prices is not None
    assert prices.token_s == pytest.approx(1e-3)
    assert prices.host_first_s == pytest.approx(2e-4)
    assert prices.host_block_s == pytest.approx(1e-2)


def test_a_router_sends_a_prompt_where_it_is_in_host_memory() -> None:
    """K15, part: fetching is priced: dearer than what is on the device, cheaper than computing it again."""
    other = [Request(i, float(i), (10 * i, 10 * i + 1), 8, 1) for i in range(1, 5)]
    again = Request(5, 9.0, (1, 2), 8, 1)
    load = workload([Request(0, 0.0, (1, 2), 8, 1), *other, again], "mooncake")
    for tiers, is_back in ((None, False), (TIERS, True)):
        simulation = simulate(load, engines=2, kv_tokens=16, timing=LINEAR, tiers=tiers)
        columns = simulation.rows.columns()
        assert columns.worker[:5].tolist() == [0, 1, 0, 1, 0]
        assert bool(columns.worker[5] == 0) is is_back


@settings(examples(12), phases=QUICK)
@given(st.integers(0, 1 << 32))
def test_routers_know_the_tiers_of_workers_that_crash_and_come_back(seed: int) -> None:
    """K15, part, X5: the tiers of a life end with it; afterwards every index has the truth, tier by tier."""
    tiers = TierConfig(host_tokens=48, disk_tokens=80)
    faults = (Crash(0.3, "w0"), Restart(0.6, "w0"), Restart(0.8, "w1"))
    simulation = simulate(traffic(seed, 50), *faults, kv_tokens=192, tiers=tiers, event_lag_s=0.01)
    assert_indexes_are_true(simulation)


@settings(examples(12), phases=QUICK)
@given(st.integers(0, 1 << 32))
def test_a_replay_with_tiers_repeats(seed: int) -> None:
    """K15, part: the same seed gives the same log, moves included."""
    tiers = TierConfig(host_tokens=128, disk_tokens=320)
    first, second = (simulate(traffic(seed, 50), kv_tokens=192, tiers=tiers) for _ in range(2))
    assert digest(first) == digest(second)


def test_a_session_that_wants_its_text_retained_finds_it_after_others_passed() -> None:
    """K15, part: up to a quarter of the device, as each session is a tenant, while others fill the rest."""
    first = Request(0, 0.0, (1, 2, 3), 12, 1, "s")
    others = [Request(i, float(i), (10 * i, 10 * i + 1), 8, 1) for i in range(1, 9)]
    again = Request(9, 20.0, (1, 2, 3, 4), 16, 1, "s")
    load = workload([first, *others, again], "mooncake")
    for retain_s, cached in ((0.0, 0), (60.0, 8)):
        simulation = simulate(load, engines=1, kv_tokens=32, timing=LINEAR, retain_s=retain_s)
        assert simulation.rows.columns().cached_tokens[-1] == cached
