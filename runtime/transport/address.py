"""Addresses of worker processes, as leases carry them.

A process listens on a Unix socket, for gateways on its own node, on a TCP port for the others, or on both.
As text: `node=NODE;unix:/folder/name.sock;tcp:10.0.0.3:41213`.
"""

from typing import NamedTuple, TypeAlias

from mallee.protocol.errors import CodecError, ConfigError

MAX_PATH_NBYTES = 107  # of a Unix socket, on Linux
MAX_TEXT_CHARS = 1024

HostPort: TypeAlias = tuple[str, int]
Way: TypeAlias = str | HostPort
"""The path of a Unix socket, or host and TCP port."""


class Address(NamedTuple):
    """The places at which one process listens. `node` names the machine that `path` is valid on."""

    node: str = ""
    path: str | None = None
    tcp: HostPort | None = None

    def __str__(self) -> str:
        parts = [f"node={self.node}"] if self.node else []
        parts += [f"unix:{self.path}"] if self.path is not None else []
        parts += [f"tcp:{host_port(*self.tcp)}"] if self.tcp is not None else []
        return ";".join(parts)

    def way_from(self, node: str) -> Way:
        """The way there for a gateway on `node`. Raises ConfigError if there is none."""
        if self.path is not None and node == self.node:
            return self.path
        if self.tcp is None:
            raise ConfigError(f"it listens for gateways of its own node alone ({self})")
        return self.tcp


def parse_address(text: str) -> Address:
    """The address that `text` is. Raises CodecError."""
    found = Address()
    for part in text[: MAX_TEXT_CHARS + 1].split(";"):
        if part.startswith("node="):
            found = found._replace(node=part.removeprefix("node="))
        elif part.startswith("unix:/"):
            found = found._replace(path=part.removeprefix("unix:"))
        elif part.startswith("tcp:"):
            found = found._replace(tcp=_host_port(part.removeprefix("tcp:"), text))
        else:
            raise _malformed(text)
    if len(text) > MAX_TEXT_CHARS or (found.path is None and found.tcp is None):
        raise _malformed(text)
    if found.path is not None and len(found.path.encode()) > MAX_PATH_NBYTES:
        raise _malformed(text)
    return found


def host_port(host: str, port: int) -> str:
    """Both as one text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host_port(part: str, text: str) -> HostPort:
    host, _, port = part.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise _malformed(text)
    return host, int(port)


def _malformed(text: str) -> CodecError:
    return CodecError(
        f"not an address of a worker: {text[:MAX_TEXT_CHARS]!r}", nbytes=len(text.encode())
    )
