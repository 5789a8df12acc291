"""Fan-outs, replicas and policies through the real router, over stub workers in virtual time."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.benches import run_bench


class Benches:
    """The modules of the bench folder, which import each other by their bare names."""

    fanout: ModuleType
    policies: ModuleType
    stub_fleet: ModuleType
    stub_gateways: ModuleType


@pytest.fixture(scope="module")
def benches() -> type[Benches]:
    for name in ("stub_cache", "stub_fleet", "stub_gateways", "fanout", "policies"):
        setattr(Benches, name, import_module(f"bench.router.{name}"))
    return Benches


# The stubs themselves


def run_tasks(benches: type[Benches], *tasks: Any, **options: Any) -> tuple[Any, Any]:
    """One worker that has done these tasks, and what it computed."""
    simulation = benches.stub_fleet.Simulation()
    work = benches.stub_fleet.Work()
    worker = benches.stub_fleet.StubWorker(
        simulation,
        "w0",
        timing=benches.stub_fleet.Timing(),
        work=work,
        publish=lambda batch: None,
        num_blocks=options.get("num_blocks", 10_000),
        max_rows=options.get("max_rows", 256),
    )
    for task in tasks:
        worker.submit(task)
    simulation.run()
    return simulation, work


@pytest.mark.parametrize(("tokens", "table_ms"), [(1024, 21.2), (4096, 92.8), (8192, 198.9)])
def test_a_stub_computes_prompts_as_fast_as_the_table_says(
    benches: type[Benches], tokens: int, table_ms: float
) -> None:
    """Within 15 % of the modelled figures for an 8B model on one H200."""
    task = benches.stub_fleet.Task("r", (), [tokens], [1])
    simulation, _ = run_tasks(benches, task)
    assert 1000 * simulation.now == pytest.approx(table_ms, rel=0.15)


@pytest.mark.parametrize(
    ("rows", "context", "table_ms"),
    [(1, 128, 4.8), (64, 512, 6.64), (256, 128, 9.13), (256, 2048, 23.5)],
)
def test_a_stub_decodes_as_fast_as_the_table_says(
    benches: type[Benches], rows: int, context: int, table_ms: float
) -> None:
    own = context // 16 - 2
    tasks = [
        benches.stub_fleet.Task(
            f"r{i}", tuple(range(1 + i * own, 1 + (i + 1) * own)), [0], [21], is_fork=True
        )
        for i in range(rows)
    ]
    simulation, _ = run_tasks(benches, *tasks, num_blocks=40_000)
    assert 1000 * simulation.now / 21 == pytest.approx(table_ms, rel=0.15)


def test_stub_siblings_compute_their_prefix_once(benches: type[Benches]) -> None:
    tasks = [benches.stub_fleet.Task(f"r{i}", tuple(range(1, 101)), [7], [2]) for i in range(9)]
    _, work = run_tasks(benches, *tasks)
    assert set(work.by_block.values()) == {1}
    assert work.prompt_tokens == 1600 + 9 * 7
    assert work.cached_tokens == 8 * 1600


def test_stub_rows_beyond_its_batch_wait_for_the_next_wave(benches: type[Benches]) -> None:
    one, _ = run_tasks(benches, benches.stub_fleet.Task("r", (), [16] * 8, [50] * 8), max_rows=8)
    two, _ = run_tasks(benches, benches.stub_fleet.Task("r", (), [16] * 9, [50] * 9), max_rows=8)
    assert two.now == pytest.approx(2 * one.now, rel=0.05)


# What the router makes of them


@pytest.mark.parametrize("engines", [4, 1000])
@pytest.mark.parametrize("fanout", [2, 8, 32, 64])
@pytest.mark.parametrize("trees", [1, 4, 16])
def test_children_go_to_their_parents_worker_while_they_fit(
    benches: type[Benches], engines: int, fanout: int, trees: int
) -> None:
    """X1: 2 to 64 branches, 1 to 16 trees at once, 4 to 1000 engines."""
    found = benches.fanout.play(benches.fanout.Scene(engines, fanout, trees))
    assert found["affinity"] >= 0.99
    assert found["prefix_copies"] == 1.0


@pytest.mark.parametrize("trees", [1, 16])
@pytest.mark.parametrize("fanout", [2, 8, 64])
def test_a_cold_fan_out_computes_its_prefix_once(
    benches: type[Benches], fanout: int, trees: int
) -> None:
    """X2, part: children that arrive as prompts of their own, at one moment, on eight workers."""
    scene = benches.fanout.Scene(8, fanout, trees, is_cold=True, prefix_tokens=16_384)
    found = benches.fanout.play(scene)
    assert found["prefix_copies"] == 1.0
    assert found["affinity"] == 1.0


@pytest.mark.parametrize("can_migrate", [False, True])
def test_a_warm_fan_out_of_512_spills_and_is_four_times_as_fast(
    benches: type[Benches], can_migrate: bool
) -> None:
    """X1, X6, part: on eight workers of 256 rows; every spill has its three prices, moved bytes count."""
    scene = benches.fanout.Scene(8, 512, can_migrate=can_migrate)
    found = benches.fanout.compare(scene)
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
    assert found["pulled_blocks"] == (7 * 4096 // 16 if can_migrate else 0)
    assert found["prefix_copies"] == (1.0 if can_migrate else 8.0)


def test_equal_scenes_have_equal_figures(benches: type[Benches]) -> None:
    scene = benches.fanout.Scene(8, 300, 4, gateways=3)
    assert benches.fanout.play(scene) == benches.fanout.play(scene)


def test_eight_replicas_hit_as_often_as_one_and_do_not_herd(benches: type[Benches]) -> None:
    """K6, X7: hit rate within 2 % of one replica's; bookings spread as evenly, if they are told."""
    rows = benches.policies.make_trace(1500, 2.0, seed=1)
    scene = benches.policies.Scene(rows, engines=8)
    one = benches.policies.play(scene, "cost")
    told = benches.policies.play(scene._replace(gateways=8), "cost")
    untold = benches.policies.play(scene._replace(gateways=8, sync=False), "cost")
    assert told["hit_rate"] == pytest.approx(one["hit_rate"], rel=0.02)
    assert told["bookings_max_mean"] <= 1.25
    assert told["bookings_max_mean"] < untold["bookings_max_mean"]


