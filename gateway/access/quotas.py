"""The use that each key makes of the gateways, and its limits, which hold for all of them together.

The rest of a limit is in the gateways' store, and gateways lease of it: what a request must have, and some
ahead, a twentieth of the limit in all, so that no request waits for the store as long as that lasts. Leases
of rates are never given back, which lets all gateways together begin a minute with that much more. Those of
what is there at once are, and end with their gateway. Rejected: shares by what each gateway was asked for
(they follow what has been), and counts that are told afterwards (all gateways overdraw until they hear).

A gateway that is alone for good counts by itself.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from mallee.gateway.access.keys import Key
from mallee.gateway.access.parts import (
    BRANCHES,
    CAPSULE_TOKENS,
    CAPSULES,
    REQUESTS,
    RUNNING,
    TOKENS,
    Part,
    Quota,
)
from mallee.gateway.store.leases import Lessee
from mallee.gateway.store.store import Bucket, ChangeLock, Entry, Store
from mallee.protocol.errors import QuotaExceeded, QuotaTooSmall, StoreAway, Unavailable
from mallee.protocol.ids import COMMON, CapsuleId

log = logging.getLogger(__name__)

AGAIN_S: Final = 0.1  # before a limit that was used up is looked at again
PAUSE_S: Final = 0.02  # in which what has just ended at another gateway comes back
AHEAD: Final = 20  # the part of a limit that all gateways together take ahead
LAYOUT: Final = 1
TTL_S: Final = 7 * 86_400.0

_NAMES: Final = {
    "branches": BRANCHES,
    "capsules": CAPSULES,
    "capsule_tokens": CAPSULE_TOKENS,
}
_FIRST: Final = {RUNNING: 1.0, REQUESTS: 1.0, TOKENS: 1.0}
_MAYBE: Final = {TOKENS: 1.0, BRANCHES: 1.0, CAPSULES: 1.0}


class Shared:
    """The limits of all keys in the gateways' store. `clock` gives seconds since the epoch."""

    def __init__(self, store: Store, lessee: Lessee, *, clock: Callable[[], float]) -> None:
        self.store = store
        self.lessee = lessee
        self.clock = clock
        self.bucket: Bucket[Quota] = store.bucket("quotas", Quota, version=LAYOUT, ttl_s=TTL_S)


