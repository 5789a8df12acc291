"""A running `mallee up`, as its clients and its operator see it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from bench.failover.faults import clock_environment
from mallee.runtime.addresses import free_port

START_S = 420.0
STOP_S = 60.0
_NODE = re.compile(r"node (\d+): (\S+), process (\d+), NATS (\S+?)(, Ray's head)?$", re.MULTILINE)
_REPLICA = "ServeReplica:mallee:"


class Node(NamedTuple):
    """A node as the start-up lines name it."""

    number: int
    address: str
    pid: int
    is_head: bool


class Cluster:
    """The nodes of `mallee up`, by its process and its lines."""

    def __init__(
        self, process: subprocess.Popen[bytes], settings: Path, log: Path, port: int
    ) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.clock = clock_in(settings.parent)
        self._settings = settings
        self._log = log

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def nodes(self) -> list[Node]:
        """As they were first."""
        return [
            Node(int(number), address, int(pid), bool(head))
            for number, address, pid, _, head in _NODE.findall(self.said)
        ]

    def processes(self, number: int) -> list[psutil.Process]:
        """The processes of a node that runs now."""
        mark = f"/{number}/orders.json"
        for outer in psutil.Process(self.process.pid).children():
            command = _command(outer)
            if mark in command and command.startswith("unshare"):
                return outer.children(recursive=True)
        return []

    def replicas(self, deployment: str) -> dict[int, int]:
        """The numbers of nodes, with their replicas of a deployment."""
        found = {
            node.number: sum(
                f"{_REPLICA}{deployment}" in _command(each) for each in self.processes(node.number)
            )
            for node in self.nodes
        }
        return {number: count for number, count in found.items() if count}

    def victim(self) -> int:
        """A node with a worker, but neither gateway nor Ray's head. Raises RuntimeError if there is none."""
        return chosen(self.replicas("Worker"), {1, *self.replicas("Gateway")}, "a worker alone")

    def gateways_node(self) -> int:
        """A node with a gateway that is not Ray's head. Raises RuntimeError if there is none."""
        return chosen(self.replicas("Gateway"), {1}, "a gateway")

    def change(self, **settings: Any) -> None:
        """Have the service roll to other settings."""
        self._settings.write_text(json.dumps(json.loads(self._settings.read_text()) | settings))
        self.process.send_signal(signal.SIGHUP)

    async def until_rolled(self, num_before: int, timeout_s: float) -> None:
        await until(lambda: self.num_rolled > num_before, timeout_s, "the new settings")

    @property
    def num_rolled(self) -> int:
        if "the old settings go on" in (said := self.said):
            raise RuntimeError(said)
        return said.count("the new settings are served")


def chosen(replicas: Mapping[int, int], others: Collection[int], what: str) -> int:
    """The first node of `replicas` that is none of `others`. Raises RuntimeError if all are."""
    for number in replicas:
        if number not in others:
            return number
    raise RuntimeError(
        f"no node but Ray's head has {what}: replicas by node {dict(replicas)}, left out"
        f" {sorted(others)}; give more nodes, or fewer gateways"
    )


def clock_in(folder: Path) -> Path:
    """The file of a node's clock error; `{net}` is the number of its network namespace."""
    return folder / "clock-{net}"


async def health(client: httpx.AsyncClient) -> dict[str, Any]:
    try:
        found: dict[str, Any] = (await client.get("/health", timeout=5.0)).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return found


async def until_well(client: httpx.AsyncClient, workers: int, timeout_s: float) -> float:
    """Seconds until three answers in a row tell of a whole service."""
    begin, num_well = time.monotonic(), 0
    while num_well < 3:
        found = await health(client)
        is_well = found.get("status") == "ok" and len(found.get("workers", ())) == workers
        num_well = num_well + 1 if is_well else 0
        if time.monotonic() > begin + timeout_s:
            raise TimeoutError(f"not well after {timeout_s:.0f} s: {found}")
        await asyncio.sleep(0.2)
    return time.monotonic() - begin


async def until(claim: Any, timeout_s: float, name: str) -> float:
    begin = time.monotonic()
    while not claim():
        if time.monotonic() > begin + timeout_s:
            raise TimeoutError(f"{name} did not come in {timeout_s:.0f} s")
        await asyncio.sleep(0.1)
    return time.monotonic() - begin


@contextmanager
def running(
    settings: dict[str, Any],
    *options: str,
) -> Iterator[Cluster]:
    """`mallee up` with these settings, until the block ends, on nodes whose clocks can be set."""
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        file, log, port = Path(folder) / "settings.json", Path(folder) / "log.txt", free_port()
        file.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "mallee.cli", "up", "--config", str(file)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--port", str(port), *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | {"COLUMNS": "200"} | clock_environment(clock_in(Path(folder))),
            )
        try:
            _wait_until_up(process, log)
            yield Cluster(process, file, log, port)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while "Ctrl-C ends" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the nodes did not come up: {log.read_text()}")
        time.sleep(0.1)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
