"""Faults of a node and of its link, done from outside as a machine or a switch would do them.

The nodes' bridge is in the network namespace of `mallee up`; nothing here touches the machine's network.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from bench.failover.faults import set_clock
from bench.nodes.cluster import Cluster

SLOW: Final = ("rate", "2mbit", "burst", "16kb", "latency", "300ms")
"""A link of 2 Mbit/s with a queue of 300 ms."""
_LOST: Final = ("rate", "8bit", "burst", "1", "limit", "1")
"""A bucket that no packet fits in: all are dropped."""


def kill_node(cluster: Cluster, number: int) -> None:
    """End all processes of a node at once, as a machine that crashes; its addresses go too."""
    first = cluster.processes(number)[0]
    first.kill()


def kill_broker(cluster: Cluster, number: int) -> None:
    """End the NATS server of a node."""
    next(each for each in cluster.processes(number) if _name(each) == "nats-server").kill()


@contextmanager
def cut(cluster: Cluster, number: int) -> Iterator[None]:
    """The link is down in both directions."""
    _in_hub(cluster, "ip", "link", "set", f"node{number}", "down")
    try:
        yield
    finally:
        _in_hub(cluster, "ip", "link", "set", f"node{number}", "up")


@contextmanager
def deaf(cluster: Cluster, number: int) -> Iterator[None]:
    """Nothing reaches the node; what it sends arrives."""
    with _shaped(cluster.process.pid, f"node{number}", _LOST):
        yield


@contextmanager
def mute(cluster: Cluster, number: int) -> Iterator[None]:
    """Nothing that the node sends arrives; it hears all."""
    with _shaped(cluster.processes(number)[0].pid, "eth0", _LOST):
        yield


@contextmanager
def slow(cluster: Cluster, number: int) -> Iterator[None]:
    """The link is slow in both directions."""
    with (
        _shaped(cluster.process.pid, f"node{number}", SLOW),
        _shaped(cluster.processes(number)[0].pid, "eth0", SLOW),
    ):
        yield


@contextmanager
def skewed(cluster: Cluster, number: int, seconds: float) -> Iterator[None]:
    """The wall clock of the node's Python processes is wrong by so much, at once; others' clocks are not."""
    network = Path(f"/proc/{cluster.processes(number)[0].pid}/ns/net").stat().st_ino
    clock = Path(str(cluster.clock).format(net=network))
    set_clock(clock, seconds)
    try:
        yield
    finally:
        set_clock(clock, 0.0)


@contextmanager
def _shaped(pid: int, device: str, shape: tuple[str, ...]) -> Iterator[None]:
    where = ("root", "tbf")
    _in_network(pid, "tc", "qdisc", "replace", "dev", device, *where, *shape)
    try:
        yield
    finally:
        _in_network(pid, "tc", "qdisc", "del", "dev", device, "root")


def _in_hub(cluster: Cluster, *command: str) -> None:
    _in_network(cluster.process.pid, *command)


def _in_network(pid: int, *command: str) -> None:
    _done(["nsenter", "--target", str(pid), "--net", *command])


def _done(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
