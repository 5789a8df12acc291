"""Addresses of this machine to listen on."""

import errno
import os
import secrets
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from mallee.protocol.errors import ConfigError

PRIVATE: Final = "MALLEE_PRIVATE_NETWORK"
"""Variable that is 1 where `mallee up` has given the nodes a network that nobody else can reach."""

_PORTS = range(20_000, 32_000)
_MAX_PATH_NBYTES = 107  # of a Unix socket, on Linux
_YOUNG_S = 60.0  # its process may not listen yet
_PROBE_S = 0.1


def base_url(host: str, port: int) -> str:
    """The URL of an HTTP server there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listener(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError if that address can't be listened at."""
    try:
        return _bound(host, port)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port} ({error.strerror}); give another --port"
        ) from error


def first_free_listener(host: str, first_port: int, num_ports: int) -> socket.socket:
    """A socket that listens at the first of so many ports that is free. Raises ConfigError."""
    for port in range(first_port, min(first_port + num_ports, 1 << 16)):
        try:
            found = _bound(host, port)
            try:
                found.listen()  # only now others can't
            except OSError:
                found.close()
                raise
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"can't listen on {host}:{port} ({error.strerror})") from error
        else:
            return found
    raise ConfigError(f"no port of {host} is free from {first_port} on, of {num_ports}")


def _bound(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off where it sees the protocol: else a small answer takes 44 ms.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now, and that no outgoing connection is given later.

    Ports that the system hands out (32768 up on Linux) get taken between the choice and its use.
    """
    for _ in range(100):
        if _is_free(port := _PORTS.start + secrets.randbelow(len(_PORTS))):
            return port
    raise ConfigError(f"no free port from {_PORTS.start} to {_PORTS.stop - 1}; give one")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def socket_path(name: str) -> str:
    """A new path for a Unix socket, in a folder that only this user can enter. Raises ConfigError."""
    folder = Path(tempfile.gettempdir()) / f"mallee-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} is open to others: remove it, or set TMPDIR to another folder")
    _remove_abandoned(folder)
    return checked_path(folder / f"{name}-{secrets.token_hex(4)}.sock")


def checked_path(path: Path) -> str:
    """The path of a Unix socket. Raises ConfigError for one that the system can't take."""
    if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
        raise ConfigError(f"{path} is too long for a socket: set TMPDIR to a shorter folder")
    return str(path)


def _remove_abandoned(folder: Path) -> None:
    """Remove the sockets of processes that were killed."""
    for path in folder.glob("*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if time.time() - path.stat().st_mtime < _YOUNG_S:
                continue
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
