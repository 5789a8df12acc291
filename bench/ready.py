"""Time until a service answers: from its command to the first completion over HTTP.

    python -m bench.ready [--quick] [--ways serve,serve_model,deploy,up] [--rounds 3] [--nodes 3]

`mallee serve` with mocked engines, and with one of SmolLM2; `serve deploy` of the same mocked service on a
Ray head that runs (its own start is `head_s`); `mallee up` with several nodes. The ways take turns in every
round, one at a time, each from nothing; medians of the rounds, and the slowest. `stop_s`: from SIGTERM
to the end of the command. The last line of stdout is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from bench import measure
from bench.doubles.ports import free_ports
from bench.processes import running, wait_for, wait_for_page
from mallee.runtime.addresses import free_port
from mallee.runtime.proxy.choice import KEEP_ALIVE_S, serving_environment

MODEL: Final = "m"
READY_S: Final = 240.0
STOP_S: Final = 60.0
ARGS: Final = {"model": "smollm2", "served_model_name": MODEL, "engine": {"kind": "mock"}}
BIN: Final = Path(sys.executable).parent

Times = dict[str, float]


def options() -> list[str]:
    """`ARGS` as options of a command."""
    sets = (f"served_model_name={MODEL}", "engine.kind=mock")
    return ["--model", "smollm2", *(word for each in sets for word in ("--set", each))]


def started(command: list[str], port: int, folder: Path) -> Times:
    """Times of a command that runs in the foreground and serves at `port`."""
    log = folder / f"{port}.log"
    begin = time.monotonic()
    with running(command, log, stop_s=STOP_S) as process:
        wait_for(f"http://127.0.0.1:{port}", process, log, READY_S)
        ready_s = time.monotonic() - begin
        begin = time.monotonic()
    return {"ready_s": ready_s, "stop_s": time.monotonic() - begin}


def serve(folder: Path, *more: str) -> Times:
    """`mallee serve`, as users start it."""
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "serve", "--port", str(port)]
    return started([*command, *(more or options())], port, folder)


def up(folder: Path, nodes: int) -> Times:
    """`mallee up`: several nodes on this machine."""
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "up", "--nodes", str(nodes)]
    return started([*command, "--port", str(port), *options()], port, folder)


def deploy(folder: Path) -> Times:
    """`serve deploy` on a running head."""
    port = free_port()
    file = folder / "serve.yaml"
    application = {
        "name": "mallee",
        "route_prefix": "/",
        "import_path": "mallee.actors.app:app",
        "args": ARGS,
    }
    http = {"host": "127.0.0.1", "port": port, "keep_alive_timeout_s": KEEP_ALIVE_S}
    text = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
    file.write_text(yaml.safe_dump(text))
    begin = time.monotonic()
    with head(folder) as (process, address, env):
        head_s = time.monotonic() - begin
        begin = time.monotonic()
        done = subprocess.run(
            [str(BIN / "serve"), "deploy", "--address", address, str(file)],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=READY_S,
        )
        if done.returncode:
            raise RuntimeError(f"serve deploy failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        accepted_s = time.monotonic() - begin
        wait_for(f"http://127.0.0.1:{port}", process, folder / "head.log", READY_S)
        ready_s = time.monotonic() - begin
    return {"head_s": head_s, "accepted_s": accepted_s, "ready_s": ready_s}


@contextmanager
def head(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Mapping[str, str]]]:
    """A Ray head on loopback with ports of its own: its process, its dashboard, its environment."""
    gcs, dashboard, client, agent = free_ports(4)
    env = {**serving_environment(folder), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    command = [str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [
        f"--port={gcs}",
        f"--dashboard-port={dashboard}",
        f"--ray-client-server-port={client}",
    ]
    command += [f"--dashboard-agent-listen-port={agent}", "--object-store-memory=100000000"]
    command += ["--num-cpus=8", "--disable-usage-stats", f"--temp-dir={folder}"]
    address = f"http://127.0.0.1:{dashboard}"
    with running(command, folder / "head.log", env, stop_s=STOP_S) as process:
        try:
            wait_for_page(f"{address}/api/version", process, folder / "head.log", READY_S)
            yield process, address, env
        finally:
            is_up = process.poll() is None
            below = psutil.Process(process.pid).children(recursive=True) if is_up else []
            process.terminate()
            end(below)


def end(processes: list[psutil.Process]) -> None:
    """Wait for the end of a head's processes; one that its head left behind is killed."""
    _, alive = psutil.wait_procs(processes, STOP_S / 4)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def ways(nodes: int) -> dict[str, Callable[[Path], Times]]:
    """All that can be timed, by name."""
    real = ("--model", "smollm2", "--set", f"served_model_name={MODEL}")
    return {
        "serve": serve,
        "serve_model": lambda folder: serve(folder, *real),
        "deploy": deploy,
        "up": lambda folder: up(folder, nodes),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--ways", default="", help="some of them, with commas; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=3, help="of `mallee up`")
    given = parser.parse_args()
    known = ways(given.nodes)
    wanted = [name for name in given.ways.split(",") if name] or list(known)
    runs: dict[str, list[Times]] = {name: [] for name in wanted}
    for number in range(1 if given.quick else given.rounds):
        for name in wanted:
            # In a short path: Ray puts Unix sockets into it.
            with tempfile.TemporaryDirectory(prefix="r-") as folder:
                runs[name].append(known[name](Path(folder)))
            print(f"round {number}: {name} {measure.rounded(runs[name][-1])}", file=sys.stderr)
    found: dict[str, Any] = {
        name: {
            **{key: statistics.median(run[key] for run in each) for key in each[0]},
            "slowest_s": max(run["ready_s"] for run in each),
        }
        for name, each in runs.items()
    }
    about = {"rounds": len(runs[wanted[0]]), "nodes": given.nodes, **measure.machine()}
    print(json.dumps(measure.rounded({"ways": found, **about})))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
