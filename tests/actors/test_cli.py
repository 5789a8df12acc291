"""The command line: what it refuses, and the whole demo as a user runs it."""

import json
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from mallee import __version__
from mallee.actors.cli import cli
from mallee.actors.demo_text import QUESTIONS
from mallee.actors.local import require_serve_extra
from mallee.protocol.errors import ConfigError, ModelError


def test_the_version_is_printed() -> None:
    answer = CliRunner().invoke(cli, ["version"])
    assert (answer.exit_code, answer.stdout) == (0, f"mallee {__version__}\n")


def test_listening_wider_than_loopback_needs_a_key() -> None:
    answer = CliRunner().invoke(cli, ["serve", "--host", "0.0.0.0"])
    assert answer.exit_code == 2
    assert "--api-key" in answer.output


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
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(ConfigError, match=r"mallee\[serve\]"):
        require_serve_extra()


@pytest.mark.ray
@pytest.mark.nats
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_forks_on_one_worker_and_leaves_nothing_running() -> None:
    """X1, part: real Ray, NATS, HTTP and model; affinity 1.0, and nothing of the prefix again."""
    from mallee.worker.model.source import resolve_model

    try:
        resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(f"no SmolLM2 weights: {error}")
    before = {p.pid for p in psutil.process_iter()}
    command = [sys.executable, "-m", "mallee.actors.cli", "demo", "--json", "--max-tokens", "4"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=380, check=False, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    _check_fork(report["fork"])
    plain = report["plain"]["branches"]
    assert [b["cached_tokens"] for b in plain] == [0] * len(QUESTIONS)
    assert {b["worker"] for b in plain} == {"w0", "w1"}
    forked = [b["text"] for b in report["fork"]["branches"]]
    assert [b["text"] for b in plain] == forked
    mine = {p.pid for p in psutil.process_iter()} - before
    left = [p for p in mine if psutil.pid_exists(p) and "mallee" in _command_line(p)]
    assert left == []


def _check_fork(fork: dict[str, Any]) -> None:
    assert fork["affinity"] == 1.0
    assert len(fork["branches"]) == len(QUESTIONS)
    assert len({b["worker"] for b in fork["branches"]}) == 1
    assert all(b["cached_tokens"] > 1000 for b in fork["branches"])
    assert all(b["prefill_tokens"] < 40 for b in fork["branches"])
    assert fork["total_ms"] >= fork["prefill_ms"] > 0


def _command_line(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
