"""Scenes of the benches in virtual time, with the product's router, scheduler, pool and tiers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.capsule.replays import Way, figures, on, turns
from bench.contention import virtual
from bench.engine.matrix import SEED, median, on_mock, setups
from bench.engine.workloads import SPECS
from bench.mocker import scenes
from bench.router import fanout, policies
from bench.search.__main__ import PROFILE, first_tokens
from bench.search.decode import decode_cost
from bench.search.programs import SHAPES, Program, Text, drawn_text
from bench.search.ways import WAYS, Setting, play
from mallee.mocker.device import DeviceConfig
from mallee.mocker.replay.run import replay
from mallee.mocker.timing import ClosedForm, Plane, Timing, load_timing

# Straight lines: the router's prices are what the engines then take.
STRAIGHT = Timing(ClosedForm(0.0, 2.2e-5, 0.0, 0.0, (Plane(4.8e-3, 1.3e-5, 2.9e-8),)))
LOAD = virtual.Load(48, 16, prompt_tokens=256, output_tokens=64)


def test_two_agents_on_one_document_take_half_as_long() -> None:
    """S10, part: the measured shape: 1.95 times end to end, the second agent's start 52 times as soon."""
    found = scenes.two_agents()
    assert found["apart_ms"] == pytest.approx(10_275, rel=0.01)
    assert found["shared_ms"] == pytest.approx(found["measured"]["shared_ms"], rel=0.05)
    assert found["speedup"] == pytest.approx(found["measured"]["speedup"], rel=0.05)
    assert 1e3 * scenes.PREFILL_S / found["second_activation_ms"] > 52


def test_fifty_readers_compute_their_document_once() -> None:
    """S11: prefill tokens = the document once and each reader's own prompt."""
    found = scenes.document()
    assert found["cost"]["prefix_copies"] == 1.0
    assert found["cost"]["prefill_tokens"] == 50_000 + 50 * 128
    assert found["round_robin"]["prefix_copies"] == pytest.approx(8.0)


def test_agents_on_one_engine_get_equal_shares_and_less_each() -> None:
    """S12."""
    found = scenes.agents_sweep(most=8)
    assert [name for name in found if name != "knee"] == ["1", "2", "4", "8"]
    waited = [found[name]["turn_ms"]["p50"] for name in ("1", "2", "4", "8")]
    assert waited == sorted(waited)
    assert all(found[name]["fairness"] > 0.98 for name in ("1", "2", "4", "8"))
    # The knee: from there twice as many bring less than half as much again.
    assert scenes.knee({1: 100.0, 2: 200.0, 4: 290.0, 8: 300.0}) == 2
    assert scenes.knee({1: 100.0, 2: 200.0}) is None


def test_sessions_that_take_turns_share_a_device_a_fourth_of_their_size() -> None:
    """F26, part, K15, part: nothing is computed twice; moving it takes a part of the time of that."""
    workload, room = turns(16, 5, 24_000, 20.0), 4 * 27_136
    fit, lru, tiers = (
        figures(replay(workload, config))
        for config in (
            on(1, 4 * room, Way(), 0),
            on(1, room, Way(), 0),
            on(1, room, Way(has_tiers=True), 0),
        )
    )
    for run in (fit, lru, tiers):
        assert run["requests"] == 80
        assert not run["errors"]
    assert lru["hit_rate"] < 0.1 < 0.75 < fit["hit_rate"]
    assert tiers["hit_rate"] > 0.98 * fit["hit_rate"]
    assert fit["serving_s"] < tiers["serving_s"] < (fit["serving_s"] + lru["serving_s"]) / 2


def test_one_engine_with_all_rows_beats_several_on_its_device() -> None:
    """S18, part: the weights are read once for all rows; by turns each engine reads them for its own."""
    found = {k: virtual.run(LOAD, k, 16, DeviceConfig(k), 0) for k in (1, 2, 4)}
    assert found[1]["tokens_per_s"] > 1.2 * found[2]["tokens_per_s"]
    assert found[2]["tokens_per_s"] > 1.2 * found[4]["tokens_per_s"]
    assert found[1]["itl_p50_ms"] < found[2]["itl_p50_ms"] < found[4]["itl_p50_ms"]
    assert found[1]["switching"] == 0.0 < found[2]["switching"]
    for engines in (2, 4, 8):  # each holds the weights
        lost = virtual.kv_tokens_of(1) - engines * virtual.kv_tokens_of(engines)
        assert 0 <= lost - (engines - 1) * virtual.weight_tokens() < engines


