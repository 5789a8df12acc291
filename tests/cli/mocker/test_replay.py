"""K21, K26: `mallee replay`, as users call it."""

import json
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
        ("--migrate", "--no-shared-reads"),
        ("--open-loop",),
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
        (("--block-size", "100"), "divisor or a multiple of 512"),
        (("--concurrency", "0"), "--concurrency=0"),
        (("--timing", "abacus"), "timing='abacus'"),
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


def test_a_fleet_that_nothing_fits_into_says_why(tmp_path: Path) -> None:
    code, stdout, _ = run(str(rows(tmp_path / "t.jsonl")), "--kv-tokens", "1024")
    assert code == 1
    assert "failed: 40 with kv_memory_exceeded" in stdout
    assert "request 0: this request needs " in stdout.replace("\n", " ")


def test_prompts_that_no_worker_took_do_not_count_as_misses(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": [0, 1]}
    huge = {**line, "input_length": 512 * 10_000, "hash_ids": [2]}
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(r) + "\n" for r in (line, huge, line)))
    code, stdout, _ = run(str(trace), "--engines", "1", "--kv-tokens", "51200", "--json")
    found = json.loads(stdout.splitlines()[-1])
    assert (code, found["errors"]) == (1, {"kv_memory_exceeded": 1})
    assert found["reasons"]["kv_memory_exceeded"].startswith("request 1: ")
    assert found["hit_rate"] == 0.25  # the last token's block is computed again


def test_times_are_those_of_the_timing(tmp_path: Path) -> None:
    planes = [[0.01, 0.0, 0.0]]
    model = {"form": "closed", "prefill_base_s": 0.1, "new_s": 0.001, "pair_s": 0.0}
    timing = tmp_path / "timing.json"
    timing.write_text(json.dumps({"model": {**model, "prefix_s": 0.0, "planes": planes}}))
    line = {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
    trace = tmp_path / "t.jsonl"
    later = {**line, "timestamp": 5000}
    trace.write_text("".join(json.dumps(r) + "\n" for r in (line, later)))
    options = ("--engines", "1", "--timing", str(timing), "--json")
    found = json.loads(run(str(trace), *options)[1].splitlines()[-1])
    # The whole prompt takes 1.124 s; behind 512 cached tokens 0.612 s.
    assert found["ttft_ms"]["mean"] == pytest.approx((1124 + 612) / 2)
    assert found["duration_s"] == pytest.approx(5 + 0.612 + 4 * 0.01)
    assert found["itl_ms"]["mean"] == pytest.approx(10.0)
