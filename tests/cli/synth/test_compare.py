"""`mallee synth compare`, as users call it."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mallee.cli.synth.group import group as synth
from mallee.synth.compare import replays
from mallee.synth.compare.report import ALL_GATES

runner = CliRunner()


def rows(path: Path, seed: int, answers: float = 1.0, sessions: int = 60) -> Path:
    """Sessions of four turns, in Mooncake's rows."""
    rng = np.random.default_rng(seed)
    found = []
    for session in range(sessions):
        at_ms, ids = float(rng.uniform(0, 300_000)), [0]
        for turn in range(4):
            ids = [*ids, 1000 * session + 10 * turn + 1, 1000 * session + 10 * turn + 2]
            at_ms += float(rng.exponential(20_000))
            row = {
                "timestamp": round(at_ms),
                "input_length": 512 * len(ids) - int(rng.integers(512)),
                "output_length": 1 + int(answers * rng.exponential(200)),
                "hash_ids": ids,
            }
            found.append(row)
    found.sort(key=lambda row: row["timestamp"])  # type: ignore[arg-type, return-value]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


@pytest.fixture(autouse=True)
def _small_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four engines take longer to make than these traces to run."""
    monkeypatch.setattr(replays, "SIZES", (4, 2))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return rows(tmp_path / "trace.jsonl", 1)


def run(*args: object) -> tuple[int, str, str]:
    done = runner.invoke(synth, ["compare", *map(str, args)])
    return done.exit_code, done.stdout, done.stderr


def test_a_trace_passes_against_itself(trace: Path) -> None:
    code, out, _ = run(trace, trace, "--no-replay", "--json", "--check")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    (compared,) = found["compared"].values()
    assert compared["counts"]["fail"] == 0
    assert compared["counts"]["pass"] > 15
    assert set(compared["gates"]) <= {gate.name for gate in ALL_GATES}
    assert compared["gates"]["ISL KS"] == {
        "group": "lengths",
        "statistic": "two-sample KS",
        "bar": 0.05,
        "value": 0.0,
        "low": 0.0,
        "high": 0.0,
        "verdict": "pass",
        "why": "",
    }
    assert found["source"]["requests"] == 240
    assert set(found["noise"]) == {"halves"}


def test_traces_of_other_lengths_are_told(trace: Path, tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    part.write_text("".join(trace.read_text().splitlines(keepends=True)[:100]))
    _, out, _ = run(trace, part, "--no-replay")
    told = " ".join(out.split())
    assert "part.jsonl has 100 requests, the source 240" in told
    assert "--requests 100" in told
    assert "Compare equal lengths" not in run(trace, trace, "--no-replay")[1]


def test_failed_gates_end_with_1_only_if_asked(trace: Path, tmp_path: Path) -> None:
    other = rows(tmp_path / "other.jsonl", 1, answers=5.0)
    code, out, _ = run(trace, other, "--no-replay")
    assert code == 0
    assert "FAIL" in out
    assert run(trace, other, "--no-replay", "--check")[0] == 1


@pytest.mark.slow
def test_both_models_stand_side_by_side(tmp_path: Path) -> None:
    """X9, part: the baseline beside the session model, with noise, replayed; and a page."""
    pytest.importorskip("matplotlib", reason="draws a page")
    trace = rows(tmp_path / "trace.jsonl", 1, sessions=30)
    page = tmp_path / "page"
    code, out, err = run(
        trace, "--model", "both", "--seeds", 1, "--replay-requests", 20, "--json", "--out", page
    )
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert list(found["compared"]) == ["tree model", "session model"]
    for each in found["compared"].values():
        assert each["samples"] == 1
        assert len(each["ideal_hit_rates_1x_4x_16x"]) == 1
        assert "TTFT p50, cost, small" in each["gates"]
        assert len(each["replays"]) == 1
    assert found["source"]["fleet"]["requests"] == 20
    assert "tree model" in err
    assert "requests in copied" in err
    html = (page / "compare.html").read_text()
    assert "session model" in html
    assert html.count("<svg") == len(list(page.glob("*.png"))) >= 5
    assert json.loads((page / "compare.json").read_text()) == found


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "give a second trace, or --model"),
        (["other.jsonl", "--model", "tree"], "give a second trace, or --model"),
        (["--model", "markov"], "--model=markov: give one of tree, session, both"),
        (["--model", "tree", "--seeds", "0"], "--seeds=0: give at least 1"),
        (["--model", "tree", "--rule", "up"], "--rule=up: give one of auto, floor, ceil"),
        (["missing.jsonl", "--no-replay"], "missing.jsonl"),
        (["--model", "tree", "--block-size", "100", "--no-replay"], "block size 100"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(trace: Path, args: list[str], words: str) -> None:
    code, _, err = run(trace, *args)
    assert code == 2
    assert words in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 3])
def test_tiny_traces_are_compared(tmp_path: Path, num: int) -> None:
    """One request, and three at one time."""
    trace = tmp_path / "tiny.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    trace.write_text(num * (json.dumps(row) + "\n"))
    code, out, err = run(trace, trace, "--json", "--replay" if num == 3 else "--no-replay")
    assert code == 0, err
    (compared,) = json.loads(out.splitlines()[-1])["compared"].values()
    assert compared["counts"]["fail"] == 0
