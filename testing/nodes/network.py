"""Networks of the nodes: a namespace for each behind a bridge, or loopback, which they share.

With namespaces the whole network is one of `mallee up`'s own: its process enters a namespace (`enter`), has
the bridge there, and each node gets a namespace with a link to it. Nothing of the machine's network is
touched, and the kernel takes all of it away with the processes, however they end. The listener of the API
is opened before: a socket stays in the namespace in which it was made. Needs root, or user namespaces.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import psutil

from mallee.protocol.errors import ConfigError

BRIDGE: Final = "mallee0"
LINK: Final = "eth0"
"""The network device of a node, in its own namespace."""
PREFIX_BITS: Final = 24
MAX_NODES: Final = 64
LISTENER: Final = "MALLEE_UP_LISTENER"
"""Variable with the number of the inherited listener, in a process that has entered its network."""

_NETWORK = "10.77.0"
_HUB = f"{_NETWORK}.254"
_TOOLS = ("unshare", "ip", "mount")
_COMMAND_S = 10.0
_AS_ROOT: tuple[str, ...] = ()
_AS_USER = ("--user", "--map-root-user")
_NODE = ("--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")


def address(number: int) -> str:
    """The address of node `number`, counted from 1, behind the bridge."""
    return f"{_NETWORK}.{number}"


def obstacle() -> str | None:
    """The reason that nodes can't have network namespaces here; None if they can."""
    found = _user_options()
    return found if isinstance(found, str) else None


def enter(listener: socket.socket) -> NoReturn:
    """Start this program again, in place, in a network namespace of its own; it inherits `listener`."""
    options = _user_options()
    if isinstance(options, str):
        raise ConfigError(f"no network namespaces: {options}")
    listener.set_inheritable(True)
    os.environ[LISTENER] = str(listener.fileno())
    command = [
        "unshare",
        *options,
        "--net",
        "--",
        sys.executable,
        "-m",
        "mallee.cli",
        *sys.argv[1:],
    ]
    os.execvp(command[0], command)  # noqa: S606 # no shell on purpose


def entered() -> socket.socket | None:
    """The inherited listener, if this process is in a network of its own."""
    number = os.environ.pop(LISTENER, None)
    return None if number is None else socket.socket(fileno=int(number))


def build_bridge() -> None:
    """Build the bridge in this process's namespace. Raises ConfigError."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{_HUB}/{PREFIX_BITS}", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


def isolated(command: Sequence[str]) -> list[str]:
    """`command` as the first process of a node, with networks, processes and mounts of its own.

    All that it starts ends with it, and it with the process that starts this.
    """
    return ["unshare", *_NODE, "--", *command]


def link(number: int, outer: psutil.Process) -> psutil.Process:
    """Link a node to the bridge; its first process, of which `outer` is the parent. Raises ConfigError."""
    children = outer.children()
    if not children:
        raise ConfigError(f"node {number} has no process yet")
    device = f"node{number}"
    # One that ended a moment ago may have left its end of the link for the kernel to remove.
    _done("ip", "link", "del", device)
    netns = str(children[0].pid)
    run("ip", "link", "add", device, "type", "veth", "peer", "name", LINK, "netns", netns)
    run("ip", "link", "set", device, "master", BRIDGE, "up")
    return children[0]


def run(*command: str) -> None:
    """Run a command of iproute2 or util-linux. Raises ConfigError with its own words."""
    done = _done(*command)
    if done.returncode != 0:
        raise ConfigError(f"`{' '.join(command)}` failed: {_last_line(done)}")


def _user_options() -> tuple[str, ...] | str:
    """Options of `unshare` by which namespaces can be made here, or what is in the way."""
    if not sys.platform.startswith("linux"):
        return "they are Linux's"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed (packages iproute2, util-linux)"
    cause = ""
    for options in (_AS_ROOT, _AS_USER) if os.geteuid() == 0 else (_AS_USER,):
        done = _done("unshare", *options, *_NODE, "ip", "link", "add", "probe", "type", "bridge")
        if done.returncode == 0:
            return options
        cause = cause or _last_line(done)
    return cause


def _done(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"
