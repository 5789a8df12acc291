"""K22, K23, K24: `mallee synth generate`, as users call it: what it writes and says, and what it refuses."""

import hashlib
import importlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mallee.cli.synth.group import group as synth
from mallee.synth.core.prefix_tree import PrefixTree
from mallee.traces.read import read_workload
from mallee.traces.trace import trace_of
from mallee.traces.workload import Workload

runner = CliRunner()


def generate(out: "Path | str", *args: "Path | str") -> Result:
    return runner.invoke(synth, ["generate", "--to", str(out), *map(str, args)])


def run(source: Path, out: "Path | str", *args: str) -> Result:
    return generate(out, "--from", source, *args)


def told(source: Path, out: "Path | str", *args: str) -> dict[str, Any]:
    """The object of the last line."""
    done = run(source, out, "--json", *args)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(i: int, **more: Any) -> str:
    """Of 40 sessions of three turns each, over one system prompt of two blocks."""
    session, turn = i % 40, i // 40
    ids = [0, 1, *range(100 * session + 100, 100 * session + 101 + 2 * turn)]
    fields = {
        "timestamp": 250 * i,
        "input_length": 512 * len(ids) - 7 * session,
        "output_length": 5 + i % 50,
        "hash_ids": ids,
    }
    return json.dumps({**fields, **more}) + "\n"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Rows of Mooncake's form."""
    path = tmp_path / "plain.jsonl"
    path.write_text("".join(row(i) for i in range(120)))
    return path


@pytest.fixture
def agentic(tmp_path: Path) -> Path:
    """The same with sessions and dependencies."""
    path = tmp_path / "agentic.jsonl"
    with path.open("w") as file:
        for i in range(120):
            waits = {"wait_for": [f"r{i - 40}"], "tool_wait_ms": 1500} if i >= 40 else {}
            file.write(row(i, session_id=f"s{i % 40}", request_id=f"r{i}", **waits))
    return path


def read(path: Path, **options: Any) -> Workload:
    return read_workload(path, spread_ticks=False, **options)


