"""Endpoints of model servers, and their sources: a list in the settings, or in a file that is followed."""

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from mallee.protocol.errors import ConfigError, shown

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # between two looks at the file
RESOLVE_S: Final = 5.0  # between two look-ups of a name
RESOLVE_LIMIT_S: Final = 10.0  # for one
MAX_FILE_NBYTES: Final = 4 << 20

_ADDRESS = re.compile(
    r"(?:http://)?(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})/?"
)
_IP = re.compile(r"[0-9.]+|\[.*\]")


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

    async def follow(self, on_endpoints: OnEndpoints) -> None:
        """Call `on_endpoints` with all endpoints, now and at each change, for ever."""
        ...


class Target(NamedTuple):
    """An address as it is given: an ip, or a name that may have several of them, by turns."""

    host: str  # in brackets where URLs need them
    port: int

    @property
    def is_name(self) -> bool:
        return _IP.fullmatch(self.host) is None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def checked_target(address: object) -> Target:
    """The target of `ip:port`, `host:port` or `http://host:port`. Raises ConfigError."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ConfigError(
            f"{shown(address)} is no endpoint: give ip:port or host:port, as 10.0.0.7:8000"
        )
    return Target(f"[{match['v6']}]" if match["v6"] else match["host"], int(match["port"]))


class ListedEndpoints:
    """The endpoints of a list: of the settings, or in a YAML or JSON file that is read when it changes.

    A file that can't be read, or not understood, is logged once and changes nothing. Names are looked up
    again and again, and one that can't be keeps the addresses that it had.
    """

    def __init__(
        self,
        listed: Path | Sequence[str],
        *,
        look_s: float = LOOK_S,
        resolve_s: float = RESOLVE_S,
    ) -> None:
        """Raises ConfigError for what is no endpoint, and if a file can't be used now."""
        self._path = listed if isinstance(listed, Path) else None
        self._look_s = look_s
        self._resolve_s = resolve_s
        self._seen: tuple[int, int, int] | None = None
        self._found: dict[Target, tuple[str, ...]] = {}  # addresses of names
        self._targets = _targets(listed) if not isinstance(listed, Path) else self._read(listed)

    async def follow(self, on_endpoints: OnEndpoints) -> None:
        told: tuple[Endpoint, ...] | None = None
        loop = asyncio.get_running_loop()
        resolved_at = float("-inf")
        while True:
            if loop.time() >= resolved_at + self._resolve_s:
                await self._resolve(self._targets)
                resolved_at = loop.time()
            endpoints = self._endpoints()
            if endpoints != told:
                on_endpoints(endpoints)
                told = endpoints
            await asyncio.sleep(self._look_s)
            if self._path is None:
                continue
            try:
                if self._stamp(self._path) == self._seen:
                    continue
                self._targets = self._read(self._path)
            except ConfigError as error:
                log.warning("the endpoints stay as they were: %s", error)
                continue
            await self._resolve([target for target in self._targets if target not in self._found])

    def _endpoints(self) -> tuple[Endpoint, ...]:
        addresses = [
            address
            for target in self._targets
            for address in (self._found.get(target, ()) if target.is_name else (target.address,))
        ]
        return tuple(map(Endpoint, dict.fromkeys(addresses)))

    async def _resolve(self, targets: Sequence[Target]) -> None:
        """Look up the names among them: their IPv4 addresses, or those of IPv6 where there are no others."""
        loop = asyncio.get_running_loop()
        for target in targets:
            if not target.is_name:
                continue
            try:
                async with asyncio.timeout(RESOLVE_LIMIT_S):
                    found = await loop.getaddrinfo(
                        target.host, target.port, type=socket.SOCK_STREAM
                    )
            except (OSError, TimeoutError, UnicodeError) as error:
                log.warning("%s can't be resolved: %s", target.host, error or "no answer")
                continue
            v4 = [place[0] for family, *_, place in found if family == socket.AF_INET]
            v6 = [f"[{place[0]}]" for family, *_, place in found if family == socket.AF_INET6]
            hosts = sorted(map(str, v4 or v6))
            self._found[target] = tuple(f"{host}:{target.port}" for host in hosts)

    def _stamp(self, path: Path) -> tuple[int, int, int]:
        try:
            found = path.stat()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        return (found.st_mtime_ns, found.st_ino, found.st_size)

    def _read(self, path: Path) -> tuple[Target, ...]:
        import yaml  # without a file of endpoints it is not needed

        stamp = self._stamp(path)
        self._seen = stamp  # also of a file that is no good: it is read when it changes
        if stamp[2] > MAX_FILE_NBYTES:
            raise ConfigError(f"{path} has {stamp[2]} bytes: give at most {MAX_FILE_NBYTES}")
        try:
            found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from None
        if not isinstance(found, list):
            raise ConfigError(f"{path}: give a list of ip:port")
        return _targets(found)


def _targets(listed: Sequence[object]) -> tuple[Target, ...]:
    return tuple(dict.fromkeys(map(checked_target, listed)))
