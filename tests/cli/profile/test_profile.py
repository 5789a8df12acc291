"""`mallee profile`: a file from a real engine, its steps as a trace that browsers show, and what is wrong."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import log2
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from bench.doubles.forward import MockForward
from mallee.cli.main import cli
from mallee.cli.profile.command import wait_of
from mallee.cli.profile.steps import PHASES, StepTimes, record_steps, summary
from mallee.mocker.measure import Profiler, Sweep
from mallee.mocker.passes import mock_spec
from mallee.mocker.timing import Timing
from mallee.mocker.timing.files import GridData, read_timing
from mallee.mocker.timing.grid import Grid
from mallee.protocol.errors import ConfigError, MalleeError
from mallee.protocol.ids import RequestId, capsule_id
from mallee.protocol.messages import Fork, Generate, Limits, Prefill, pack_tokens
from mallee.worker.forward import DeviceForward, ForwardBatch, Logits
from support.conforming import make_mocked
from support.fake_device import FakeDevice

SIZES = ["--max-rows", "3", "--max-context", "256", "--max-step-tokens", "32", "--threads", "1"]


def steps_of(timing: Timing, *rounds: list[Prefill | Fork | Generate]) -> list[float]:
    """Seconds of each step of a mocked engine that is given these commands, round after round."""
    engine = make_mocked(lambda: 0.0, num_blocks=256, timing=timing, block_size=16)
    found, now = [], 0.0
    for commands in rounds:
        for command in commands:
            engine.submit(command)
        while engine.has_work:
            end = engine.start(now)
            assert end is not None
            found.append(end - now)
            engine.finish()
            now = end
    return found


def test_a_mock_takes_what_was_measured_at_each_point(tmp_path: Path) -> None:
    """K20, I27, part: drawn weights to a grid to an engine's steps; the grid's points come back."""
    pytest.importorskip("torch")
    from bench.doubles.random_model import random_model

    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(random_model("llama", 4).raw))
    out = tmp_path / "tiny.json"
    arguments = ["profile", str(folder), "--random-weights", "--to", str(out), "--force", *SIZES]
    answer = CliRunner().invoke(cli, [*arguments, "--kv-tokens", "2048", "--dtype", "float32"])
    assert answer.exit_code == 0, answer.output
    found = read_timing(out)
    assert found.conditions["weights"] == "random"
    assert found.conditions["model"] == "shape"
    assert found.conditions["device"] == "cpu"
    assert found.conditions["torch"]
    assert isinstance(found.model, GridData)
    timing, prefill, decode = (
        replace(found.timing(), jitter=0.0),
        found.model.prefill,
        found.model.decode,
    )
    assert isinstance(timing.model, Grid)
    assert prefill.prefix == (0, 256)
    table = (
        timing.model.prefills.seconds
    )  # measured, made monotone, which leaves the mean of the logs
    measured = [log2(seconds) for row in prefill.seconds for seconds in row]
    assert fmean(log2(s) for row in table for s in row) == pytest.approx(fmean(measured), abs=0.01)
    limits = Limits(1, ignore_eos=True)
    for i, new in enumerate(prefill.new):
        text = pack_tokens(list(range(int(new))))
        for j, prefix in enumerate(prefill.prefix):
            if prefix:
                first = Prefill("p", pack_tokens([7] * int(prefix)))
                fork = Fork("f", capsule_id(RequestId("p"), 0), (text,), limits)
                times = steps_of(timing, [first], [fork])
            else:
                times = steps_of(timing, [Generate("g", text, limits)])
            assert times[-1] == pytest.approx(table[i][j])
    for i, rows in enumerate(decode.rows):
        for j, context in enumerate(decode.context):
            # The step after the prompts' reads each prompt and its first token.
            texts = [pack_tokens([row] * (int(context) - 1)) for row in range(int(rows))]
            both = Limits(2, ignore_eos=True)
            times = steps_of(
                timing, [Generate(f"g{i}", text, both) for i, text in enumerate(texts)]
            )
            assert times[-1] == pytest.approx(timing.model.decodes.seconds[i][j], rel=1e-6)


def test_prefills_are_timed_until_the_device_is_done_and_decodes_as_they_are_launched() -> None:
    """I27, part: on a device that does what it is given later, or never if nobody waits."""
    done: list[int] = []

    class Slow(MockForward):
        def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
            done.append(sum(len(row.tokens) for row in batch.rows))
            return super().forward(batch)

    inner = Slow(mock_spec(max_model_len=512), num_blocks=128, block_size=16)
    device = FakeDevice(inner, eagerness=0.0)
    waits: list[int] = []

    def wait() -> None:
        device.wait()
        waits.append(len(done))

    sweep = Sweep((16, 32), (0, 64), (1, 2), (64, 128), repeats=2, steps=3)
    forward = cast("DeviceForward", device)
    # Passes that the device has done are the time.
    profiler = Profiler(forward, sweep, device=forward, wait=wait, clock=lambda: float(len(done)))
    assert profiler.chunk_s(32, 64) == 1.0
    # Before and after each step: of the prefix, of the suffix, and of the capsule's release.
    assert waits == [0, 1, 1, 2, 2, 2]
    before = len(waits)
    assert profiler._decodes(64) == [1.0, 1.0], "the pass that was launched in the step before"
    # Waits are for the cancelled ones alone, at the end.
    assert len(waits) - before <= 2
    assert profiler._engine.stats().ahead.num_rows > 0


def test_a_cuda_device_is_waited_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    wait_of("cuda:0")()
    wait_of("cpu")()
    assert waited == ["cuda:0"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["smollm2", "--device", "tpu"], "tpu"),
        (["smollm2", "--device", "cuda:99"], "cuda:99"),
        (["no/such", "--random-weights"], "none of the shapes llama-3.1-8b"),
        (["no/such"], "no/such"),
    ],
)
def test_a_model_or_device_that_there_is_not_is_named(
    arguments: list[str], named: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "x.json"
    answer = CliRunner().invoke(cli, ["profile", *arguments, "--to", str(out)])
    assert isinstance(answer.exception, MalleeError)
    assert named in str(answer.exception)
    assert not out.exists()


def test_a_grid_with_fewer_than_two_points_says_what_to_give(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from bench.doubles.random_model import random_model

    random_model("llama", 4, max_position_embeddings=64).save(tmp_path / "model")
    arguments = ["profile", str(tmp_path / "model"), "--to", str(tmp_path / "x.json")]
    answer = CliRunner().invoke(cli, [*arguments, "--kv-tokens", "1024", "--threads", "1"])
    assert isinstance(answer.exception, ConfigError)
    assert "fewer than two fit" in str(answer.exception)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "give MODEL and --to FILE or --trace FILE"),
        (["smollm2"], "give MODEL and --to FILE or --trace FILE"),
        (["smollm2", "--to", "x.npz"], "x.npz: a profile is JSON"),
        (["smollm2", "--to", "no/such/x.json"], "there is no folder no/such"),
        (["smollm2", "--to", "/dev"], "/dev: can't be written"),
        (["smollm2", "--trace", "no/such/x.json"], "--trace no/such/x.json: there is no folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], named: str) -> None:
    answer = CliRunner().invoke(cli, ["profile", *arguments])
    assert isinstance(answer.exception, ConfigError)
    assert named in str(answer.exception)
    assert "\n" not in str(answer.exception)


def test_fits_are_printed_with_their_errors() -> None:
    answer = CliRunner().invoke(cli, ["profile", "--fits"])
    assert answer.exit_code == 0
    lines = answer.output.splitlines()
    assert any(line.startswith("h200-llama-3.1-8b-fp8 ") and "%" in line for line in lines)
    (own,) = [line for line in lines if line.startswith("h100-qwen3-30b-a3b-bf16 ")]
    assert " 111,000 " in own, "KV tokens beside the weights"
    assert " 98,304 " in own, "bytes of each"
    assert any(line.startswith("gb10-") and "guess" in line for line in lines)
    assert any(line.startswith("@vllm: prefill x") for line in lines)
    told = json.loads(CliRunner().invoke(cli, ["profile", "--fits", "--json"]).stdout)
    assert "h200-llama-3.1-8b-fp8" in told["profiles"]
    assert told["credits"]


# Steps as a trace

STEP_SIZES = {"max_context": 256, "max_rows": 4, "max_step_tokens": 64}


def recorded(num_blocks: int = 200) -> list[StepTimes]:
    """Steps under a clock that ticks a millisecond at each look."""
    ticks = count()
    forward = MockForward(mock_spec(), num_blocks=num_blocks, block_size=16)
    return record_steps(forward, clock=lambda: next(ticks) / 1000, **STEP_SIZES)


def test_steps_of_every_kind_are_recorded() -> None:
    steps = recorded()
    assert any(step.chunks and not step.decodes for step in steps)
    assert any(step.decodes and not step.chunks for step in steps)
    assert any(step.decodes and step.chunks for step in steps)
    assert any(step.draws for step in steps), "forks draw from their capsule's logits"
    assert sum(step.chunk_tokens for step in steps) == 2 * 192, "two prompts; forks compute none"
    assert max(step.rows for step in steps) == 5


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
    from bench.doubles.random_model import random_model

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
