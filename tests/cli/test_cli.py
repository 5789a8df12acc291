"""The command line: what it refuses; and the search of its demo."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from anyio.to_thread import run_sync
from rich.console import Console
from typer.testing import CliRunner

from bench.doubles.random_model import random_model
from mallee import __version__
from mallee.cli.demo import command as demo
from mallee.cli.demo.search import ANSWER_TOKENS, search_table, searched, verdict
from mallee.cli.main import cli, main
from mallee.cli.options import require_serve_extra
from mallee.client import Mallee
from mallee.protocol.errors import ConfigError, ModelNotFound
from mallee.worker.model.loading.source import (
    STAMP,
    default_cache_dir,
    made_once,
    tiny_hybrid_folder,
)
from support.tiny_fleet import tiny_api


def test_the_version_is_printed() -> None:
    for arguments in (["version"], ["--version"]):
        answer = CliRunner().invoke(cli, arguments)
        assert (answer.exit_code, answer.stdout) == (0, f"mallee {__version__}\n")
    told = CliRunner().invoke(cli, ["version", "--json"]).stdout
    assert json.loads(told) == {"version": __version__}


@pytest.mark.parametrize("command", ["serve", "mock"])
def test_listening_wider_than_loopback_needs_a_key(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLEE_API_KEY", raising=False)
    answer = CliRunner().invoke(cli, [command, "--host", "0.0.0.0"])
    assert isinstance(answer.exception, ConfigError)
    assert "MALLEE_API_KEY" in str(answer.exception)


@pytest.mark.parametrize(
    "arguments",
    [["serve", "--workers", "0"], ["serve", "--port", "70000"], ["demo", "--max-tokens", "0"]],
)
def test_numbers_out_of_range_are_refused_before_anything_starts(arguments: list[str]) -> None:
    answer = CliRunner().invoke(cli, arguments)
    assert answer.exit_code == 2
    assert "Invalid value" in answer.output


def test_a_base_install_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray not installed: run .*mallee\[serve\]"):
        require_serve_extra()


def ended(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[Any, str]:
    """The exit status of `mallee` with these arguments, and its last line on stderr."""
    monkeypatch.setattr(sys, "argv", ["mallee", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    return caught.value.code, lines[-1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "/no/such/dir"], "/no/such/dir"),
        (["--model", "EMPTY"], "config.json"),
        (["--model", "GPT2"], "llama"),
        (["--model", "/tmp/[/x]"], "/tmp/[/x]"),
        (["--dtype", "int3"], "--dtype='int3'"),
        (["--kv-dtype", "fp4"], "--kv-dtype='fp4': Input should be 'auto' or 'fp8'"),
    ],
)
def test_what_can_not_start_is_said_in_one_line_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    says: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    random_model().save(tmp_path / "llama")
    names = {"EMPTY": str(tmp_path / "empty"), "GPT2": str(tmp_path / "gpt2")}
    arguments = [names.get(option, option) for option in options]
    if "--model" not in arguments:
        arguments += ["--model", str(tmp_path / "llama")]
    status, said = ended(["serve", *arguments], monkeypatch, capsys)
    assert status == 1
    assert said.startswith("error:")
    assert says in said


# `mallee demo`: its search and `--keep`, without Ray; the whole of it is in test_processes.py

MODEL = random_model("llama", 5, max_position_embeddings=2048)


def way(score: float, drawn: int) -> dict[str, Any]:
    return {"score": score, "drawn": drawn, "prefill_tokens": 9, "total_ms": 1234.0, "text": ""}


async def test_a_search_draws_no_more_tokens_than_the_samples() -> None:
    """D33, part: both from one capsule, which is not computed again; samples of a tiny model end early."""
    async with tiny_api(MODEL, 1, num_blocks=2048) as (client, _):
        made = await client.post("/v1/capsules", json={"prompt": "A tree of many trunks"})
        with Mallee(str(client.base_url)) as sdk:
            ways = await run_sync(searched, sdk, made.json()["id"])
    assert 0 < ways["search"]["drawn"] <= ways["samples"]["drawn"] <= 8 * ANSWER_TOKENS
    for each in ways.values():
        assert 0 < each["score"] <= 1
        assert each["text"]
        assert each["prefill_tokens"] < 30 * 4, "a token of each fork's last block at most"


@pytest.mark.parametrize(
    ("search", "says"),
    [
        (way(0.3, 368), "search: 1.5 times the score: 0.300 for 368 tokens drawn, "),
        (way(0.2, 368), "search: it did not win this time: 0.200 for 368 tokens drawn, "),
    ],
)
def test_a_search_that_does_not_win_is_said_to(search: dict[str, Any], says: str) -> None:
    ways = {"samples": way(0.2, 384), "search": search}
    assert verdict(ways).startswith(says)
    assert verdict(ways).endswith("0.200 for 384")


def test_the_table_of_the_search_fits_a_narrow_terminal() -> None:
    console = Console(width=60)
    with console.capture() as captured:
        console.print(search_table({"samples": way(0.2, 384), "search": way(0.3, 368)}))
    lines = captured.get().splitlines()
    assert any("samples" in line and "384" in line and "0.200" in line for line in lines)
    assert any("search" in line and "368" in line and "1.2" in line for line in lines)


def test_a_report_of_a_kept_service_is_refused() -> None:
    answer = CliRunner().invoke(cli, ["demo", "--keep", "--json"])
    assert answer.exit_code == 2
    assert "--keep with --json" in answer.output


def test_the_demo_trains_its_hybrid_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran, console = [], Console(record=True, file=io.StringIO())

    def run(words: list[str], **_: Any) -> SimpleNamespace:
        ran.append(words)
        if len(ran) > 1:
            made_once(tiny_hybrid_folder(default_cache_dir()), lambda _: {})
        return SimpleNamespace(returncode=int(len(ran) == 1))

    monkeypatch.setattr(demo.subprocess, "run", run)
    with pytest.raises(ModelNotFound, match="ended with status 1"):
        demo.make_model("tiny-hybrid", console)
    for model in ("tiny-hybrid", "tiny-hybrid", "smollm2"):
        demo.make_model(model, console)
    assert [Path(words[1]).name for words in ran] == ["train_tiny_hybrid.py"] * 2
    assert "tiny-hybrid is trained first" in console.export_text()
    (tmp_path / "mallee" / "models" / "tiny-hybrid-1" / STAMP).unlink()
    monkeypatch.setattr(demo, "TRAINING", tmp_path / "no-checkout.py")
    with pytest.raises(ModelNotFound, match=r"python examples/train_tiny_hybrid\.py"):
        demo.make_model("tiny-hybrid", console)
