"""`mallee profile --trace`: an engine's steps as a trace that browsers show."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.mocker.passes import mock_spec
from mallee.mocker.timing.steps import PHASES, StepTimes, chrome_trace, record_steps, summary
from mallee.protocol.errors import ConfigError
from mallee.testing.forward import MockForward

SIZES = {"max_context": 256, "max_rows": 4, "max_step_tokens": 64}


def recorded(num_blocks: int = 200) -> list[StepTimes]:
    """Steps under a clock that ticks a millisecond at each look."""
    ticks = count()
    forward = MockForward(mock_spec(), num_blocks=num_blocks, block_size=16)
    return record_steps(forward, clock=lambda: next(ticks) / 1000, **SIZES)


def test_steps_of_every_kind_are_recorded() -> None:
    steps = recorded()
    assert any(step.chunks and not step.decodes for step in steps)
    assert any(step.decodes and not step.chunks for step in steps)
    assert any(step.decodes and step.chunks for step in steps)
    assert any(step.draws for step in steps), "forks draw from their capsule's logits"
    assert sum(step.chunk_tokens for step in steps) == 2 * 192, "two prompts; forks compute none"
    assert max(step.rows for step in steps) == 5


def test_the_trace_has_each_step_with_its_phases_inside() -> None:
    """I27, part: valid events; phases one after the other, which fill their step; rows and tokens."""
    steps = recorded()
    trace = json.loads(json.dumps(chrome_trace(steps, {"model": "mock"})))
    check_trace(trace, len(steps))
    assert trace["otherData"] == {"model": "mock"}


def check_trace(trace: dict[str, Any], num_steps: int) -> None:
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert event["pid"] == 1
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    whole = [event for event in events if event["name"] == "step"]
    assert [event["args"]["step"] for event in whole] == list(range(num_steps))
    end = 0.0
    for step in whole:
        assert step["ts"] >= end, "one after the other"
        end = step["ts"] + step["dur"]
        args = step["args"]
        assert args["rows"] == args["decodes"] + args["chunks"]
        assert args["tokens"] == args["decodes"] + args["chunk_tokens"]
        inside = [e for e in events if e["name"] in PHASES and e["args"]["step"] == args["step"]]
        assert [event["name"] for event in inside] == list(PHASES)
        at = step["ts"]
        for phase in inside:
            assert phase["ts"] == pytest.approx(at, abs=0.01)
            at = phase["ts"] + phase["dur"]
        assert at == pytest.approx(end, abs=0.01)
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"rows", "tokens"}
    assert len(counters) == 2 * num_steps


def test_a_summary_has_the_share_of_each_phase() -> None:
    step = StepTimes((0.0, 0.001, 0.004, 0.005, 0.010), 2, 1, 30, 0, 0)
    assert summary([step, step]) == [
        "plan           2.0 ms   10.0%",
        "launch         6.0 ms   30.0%",
        "collect        2.0 ms   10.0%",
        "emit          10.0 ms   50.0%",
    ]


def test_too_little_memory_is_told_with_what_it_takes() -> None:
    with pytest.raises(ConfigError, match="give at least 256 KV tokens"):
        recorded(num_blocks=12)


def test_a_real_model_is_traced_by_one_command(tmp_path: Path) -> None:
    """I27: `mallee profile MODEL --trace FILE` writes it, and prints where the time goes."""
    pytest.importorskip("torch")
    from mallee.testing.random_model import random_model

    random_model("llama", 4).save(tmp_path / "model")
    out = tmp_path / "steps.json"
    sizes = ["--max-rows", "3", "--max-context", "128", "--max-step-tokens", "32"]
    arguments = ["profile", str(tmp_path / "model"), "--trace", str(out), "--dtype", "float32"]
    answer = CliRunner().invoke(cli, [*arguments, "--threads", "1", "--kv-tokens", "2048", *sizes])
    assert answer.exit_code == 0, answer.output
    trace = json.loads(out.read_text())
    steps = sum(event["name"] == "step" for event in trace["traceEvents"])
    check_trace(trace, steps)
    assert steps > 40
    assert trace["otherData"]["dtype"] == "float32"
