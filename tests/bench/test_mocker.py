"""The mocker bench: its scenes say what they should, its report has what it promises."""

import json
from pathlib import Path

import pytest

from bench.mocker import __main__ as mocker
from bench.mocker import scenes


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
    turns = [found[name]["turn_ms"]["p50"] for name in ("1", "2", "4", "8")]
    assert turns == sorted(turns)
    assert all(found[name]["fairness"] > 0.98 for name in ("1", "2", "4", "8"))


def test_the_knee_is_where_twice_as_many_bring_less_than_half_as_much_again() -> None:
    assert scenes.knee({1: 100.0, 2: 200.0, 4: 290.0, 8: 300.0}) == 2
    assert scenes.knee({1: 100.0, 2: 200.0}) is None


def test_a_case_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(row) + "\n")
    found = mocker.both(
        trace, None, None, 0, engines=2, policy="cost", block_size=512, kv_tokens=32_768
    )["mallee"]
    assert found["requests"] == 1
    assert found["peak_mb"] > 10
    (head, rule, line) = mocker.table({"one": {"mallee": found}})
    assert head.count("|") == rule.count("|") == line.count("|")