@pytest.mark.parametrize("can_migrate", [False, True])
def test_a_warm_fan_out_of_512_spills_and_is_much_faster(can_migrate: bool) -> None:
    """X1, X6, part: on eight workers of 256 rows; every spill has its three prices, moved bytes count."""
    scene = fanout.Scene(8, 512, can_migrate=can_migrate, timing=STRAIGHT)
    found = fanout.compare(scene)
    assert found["slowest_child_ms"] <= found["no_spill_slowest_child_ms"] / 4
    spills = found["spills"]
    assert spills["count"] == len(spills["list"]) == 7
    how = "migrate" if can_migrate else "recompute"
    for spill in spills["list"]:
        assert spill["how"] == how
        assert set(spill["prices"]) == {"wait_s", "migrate_s", "recompute_s"}
        assert 0 < spill["prices"][f"{how}_s"] < spill["prices"]["wait_s"] / 2
        # The price is what then happens: chunks and batches make the rest of the difference.
        assert 1000 * spill["prices"][f"{how}_s"] == pytest.approx(
            found["slowest_child_ms"], rel=0.3
        )
    assert found["moved_nbytes"] == (7 * 4096 * (2 << 20) // 16 if can_migrate else 0)
    assert found["prefix_copies"] == (1.0 if can_migrate else pytest.approx(8.0, rel=0.01))


@pytest.mark.slow
def test_eight_replicas_hit_as_often_as_one_and_do_not_herd() -> None:
    """K6, X7: hit rate within 2 % of one replica's; bookings spread as evenly, if they are told.

    Few requests: in a long run, crowds at one worker after the other even out in the sum of bookings.
    """
    workload = policies.made_up(500, seed=1)
    one = policies.play(workload, policies.config_for(8, "cost"))
    told = policies.play(workload, policies.config_for(8, "cost", gateways=8))
    untold = policies.play(workload, policies.config_for(8, "cost", gateways=8, sync=False))
    assert told["hit_rate"] == pytest.approx(one["hit_rate"], rel=0.02)
    assert told["bookings_max_mean"] <= 1.25
    assert told["bookings_max_mean"] < untold["bookings_max_mean"]


@pytest.mark.slow
def test_our_policy_is_better_than_the_baselines() -> None:
    """K12: time to first token, and to the last, on sessions that grow turn by turn; fixed seed."""
    workload = policies.made_up(600, seed=0)
    names = ("cost", "round_robin", "random", "least_loaded", "dynamo", "prefix_only")
    found: dict[str, Any] = {
        name: policies.play(workload, policies.config_for(4, name)) for name in names
    }
    ours, herding = found["cost"], found["prefix_only"]
    for name in names[1:5]:
        assert ours["hit_rate"] > found[name]["hit_rate"]
        for key in ("ttft_ms", "whole_s"):
            assert ours[key]["p50"] < found[name][key]["p50"]
            assert ours[key]["p99"] < found[name][key]["p99"]
    assert ours["ttft_ms"]["p99"] < herding["ttft_ms"]["p99"]
    assert ours["whole_s"]["p50"] < herding["whole_s"]["p50"]


@pytest.fixture(scope="module")
def matrix() -> dict[str, dict[str, Any]]:
    """Metrics by workload and configuration, on the mock."""
    return {
        workload: {
            name: median([on_mock(workload, setup, SEED)]) for name, setup in setups().items()
        }
        for workload in SPECS
    }


@pytest.mark.slow
def test_every_workload_runs_on_every_configuration_with_equal_answers(
    matrix: dict[str, dict[str, Any]],
) -> None:
    """D22, part, I20, I23, part, I24, part: each feature on and off, every metric of every cell."""
    assert list(matrix) == ["W1", "W2", "W3", "fan", "tree", "chain"]
    for results in matrix.values():
        assert len({metrics["answers"] for metrics in results.values()}) == 1
        for metrics in results.values():
            for name in ("ttft_ms", "itl_ms", "latency_ms", "queue_wait_ms"):
                assert 0 <= metrics[name]["p50"] <= metrics[name]["p95"] <= metrics[name]["p99"]
            assert metrics["throughput_tok_s"] > 0
            assert metrics["gb_per_branch"] > 0
            assert 0 < metrics["slot_fill"] <= 1


def test_each_feature_pays_where_it_is_meant_to(matrix: dict[str, dict[str, Any]]) -> None:
    """D26, part, D37, part, I8, I10, I12, part: and who never branches pays nothing for it."""
    of = matrix
    assert of["W2"]["static"]["ttft_ms"]["p99"] > 3 * of["W2"]["continuous"]["ttft_ms"]["p99"]
    assert of["W3"]["continuous"]["queue_wait_ms"]["p99"] > 0
    assert of["W3"]["paged"]["queue_wait_ms"]["p99"] == 0  # more sequences in the same memory
    assert of["W3"]["prefix"]["prefill_tokens"] == 1024 + 16 * 32
    assert of["fan"]["fork"]["prefill_tokens"] == 1024
    assert of["fan"]["prefix"]["ttft_ms"]["p50"] > 100 * of["fan"]["fork"]["ttft_ms"]["p50"]
    assert of["fan"]["tree"]["total_s"] < 0.8 * of["fan"]["fork"]["total_s"]
    assert of["tree"]["fork"]["share_ratio"] > 0.5
    assert of["tree"]["static"]["total_s"] > 3 * of["tree"]["tree"]["total_s"]
    for workload in ("W1", "chain"):
        assert of[workload]["tree"]["total_s"] <= 1.02 * of[workload]["prefix"]["total_s"]


# Searches on a mocked H200: the programs, and the ways of serving them

TIMING = replace(load_timing(PROFILE), jitter=0.05)
SMALL = {"expansions": 6, "rollouts": 5, "tokens": 20, "leaves": 2}


def rounds(program: Program) -> list[list[tuple[int, int, int]]]:
    """Of each expansion: tokens of its text, answers and their length; answers are all zeros."""
    found = []
    expands = next(program)
    while True:
        found.append([(len(e.text.tokens) + len(e.suffix), e.width, e.tokens) for e in expands])
        texts = [
            [
                Text(np.concatenate([e.text.tokens, e.suffix, np.zeros(e.tokens, np.uint32)]))
                for _ in range(e.width)
            ]
            for e in expands
        ]
        try:
            expands = program.send(texts)
        except StopIteration:
            return found


@pytest.mark.parametrize(("shape", "leaves"), [("mcts", 1), ("mcts_4", 4)])
def test_the_search_expands_50_texts_by_1000_rollouts_of_50_tokens(shape: str, leaves: int) -> None:
    """D24, part: the tree grows below its own answers, and no text is expanded twice at once."""
    found = rounds(SHAPES[shape].begin(Text(drawn_text(1, 100)), 7))
    expansions = [each for round in found for each in round]
    assert len(expansions) == 50
    assert {each[1:] for each in expansions} == {(20, 50)}
    assert expansions[0][0] == 100
    assert all(each[0] % 50 == 0 and each[0] > 100 for each in expansions[1:])
    assert {100, 150, 200} <= {each[0] for each in expansions}
    assert max(map(len, found)) == leaves


def test_a_search_is_the_same_by_all_ways_and_in_a_pool_that_loses_capsules() -> None:
    """D24, part, I20, part: forks, requests with and without a cache, and evicted capsules."""
    shape = SHAPES["mcts"]._replace(figures=SMALL)
    wide = Setting(TIMING, 100_000, 200, searches=2)
    narrow = wide._replace(kv_tokens=1024)
    runs = {(s.kv_tokens, way): play(shape, way, s, 1) for s in (wide, narrow) for way in WAYS}
    assert len({run.answers for run in runs.values()}) == 1
    assert {run.drawn for run in runs.values()} == {2 * 6 * 5 * 20}
    # Of a request with n answers each computes the last token of the prompt; of forks none does.
    assert runs[100_000, "tree"].prefilled == 2 * (200 + 5)
    assert runs[100_000, "tree"].resent == 0
    assert runs[1024, "tree"].resent > 0
    assert runs[1024, "cached"].prefilled > runs[100_000, "cached"].prefilled
    resent = runs[100_000, "resent"]
    assert resent.prefilled >= 2 * 6 * 5 * 200, "each answer's whole text"
    assert resent.peak_blocks > 4 * runs[100_000, "tree"].peak_blocks


def test_a_text_costs_what_the_timing_says() -> None:
    """One answer of two tokens, without jitter: the request, a prefill, a decode."""
    timing = load_timing(PROFILE)
    shape = SHAPES["chain"]._replace(figures={"depth": 1, "width": 1, "tokens": 2})
    run = play(shape, "resent", Setting(timing, 100_000, 300), 1)
    first = timing.request_s + timing.step_s([(300, 0)], 0, 0)
    assert run.ttft_s == pytest.approx((first,))
    # The first token's own KV is there when the second is drawn.
    assert run.total_s == pytest.approx(first + timing.step_s([], 1, 301), rel=1e-3)


def test_captures_cost_less_than_a_fiftieth_of_a_decode_step() -> None:
    """F15, part: host time of a step with a capture of each row every 64 tokens, against an H200's step."""
    cost = decode_cost(TIMING, 8, num_steps=64)
    assert cost.plain_us > 0
    assert cost.slowdown < 1.02


def test_the_gain_in_first_tokens_grows_with_the_prompt() -> None:
    """F16, part: 2, 4 and 8 thousand tokens; a capsule's first token takes as long after any of them."""
    found = first_tokens(TIMING, 100_000, 3)
    for name in ("fork", "restore"):
        gains = [found[str(n)][f"{name}_speedup"]["median"] for n in (2048, 4096, 8192)]
        assert 2 < gains[0] < gains[1] < gains[2]
    assert abs(found["slope_us_per_token"]["restore"]) < 0.01 * found["slope_us_per_token"]["cold"]
