"""A program: HAProxy with what Ray Serve opens beside the API moved into Unix sockets.

    python haproxy.py /path/to/haproxy -db -f haproxy.cfg ...

Ray's configuration binds HAProxy's statistics and its Prometheus exporter on every interface, at ports
that clash with a second one's, and has no setting for the address. Here they become sockets in the
configuration's own folder: `curl --unix-socket FOLDER/stats.sock http://x/stats`. HAProxy ends with the
process that started it, which Ray may kill.
"""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SIDE_DOOR = re.compile(r"^(frontend prometheus|listen stats)\n(\s+bind )\S*:\d+$", re.MULTILINE)


def closed(config: str, folder: Path) -> str:
    """`config` with its side doors in `folder`."""

    def move(door: re.Match[str]) -> str:
        name = door[1].split()[1]
        return f"{door[1]}\n{door[2]}unix@{folder / name}.sock mode 600"

    return _SIDE_DOOR.sub(move, config)


def main(binary: str, *args: str) -> None:
    path = Path(args[args.index("-f") + 1])
    path.write_text(closed(path.read_text(), path.parent))
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(binary, [binary, *args])


if __name__ == "__main__":
    main(*sys.argv[1:])
