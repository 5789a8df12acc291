"""`mallee sweep`: what it leaves behind is enough to make it again."""

import csv
import hashlib
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mallee.cli.main import cli

ROWS = [
    {
        "timestamp": 40 * i,
        "input_length": 1024 - 8 * (i % 3),
        "output_length": 8,
        "hash_ids": [i % 4, 9 + i],
    }
    for i in range(24)
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "a trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def sweep(*options: str) -> None:
    done = CliRunner().invoke(cli, ["sweep", *options])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_the_command_of_a_sweep_makes_the_same_trials_again(trace: Path, tmp_path: Path) -> None:
    """S15: trials as CSV and JSON with seeds, the best, plots, and a page whose command reproduces them."""
    options = ["--engines", "1,2", "--kv-tokens", "8192", "--seeds", "2", "--slo-ttft-ms", "900"]
    first = tmp_path / "first"
    sweep(str(trace), *options, "--kind", "mooncake", "--processes", "1", "--out", str(first))
    found = json.loads((first / "sweep.json").read_text())
    with (first / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["trials"]) == 2 * 2 * 2
    assert {row["seed"] for row in rows} == {"1", "2"}
    best = [trial for trial in found["trials"] if trial["is_best"]]
    assert {trial["engines"] for trial in best} == {found["smallest_good"]["engines"]}
    assert len(best) == 2
    assert (first / "pareto.png").stat().st_size > 1000

    origin = found["origin"]
    assert origin["trace_sha256"] == hashlib.sha256(trace.read_bytes()).hexdigest()
    assert "mallee" in origin["versions"]
    page = (first / "sweep.html").read_text()
    assert "Reproduce" in page
    assert origin["trace_sha256"] in page
    program, command, *words = shlex.split(origin["command"])
    assert (program, command) == ("mallee", "sweep")
    again = tmp_path / "again"
    words[words.index("--out") + 1] = str(again)
    sweep(*words)
    repeated = json.loads((again / "sweep.json").read_text())
    assert repeated["trials"] == found["trials"]
    assert repeated["conditions"] == found["conditions"]
