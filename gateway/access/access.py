"""The callers of the API: found by their keys, with a tenant, rights and limits each."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from mallee.gateway.access.keys import Key, KeyRing, of_environment, read_file
from mallee.gateway.access.quotas import Shared, Use
from mallee.gateway.access.visits import UNLIMITED, Visit
from mallee.protocol.api.shared import MAX_TENANT
from mallee.protocol.errors import ConfigError, Forbidden, InvalidParameter, Unauthorized
from mallee.runtime.tasks import Tasks
from mallee.runtime.telemetry.families import Label, Reading

log = logging.getLogger(__name__)

RELOAD_S: Final = 1.0
SWEEP_S: Final = 5.0  # between looks for capsules that are gone
TENANT_HEADER: Final = "x-tenant-id"
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
READINGS: Final = (
    Reading(
        "mallee_keys_refused",
        "1 while the file of keys has a fault: the keys before it hold.",
        lambda access: bool(access.fault),
    ),
    Reading(
        "mallee_expiry_timestamp_seconds",
        "When the next `key`, or `links.tls_cert`, expires, since the epoch; 0: none does.",
        "expiries",
        (Label("of", ("key", "certificate")),),
    ),
)
"""Metrics of an `Access`."""


class Caller(NamedTuple):
    """The sender of one request."""

    tenant: str
    is_operator: bool
    weight: float | None = (
        None  # of its tenant; None: no keys are set, sessions weigh what they say
    )
    visit: Visit = UNLIMITED


OPERATOR: Final = Caller("", True)
NOBODY: Final = Caller("", False)


class Access:
    """Keys, and their use by one gateway. Belongs to one event loop.

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
        self._uses: dict[str, Use] = {}
        self.shared: Shared | None = None  # limits of all gateways together
        self.fault = ""  # of the file as it is now, while the keys before it hold
        self.certificate_expiry = 0.0  # of the links' own
        self._seen = self._refused = _version(file)
        self._take([] if file is None else read_file(file))
        self.tasks = Tasks("the API keys")

    @property
    def has_keys(self) -> bool:
        # A file that lost its last key must not open the service.
        return self._file is not None or bool(self._ring.keys)

    def check_listening(self, host: str) -> None:
        """Raises ConfigError if other machines could reach the service without a key."""
        if host not in LOOPBACK and not self.has_keys:
            raise ConfigError(
                f"{host} listens beyond this machine, and no API key is set: give MALLEE_API_KEY in the"
                " environment, or http.keys_file (`mallee keys new` makes keys)"
            )

    @property
    def expiries(self) -> dict[str, float]:
        """The ends of the next key and of the certificate, in seconds since the epoch; 0: there is none."""
        now = self._wall_clock()
        ends = (key.expires.timestamp() for key in self._ring.keys if key.expires is not None)
        next_end = min((end for end in ends if end > now), default=0.0)
        return {"key": next_end, "certificate": self.certificate_expiry}

    def start_up(self) -> None:
        """Follow the file from now on, and what becomes of the capsules that count."""
        if self._file is not None:
            self.tasks.spawn(self._follow())
            self.tasks.spawn(self._sweep())

    async def close(self) -> None:
        await self.tasks.close()

    def caller(self, token: str | None, tenant: str | None) -> Caller:
        """The caller with this key, who names this tenant.

        Raises Unauthorized, Forbidden, InvalidParameter.
        """
        if tenant is not None and len(tenant) > MAX_TENANT:
            raise InvalidParameter(TENANT_HEADER, tenant, f"give at most {MAX_TENANT} characters")
        if not self.has_keys:
            return OPERATOR if not tenant else Caller(tenant, True)
        key = None if token is None else self._ring.find(token, self._wall_clock())
        if key is None:
            raise Unauthorized()
        owner = key.owner
        if tenant is not None and tenant != owner:
            if not key.may_name_tenants:
                raise Forbidden(f"this key speaks for one tenant: leave {TENANT_HEADER} out")
            if not tenant:  # a proxy that forgot whom it speaks for
                raise InvalidParameter(TENANT_HEADER, tenant, "name a tenant, or leave it out")
            owner = tenant
        use = self._uses.get(key.name)
        if use is None:
            use = self._uses[key.name] = Use(key, self._clock, lambda: self.shared)
        return Caller(owner, key.is_operator, key.weight, Visit(use))

    def is_operator(self, token: str | None) -> bool:
        """Whether the bearer of that key is an operator."""
        try:
            return self.caller(token, None).is_operator
        except Unauthorized:
            return False

    async def reload(self) -> None:
        """Read the file again, if it has changed, or could not be read when it had."""
        version = _version(self._file)
        if self._file is None or version == self._seen:
            self.fault = ""
            return
        try:
            keys = await asyncio.to_thread(read_file, self._file)
        except ConfigError as error:
            if version != self._refused:
                log.error("the keys stay as they were: %s", error)
            self._refused, self.fault = version, str(error)
            return
        self._seen, self.fault = version, ""
        self._take(keys)
        log.info("%d API keys were read", len(keys))

    def _take(self, keys: Sequence[Key]) -> None:
        """Have the keys of the environment, and these."""
        self._ring = KeyRing((*self._given, *keys))
        self.weights.clear()
        self.weights.update((key.owner, key.weight) for key in self._ring.keys)
        known = {key.name: key for key in self._ring.keys}
        for name, use in list(self._uses.items()):
            if name in known:
                use.limit(known[name])
            elif use.is_idle:
                del self._uses[name]

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            await self.reload()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for use in self._uses.values():
                use.sweep()


def _version(file: Path | None) -> tuple[int, ...] | None:
    """Differs when the file has changed; None if there is none to be read."""
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
