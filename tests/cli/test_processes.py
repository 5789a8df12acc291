"""The program itself: the whole demo, its shells and signals, and a record that outlives a kill."""

import asyncio
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from bench.doubles.random_model import random_model
from mallee.cli.demo.text import QUESTIONS
from mallee.cli.doctor import machine as doctor
from mallee.cli.main import cli
from mallee.protocol.errors import MalleeError, ModelError
from mallee.runtime.addresses import free_port
from mallee.sessions.record import Got, Placed, read
from support.brokers import OpenBroker
from support.mock_scene import make_folder

pytestmark = pytest.mark.process

KEEPS = """
from rich.console import Console
from mallee.cli.demo.command import _keep_up
_keep_up("http://127.0.0.1:1", Console(), 0.5)
"""


@pytest.mark.ray
@pytest.mark.model
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
    assert [b["prefill_tokens"] > 1000 for b in plain].count(True) == 2, "once by each of two"
    assert report["rewind"]["prefill_tokens"] <= 3 * 16
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


def test_a_kept_service_says_where_it_is_and_ends_by_a_signal() -> None:
    kept = subprocess.Popen([sys.executable, "-c", KEEPS], stdout=subprocess.PIPE, text=True)
    try:
        assert kept.stdout is not None
        said = []
        while not said or not said[-1].startswith("mallee chat"):
            said.append(kept.stdout.readline())
            assert said[-1], "".join(said)
        shown = " ".join("".join(said).split())
        assert (
            "stays up at http://127.0.0.1:1 until Ctrl-C, its page at http://127.0.0.1:1/ui"
            in shown
        )
        assert any(line.startswith("curl http://127.0.0.1:1/v1/search -H") for line in said)
        kept.send_signal(signal.SIGINT)
        rest, _ = kept.communicate(timeout=30)
    finally:
        kept.kill()
    assert kept.returncode == 0
    # A signal that comes while a line is printed may have it printed twice.
    assert "stopping, 0.5 s at most" in rest


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 3]}
    trace.write_text(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "mallee.cli", "replay", str(trace)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    told, error = done.stderr.strip().splitlines()
    assert told.startswith("t.jsonl: 1 requests")
    assert error == "error: output can't be written (No space left on device)"


@contextmanager
def mocked(folder: Path, records: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "mock", "--engines", "2", "--speedup", "1"]
    command += ["--model", str(folder), "--port", str(port)]
    command += ["--set", f"recording.folder={records}"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/health", timeout=5).json().get("status") == "ok":
                    break
            except httpx.HTTPError:
                pass
            assert process.poll() is None, "it ended"
            time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.wait()


def test_a_gateway_that_is_killed_leaves_a_record_that_replays(tmp_path: Path) -> None:
    """F25: kill -9 in mid-session; what was written is whole, and comes out of a mocked engine again."""
    folder, records = tmp_path / "tiny", tmp_path / "records"
    folder.mkdir()
    make_folder(folder)
    body = {
        "max_tokens": 600,
        "ignore_eos": True,
        "temperature": 1.0,
        "mallee": {"session": "s", "record": True},
    }
    with (
        mocked(folder, records) as (url, process),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        short = {**body, "prompt": "a tree of many trunks", "n": 3, "max_tokens": 9}
        made = client.post("/v1/completions", json=short).json()
        capsule = made["choices"][1]["mallee"]["capsule"]
        path, forked = f"/v1/capsules/{capsule}/fork", {**body, "n": 2, "stream": True}
        with client.stream("POST", path, json=forked) as response:
            lines = response.iter_lines()
            for _ in range(200):
                next(lines)
            process.kill()
            process.wait()
    [part] = records.iterdir()
    entries = read(part.read_bytes()).entries
    assert sum(isinstance(entry, Placed) for entry in entries) >= 2
    got = [len(e.tokens) // 4 for e in entries if isinstance(e, Got)]
    assert sum(got) > 27 + 20
    args = ("replay-session", str(part), "--model", str(folder), "--json")
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["tokens_equal"] == sum(got)


def test_a_port_of_another_program_is_a_fault(tmp_path: Path) -> None:
    random_model().save(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = doctor._port("127.0.0.1", port)
        assert (found.verdict, "taken by another program" in found.found) == ("fault", True)
        command = ["serve", "--model", str(tmp_path), "--port", str(port)]
        done = CliRunner().invoke(cli, command)
    assert isinstance(done.exception, MalleeError)
    assert f"can't listen on 127.0.0.1:{port}" in str(done.exception)


def test_a_broker_that_does_not_answer_is_named_before_anything_starts(tmp_path: Path) -> None:
    random_model().save(tmp_path)
    command = ["serve", "--model", str(tmp_path), "--nats-url", "nats://127.0.0.1:1"]
    done = CliRunner().invoke(cli, command)
    assert isinstance(done.exception, MalleeError)
    assert "no broker at 127.0.0.1:1" in str(done.exception)


async def test_a_broker_that_refuses_is_a_fault_of_a_config_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "fleet.yaml"

    async def checked(url: str) -> Result:
        path.write_text(f"model: m\nnats_url: {url}\n")
        command = ["check", str(path), "--broker"]
        return await asyncio.to_thread(CliRunner().invoke, cli, command)

    broker = OpenBroker()
    await broker.start()
    try:
        assert (await checked(broker.url)).exit_code == 0
    finally:
        await broker.stop()
    answer = await checked(f"nats://127.0.0.1:{free_port()}")
    assert answer.exit_code == 1
    assert "no broker at 127.0.0.1:" in answer.stderr
