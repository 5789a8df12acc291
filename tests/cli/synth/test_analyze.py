"""X9, part: `mallee synth analyze`, as users call it."""

import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from mallee.cli.synth.analyze import tables
from mallee.cli.synth.group import group as synth
from mallee.synth.analysis.analysis import analyze
from mallee.synth.analysis.report import report_of
from mallee.traces.read import read_workload
from mallee.traces.trace import trace_of
from support.trace_rows import row

NODES = [
    {"id": i, "parent": parent, "depth": depth, "tok": 5 + i}
    for i, (parent, depth) in enumerate([(-1, 0), (0, 1), (0, 1), (0, 1), (1, 2), (1, 2)])
]
TREES = json.dumps({"task": 1, "nodes": NODES})
runner = CliRunner()


def run(*args: object) -> Result:
    return runner.invoke(synth, ["analyze", *map(str, args)])


def told(*args: object) -> dict[str, Any]:
    done = run(*args, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(path: Path, *more: str) -> Path:
    lines = [row(700 * i, 1200 + i, [1, 2 + i // 4, 50 + i]) for i in range(40)]
    path.write_text("\n".join([*lines, *more]) + "\n")
    return path


def test_the_last_line_is_one_object_with_what_was_measured(tmp_path: Path) -> None:
    found = told(rows(tmp_path / "a.jsonl"))
    assert (found["requests"], found["block_size"], found["rule"]) == (40, 512, "ceil")
    assert found["tree"]["blocks"] == 1 + 10 + 40
    assert (found["tree"]["roots"], found["tree"]["branch_nodes"]) == (1, 11)
    assert found["reuse"]["ideal_hit"] == pytest.approx((120 - 51) / 120)
    assert found["lengths"]["isl"]["max"] == 1239
    assert found["arrivals"]["gap_s"]["p50"] == pytest.approx(0.7)
    assert [each["share"] for each in found["reuse"]["lru"]] == [
        *(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
    ]
    assert found["malformed"] == {"skipped": 0, "mended": 0}
    assert found["forks"] is None


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_nothing_is_cut_off_on_a_narrow_terminal(tmp_path: Path, width: int) -> None:
    """K22, part: each fact is there with its value, and each size with its hit rates."""
    found = report_of(analyze(trace_of(read_workload(rows(tmp_path / "a.jsonl")))))
    console = Console(width=width, file=io.StringIO(), highlight=False)
    with console.capture() as shown:
        for table in tables(found, width):
            console.print(table)
    text = shown.get()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for name, value in (pair for pairs in found.facts.values() for pair in pairs):
        assert any(
            re.search(rf"{re.escape(name)} +{re.escape(value)}( |$)", each) for each in lines
        )
    for each in found.caches:
        assert f"{each['hit_rate']:.3f}" in text
        assert f"{each['engine_hit_rate']:.3f}" in text


def test_packed_traces_and_options_of_reading(tmp_path: Path) -> None:
    plain = rows(tmp_path / "a.jsonl")
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert told(packed)["tree"] == told(plain)["tree"]
    assert told(plain, "--requests", 5)["requests"] == 5
    assert told(plain, "--rule", "floor")["rule"] == "floor"
    halves = told(plain, "--block-size", 256)
    assert halves["block_size"] == 256
    assert halves["tree"]["blocks"] == 2 * 11 + 40  # the third block of a prompt has a half alone


def test_malformed_lines_are_told_and_counted(tmp_path: Path) -> None:
    trace = rows(tmp_path / "a.jsonl", '{"timestamp": 1}', row(10**6, -5, []))
    found = told(trace)
    assert found["requests"] == 40
    assert found["malformed"]["skipped"] == 2
    done = run(trace)
    assert "2 malformed lines" in done.stderr
    assert "line 41" in done.stderr
    assert "line 42" in done.stderr
    strict = run(trace, "--strict")
    assert strict.exit_code == 2
    assert "line 41" in strict.stderr


@pytest.mark.parametrize(
    ("content", "args", "named"),
    [
        (None, (), "no such file"),
        (b"", (), "no requests"),
        (b"\x00\x01\xfe\xff" * 100, (), "neither a JSON object nor"),
        (b"hello\n", (), "line 1"),
        (b'{"timestamp": 1}\n', (), "line 1: Object missing required field `input_length`"),
        (
            (row(0, 1024, [1, 2]) + "\n" + row(5, 1024, [3, 2])).encode(),
            (),
            "hash id 2 comes after hash id 1 in request 0",
        ),
        (row(0, 1024, [1, 2]).encode(), ("--rule", "round"), "--rule=round"),
        (row(0, 1024, [1, 2]).encode(), ("--block-size", "500"), "block size 500"),
        (row(0, 1024, [1, 2]).encode(), ("--kind", "pdf"), "pdf"),
        (row(0, 1024, [1, 2]).encode(), ("--requests", "0"), "--requests=0"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    content: bytes | None, args: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    """K22, part: a non-tree input is refused, naming block and parents."""
    trace = tmp_path / "a.jsonl"
    if content is not None:
        trace.write_bytes(content)
    done = run(trace, *args)
    assert done.exit_code == 2
    assert named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "figures"),
    [
        (None, {"lengths", "arrivals", "dispersion", "cache", "tree", "reuse", "sessions"}),
        (TREES, {"lengths", "cache", "tree", "forks"}),
        (row(0, 100, []), {"lengths"}),
    ],
)
def test_a_page_with_figures_is_written(
    content: str | None, figures: set[str], tmp_path: Path
) -> None:
    trace = tmp_path / "a.jsonl"
    if content is None:
        lines = [
            row(300 * i, 600 * (1 + i // 8), [i % 8, *range(8 + i % 8, 8 * (1 + i // 8), 8)])
            for i in range(64)
        ]
        content = "\n".join(lines)
    trace.write_text(content + "\n")
    out = tmp_path / "out"
    done = run(trace, "--out", out)
    assert done.exit_code == 0, done.output
    assert {path.stem for path in out.glob("*.png")} == figures
    page = (out / "analysis.html").read_text()
    assert page.count("<svg") == len(figures)
    assert "Distributions" in page
    assert json.loads((out / "analysis.json").read_text())["name"] == "a.jsonl"
    for path in out.iterdir():
        assert str(path) in done.stderr


def test_a_folder_that_cant_be_written_stops_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    done = run(rows(tmp_path / "a.jsonl"), "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "not a folder" in done.stderr
