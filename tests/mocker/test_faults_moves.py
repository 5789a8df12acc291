"""K27, X6, K15: KV that moves: from prefill to decode workers, to where a fan-out spills, from below."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mallee.mocker.device import DeviceConfig
from mallee.mocker.links import LinkConfig
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.faults import Crash, Drain, Restart
from mallee.mocker.replay.fleet.loans import FleetPeers
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


def peers(simulation: Simulation) -> FleetPeers:
    assert simulation.fleet.peers is not None
    return simulation.fleet.peers


def roles(load: Any, *faults: Any, **more: Any) -> Simulation:
    fixed: dict[str, Any] = {"engines": 2, "prefill_engines": 1, "timing": FIXED, "link": LINK}
    return simulate(load, *faults, **(fixed | more))


# Prefill and decode workers


def test_a_prompt_is_computed_moved_and_answered() -> None:
    """K27: 10 ms of prompt, 2 ms and a block of 4 tokens at 10 ms on the link, then 10 ms for the last block,
    for its logits, and 5 ms a token after the first."""
    again = Request(1, 1.0, (1, 2), 8, 3)
    simulation = roles(workload([Request(0, 0.0, (1, 2), 8, 3), again], "mooncake"))
    first, second = ends(simulation)
    assert first == pytest.approx(0.01 + 0.002 + 0.04 + 0.01 + 2 * 0.005)
    # The same prompt again: its last block is computed for its logits; nothing is left to move.
    assert second == pytest.approx(1.0 + 0.01 + 0.01 + 2 * 0.005)
    assert (peers(simulation).num_moves, peers(simulation).num_blocks) == (1, 1)
    columns = simulation.rows.columns()
    assert columns.computed_tokens.tolist() == [8 + 4, 4 + 4]
    assert columns.cached_tokens.tolist() == [0, 4]


def test_each_worker_does_what_its_role_says() -> None:
    """K27: over a longer run of plain prompts and fan-outs, on several workers of each kind: prefill workers
    draw nothing, decode workers compute what is left of a prompt after its last whole block."""
    load = workload([r for r in traffic(2, 120) if r.parent == -1])
    timing = Timing(ClosedForm(0.0, 1e-2, 0.0, 0.0, (Plane(5e-3, 0.0, 0.0),)))  # dearer than a link
    link = LinkConfig(bytes_s=1e6, latency_s=0.002, token_nbytes=100)
    simulation = roles(load, engines=5, prefill_engines=2, kv_tokens=1600, timing=timing, link=link)
    computed = 0
    for worker in simulation.fleet.lives.values():
        stats = worker.engine.engine.stats()
        if worker.role == "prefill":
            assert stats.num_output_tokens == 0
            assert stats.capsules.kept == 0, "a prompt that was fetched is kept"
        else:
            computed += stats.num_prefill_tokens
    assert computed <= 4 * len(list(load))
    assert_indexes_are_true(simulation)
    workers = simulation.rows.columns().worker
    assert set(workers.tolist()) == {0, 1}, "where the prompt went"
    assert peers(simulation).num_moves > 20


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


@pytest.mark.parametrize(
    ("at_s", "ids", "crash_s", "moved", "took_s", "computed"),
    [
        # Two of three blocks were there; the decode worker computes the others itself, at the time at which
        # the last one would have come.
        (0.0, (1, 2, 3, 4), 0.012 + 0.09, (1, 2, 1), 0.012 + 0.12 + 0.01, 16 + 8),
        # A lender that is gone by the question lends nothing.
        (0.0, (1, 2), 0.011, (0, 0, 0), 0.012 + 0.01, 8 + 8),
        # A fleet that lost one kind of workers is slower, not dead.
        (0.1, (1, 2), 0.05, (0, 0, 0), 0.01, 8),
    ],
)
def test_what_a_prefill_worker_that_dies_did_not_lend_is_computed_where_it_is_answered(
    at_s: float,
    ids: tuple[int, ...],
    crash_s: float,
    moved: tuple[int, int, int],
    took_s: float,
    computed: int,
) -> None:
    """K27, K28, part: a crash during the pull, before it, and before the request."""
    load = workload([Request(0, at_s, ids, 4 * len(ids), 3)], "mooncake")
    simulation = roles(load, Crash(crash_s, "w0"))
    found = peers(simulation)
    assert (found.num_moves, found.num_blocks, found.num_broken) == moved
    assert ends(simulation) == [pytest.approx(at_s + took_s + 2 * 0.005)]
    assert simulation.rows.columns().computed_tokens.tolist() == [computed]


def test_a_prompt_that_can_not_be_kept_is_computed_where_it_is_answered() -> None:
    """K27: a capsule beyond what a prefill worker may keep is refused there, not by the fleet."""
    load = workload([Request(0, 0.0, tuple(range(19)), 76, 2)], "mooncake")
    simulation = roles(load, kv_tokens=80)
    assert peers(simulation).num_moves == 0
    assert simulation.rows.columns().computed_tokens.tolist() == [76]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prefill_engines": 2}, "leave at least one to decode"),
        ({"prefill_engines": 1, "gateways": 2}, "set gateways to 1"),
        ({"link": LinkConfig(bytes_s=0.0)}, "bytes_s=0.0"),
        ({"tiers": TierConfig(host_tokens=-1)}, "host_tokens=-1"),
        ({"tiers": TierConfig(host_bytes_s=0)}, "host_bytes_s=0"),
        ({"tiers": TierConfig(disk_latency_s=-1)}, "disk_latency_s=-1"),
        ({"tiers": TierConfig(token_nbytes=0)}, "token_nbytes=0"),
        ({"tiers": TierConfig(disk_tokens=64)}, "by way of host memory"),
        ({"device": DeviceConfig(0)}, "engines_per_device=0"),
        ({"device": DeviceConfig(2, slice_s=0.0)}, "slice_s=0"),
        ({"device": DeviceConfig(2, switch_s=-1.0)}, "switch_s=-1"),
    ],
)
def test_what_can_not_be_is_refused_by_value(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ReplayConfig(**({"engines": 2} | settings)).validate()


# Pulls of a fan-out that spills

GPU = Timing(ClosedForm(2e-3, 2e-5, 0.0, 0.0, (Plane(4e-3, 1e-5, 0.0),)))


def fan_out(*faults: Any, **more: Any) -> Simulation:
    """A capsule of 2048 tokens, and 64 branches of 200 tokens for workers with 16 rows."""
    parent = Request(0, 0.0, tuple(range(512)), 2048, 0, num_children=1)
    children = Request(1, 1.0, (), 4, 200, tool_wait_s=0.5, parent=0, branches=64)
    fixed: dict[str, Any] = {"engines": 4, "kv_tokens": 32_000, "max_rows": 16, "timing": GPU}
    return simulate(workload([parent, children]), *faults, **(fixed | more))


def test_a_fan_out_whose_lender_dies_is_computed() -> None:
    """X6, part, K28, part: in the middle of its pulls; every branch gets its tokens all the same."""
    link = LinkConfig(bytes_s=25e9, latency_s=1e-3, token_nbytes=100_000)
    whole = fan_out(can_migrate=True, link=link)
    home = int(whole.rows.columns().worker[0])
    broken = fan_out(Crash(0.552, f"w{home}"), can_migrate=True, link=link)
    assert peers(broken).num_broken == 3
    assert 3 * 256 < peers(broken).num_blocks < 3 * 512
    assert digest(fan_out(Crash(0.552, f"w{home}"), can_migrate=True, link=link)) == digest(broken)


@settings(examples(12), phases=QUICK)
@given(st.integers(0, 1 << 32))
def test_workers_that_lend_die_and_come_back_and_it_repeats(seed: int) -> None:
    """X6, part, K15, part, K28, part, X5, part: with tiers and without: equal logs, true indexes."""
    tiers = TierConfig(host_tokens=48, disk_tokens=80) if seed % 2 else None
    link = LinkConfig(bytes_s=1e6, latency_s=1e-3, token_nbytes=100)
    faults = (Crash(0.3, "w0"), Restart(0.6, "w0"), Drain(0.7, "w2"), Restart(0.9, "w1"))
    first, second = (
        simulate(
            traffic(seed, 60, kept=0.5),
            *faults,
            kv_tokens=192,
            tiers=tiers,
            link=link,
            can_migrate=True,
            event_lag_s=0.01,
        )
        for _ in range(2)
    )
    assert digest(first) == digest(second)
    assert_indexes_are_true(first)
    for worker in first.fleet.workers.values():
        assert worker.engine.engine.stats().lending.open == 0


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
