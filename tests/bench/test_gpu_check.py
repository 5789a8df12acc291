"""The one command that proves the GPU path: its logic on tiny shapes, on this CPU."""

import json
import math
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench import ROOT
from bench.gpu import exact, loop, steps, trees
from bench.gpu.check import Check, Outcome, run, run_bench
from bench.gpu.shapes import FULL, TINY_SCALE, product_flops, random_model
from bench.gpu.targets import TARGETS, row
from bench.gpu_check import Report, run_apart
from mallee.mocker.timing.files import read_timing
from mallee.worker.forward import ForwardBatch, Logits
from mallee.worker.model.attention.base import AttentionSplit
from mallee.worker.model.backend import choose_backend
from mallee.worker.model.graphs.decode import GraphOptions
from mallee.worker.model.loading.stored import expected_shapes
from support import flashinfer_emulator
from support.recorded_graphs import RecordedGraphs
from support.torch_threads import torch_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads():
        yield


@pytest.fixture(scope="module")
def check() -> Check:
    return Check("cpu", TINY_SCALE)


def test_a_grid_of_steps_is_written_for_the_mocker(tmp_path: Path) -> None:
    """I27, part: `--profile FILE`, with what it was measured on."""
    out = tmp_path / "grid.json"
    rows, failed = run(Check("cpu", TINY_SCALE, out), {"profile"})
    assert failed == []
    assert [each.measured for each in rows] == [None] * len(TARGETS)
    found = read_timing(out)
    assert found.conditions["device"] == "cpu"
    assert found.conditions["torch"] == torch.__version__
    assert 0 < found.timing().step_s([(100, 0)], 2, 200) < 10


def test_a_figure_is_judged_by_its_bound() -> None:
    for name, measured, meets in (
        ("decode_bf16", 0.71, True),
        ("decode_bf16", 0.69, False),
        ("shared_step", 1.15, True),
        ("shared_step", 1.16, False),
        ("recaptures", 0, True),
        ("recaptures", 1, False),
    ):
        assert row(name, measured).meets is meets
        assert row(name, measured, judges=False).meets is None
    with pytest.raises(AssertionError, match="neither a figure nor a reason"):
        row("forks", None)


