"""K26, part: `mallee trace convert`, as users call it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mallee.cli.main import cli
from mallee.protocol.errors import ConfigError
from mallee.traces.read import read_workload
from support.trace_rows import row, write

TABLE = ("ts,in,out,who", "1700000003,20,2,a", "1700000001,10,1,a", "1700000002,x,1,b")
COLUMNS = "timestamp=ts,input=in,output=out,session=who"
runner = CliRunner()


def run(*args: object) -> Result:
    return runner.invoke(cli, ["trace", "convert", *map(str, args)])


def told(*args: object) -> dict[str, Any]:
    done = run(*args, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_table_is_written_by_time_with_its_unit_and_bad_rows_said(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = run(write(tmp_path, *TABLE), out, "--columns", COLUMNS)
    assert done.exit_code == 0
    assert "line 4: in: 'x': could not convert" in done.stderr
    assert "table to mallee: 2 requests, 2 lines" in done.stderr
    assert "times in s" in done.stderr
    first, second = read_workload(out)
    assert (first.input_tokens, second.input_tokens) == (10, 20)
    assert (second.arrival_s, second.wait_for, second.session) == (2.0, (0,), "a")


@pytest.mark.parametrize("to", ["mallee", "mooncake", "aiperf", "weka"])
def test_each_format_is_read_again(tmp_path: Path, to: str) -> None:
    """Lengths are kept by all; the text of aiperf has answers in it, so a prompt that has fewer is longer."""
    lines = [row(1000 * i, 700 * (i + 1), tuple(range(i + 1)), session_id="s") for i in range(3)]
    source, out = write(tmp_path, *lines), tmp_path / "out"
    found = told(source, out, "--to", to)
    assert (found["kind"], found["to"], found["requests"]) == ("agentic", to, 3)
    again = next(out.iterdir()) if to == "weka" else out
    back = list(read_workload(again))
    assert [(r.input_tokens, r.output_tokens) for r in back] == [(700, 4), (1400, 4), (2100, 4)]
    assert [r.wait_for for r in back] == ([()] * 3 if to == "mooncake" else [(), (0,), (1,)])


def test_ticks_and_a_number_of_requests_are_kept(tmp_path: Path) -> None:
    source = write(tmp_path, *(row(3000 * (i // 2)) for i in range(40)), "damage")
    out = tmp_path / "out.jsonl"
    assert told(source, out, "--requests", 20)["skipped"] == 0
    assert [r.arrival_s for r in read_workload(out, spread_ticks=False)] == [
        3.0 * (i // 2) for i in range(20)
    ]
    assert told(source, out)["skipped"] == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--to", "parquet"), "--to=parquet: give one of mallee, mooncake, aiperf, weka"),
        (("--from", "pdf"), "kind='pdf': give one of auto, mooncake"),
        (("--from", "azure", "--columns", COLUMNS), "columns make a table; leave out --from"),
        (
            ("--from", "azure"),
            "line 1: no column ContextTokens, GeneratedTokens, TIMESTAMP among ts",
        ),
        (("--to", "weka", "--columns", COLUMNS), "give a new folder for sessions"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    done = run(write(tmp_path, *TABLE), tmp_path, *args)
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)
