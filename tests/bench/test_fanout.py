"""Fan-outs, replicas and policies in replays: what the router's decisions are worth."""

import pytest

from bench.router import fanout, policies
from mallee.mocker.timing import ClosedForm, Plane, Timing
from support.benches import run_bench

# Straight lines: the router's prices are what the engines then take.
STRAIGHT = Timing(ClosedForm(0.0, 2.2e-5, 0.0, 0.0, (Plane(4.8e-3, 1.3e-5, 2.9e-8),)))


@pytest.mark.parametrize(
    ("engines", "trees", "width"), [(4, 1, 2), (4, 16, 8), (4, 16, 64), (1000, 4, 32)]
)
def test_children_go_to_their_parents_worker_while_they_fit(
    engines: int, trees: int, width: int
) -> None:
    """X1: 2 to 64 branches, 1 to 16 trees at once, 4 to 1000 engines."""
    found = fanout.play(fanout.Scene(engines, width, trees))
    assert found["affinity"] >= 0.99
    assert found["prefix_copies"] == 1.0


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


def test_equal_scenes_have_equal_figures() -> None:
    scene = fanout.Scene(8, 300, 4, gateways=3)
    assert fanout.play(scene) == fanout.play(scene)


def test_eight_replicas_hit_as_often_as_one_and_do_not_herd() -> None:
    """K6, X7: hit rate within 2 % of one replica's; bookings spread as evenly, if they are told."""
    workload = policies.made_up(1500, seed=1)
    one = policies.play(workload, policies.config_for(8, "cost"))
    told = policies.play(workload, policies.config_for(8, "cost", gateways=8))
    untold = policies.play(workload, policies.config_for(8, "cost", gateways=8, sync=False))
    assert told["hit_rate"] == pytest.approx(one["hit_rate"], rel=0.02)
    assert told["bookings_max_mean"] <= 1.25
    assert told["bookings_max_mean"] < untold["bookings_max_mean"]


def test_our_policy_is_better_than_the_baselines() -> None:
    """K12: time to first token, and to the last, on sessions that grow turn by turn; fixed seed."""
    workload = policies.made_up(1000, seed=0)

    def play(policy: str) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = policies.play(workload, policies.config_for(4, policy))
        return found

    ours = play("cost")
    for policy in ("round_robin", "random", "least_loaded", "dynamo"):
        other = play(policy)
        assert ours["hit_rate"] > other["hit_rate"]
        for key in ("ttft_ms", "whole_s"):
            assert ours[key]["p50"] < other[key]["p50"]
            assert ours[key]["p99"] < other[key]["p99"]
    herding = play("prefix_only")
    assert ours["ttft_ms"]["p99"] < herding["ttft_ms"]["p99"]
    assert ours["whole_s"]["p50"] < herding["whole_s"]["p50"]


@pytest.mark.parametrize(
    "command",
    [
        "router.fanout --engines 8 --fanout 64 --warm",
        "router.fanout --engines 4 --fanout 4 --trees 2 --cold --gateways 2",
        "router.policies --requests 50 --policies cost random",
    ],
)
def test_the_benches_print_one_json_object_last(command: str) -> None:
    found, _ = run_bench(*command.split())
    if "fanout" in command:
        assert found.keys() >= {"affinity", "prefix_copies", "slowest_child_ms", "spills"}
        assert ("no_spill_slowest_child_ms" in found) == ("--warm" in command)
    else:
        assert found["cost"].keys() == found["random"].keys()