def test_a_row_of_the_docs_is_measured_only_by_a_committed_figure() -> None:
    """Every target is a row of docs/gpu.md; its last column links the JSON of a real run, or says not yet."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows if name in TARGETS] == list(TARGETS)
    for name, measured in rows:
        if name in TARGETS and measured != "not yet":
            found = re.fullmatch(
                r"\[([\d.]+)[^\]]*\]\(\.\./(bench/results/gpu/\S+\.json)\)", measured
            )
            assert found is not None, f"{name}: {measured}"
            run = json.loads((ROOT / found[2]).read_text())
            assert run["versions"]["gpu"], "no run on a GPU"
            assert not run["is_tiny"]
            (figure,) = [each["measured"] for each in run["rows"] if each["name"] == name]
            assert float(found[1]) == pytest.approx(figure, rel=0.01)


def test_a_process_that_is_lost_is_a_row_with_its_reason_beside_what_it_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A bench apart may end its process, or never end: the rows of others stay, also in the file."""
    out = tmp_path / "all.json"
    report = Report(out, {"device": "cuda"})
    report.outcome.rows["forks"] = row("forks", 0.5)
    report.figures["seconds"] = {"forks": 1.0}

    def dies(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        theirs = Report(Path(command[command.index("--out") + 1]), {})
        theirs.figures["decode_fp8"] = {"step_ms": 4.0}
        theirs.keep()
        return subprocess.CompletedProcess(command, -6)

    def hangs(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    for process, says in ((dies, "ended with -6"), (hangs, "took more than 9 s")):
        report.outcome.rows.pop("decode_fp8", None)
        monkeypatch.setattr(subprocess, "run", process)
        run_apart("decode_fp8", [], report, 9.0)
        assert report.outcome.failed[-1] == f"decode_fp8: its process {says}"
        kept = {each["name"]: each for each in json.loads(out.read_text())["rows"]}
        assert kept["forks"]["measured"] == 0.5
        assert kept["decode_fp8"]["reason"] == f"its process {says}"
    assert report.figures == {"seconds": {"forks": 1.0}, "decode_fp8": {"step_ms": 4.0}}


def test_a_bench_that_fails_is_a_row_with_the_reason_and_the_others_go_on(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(steps, "prefill_flops", refuse)
    rows, failed = run(check, {"prefill", "recaptures", "forks"})
    found = {each.name: each for each in rows}
    assert list(found) == list(TARGETS)
    reason = "it failed: RuntimeError: no kernel image is available"
    assert failed == [f"prefill: {reason}"]
    assert (found["prefill"].measured, found["prefill"].reason) == (None, reason)
    assert found["forks"].measured is not None
    assert found["search"].reason == "it was not run"


def test_attention_that_reads_other_keys_is_found_out(check: Check) -> None:
    attention = choose_backend(
        check.model.config,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        device="cpu",
        block_size=16,
        uses_kernels=False,
    ).attention
    errors = exact.attention_errors(attention, check.model.config, 16, "cpu")
    assert errors.keys() == {"decode", "chunks", "mixed", "forks"}
    assert max(errors.values()) < 0.03
    prepare = attention.prepare

    class Moved:
        min_saving = attention.min_saving
        attend = attention.attend

        def prepare(self, split: AttentionSplit) -> Any:
            segments, shared = (
                tuple(part._replace(blocks=(part.blocks + 500) % 1024) for part in parts)
                for parts in (split.segments, split.shared)
            )
            return prepare(split._replace(segments=segments, shared=shared))

    wrong = exact.attention_errors(Moved(), check.model.config, 16, "cpu")
    assert min(wrong.values()) > 0.5


def test_a_device_that_is_lost_ends_the_benches_and_each_row_is_kept_at_once(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[set[str]] = []
    outcome = Outcome({}, [])
    assert not run_bench(check, "forks", outcome, lambda: kept.append(set(outcome.rows)))
    assert kept == [{"forks"}, {"forks", "restore"}, {"forks", "restore"}]

    def lost(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(check, "is_cuda", True)
    rows, failed = run(check, {"forks", "draws"})
    assert failed == ["forks: the device is lost: an illegal memory access was encountered"]
    found = {each.name: each for each in rows}
    assert found["restore"].measured is not None
    assert found["draws"].reason == "it was not run"


@pytest.mark.slow
def test_forks_of_a_whole_engine_replay_and_capture_nothing() -> None:
    """I13, part, F3, part: over the stand-in for a GPU; each answer draws three tokens by replays.

    Replayed logits are those of eager steps, which the check of a device shows first.
    """
    scale = replace(TINY_SCALE, raw={**TINY_SCALE.raw, "head_dim": 64})
    device = RecordedGraphs()
    model = random_model(scale, "cpu")
    forward = model.forward(
        scale.num_blocks, flashinfer=flashinfer_emulator, graphs=GraphOptions(8, device=device)
    )
    eager = model.beside(forward, flashinfer=flashinfer_emulator)
    for size in forward.graph_stats().sizes:
        assert steps.replay_error(forward, eager, size) < 1e-2
    before = forward.graph_stats().num_replays
    assert before == len(forward.graph_stats().sizes), "those steps were no replays"
    ours = trees.engine_over(forward, scale)
    found = trees.replays(ours, scale)
    assert found == (0, 3 * scale.forks / trees.REPLAYED_FORKS, 0)
    assert device.num_captures == 4
    ours.engine.close()


def test_the_operations_of_a_prefill_are_two_for_each_weight_and_token() -> None:
    """Llama 3.1 8B: 8.03 G weights, of which 6.98 G multiply every token, and attention half a square."""
    config = FULL.config
    shapes = expected_shapes(config).values()
    assert sum(math.prod(shape) for shape in shapes) == 8_030_261_248
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    head = 128_256 * 4096
    for num in (1, 8192):
        attention = sum(4 * 32 * 32 * 128 * seen for seen in range(1, num + 1))
        assert product_flops(config, num) == 2 * layers * num + attention + 2 * head


def test_a_path_that_computes_something_else_is_found_out(check: Check) -> None:
    other = random_model(TINY_SCALE, "cpu", seed=1).forward(64)
    own = check.model.forward(64, uses_kernels=False)
    assert exact.distance(own, own, TINY_SCALE) == (0.0, 0.0, 1.0)
    far = exact.distance(other, own, TINY_SCALE)
    assert far.largest >= far.error > 0.1
    assert far.agreement < 0.5
    assert exact.num_equal(own, TINY_SCALE) == TINY_SCALE.exact_prompts
    compute = own.forward

    def by_batch(batch: ForwardBatch) -> Sequence[Logits]:
        return [logits * (-1 if len(batch.rows) > 1 else 1) for logits in compute(batch)]

    wrong = SimpleNamespace(forward=by_batch, sample=own.sample, block_size=16, num_blocks=64)
    assert exact.num_equal(cast(Any, wrong), TINY_SCALE) < TINY_SCALE.exact_prompts


def test_steps_are_those_of_an_engine_and_gaps_those_between_its_launches(check: Check) -> None:
    for found in (
        loop.alone(check.forward, TINY_SCALE),
        loop.forked(check.forward, TINY_SCALE, TINY_SCALE.shared),
    ):
        assert found.step_s > 0
        assert found.host_gap is None, "a CPU has no events"

    class At(float):
        def elapsed_time(self, later: float) -> float:
            return later - self

    spans = [(At(begin), At(end)) for begin, end in ((0, 4), (4, 5), (6, 9), (9.5, 10))]
    assert loop.idle_share(spans) == pytest.approx(0.15)
    assert loop.idle_share([]) is None
