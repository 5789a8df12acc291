"""The services under fault: with API keys for two tenants, everything else by default."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import psutil

from bench.doubles.ports import free_ports
from bench.failover.faults import PARTS, processes
from bench.failover.streams import MODEL
from bench.peers.vllm_server import vllm_command, vllm_env
from bench.processes import running, wait_for
from bench.serve.sides import version_of
from mallee.runtime.addresses import free_port

START_S: Final = 300.0
STOP_S: Final = 30.0
KEYS: Final = ("key-of-tenant-a-0123456789", "key-of-tenant-b-0123456789")
OPERATOR: Final = "key-of-the-operator-0123456789"
VLLM_ENV: Final = vllm_env(threads=1)
_VLLM_RUNNING = re.compile(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", re.MULTILINE)


class Service(NamedTuple):
    """A running service. `engines`: the processes of each engine. `others`: its further addresses."""

    url: str
    pid: int
    engines: Callable[[], list[list[int]]]
    num_running: Callable[[], float]
    others: tuple[str, ...] = ()

    def tree(self) -> list[psutil.Process]:
        """All its processes that run."""
        first = [psutil.Process(self.pid)] if psutil.pid_exists(self.pid) else []
        below = [each for process in first for each in process.children(recursive=True)]
        named = [psutil.Process(p) for pids in self.engines() for p in pids if psutil.pid_exists(p)]
        return list({each.pid: each for each in [*first, *below, *named]}.values())

    def rss_mb(self) -> float:
        """Resident memory of all but the engines, whose KV memory grows by itself."""
        found = [each for each in self.tree() if not is_engine(each)]
        return sum(each.memory_info().rss for each in found) / 1e6


def is_engine(process: psutil.Process) -> bool:
    """Whether it is one of ours or of vLLM's that computes."""
    command = " ".join(process.cmdline())
    return PARTS["worker"] in command or "VLLM::" in command


def send(pids: list[int], number: signal.Signals) -> None:
    """A signal to those that still run."""
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, number)


def _wait(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    url = f"http://127.0.0.1:{port}"
    wait_for(url, process, log, START_S, model=MODEL, headers=bearer(KEYS[0]))


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@contextmanager
def _begun(
    command: list[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """The process of `command`; afterwards none of its children is left."""
    with running(command, log, env, stop_s=STOP_S) as process:
        try:
            yield process
        finally:
            left = [psutil.Process(pid) for pid in _below(process.pid)]
            send([each.pid for each in left], signal.SIGCONT)
            process.terminate()
            _, alive = psutil.wait_procs(left, STOP_S)
            for each in alive:
                each.kill()


@contextmanager
def _started(
    command: list[str], folder: Path, port: int, env: Mapping[str, str] | None = None
) -> Iterator[int]:
    """The process of `command` once it answers."""
    log = folder / f"{port}.log"
    with _begun(command, log, env) as process:
        _wait(port, process, log)
        yield process.pid


def _below(pid: int) -> list[int]:
    if not psutil.pid_exists(pid):
        return []
    return [each.pid for each in psutil.Process(pid).children(recursive=True)]


@contextmanager
def mallee(folder: Path) -> Iterator[Service]:
    """`mallee serve`: Ray, HAProxy, one gateway, two workers of a core each."""
    port = free_port()
    entries = [
        ("a", KEYS[0], "client"),
        ("b", KEYS[1], "client"),
        ("operator", OPERATOR, "operator"),
    ]
    keys = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "role": role}
        for name, key, role in entries
    ]
    (folder / "keys.yaml").write_text(json.dumps({"keys": keys}))
    command = [
        sys.executable,
        "-m",
        "mallee.cli",
        "serve",
        "--model",
        "smollm2",
        "--port",
        str(port),
    ]
    command += ["--workers", "2", "--threads", "1", "--served-model-name", MODEL]
    command += ["--set", f"http.keys_file={folder / 'keys.yaml'}"]
    url = f"http://127.0.0.1:{port}"

    def num_running() -> float:
        listed = httpx.get(f"{url}/v1/router/workers", headers=bearer(OPERATOR)).json()["data"]
        return float(sum(each["rows"] + each["waiting"] for each in listed))

    with _started(command, folder, port) as pid:
        yield Service(url, pid, lambda: [[p] for p in processes(pid, "worker")], num_running)


def _vllm_running(port: int) -> float:
    """Requests that it computes or that wait."""
    metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return sum(float(each) for each in _VLLM_RUNNING.findall(metrics))


@contextmanager
def vllm(folder: Path, python: str) -> Iterator[Service]:
    """One server of vLLM for CPUs, and its engine, which is a process of its own."""
    port = free_port()
    with _started(vllm_command(python, port, MODEL, KEYS), folder, port, VLLM_ENV) as pid:

        def engines() -> list[list[int]]:
            return [[each for each in _below(pid) if is_engine(psutil.Process(each))]]

        yield Service(f"http://127.0.0.1:{port}", pid, engines, lambda: _vllm_running(port))


@contextmanager
def smg(folder: Path, program: str, python: str) -> Iterator[Service]:
    """smg over two servers of vLLM; an engine is all processes of one."""
    port, metrics, *ports = free_ports(4)
    with ExitStack() as stack:
        behind = [
            stack.enter_context(
                _begun(vllm_command(python, each, MODEL), folder / f"{each}.log", VLLM_ENV)
            )
            for each in ports
        ]
        for process, each in zip(behind, ports, strict=True):
            _wait(each, process, folder / f"{each}.log")
        trees = [[each.pid, *_below(each.pid)] for each in behind]
        command = [program, "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        command += ["--policy", "cache_aware", "--log-level", "error"]
        for name, key in zip(("a", "b"), KEYS, strict=True):
            command += ["--tenant-api-key", f"{name}:{key}"]
        command += ["--worker-urls", *(f"http://127.0.0.1:{each}" for each in ports)]
        yield Service(
            f"http://127.0.0.1:{port}",
            stack.enter_context(_started(command, folder, port)),
            lambda: trees,
            lambda: sum(_vllm_running(each) for each in ports),
            (f"http://127.0.0.1:{metrics}",),
        )


def versions(programs: Mapping[str, str]) -> dict[str, str]:
    """Of ours and of theirs, by the Python beside each program."""
    found = {name: metadata.version(name) for name in ("mallee", "ray")}
    for package, program in programs.items():
        found[package] = version_of(str(Path(program).with_name("python")), package)
    return found
