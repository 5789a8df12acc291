"""Replays of two traces on one fleet: how it is chosen, and what counts as another ranking."""

from dataclasses import dataclass, field

import msgspec
import pytest

from mallee.cli.synth.replays import replay
from mallee.synth.compare.fits import Reading, Source, compare_workload, source_of
from mallee.synth.compare.gates import outcomes
from mallee.synth.compare.replays import (
    LARGE,
    LEAST_BAND,
    PILOT,
    POLICIES,
    REPLAY_GATES,
    SIZES,
    Figures,
    Fleet,
    Replays,
    _compared,
    fleet_for,
    noise_band,
    replay_all,
)
from mallee.traces.trace import trace_of
from mallee.traces.workload import Workload
from support.made_workloads import fan_out_workload, sessions_workload

WORKLOAD = sessions_workload(100, seed=3)


@dataclass
class Pretended:
    """A replayer whose engines are saturated below `load` of them (by policy)."""

    load: dict[str, float] = field(default_factory=dict)
    failing_below: int = 0
    asked: list[tuple[Fleet, str]] = field(default_factory=list)

    def __call__(self, workload: Workload, fleet: Fleet, policy: str) -> Figures:
        self.asked.append((fleet, policy))
        p50_ms = 100.0 if fleet.engines >= self.load.get(policy, 0.0) else 1000.0
        return Figures(p50_ms, 10 * p50_ms, 0.5, 0.5, int(fleet.engines < self.failing_below))


@pytest.mark.parametrize(
    ("cost", "round_robin", "engines"),
    [(0.1, 0.1, 2), (1.7, 3.3, 4), (1.7, 20.0, 32), (40.0, 1.0, 64), (1e6, 1e6, 2)],
)
def test_the_smallest_fleet_that_is_not_saturated_is_taken(
    cost: float, round_robin: float, engines: int
) -> None:
    """Load that saturates all fleets saturates the largest by as much as the smallest."""
    pretended = Pretended({"cost": cost, "round_robin": round_robin})
    fleet = fleet_for(trace_of(WORKLOAD), WORKLOAD, pretended, 400)
    assert fleet.engines == engines
    sizes = [each.engines for each, policy in pretended.asked if policy == "cost"]
    assert sizes == list(SIZES[: len(sizes)])
    assert min(sizes) in (engines, engines // 2)


def test_a_fleet_is_tried_with_the_first_requests_and_fails_none() -> None:
    pretended = Pretended(failing_below=8)
    many = sessions_workload(PILOT + 500, seed=3)
    fleet = fleet_for(trace_of(many), many, pretended, PILOT + 400)
    assert (fleet.engines, fleet.requests) == (8, PILOT + 400)
    assert {each.requests for each, _ in pretended.asked} == {PILOT}


def test_caches_hold_a_part_of_the_blocks_but_the_longest_request() -> None:
    trace = trace_of(WORKLOAD)
    fleet = fleet_for(trace, WORKLOAD, Pretended(), 400)
    assert fleet.kv_tokens * fleet.engines >= 0.075 * trace.num_blocks * trace.block_size
    assert fleet.kv_tokens > int((trace.input_tokens + trace.output_tokens).max())
    assert fleet.block_size == trace.block_size
    assert not fleet.keeps_order
    forks = fan_out_workload(8, prefix_tokens=256, suffix_tokens=16, output_tokens=8, as_forks=True)
    assert fleet_for(trace_of(forks), forks, Pretended(), 400).keeps_order
    assert fleet_for(trace, WORKLOAD, Pretended(), 50).requests == 50


def test_all_policies_run_at_both_sizes_of_cache() -> None:
    pretended = Pretended()
    fleet = Fleet(4, 100, 512, False, 400)
    found = replay_all(WORKLOAD, fleet, pretended)
    assert list(found.small) == list(found.large) == list(POLICIES)
    assert {each.kv_tokens for each, _ in pretended.asked} == {100, LARGE * 100}


def _replays(**p50_ms: float) -> Replays:
    figures = {policy: Figures(ms, 10 * ms, 0.5, 0.5, 0) for policy, ms in p50_ms.items()}
    return Replays(figures, figures)


def test_pairs_that_are_close_in_either_trace_are_not_ranked() -> None:
    source = _replays(cost=100.0, round_robin=200.0, random=204.0)

    def swapped(other: Replays, band: float = 0.05) -> tuple[float | None, str]:
        value, why = dict(_compared(source, other, band))["ranking, small"]
        return value, why

    assert swapped(source) == (0.0, "")
    assert swapped(_replays(cost=300.0, round_robin=200.0, random=190.0)) == (
        2.0,
        "cost and round_robin, cost and random",
    )
    assert swapped(_replays(cost=100.0, round_robin=204.0, random=150.0)) == (0.0, "")
    assert swapped(_replays(cost=205.0, round_robin=200.0, random=300.0)) == (0.0, "")
    assert swapped(_replays(cost=300.0, round_robin=200.0, random=400.0), band=1.5) == (0.0, "")


def test_the_band_is_what_other_starts_do() -> None:
    one, other = _replays(cost=100.0, round_robin=200.0), _replays(cost=120.0, round_robin=199.0)
    assert noise_band(one, other) == pytest.approx(0.2)
    assert noise_band(one, one) == LEAST_BAND


@pytest.fixture(scope="module")
def replayed() -> Source:
    with pytest.MonkeyPatch.context() as patch:  # 64 engines take longer to make than this to run
        patch.setattr("mallee.synth.compare.replays.SIZES", (4, 2))
        return source_of(Reading(lambda seed: WORKLOAD), replay, requests=100)


@pytest.mark.slow
def test_a_trace_replays_as_itself(replayed: Source) -> None:
    """K26, part: in virtual time, so that nothing but the trace can differ."""
    sample = compare_workload(replayed, WORKLOAD)
    found = outcomes([sample.values], REPLAY_GATES)
    assert [each.gate for each in found] == list(REPLAY_GATES)
    assert {each.value for each in found} == {0.0}
    assert sample.replays is not None
    assert sample.replays.small["cost"].ttft_p50_ms > 0


def test_slower_prompts_show_in_first_tokens(replayed: Source) -> None:
    longer = [
        msgspec.structs.replace(each, input_tokens=2 * each.input_tokens, ids=())
        for each in WORKLOAD
    ]
    other = Workload("longer", 512, lambda: iter(longer))
    assert replayed.stage is not None
    before = replayed.stage.source.small["cost"]
    after = replay(other, replayed.stage.fleet, "cost")
    assert after.ttft_p50_ms > 1.5 * before.ttft_p50_ms
    assert after.hit_rate == 0.0 < before.hit_rate
