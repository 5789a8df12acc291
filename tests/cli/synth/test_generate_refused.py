"""K23, K24: what `mallee synth generate` refuses before it writes over anything, and what it says."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mallee.cli.synth.group import synth

runner = CliRunner()


def run(out: "Path | str", *args: "Path | str") -> Result:
    return runner.invoke(synth, ["generate", "--to", str(out), *map(str, args)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sixty rows, three turns each of twenty sessions."""
    path = tmp_path / "source.jsonl"
    with path.open("w") as file:
        for i in range(60):
            ids = [0, *range(100 * (i % 20) + 100, 100 * (i % 20) + 102 + i // 20)]
            fields = {"timestamp": 700 * i, "input_length": 512 * len(ids), "output_length": 9}
            file.write(json.dumps({**fields, "hash_ids": ids}) + "\n")
    return path


@pytest.fixture
def saved(source: Path, tmp_path: Path) -> Path:
    path = tmp_path / "saved.model"
    assert run("/dev/null", "--from", source, "--save-model", path).exit_code == 0
    return path


def refused(done: Result, says: str) -> None:
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_source_is_not_written_over(source: Path, tmp_path: Path) -> None:
    """By any name it has."""
    before = source.read_bytes()
    other = tmp_path / "other.jsonl"
    other.symlink_to(source)
    for out in (source, other, tmp_path / "." / "source.jsonl"):
        refused(run(out, "--from", source), "--from reads")
        refused(run(tmp_path / "x", "--from", source, "--save-model", out), "--from reads")
    assert source.read_bytes() == before


def test_a_model_and_a_trace_go_into_two_files(source: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    refused(run(both, "--from", source, "--save-model", both), "is --to, too")
    assert not both.exists()


def test_a_model_goes_into_a_plain_file(source: Path, tmp_path: Path) -> None:
    """A device would be replaced by a file."""
    for path in (Path("/dev/null"), tmp_path):
        refused(run(tmp_path / "x", "--from", source, "--save-model", path), "no plain file")
    none = tmp_path / "none" / "model"
    refused(run(tmp_path / "x", "--from", source, "--save-model", none), "there is no folder")
    assert Path("/dev/null").is_char_device()
    assert not (tmp_path / "x").exists()


READING = [
    ["--kind", "azure"],
    ["--id-tokens", "16"],
    ["--rule", "ceil"],
    ["--read-requests", "5"],
    ["--strict"],
    ["--keep-ticks"],
    ["--read-seed", "2"],
]


@pytest.mark.parametrize("args", READING)
def test_nothing_is_read_of_a_model(args: Sequence[str], saved: Path, tmp_path: Path) -> None:
    """Options of reading would have no effect, and so would another model's name."""
    more = ["--requests", "5", *args]
    refused(run(tmp_path / "x", "--from", saved, *more), args[0])
    refused(run(tmp_path / "x", "--program", "bfs", *more), args[0])


def test_a_model_is_of_its_kind(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    refused(run(out, "--from", saved, "--requests", "5", "--model", "tree"), "is a session model")
    assert run(out, "--from", saved, "--requests", "5", "--model", "session").exit_code == 0
    assert run(out, "--program", "dfs", "--requests", "5", "--model", "session").exit_code == 0
    refused(run(out, "--program", "dfs", "--requests", "5", "--model", "tree"), "program dfs")


def test_programs_are_no_models_to_keep(tmp_path: Path) -> None:
    args = ["--program", "bfs", "--requests", "5"]
    refused(run(tmp_path / "x", *args, "--save-model", tmp_path / "m"), "--save-model")
    refused(run(tmp_path / "x", *args, "--shareable"), "--shareable")
    assert list(tmp_path.iterdir()) == []


def test_what_is_told_of_a_file_is_what_it_holds(source: Path, saved: Path, tmp_path: Path) -> None:
    """A model that is shareable stays so when it is saved again."""
    shared, again = tmp_path / "shared", tmp_path / "again"
    first = run("/dev/null", "--from", source, "--save-model", shared, "--shareable")
    assert first.exit_code == 0, first.output
    second = run("/dev/null", "--from", shared, "--save-model", again, "--requests", "5")
    assert first.stderr.split(": ", 1)[1].splitlines()[0] in second.stderr
    assert again.read_bytes() == shared.read_bytes()


def test_the_extra_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions need scipy, trees don't."""
    importing = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return importing(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    refused(run(tmp_path / "x", "--from", source), "mallee[synth]")
    assert run(tmp_path / "x", "--from", source, "--model", "tree").exit_code == 0


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no /dev/stdout here")
def test_stdout_has_nothing_but_the_trace(source: Path) -> None:
    """By its other name, too."""
    one, other = run("-", "--from", source), run("/dev/stdout", "--from", source)
    assert one.exit_code == other.exit_code == 0
    assert len(one.stdout.splitlines()) == 60
    assert one.stdout == other.stdout
