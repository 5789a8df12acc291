"""Engines on one device, by their number: in virtual time, and as processes."""

import pytest

from bench.contention.processes import Share, together
from bench.contention.virtual import Load, kv_tokens_of, run, weight_tokens
from mallee.mocker.device import DeviceConfig
from support.benches import run_bench

LOAD = Load(48, 16, prompt_tokens=256, output_tokens=64)


def test_engines_on_one_device_have_less_room_than_one_as_each_holds_the_weights() -> None:
    for engines in (2, 4, 8):
        lost = kv_tokens_of(1) - engines * kv_tokens_of(engines)
        assert 0 <= lost - (engines - 1) * weight_tokens() < engines


def test_one_engine_with_all_rows_beats_several_on_its_device() -> None:
    """S18, part: the weights are read once for all rows; by turns each engine reads them for its own."""
    found = {k: run(LOAD, k, 16, DeviceConfig(k), 0) for k in (1, 2, 4)}
    assert found[1]["tokens_per_s"] > 1.2 * found[2]["tokens_per_s"]
    assert found[2]["tokens_per_s"] > 1.2 * found[4]["tokens_per_s"]
    assert found[1]["itl_p50_ms"] < found[2]["itl_p50_ms"] < found[4]["itl_p50_ms"]
    assert found[1]["switching"] == 0.0 < found[2]["switching"]


def test_short_slices_and_dear_changes_cost_throughput() -> None:
    """S18, part."""
    short, middle = (
        run(LOAD, 4, 16, DeviceConfig(4, slice_s=slice_s), 0) for slice_s in (0.0005, 0.008)
    )
    dear = run(LOAD, 4, 16, DeviceConfig(4, slice_s=0.008, switch_s=0.002), 0)
    assert short["switching"] > 2 * middle["switching"]
    assert short["tokens_per_s"] < middle["tokens_per_s"]
    assert dear["tokens_per_s"] < middle["tokens_per_s"]


@pytest.mark.slow
def test_the_bench_prints_every_scene() -> None:
    """S18: throughput and p99 by the number of engines on one device, slices and changes."""
    found, table = run_bench("contention", "--quick", "--no-processes")
    assert set(found["busy"]) == set(found["quiet"]) == {"1", "2"}
    assert set(found["slices"]) == {"2 ms", "whole steps"}
    assert all(run["ttft_p99_ms"] > 0 for run in found["busy"].values())
    assert "processes" not in found
    assert "busy" in table


@pytest.mark.slow
@pytest.mark.model
def test_real_engines_begin_together_and_answer_everything() -> None:
    """S18, part: two processes on this machine's cores, each with its own weights."""
    found = together(2, Share(rows=2, requests=2, prompt_tokens=16, output_tokens=3), "smollm2", 1)
    assert found["tokens_per_s"] > 0
    assert 0 < found["itl_p50_ms"] <= found["itl_p99_ms"]
    assert found["peak_mb"] > 500