@pytest.mark.parametrize("model", ["tree", "session"])
@pytest.mark.parametrize("form", ["mooncake", "agentic", "dag"])
def test_what_is_written_can_be_read(model: str, form: str, agentic: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    found = told(agentic, out, "--model", model, "--format", form, "--requests", "200")
    assert found["requests"] == 200
    assert found["model"] == model
    assert found["format"] == form
    assert found["requests_per_min"] > 0
    assert found["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    if form != "dag":
        requests = list(read(out))
        assert len(requests) == 200
        PrefixTree.of(trace_of(read(out)))


def test_the_format_fits_the_model(agentic: Path, tmp_path: Path) -> None:
    """By default rows of a tree model arrive in an open loop; those of a session wait, unless told."""
    out = tmp_path / "out.jsonl"
    assert told(agentic, out, "--model", "tree")["format"] == "mooncake"
    assert not any(r.wait_for or r.session for r in read(out))
    assert told(agentic, out)["format"] == "agentic"
    assert any(r.wait_for and r.tool_wait_s for r in read(out))
    opened = tmp_path / "open.jsonl"
    run(agentic, opened, "--open-loop")
    assert not any(r.wait_for or r.tool_wait_s for r in read(opened))
    assert [r.arrival_s for r in read(opened)] == [r.arrival_s for r in read(out)]


@pytest.mark.parametrize("model", ["tree", "session"])
def test_as_many_as_the_source_by_default(model: str, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert told(plain, out, "--model", model)["requests"] == 120
    assert told(plain, out, "--model", model, "--read-requests", "50")["requests"] == 50


def test_knobs_are_turned_and_told(plain: Path, tmp_path: Path) -> None:
    """K24."""
    one, other = tmp_path / "one", tmp_path / "other"
    told(plain, one, "--model", "tree")
    knobs = ("--osl", "3", "--speedup", "2", "--prefix-root", "4", "--prefix-len", "2")
    found = told(plain, other, "--model", "tree", *knobs)
    assert found["knobs"] == {"osl": 3.0, "speedup": 2.0, "prefix_root": 4, "prefix_len": 2.0}
    before, after = list(read(one)), list(read(other))
    assert [r.output_tokens for r in after] == [3 * r.output_tokens for r in before]
    assert after[-1].arrival_s == pytest.approx(before[-1].arrival_s / 2, abs=1e-6)
    assert len({r.ids[0] for r in after}) == 4 * len({r.ids[0] for r in before})


@pytest.mark.parametrize("model", ["tree", "session"])
def test_a_saved_model_generates_the_same(model: str, agentic: Path, tmp_path: Path) -> None:
    """Learning again is not needed; what the file tells of the trace is said when it is written."""
    kept = tmp_path / "kept.model"
    args = ("--requests", "150", "--seed", "4", "--format", "agentic")
    done = run(agentic, tmp_path / "one", "--model", model, "--save-model", str(kept), *args)
    assert done.exit_code == 0
    assert f"wrote {kept}: " in done.stderr
    found = told(kept, tmp_path / "other", *args)
    assert found["model"] == model
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert run(kept, tmp_path / "none").exit_code == 2  # how many? a model has no number


@pytest.mark.parametrize("program", ["bfs", "dfs", "mcts", "swarm"])
def test_programs_need_no_source(program: str, tmp_path: Path) -> None:
    """K25, part."""
    out = tmp_path / "out.jsonl"
    args = ["generate", "--program", program, "--to", str(out), "--requests", "120", "--json"]
    done = runner.invoke(synth, args)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["source"] == f"program {program}"
    requests = list(read(out))
    assert len(requests) == 120
    assert any(each.parent >= 0 or each.branches > 1 for each in requests)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give --from"),
        (["--program", "bfs", "--from", "x.jsonl"], "x.jsonl"),
        (["--program", "astar", "--requests", "5"], "--program=astar: give one of bfs"),
        (["--program", "bfs"], "give --requests"),
    ],
)
def test_a_wrong_program_is_one_line(args: list[str], says: str, tmp_path: Path) -> None:
    done = runner.invoke(synth, ["generate", "--to", str(tmp_path / "out"), *args])
    assert done.exit_code == 2
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


WRONG = [
    (["--model", "forest"], "--model=forest: give one of tree, session"),
    (["--format", "parquet"], "--format=parquet"),
    (["--requests", "0"], "--requests=0"),
    (["--block-size", "100"], "block size 100"),
    (["--rule", "round"], "--rule=round"),
    (["--seed", "-1"], "seed -1"),
    (["--prefix-root", "0"], "prefix_root=0"),
    (["--format", "mooncake", "--closed-loop"], "--closed-loop"),
    (["--format", "dag", "--open-loop"], "--open-loop"),
    (["--kind", "parquet"], "kind='parquet'"),
    (["--read-requests", "0"], "--read-requests=0"),
]


@pytest.mark.parametrize(("args", "says"), WRONG)
def test_a_wrong_option_is_one_line(
    args: list[str], says: str, plain: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    done = run(plain, out, *args)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert done.stdout == ""
    assert out.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [out, plain]


def test_a_wrong_source_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "graph").write_text(row(0, hash_ids=[0, 1]) + row(1, hash_ids=[2, 1]))
    (tmp_path / "folder").mkdir()
    for name, model in itertools.product(
        ("missing", "empty", "bytes", "graph", "folder"), ("tree", "session")
    ):
        done = run(tmp_path / name, tmp_path / "out", "--model", model)
        assert done.exit_code == 2, name
        assert name in done.stderr
        assert "Traceback" not in done.output
        assert not (tmp_path / "out").exists()


# What is refused before anything is written over


@pytest.fixture
def saved(plain: Path, tmp_path: Path) -> Path:
    path = tmp_path / "saved.model"
    assert generate("/dev/null", "--from", plain, "--save-model", path).exit_code == 0
    return path


def refused(done: Result, says: str) -> None:
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_source_is_not_written_over(plain: Path, tmp_path: Path) -> None:
    """By any name it has."""
    before = plain.read_bytes()
    other = tmp_path / "other.jsonl"
    other.symlink_to(plain)
    for out in (plain, other, tmp_path / "." / "plain.jsonl"):
        refused(generate(out, "--from", plain), "--from reads")
        refused(generate(tmp_path / "x", "--from", plain, "--save-model", out), "--from reads")
    assert plain.read_bytes() == before


def test_a_model_goes_into_a_plain_file_of_its_own(plain: Path, tmp_path: Path) -> None:
    """A device would be replaced by a file."""
    both = tmp_path / "both"
    refused(generate(both, "--from", plain, "--save-model", both), "is --to, too")
    assert not both.exists()
    for path in (Path("/dev/null"), tmp_path):
        refused(generate(tmp_path / "x", "--from", plain, "--save-model", path), "no plain file")
    none = tmp_path / "none" / "model"
    refused(generate(tmp_path / "x", "--from", plain, "--save-model", none), "there is no folder")
    refused(generate(none, "--from", plain), "there is no folder")
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
    refused(generate(tmp_path / "x", "--from", saved, *more), args[0])
    refused(generate(tmp_path / "x", "--program", "bfs", *more), args[0])


def test_a_model_is_of_its_kind(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    refused(
        generate(out, "--from", saved, "--requests", "5", "--model", "tree"), "is a session model"
    )
    assert generate(out, "--from", saved, "--requests", "5", "--model", "session").exit_code == 0
    assert generate(out, "--program", "dfs", "--requests", "5", "--model", "session").exit_code == 0
    refused(generate(out, "--program", "dfs", "--requests", "5", "--model", "tree"), "program dfs")


def test_programs_are_no_models_to_keep(tmp_path: Path) -> None:
    args = ["--program", "bfs", "--requests", "5"]
    refused(generate(tmp_path / "x", *args, "--save-model", tmp_path / "m"), "--save-model")
    assert list(tmp_path.iterdir()) == []


def test_the_extra_is_named(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions need scipy, trees don't."""
    importing = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return importing(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    refused(generate(tmp_path / "x", "--from", plain), "mallee[synth]")
    assert generate(tmp_path / "x", "--from", plain, "--model", "tree").exit_code == 0


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no /dev/stdout here")
def test_stdout_has_nothing_but_the_trace(plain: Path) -> None:
    """By its other name, too; what is told goes to stderr then."""
    one, other = (generate(out, "--from", plain, "--json") for out in ("-", "/dev/stdout"))
    assert one.exit_code == other.exit_code == 0
    assert len(one.stdout.splitlines()) == 120
    assert one.stdout == other.stdout
    assert all(
        {"timestamp", "hash_ids"} <= json.loads(line).keys() for line in one.stdout.splitlines()
    )
    assert json.loads(one.stderr.splitlines()[-1])["sha256"] is None
