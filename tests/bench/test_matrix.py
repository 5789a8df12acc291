"""The matrix bench: what its report says, and what it must show."""

from typing import Any

import pytest

from support.benches import run_bench

WORKLOADS = ["W1", "W2", "W3", "fan", "tree", "chain"]
CONFIGS = ["static", "continuous", "paged", "chunked", "prefix", "fork", "tree"]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """One whole run on the mock."""
    return run_bench("engine.matrix")[0]


def test_the_report_carries_all_that_its_figures_depend_on(report: dict[str, Any]) -> None:
    """I25, part: model, dtype, timing, seed, warm-up, machine, versions, every setting of every config."""
    assert report["model"] == "mock"
    assert report["seed"] == 11
    assert report["timing"]["base_s"] > 0
    assert {"dtype", "threads", "rounds", "warmup_rounds", "machine"} <= report.keys()
    assert {"python", "numpy", "torch", "mallee"} == report["versions"].keys()
    assert list(report["configs"]) == CONFIGS
    for config in report["configs"].values():
        assert {"paged", "prefix_cache", "tree_attention", "kv_checks", "forks"} <= config.keys()
        assert {"chunked", "continuous", "gang", "policy"} <= config["scheduler"].keys()


def test_every_workload_ran_on_every_configuration_with_all_metrics(report: dict[str, Any]) -> None:
    """D22, part, I23, part, I24, part: no cell of the table is missing or empty."""
    assert list(report["results"]) == WORKLOADS
    for results in report["results"].values():
        assert list(results) == CONFIGS
        for metrics in results.values():
            for name in ("ttft_ms", "itl_ms", "latency_ms", "queue_wait_ms"):
                assert 0 <= metrics[name]["p50"] <= metrics[name]["p95"] <= metrics[name]["p99"]
            assert metrics["throughput_tok_s"] > 0
            assert metrics["gb_per_branch"] > 0
            assert 0 < metrics["slot_fill"] <= 1


def test_no_configuration_changes_an_answer(report: dict[str, Any]) -> None:
    """I20: on/off equivalence of every feature, on every workload."""
    for results in report["results"].values():
        assert len({metrics["answers"] for metrics in results.values()}) == 1


def test_each_feature_pays_where_it_is_meant_to(report: dict[str, Any]) -> None:
    """D26, part, D37, part, I8, I10, I12, part."""
    of = report["results"]
    assert of["W2"]["static"]["ttft_ms"]["p99"] > 3 * of["W2"]["continuous"]["ttft_ms"]["p99"]
    assert of["W3"]["continuous"]["queue_wait_ms"]["p99"] > 0
    assert of["W3"]["paged"]["queue_wait_ms"]["p99"] == 0  # more sequences in the same memory
    assert of["W3"]["prefix"]["prefill_tokens"] == 1024 + 16 * 32
    assert of["fan"]["fork"]["prefill_tokens"] == 1024
    assert of["fan"]["prefix"]["ttft_ms"]["p50"] > 100 * of["fan"]["fork"]["ttft_ms"]["p50"]
    assert of["fan"]["tree"]["total_s"] < 0.8 * of["fan"]["fork"]["total_s"]
    assert of["tree"]["fork"]["share_ratio"] > 0.5
    assert of["tree"]["static"]["total_s"] > 3 * of["tree"]["tree"]["total_s"]


def test_those_who_never_branch_pay_nothing_for_it(report: dict[str, Any]) -> None:
    """D26, part: a linear chain and a single request, with all features and without those for trees."""
    for workload in ("W1", "chain"):
        results = report["results"][workload]
        assert results["tree"]["total_s"] <= 1.02 * results["prefix"]["total_s"]
