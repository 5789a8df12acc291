"""K21, K26: `mallee replay` and `mallee sweep`, as users call them."""

import csv
import gzip
import hashlib
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.protocol.errors import MalleeError

runner = CliRunner()


def run(*args: str) -> tuple[int, str, Exception | None]:
    done = runner.invoke(cli, ["replay", *args])
    error = done.exception if isinstance(done.exception, Exception) else None
    return done.exit_code, done.stdout, error


def rows(path: Path, num: int = 40) -> Path:
    """Requests in the form of Mooncake's trace, of which three share a prefix each."""
    lines = [
        json.dumps(
            {
                "timestamp": i * 50,
                "input_length": 1500 + i,
                "output_length": 5 + i % 7,
                "hash_ids": [10 * (i // 3), 10 * (i // 3) + 1, 1000 + i],
            }
        )
        for i in range(num)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("policy", ["cost", "random"])
def test_the_last_line_is_one_object(policy: str, tmp_path: Path) -> None:
    trace = rows(tmp_path / "trace.jsonl")
    code, stdout, error = run(str(trace), "--engines", "3", "--policy", policy, "--json")
    assert (code, error) == (0, None)
    found = json.loads(stdout.splitlines()[-1])
    assert found["requests"] == 40
    assert found["requests_per_s"] > 0
    assert set(found["ttft_ms"]) == set(found["itl_ms"]) == {"p50", "p90", "p99", "mean"}
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p90"] <= found["ttft_ms"]["p99"]
    assert 0.0 <= found["hit_rate"] < 1.0
    assert found["prefix_copies"] >= 1.0
    assert found["lost"] == 0
    assert found["peak_mb"] > 10
    again = json.loads(
        run(str(trace), "--engines", "3", "--policy", policy, "--json")[1].splitlines()[-1]
    )
    assert again["digest"] == found["digest"]


@pytest.mark.parametrize(
    "options",
    [
        ("--block-size", "16"),
        ("--block-size", "1024"),
        ("--kv-tokens", "32768"),
        ("--concurrency", "5"),
        ("--gateways", "2", "--event-lag", "3"),
        ("--speedup", "10", "--requests", "20", "--max-tokens", "3"),
        ("--timing", "h100-llama-3.1-8b-bf16", "--seed", "7"),
        ("--prefill-engines", "2", "--kv-bytes-per-token", "65536", "--link-gb-s", "50"),
        ("--host-kv-tokens", "51200", "--disk-kv-tokens", "51200", "--kv-tokens", "32768"),
        ("--migrate", "--set", "experimental.tree_attention=false"),
        ("--open-loop",),
        (
            "--engine",
            "vllm",
            "--gateways",
            "2",
            "--set",
            "mock.engines_per_device=2",
            "--kv-tokens",
            "32768",
        ),
    ],
)
def test_options_are_taken(options: tuple[str, ...], tmp_path: Path) -> None:
    code, stdout, error = run(str(rows(tmp_path / "t.jsonl")), *options)
    assert (code, error) == (0, None)
    assert "hit rate" in stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engines", "0"), "engines=0: give at least 1"),
        (("--policy", "best"), "policy='best': give one of cost"),
        (("--engine", "sglang"), "rules='sglang': give one of mallee, vllm"),
        (("--engine", "vllm", "--migrate"), "can_migrate=True with the rules of vLLM"),
        (("--block-size", "100"), "divisor or a multiple of 512"),
        (("--concurrency", "0"), "--concurrency=0"),
        (("--timing", "abacus"), "timing='abacus'"),
        (
            ("--set", "mock.engines_per_device=2"),
            "--kv-tokens, what each has of the 906,000 of its device",
        ),
        (("--timing", "dynamo"), "--timing dynamo does not say how much KV a device holds"),
        (
            ("--timing", "dynamo", "--kv-tokens", "65536", "--migrate"),
            "does not say what a token's KV takes, and KV moves: give --kv-bytes-per-token",
        ),
        (("--speedup", "-1"), "speedup=-1.0"),
        (("--speedup", "1e-300"), "virtual time"),
        (("--faults", "nowhere.json"), "nowhere.json"),
        (("--event-lag", "inf"), "--event-lag=inf"),
        (("--slo-ttft-ms", "0"), "--slo-ttft-ms=0"),
        (("--link-gb-s", "nan"), "--link-gb-s=nan"),
        (("--kv-bytes-per-token", "0"), "--kv-bytes-per-token=0"),
        (("--id-tokens", "0"), "--id-tokens=0"),
        (("--kv-tokens", str(10**30)), "don't fit into memory"),
        (("--csv", "/nowhere/rows.csv"), "/nowhere/rows.csv: can't be written"),
        (("--out", "/dev/null/x"), "--out /dev/null/x"),
    ],
)
def test_what_can_not_be_is_one_line(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    code, _, error = run(str(rows(tmp_path / "t.jsonl")), *options)
    assert code == 1
    assert isinstance(error, MalleeError)
    assert message in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("timing", "kv_tokens", "nbytes"),
    [
        ("h100-qwen3-30b-a3b-bf16", 111_000, 98_304),
        ("h100-llama-3.1-70b-fp8@kernels", 663_000, 327_680),
        ("h200-llama-3.1-8b-fp8", 906_000, 131_072),
    ],
)
def test_kv_memory_is_that_of_the_timings_device(
    timing: str, kv_tokens: int, nbytes: int, tmp_path: Path
) -> None:
    """Its tokens, and the bytes of one where KV moves, unless they are given."""
    trace, named = str(rows(tmp_path / "t.jsonl")), ("--timing", timing, "--json")
    told = json.loads(run(trace, *named, "--migrate")[1].splitlines()[-1])["conditions"]
    assert (told["kv_tokens"], told["kv_bytes_per_token"]) == (kv_tokens, nbytes)
    given = ("--kv-tokens", "65536", "--kv-bytes-per-token", "7")
    told = json.loads(run(trace, *named, *given)[1].splitlines()[-1])["conditions"]
    assert (told["kv_tokens"], told["kv_bytes_per_token"]) == (65_536, 7)
    points = json.loads(sweep(trace, *named, "--engines", "1", "--processes", "1").splitlines()[-1])
    assert {point["kv_tokens"] for point in points["points"]} == {kv_tokens}


def test_prompts_that_no_worker_took_are_told_and_do_not_count_as_misses(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": [0, 1]}
    huge = {**line, "input_length": 512 * 10_000, "hash_ids": [2]}
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(r) + "\n" for r in (line, huge, line)))
    code, stdout, _ = run(str(trace), "--engines", "1", "--kv-tokens", "51200", "--json")
    found = json.loads(stdout.splitlines()[-1])
    assert (code, found["errors"]) == (1, {"kv_memory_exceeded": 1})
    assert found["reasons"]["kv_memory_exceeded"].startswith("request 1: ")
    assert found["hit_rate"] == 0.25  # the last token's block is computed again
    code, stdout, _ = run(str(trace), "--engines", "1", "--kv-tokens", "51200")
    assert code == 1
    assert "failed: 1 with kv_memory_exceeded" in stdout
    assert "request 1: this request needs " in stdout.replace("\n", " ")


