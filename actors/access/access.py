"""The callers of the API: found by their keys, with a tenant, rights and limits each."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from mallee.actors.access.keys import KeyRing, of_environment, read_file
from mallee.actors.access.quotas import Use
from mallee.actors.tasks import Tasks
from mallee.protocol.errors import ConfigError, Forbidden, Unauthorized
from mallee.protocol.ids import CapsuleId

log = logging.getLogger(__name__)

RELOAD_S: Final = 1.0
MAX_TENANT: Final = 128  # characters
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class Caller(NamedTuple):
    """The sender of one request."""

    tenant: str
    is_operator: bool
    weight: float | None = (
        None  # of its tenant; None: no keys are set, its sessions weigh what they say
    )
    use: Use | None = None  # of its key

    def charge_prompt(self, tokens: int) -> None:
        """Raises QuotaExceeded."""
        if self.use is not None:
            self.use.charge_prompt(tokens)

    def charge(self, tokens: int) -> None:
        """So many tokens of an answer."""
        if self.use is not None:
            self.use.charge(tokens)

    @contextmanager
    def making(
        self, tokens: int, is_kept: Callable[[CapsuleId], bool]
    ) -> Iterator[Callable[[CapsuleId], None]]:
        """See `Use.making`."""
        if self.use is None:
            yield lambda capsule: None
            return
        with self.use.making(tokens, is_kept) as keep:
            yield keep


OPERATOR: Final = Caller("", True)
NOBODY: Final = Caller("", False)


class Access:
    """Keys and their use, at one gateway. Belongs to one event loop.

    Without keys everybody is the operator, and speaks for any tenant. The file is read again when it
    changes; a wrong one is logged, and the keys before it stay.
    """

    def __init__(
        self,
        file: Path | None,
        environment: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError."""
        self._file = file
        self._given = of_environment(environment)
        self._clock = clock
        self._wall_clock = wall_clock
        self.weights: dict[str, float] = {}  # of tenants, as their keys say
        self._seen = _version(file)
        self._ring = self._read()
        self._uses: dict[str, Use] = {}
        self.tasks = Tasks("the API keys")

    @property
    def has_keys(self) -> bool:
        # A file that lost its last key must not open the service.
        return self._file is not None or bool(self._ring)

    def check_listening(self, host: str) -> None:
        """Raises ConfigError if other machines could reach the service without a key."""
        if host not in _LOOPBACK and not self.has_keys:
            raise ConfigError(
                f"{host} listens beyond this machine, and no API key is set: give MALLEE_API_KEY in the"
                " environment, or http.keys_file (`mallee keys new` makes keys)"
            )

    def start_up(self) -> None:
        """Follow the file from now on."""
        if self._file is not None:
            self.tasks.spawn(self._follow())

    async def close(self) -> None:
        await self.tasks.close()

    def caller(self, token: str | None, tenant: str | None) -> Caller:
        """The caller with this key, who names this tenant. Raises Unauthorized, Forbidden."""
        if not self.has_keys:
            return OPERATOR if not tenant else Caller(tenant[:MAX_TENANT], True)
        key = None if token is None else self._ring.find(token, self._wall_clock())
        if key is None:
            raise Unauthorized()
        owner = key.owner
        if tenant and tenant != owner:
            if not key.may_name_tenants:
                raise Forbidden("this key speaks for one tenant: leave x-tenant-id out")
            owner = tenant[:MAX_TENANT]
        use = self._uses.get(key.name)
        if use is None:
            use = self._uses[key.name] = Use(key, self._clock)
        return Caller(owner, key.is_operator, key.weight, use)

    @contextmanager
    def counted(self, caller: Caller, *, is_work: bool) -> Iterator[None]:
        """One request of `caller`, as long as it lasts. Raises QuotaExceeded, before, if it `is_work`."""
        if caller.use is None or not is_work:
            yield
            return
        caller.use.begin()
        try:
            yield
        finally:
            caller.use.end()

    def reload(self) -> None:
        """Read the file again, if it has changed."""
        version = _version(self._file)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._ring = self._read()
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
            return
        log.info("%d API keys were read", len(self._ring.keys))
        known = {key.name: key for key in self._ring.keys}
        for name, use in list(self._uses.items()):
            if name in known:
                use.limit(known[name])
            elif use.is_idle:
                del self._uses[name]

    def _read(self) -> KeyRing:
        keys = self._given + ([] if self._file is None else read_file(self._file))
        self.weights.clear()
        self.weights.update((key.owner, key.weight) for key in keys)
        return KeyRing(keys)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            self.reload()


def _version(file: Path | None) -> tuple[int, int, int] | None:
    """Differs when the file has changed; None if there is none to be read."""
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
