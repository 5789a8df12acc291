"""The services under test, each started by its own command and reached over HTTP on loopback."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeAlias

from bench.doubles.ports import free_ports
from bench.processes import running, wait_for
from mallee.runtime.addresses import free_port
from mallee.worker.model.loading.source import resolve_model

MODEL = "m"
NUM_STUBS = 4
STOP_S = 60.0
FLEET = ("--model", "smollm2", "--set", f"served_model_name={MODEL}")

Side: TypeAlias = Callable[[], AbstractContextManager[str]]
"""Starts a service and gives its URL."""


class Programs(NamedTuple):
    """Foreign programs, "" where they are not installed. `dynamo` is a Python that has it."""

    smg: str
    dynamo: str

    def versions(self) -> dict[str, str]:
        """Of ours and theirs; of what is not installed, that."""
        found = {name: metadata.version(name) for name in ("mallee", "ray")}
        smg = Path(self.smg).with_name("python") if self.smg else None
        for name, python in (("smg", smg), ("ai-dynamo", self.dynamo)):
            found[name] = version_of(str(python), name) if python else "not installed"
        return found


def version_of(python: str, package: str) -> str:
    """The version of a package in the environment of a Python."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


@contextmanager
def answering(
    command: list[str], port: int, folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The URL of `command` once it answers; it ends with the block."""
    url, log = f"http://127.0.0.1:{port}", folder / f"{port}.log"
    with running(command, log, env, stop_s=STOP_S) as process:
        wait_for(url, process, log)
        yield url


@contextmanager
def serve(
    folder: Path,
    engines: int,
    *,
    gateways: int = 1,
    proxy: str | None = None,
    speedup: float = 0.0,
) -> Iterator[str]:
    """`mallee serve`: over Ray, one process of mocked engines; behind the proxy that it takes by itself.

    Its proxy can be forced: "haproxy" or "python".
    """
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "serve", *FLEET, "--port", str(port)]
    command += ["--set", "engine.kind=mock", "--set", f"mock.engines_per_worker={engines}"]
    command += ["--set", f"gateways={gateways}", "--set", f"mock.speedup={speedup}"]
    command += ["--set", f"store.folder={folder / f'store-{port}'}"]  # several are alive at once
    env = {} if proxy is None else {"RAY_SERVE_ENABLE_HA_PROXY": str(int(proxy == "haproxy"))}
    with answering(command, port, folder, env) as url:
        yield url


@contextmanager
def serve_model(model: str, dtype: str) -> Iterator[str]:
    """`mallee serve` with one worker of a real model, over Ray."""
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "serve", "--model", model, "--port", str(port)]
    command += ["--set", f"served_model_name={MODEL}", "--dtype", dtype]
    with (
        tempfile.TemporaryDirectory() as folder,
        answering(command, port, Path(folder)) as url,
    ):
        yield url


@contextmanager
def one_process(folder: Path, engines: int) -> Iterator[str]:
    """`mallee mock`: HTTP and gateway in one process, the engines in another; no Ray."""
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "mock", *FLEET, "--port", str(port)]
    command += ["--set", "mock.speedup=0"]
    with answering([*command, "--engines", str(engines)], port, folder) as url:
        yield url


@contextmanager
def smg(folder: Path, program: str) -> Iterator[str]:
    """smg over stub engines that answer at once (it mocks none), by its `cache_aware` policy."""
    port, metrics, *stubs = free_ports(2 + NUM_STUBS)
    stub = [sys.executable, "-m", "bench.gateway.backends", "--http", *map(str, stubs)]
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    command += ["--policy", "cache_aware", "--log-level", "error"]
    command += ["--worker-urls", *(f"http://127.0.0.1:{each}" for each in stubs)]
    with answering(stub, stubs[0], folder), answering(command, port, folder) as url:
        yield url


@contextmanager
def dynamo(folder: Path, python: str, engines: int) -> Iterator[str]:
    """Dynamo's frontend, KV-routed, over as many of its mockers in one process that take no time."""
    port = free_port()
    env = {
        "DYN_FILE_KV": str(folder / "dynamo"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_LOG": "error",
    }
    mocker = [python, "-m", "dynamo.mocker", "--model-path", str(resolve_model("smollm2"))]
    mocker += ["--model-name", MODEL, "--num-workers", str(engines), "--speedup-ratio", "0"]
    mocker += ["--block-size", "16"]
    frontend = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
    frontend += ["--http-port", str(port), "--router-mode", "kv"]
    with (
        running(mocker, folder / "mocker.log", env),
        answering(frontend, port, folder, env) as url,
    ):
        yield url


def sides(folder: Path, engines: int, programs: Programs) -> dict[str, Side]:
    """All that can be started here, by name."""
    found: dict[str, Side] = {
        "serve": lambda: serve(folder, engines),
        "two_gateways": lambda: serve(folder, engines, gateways=2),
        "python_proxy": lambda: serve(folder, engines, proxy="python"),
        "one_process": lambda: one_process(folder, engines),
    }
    if programs.smg:
        found["smg"] = lambda: smg(folder, programs.smg)
    if programs.dynamo:
        found["dynamo"] = lambda: dynamo(folder, programs.dynamo, engines)
    return found
