"""A program: the first process of a node, which keeps its NATS server and its Ray running.

    python -m mallee.testing.nodes.node orders.json

A NATS server that dies is started again. When Ray ends, the node does: `mallee up` starts it again. In
namespaces of its own it is process 1: it also takes in processes that lost their parent.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec

from mallee.runtime.bus.children import death_follower
from mallee.testing.nodes import network

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 # Ray's object store; each node has its own
_LINK_S = 20.0
_RESTART_S = 0.5
_STOP_S = 5.0
_TICK_S = 0.1


class Orders(msgspec.Struct, frozen=True):
    """Place and commands of a node."""

    address: str | None
    """To have behind the bridge; None for a node on loopback."""
    folders: tuple[tuple[str, str], ...]
    """Of this node alone, each with the place where it is mounted."""
    broker: tuple[str, ...]
    ray: tuple[str, ...]
    deploying: tuple[str, ...] | None
    """The program that talks to `mallee up` over this one's stdin and stdout."""


def main() -> None:
    orders = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Orders)
    signal.signal(signal.SIGTERM, _end)
    if orders.address is not None:
        _settle(orders.address, orders.folders)
    children = [_start(orders.ray)]
    if orders.deploying is not None:
        children.append(_start(orders.deploying, talks=True))
    try:
        _keep(orders.broker, {child.pid for child in children})
    finally:
        # Of namespaces the kernel ends every process; on loopback Ray ends its own on SIGTERM.
        _stop(children)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _settle(address: str, folders: Sequence[tuple[str, str]]) -> None:
    """Take the place in the network and the mounts."""
    deadline = time.monotonic() + _LINK_S
    while network.LINK not in {name for _, name in socket.if_nameindex()}:
        if time.monotonic() > deadline:
            sys.exit("no link to the bridge came")
        time.sleep(0.02)
    network.run("ip", "link", "set", "lo", "up")
    network.run("ip", "addr", "add", f"{address}/{network.PREFIX_BITS}", "dev", network.LINK)
    network.run("ip", "link", "set", network.LINK, "up")
    network.run("mount", "-t", "tmpfs", "none", _SHARED_MEMORY)
    for own, place in folders:
        network.run("mount", "--bind", own, place)


def _start(command: Sequence[str], *, talks: bool = False) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=None if talks else subprocess.DEVNULL,
        stdout=None if talks else sys.stderr.fileno(),
        preexec_fn=death_follower(),
    )


def _keep(broker: Sequence[str], needed: set[int]) -> None:
    """Until one of the processes `needed` ends."""
    server = _start(broker)
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(_TICK_S)
        elif pid in needed:
            sys.exit(1)  # what it said itself is the last line of the log
        elif pid == server.pid:
            sys.stderr.write(f"the NATS server ended with status {status}; it is started again\n")
            time.sleep(_RESTART_S)
            server = _start(broker)


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            child.terminate()
    deadline = time.monotonic() + _STOP_S
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))


if __name__ == "__main__":
    main()