def test_our_policy_is_better_than_the_baselines(benches: type[Benches]) -> None:
    """K12: time to first token, and to the last, on sessions that grow turn by turn; fixed seed."""
    scene = benches.policies.Scene(benches.policies.make_trace(1500, 1.0, seed=0), engines=4)
    ours = benches.policies.play(scene, "cost")
    for policy in ("round_robin", "random", "least_loaded", "dynamo"):
        other = benches.policies.play(scene, policy)
        assert ours["hit_rate"] > other["hit_rate"]
        for key in ("ttft_ms", "whole_s"):
            assert ours[key]["p50"] < other[key]["p50"]
            assert ours[key]["p99"] < other[key]["p99"]
    herding = benches.policies.play(scene, "prefix_only")
    assert ours["ttft_ms"]["p99"] < herding["ttft_ms"]["p99"]
    assert ours["whole_s"]["p50"] < herding["whole_s"]["p50"]


def test_a_trace_is_read_with_its_ticks_spread(benches: type[Benches], tmp_path: Path) -> None:
    lines = [
        {
            "timestamp": 3000 * (i // 3),
            "input_length": 1025,
            "output_length": 3,
            "hash_ids": [1, 2, i],
        }
        for i in range(9)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    rows = benches.policies.read_trace(path, 6, speedup=2.0)
    assert [row.timestamp for row in rows] == [0, 500, 1000, 1500, 2000, 2500]
    assert len(benches.policies.hashes_of(rows[0])) == 2


def test_the_benches_print_one_json_object_last() -> None:
    for command in (
        ["fanout", "--engines", "8", "--fanout", "512", "--warm"],
        [
            "fanout",
            "--engines",
            "4",
            "--fanout",
            "4",
            "--trees",
            "2",
            "--cold",
            "--gateways",
            "2",
        ],
        ["policies", "--requests", "50", "--policies", "cost", "random"],
    ):
        found, _ = run_bench(f"router.{command[0]}", *command[1:])
        if command[0] == "fanout":
            assert found.keys() >= {"affinity", "prefix_copies", "slowest_child_ms", "spills"}
            assert ("no_spill_slowest_child_ms" in found) == ("--warm" in command)
        else:
            assert found["cost"].keys() == found["random"].keys()