def test_times_are_those_of_the_timing(tmp_path: Path) -> None:
    planes = [[0.01, 0.0, 0.0]]
    model = {"form": "closed", "prefill_base_s": 0.1, "new_s": 0.001, "pair_s": 0.0}
    timing = tmp_path / "timing.json"
    timing.write_text(json.dumps({"model": {**model, "prefix_s": 0.0, "planes": planes}}))
    line = {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
    trace = tmp_path / "t.jsonl"
    later = {**line, "timestamp": 5000}
    trace.write_text("".join(json.dumps(r) + "\n" for r in (line, later)))
    options = ("--engines", "1", "--timing", str(timing), "--kv-tokens", "65536", "--json")
    found = json.loads(run(str(trace), *options)[1].splitlines()[-1])
    # The whole prompt takes 1.124 s; behind 512 cached tokens 0.612 s.
    assert found["ttft_ms"]["mean"] == pytest.approx((1124 + 612) / 2)
    assert found["duration_s"] == pytest.approx(5 + 0.612 + 4 * 0.01)
    assert found["itl_ms"]["mean"] == pytest.approx(10.0)


def test_the_faults_of_the_docs_are_played_and_every_life_is_named(tmp_path: Path) -> None:
    """The JSON line is there whatever becomes of the files, and each row has the life that took it."""
    text = (Path(__file__).parents[3] / "docs" / "size-a-fleet.md").read_text()
    faults, out = tmp_path / "faults.json", tmp_path / "rows.csv"
    faults.write_text(text.partition("```json\n")[2].partition("```")[0])
    trace = rows(tmp_path / "t.jsonl", num=300)
    code, stdout, error = run(
        str(trace), "--faults", str(faults), "--csv", str(out), "--json", "--kv-tokens", "65536"
    )
    assert (code, error) == (0, None)
    assert json.loads(stdout.splitlines()[-1])["requests"] == 300
    with out.open(newline="") as file:
        found = [(float(row["routed_s"]), row["worker"]) for row in csv.DictReader(file)]
    assert {name for _, name in found} == {"w0", "w1", "w1#2", "w2", "w3", "w8"}
    assert all(at <= 5 for at, name in found if name == "w1")
    assert all(at >= 9 for at, name in found if name == "w1#2")


# Sweeps: what one leaves behind is enough to make it again

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


def sweep(*options: str) -> str:
    done = CliRunner().invoke(cli, ["sweep", *options])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_the_command_of_a_sweep_makes_the_same_trials_again(trace: Path, tmp_path: Path) -> None:
    """S15, K26: trials as CSV and JSON with seeds, the best, plots, and a page whose command reproduces them.

    The frontier is printed, or one JSON line.
    """
    options = ["--engines", "1,2", "--kv-tokens", "8192", "--seeds", "2", "--slo-ttft-ms", "900"]
    first = tmp_path / "first"
    shown = sweep(
        str(trace), *options, "--kind", "mooncake", "--processes", "1", "--out", str(first)
    )
    assert "* is the frontier" in shown
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
    told = json.loads(sweep(*words, "--json").splitlines()[-1])
    assert [point["engines"] for point in told["points"]] == [1, 1, 2, 2]  # by two policies
    assert told["conditions"]["trace"] == trace.name
    repeated = json.loads((again / "sweep.json").read_text())
    assert repeated["trials"] == found["trials"]
    assert repeated["conditions"] == found["conditions"]


# The docs

DOC = (Path(__file__).resolve().parents[3] / "docs" / "size-a-fleet.md").read_text()
COMMANDS = re.findall(r"^mallee ((?:replay|sweep|figures) .*)$", DOC, re.MULTILINE)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(each, marks=pytest.mark.slow if "--out" in each else ())
        for each in dict.fromkeys(COMMANDS)
    ],
)
def test_commands_that_size_a_fleet_run_as_they_are_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small trace of that name, with the faults of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    with gzip.open("mooncake_conversation.jsonl.gz", "wt") as file:
        file.writelines(
            json.dumps({**row, "timestamp": 500 * i}) + "\n" for i, row in enumerate(ROWS)
        )
    faults = re.search(r"```json\n(\[.*?\])\n```", DOC, re.DOTALL)
    assert faults is not None
    Path("faults.json").write_text(faults[1])
    Path("fleet.yaml").write_text("model: smollm2\nengine: {kind: mock}\nworkers: 2\n")
    done = CliRunner().invoke(cli, shlex.split(command), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert re.search(r"virtual time|first tokens within|wrote", done.output)
