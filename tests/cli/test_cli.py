"""The command line: what it refuses, and the whole demo as a user runs it."""

import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from mallee import __version__
from mallee.cli.demo.text import QUESTIONS
from mallee.cli.main import cli
from mallee.cli.options import require_serve_extra
from mallee.protocol.errors import ConfigError, ModelError
from mallee.testing.random_model import random_model


def test_the_version_is_printed() -> None:
    for arguments in (["version"], ["--version"]):
        answer = CliRunner().invoke(cli, arguments)
        assert (answer.exit_code, answer.stdout) == (0, f"mallee {__version__}\n")


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "/no/such/dir"], "/no/such/dir"),
        (["--model", "EMPTY"], "config.json"),
        (["--model", "GPT2"], "llama"),
        (["--model", "/tmp/[/x]"], "/tmp/[/x]"),
        (["--dtype", "int3"], "--dtype='int3'"),
        (["--kv-dtype", "fp4"], "--kv-dtype='fp4': Input should be 'auto' or 'fp8'"),
        (["--nats-url", "nats://127.0.0.1:1"], "no broker at 127.0.0.1:1"),
        (["--port", "PORT"], "can't listen on 127.0.0.1:"),
    ],
)
def test_what_can_not_start_is_said_in_one_line_before_anything_starts(
    tmp_path: Path, options: list[str], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    random_model().save(tmp_path / "llama")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {
            "EMPTY": str(tmp_path / "empty"),
            "GPT2": str(tmp_path / "gpt2"),
            "PORT": str(taken.getsockname()[1]),
        }
        arguments = [names.get(option, option) for option in options]
        if "--model" not in arguments:
            arguments += ["--model", str(tmp_path / "llama")]
        done = subprocess.run(
            [sys.executable, "-m", "mallee.cli", "serve", *arguments],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines[-1].startswith("error:")
    assert says in lines[-1]
    assert "Traceback" not in done.stderr


def test_an_option_of_old_is_refused_with_its_new_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mallee.cli", "mock", "--http=8001"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: --http is now --port"


@pytest.mark.ray
@pytest.mark.nats
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(400)
def test_the_demo_forks_on_one_worker_and_leaves_nothing_running() -> None:
    """X1, part: real Ray, NATS, HTTP and model; affinity 1.0, and nothing of the prefix again."""
    from mallee.worker.model.loading.source import resolve_model

    try:
        resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(f"no SmolLM2 weights: {error}")
    command = [sys.executable, "-m", "mallee.cli", "demo", "--json", "--max-tokens", "4"]
    mark = f"MALLEE_TEST_{secrets.token_hex(8)}"  # all processes of the demo have this variable
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=380, check=False,
        env={**os.environ, mark: "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    _check_fork(report["fork"])
    plain = report["plain"]["branches"]
    assert [b["cached_tokens"] for b in plain] == [0] * len(QUESTIONS)
    assert {b["worker"] for b in plain} == {"w0", "w1"}
    forked = [b["text"] for b in report["fork"]["branches"]]
    assert [b["text"] for b in plain] == forked
    search = report["search"]
    assert 0 < search["search"]["drawn"] <= search["samples"]["drawn"]
    assert all(way["prefill_tokens"] < 120 for way in search.values())
    assert [each for each in psutil.process_iter() if _is_left(each, mark)] == []


def _check_fork(fork: dict[str, Any]) -> None:
    assert fork["affinity"] == 1.0
    assert len(fork["branches"]) == len(QUESTIONS)
    assert len({b["worker"] for b in fork["branches"]}) == 1
    assert all(b["cached_tokens"] > 1000 for b in fork["branches"])
    assert all(b["prefill_tokens"] < 40 for b in fork["branches"])
    assert fork["total_ms"] >= fork["prefill_ms"] > 0


def _is_left(process: psutil.Process, mark: str) -> bool:
    try:
        return mark in process.environ() and "mallee" in " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile, or is not ours to look at
        return False


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        ("bash", {"COMP_WORDS": "mallee ca", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "mallee ca"}),
    ],
)
def test_a_shell_completes_commands(shell: str, asked: dict[str, str]) -> None:
    """By typer's own protocol, as each shell asks."""
    program = "from mallee.cli.main import cli; cli(prog_name='mallee')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "_MALLEE_COMPLETE": f"complete_{shell}", **asked},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "capsules" in done.stdout, done.stderr
    assert "workers" not in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_for_a_shell_is_shown(shell: str) -> None:
    script = _completion_of(shell)
    assert f"complete_{shell}" in script
    assert "_mallee_completion mallee" in script


def _completion_of(shell: str) -> str:
    program = "from mallee.cli.main import cli; cli(prog_name='mallee')"
    done = subprocess.run(
        [sys.executable, "-c", program, "--show-completion", shell],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_itself_completes_by_the_script(tmp_path: Path) -> None:
    command = tmp_path / "mallee"
    program = "from mallee.cli.main import cli; cli(prog_name='mallee')"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n')
    command.chmod(0o755)
    lines = (
        _completion_of("bash"),
        "COMP_WORDS=(mallee workers dr); COMP_CWORD=2",
        f"_mallee_completion {shlex.quote(str(command))}",
        'echo "${COMPREPLY[@]}"',
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.split() == ["drain"], done.stderr


def test_the_program_loads_no_screen_before_it_opens_one() -> None:
    """Its help and its other commands don't pay for textual."""
    code = "import sys, mallee.cli.main; print('textual' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