class Use:
    """The requests and capsules of one key, and its rates. Belongs to one event loop.

    `clock` gives monotonic seconds. Without `shared()`, or if that is alone, it counts by itself.
    """

    def __init__(
        self,
        key: Key,
        clock: Callable[[], float],
        shared: Callable[[], Shared | None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._shared_by = shared
        self._own = Quota()
        self._known: Entry[Quota] | None = None
        self._turn = ChangeLock()
        self._is_telling = False
        self._parts: dict[str, Part] = {}
        self._capsules: dict[CapsuleId, int] = {}  # tokens of those it asked for
        self._is_kept: Callable[[CapsuleId], bool] = bool  # as `making` was given it last
        self.limit(key)

    def limit(self, key: Key) -> None:
        """Take the limits of `key`, which may have changed; what was used stays."""
        self.key = key
        limits = {
            REQUESTS: key.requests_per_minute,
            TOKENS: key.tokens_per_minute,
            RUNNING: key.max_running,
            BRANCHES: key.max_branches,
            CAPSULES: key.max_capsules,
            CAPSULE_TOKENS: key.max_capsule_tokens,
        }
        for what, limit in limits.items():
            part = self._parts.get(what)
            if part is None:
                part = self._parts[what] = Part(what, limit or 0)
            if part.is_rate and not part.is_limited:
                part.leased = part.used = 0.0
            if part.limit != limit:
                part.again_at = 0.0
            part.limit, part.is_limited = limit or 0, limit is not None
        self._is_limited = any(part.is_limited for part in self._parts.values())

    @property
    def is_idle(self) -> bool:
        return not (self._parts[RUNNING].used or self._capsules)

    # Leases

    @property
    def _shared(self) -> Shared | None:
        """The limits of all gateways; None: this one counts by itself."""
        shared = self._shared_by()
        return None if shared is None or not shared.lessee.num_gateways else shared

    def _lacking(self, need: Mapping[str, float]) -> list[Part]:
        parts = [self._parts[what] for what in need]
        return [part for part in parts if part.is_limited and part.free < need[part.what]]

    async def ready(self, **more: float) -> None:
        """Lease what a request needs before anything else, and what it may need. Raises StoreAway.

        `more`: what it needs now, by the names of `Visit.ready`.
        """
        shared = self._shared
        if shared is None or not self._is_limited:
            return
        need = {_NAMES[name]: n for name, n in more.items()} or _FIRST
        wanted = _MAYBE | need
        if not self._lacking(wanted):
            return
        try:
            async with self._turn.hold():
                now = self._clock()
                if all(part.again_at > now for part in self._lacking(wanted)):
                    return
                await self._lease(shared, wanted)
                if any(not part.is_rate for part in self._lacking(need)):
                    await asyncio.sleep(PAUSE_S)
                    await self._lease(shared, wanted)
        except Unavailable:
            if self._lacking(need):
                raise

    async def _lease(self, shared: Shared, need: Mapping[str, float]) -> None:
        name = blake2b(self.key.name.encode(), digest_size=16).hexdigest()
        known, self._known = self._known, None
        leased: dict[Part, float] = {}

        async def lease(stored: Quota | None) -> Quota:
            nonlocal leased
            quota, ahead = stored or Quota(), AHEAD * shared.lessee.num_gateways
            gone = await shared.lessee.gone(quota.holders)
            leased = self._take(quota, need, shared.clock(), shared.lessee.name, gone, ahead)
            for part, amount in leased.items():
                if not part.is_rate:  # nothing that is given back is used from now on
                    part.leased = min(part.leased, amount)
            return quota

        self._known = await shared.bucket.change(COMMON, name, lease, known)
        self._have(leased, need)

    def _take(
        self,
        quota: Quota,
        need: Mapping[str, float],
        now: float,
        holder: str = "",
        gone: Collection[str] = (),
        ahead: int = 0,
    ) -> dict[Part, float]:
        """The amounts that are leased then, with the part `1 / ahead` of each limit beyond what is needed."""
        leased = {}
        for part in self._parts.values():
            if part.is_limited:
                part.ahead, wanted = part.limit // ahead if ahead else 0, need.get(part.what, 0)
                if part.is_rate:
                    leased[part] = part.of_rate(quota, wanted, now)
                else:
                    leased[part] = part.at_once(quota, holder, wanted, gone)
        return leased

    def _have(self, leased: Mapping[Part, float], need: Mapping[str, float]) -> None:
        now = self._clock()
        for part, amount in leased.items():
            part.leased = amount
            if part.is_rate:
                part.leased, part.used = part.leased - part.used, 0.0
            part.again_at = 0.0
            if part.free < need.get(part.what, 0):
                part.again_at = now + max(AGAIN_S, part.wait_s if part.is_rate else 0.0)

    def _check(self, need: Mapping[str, float]) -> None:
        """Raises QuotaExceeded; StoreAway: there may be more."""
        lacking = self._lacking(need)
        shared = self._shared
        if lacking and shared is None:
            self._have(self._take(self._own, need, self._clock()), need)
            lacking = self._lacking(need)
        for part in lacking:
            if shared is not None and not shared.store.is_up:
                raise StoreAway(f"this API key's {part.what} can't be counted")
            if part.again_at <= self._clock():  # it was not asked for yet
                self._tell_soon(need)
            wait_s = part.again_at - self._clock() if part.is_rate else part.wait_s
            raise QuotaExceeded(part.what, int(part.total), part.limit, max(wait_s, AGAIN_S))

    def _tell_soon(self, need: Mapping[str, float] = MappingProxyType({})) -> None:
        """Have the other gateways know of what is owed, or free, or have more."""
        shared = self._shared
        if shared is not None and not self._is_telling:
            self._is_telling = True
            shared.store.spawn(self._tell(shared, need), name="a key's quota")

    async def _tell(self, shared: Shared, need: Mapping[str, float]) -> None:
        try:
            while True:
                try:
                    async with self._turn.hold():
                        await self._lease(shared, need)
                except Unavailable as error:
                    log.debug("the quota of a key was not told: %s", error)
                told = [part for part in self._parts.values() if part.is_limited]
                if not any(part.is_to_tell for part in told):
                    return
                need = {}
                await asyncio.sleep(AGAIN_S)  # for all that is used or ends meanwhile
        finally:
            self._is_telling = False

    def _changed(self) -> None:
        if self._is_limited and any(p.is_limited and p.is_to_tell for p in self._parts.values()):
            self._tell_soon()

    # Requests

    def begin(self) -> None:
        """One more request. Raises QuotaExceeded: too many run, or came or used too much in this minute."""
        self._check(_FIRST)
        self._parts[REQUESTS].used += 1
        self._parts[RUNNING].used += 1

    def add_branches(self, n: int) -> None:
        """So many branches more, of requests that run. Raises QuotaExceeded, QuotaTooSmall."""
        self._check_size(BRANCHES, n)
        self._check({BRANCHES: n})
        self._parts[BRANCHES].used += n

    def stay(self) -> None:
        """A request goes on after its answer."""
        self._parts[RUNNING].used += 1

    def end(self, num_branches: int) -> None:
        """The end of a request that had so many."""
        self._parts[RUNNING].used -= 1
        self._parts[BRANCHES].used -= num_branches
        self._changed()

    def charge_prompt(self, tokens: int) -> None:
        """So many tokens more. Raises QuotaExceeded if others used them up since the request began."""
        self._check({TOKENS: 1})
        self.charge(tokens)

    def charge(self, tokens: int) -> None:
        """So many tokens more, of an answer under way; the next request waits for them."""
        part = self._parts[TOKENS]
        if part.is_limited:
            part.used += tokens
            if part.free < 0:
                self._changed()

    @contextmanager
    def making(
        self, tokens: int, is_kept: Callable[[CapsuleId], bool]
    ) -> Iterator[Callable[[CapsuleId], None]]:
        """A capsule of so many tokens while it is made; the value is called with its id.

        Raises QuotaExceeded, QuotaTooSmall. Capsules count until `is_kept(capsule)` says that they are gone.
        """
        if not (self._parts[CAPSULES].is_limited or self._parts[CAPSULE_TOKENS].is_limited):
            yield lambda capsule: None
            return
        self._check_size(CAPSULES, 1)
        self._check_size(CAPSULE_TOKENS, tokens)
        self._is_kept = is_kept
        self.sweep()
        self._check({CAPSULES: 1, CAPSULE_TOKENS: tokens})
        self._count_capsule(1, tokens)

        def keep(capsule: CapsuleId) -> None:
            self.unkeep(capsule)
            self._capsules[capsule] = tokens
            self._count_capsule(1, tokens)

        try:
            yield keep
        finally:
            self._count_capsule(-1, -tokens)

    def sweep(self) -> None:
        """Count no capsule that is gone, by whatever way: other gateways may make as many."""
        for gone in [each for each in self._capsules if not self._is_kept(each)]:
            self.unkeep(gone)

    def unkeep(self, capsule: CapsuleId) -> None:
        """`capsule` is not kept any more, though it may be there: it counts no more."""
        tokens = self._capsules.pop(capsule, None)
        if tokens is not None:
            self._count_capsule(-1, -tokens)

    def _count_capsule(self, num: int, tokens: int) -> None:
        self._parts[CAPSULES].used += num
        self._parts[CAPSULE_TOKENS].used += tokens
        self._changed()

    def _check_size(self, what: str, n: int) -> None:
        part = self._parts[what]
        if part.is_limited and n > part.limit:
            raise QuotaTooSmall(what, n, part.limit)
