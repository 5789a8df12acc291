"""Endpoints of model servers, and two sources of them: the settings, and a file that is followed."""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from mallee.protocol.errors import ConfigError, shown

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # between two looks at the file
MAX_FILE_NBYTES: Final = 4 << 20

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<v4>[0-9.]+)):(?P<port>[0-9]{1,5})")


class Endpoint(NamedTuple):
    """One engine's API at `address` (ip:port). `rank`: of the pod's endpoints, as its ports are listed.

    `owner`: the life of the pod, where it is known. An endpoint that drains gets no new requests.
    """

    address: str
    rank: int = 0
    owner: str = ""
    is_draining: bool = False

    @property
    def host(self) -> str:
        """The address without the port; in brackets where URLs need them."""
        return self.address.rpartition(":")[0]


OnEndpoints = Callable[[Sequence[Endpoint]], None]


class EndpointSource(Protocol):
    """Tells of endpoints: all that there are, at each change."""

    @property
    def is_synced(self) -> bool:
        """Whether it has told of them once."""
        ...

    async def follow(self, on_endpoints: OnEndpoints) -> None:
        """Call `on_endpoints` with all endpoints, now and at each change, for ever."""
        ...


def checked_address(address: object) -> str:
    """`address` as ip:port. Raises ConfigError."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ConfigError(f"{shown(address)} is no endpoint: give ip:port, as 10.0.0.7:8000")
    return match[0]


class StaticEndpoints:
    """The endpoints of the settings."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Raises ConfigError."""
        self._endpoints = tuple(Endpoint(checked_address(each)) for each in addresses)
        self.is_synced = False

    async def follow(self, on_endpoints: OnEndpoints) -> None:
        on_endpoints(self._endpoints)
        self.is_synced = True
        await asyncio.Event().wait()


class FileEndpoints:
    """The endpoints in a YAML or JSON file: a list of ip:port, read again whenever it changes.

    A file that can't be read, or not understood, is logged once and changes nothing.
    """

    def __init__(self, path: Path, *, look_s: float = LOOK_S) -> None:
        """Raises ConfigError if the file can't be used now."""
        self._path = path
        self._look_s = look_s
        self._seen: tuple[int, int, int] | None = None
        self._endpoints = self._read()
        self.is_synced = False

    async def follow(self, on_endpoints: OnEndpoints) -> None:
        on_endpoints(self._endpoints)
        self.is_synced = True
        while True:
            await asyncio.sleep(self._look_s)
            try:
                if self._stamp() == self._seen:
                    continue
                self._endpoints = self._read()
            except ConfigError as error:
                log.warning("the endpoints stay as they were: %s", error)
                continue
            on_endpoints(self._endpoints)

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from None
        return (found.st_mtime_ns, found.st_ino, found.st_size)

    def _read(self) -> tuple[Endpoint, ...]:
        import yaml  # a picker without a file of endpoints reads none

        stamp = self._stamp()
        self._seen = stamp  # also of a file that is no good: it is read when it changes
        if stamp[2] > MAX_FILE_NBYTES:
            raise ConfigError(f"{self._path} has {stamp[2]} bytes: give at most {MAX_FILE_NBYTES}")
        try:
            found: Any = yaml.safe_load(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{self._path} can't be read: {error}") from None
        if not isinstance(found, list):
            raise ConfigError(f"{self._path}: give a list of ip:port")
        return tuple(Endpoint(address) for address in dict.fromkeys(map(checked_address, found)))
