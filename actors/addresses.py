"""Addresses of this machine to listen on."""

import secrets
import socket

from mallee.protocol.errors import ConfigError

_PORTS = range(20_000, 32_000)


def base_url(host: str, port: int) -> str:
    """The URL of an HTTP server there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listener(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError if that address can't be listened at."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ConfigError(
            f"can't listen on {host}:{port} ({error.strerror}); give another --port"
        ) from error
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
