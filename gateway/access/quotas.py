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
from functools import cached_property
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

import msgspec

from mallee.gateway.access.keys import Key
from mallee.gateway.store.store import Bucket, Entry, Store
from mallee.protocol.errors import QuotaExceeded, QuotaTooSmall, StoreAway, Unavailable
from mallee.protocol.ids import COMMON, CapsuleId

log = logging.getLogger(__name__)

MINUTE_S: Final = 60.0
AGAIN_S: Final = 0.1  # before a limit that was used up is looked at again
PAUSE_S: Final = 0.02  # in which what has just ended at another gateway comes back
GONE_S: Final = 5.0  # for which a gateway is not heard of
AHEAD: Final = 20  # the part of a limit that all gateways together take ahead
LAYOUT: Final = 1
TTL_S: Final = 7 * 86_400.0

REQUESTS: Final = "requests per minute"
TOKENS: Final = "tokens per minute"
RUNNING: Final = "requests at once"
BRANCHES: Final = "branches at once"
CAPSULES: Final = "capsules"
CAPSULE_TOKENS: Final = "tokens in capsules"


class Rate(msgspec.Struct, array_like=True):
    """A rate: it fills with `per_minute` units a minute, up to as many, and may be overdrawn by one use."""

    level: float
    at: float  # seconds since the epoch

    def fill(self, per_minute: int, now: float) -> None:
        """Fill it for the time since another filled it, whose clock may go before this one."""
        passed_s = now - self.at
        if not -MINUTE_S < passed_s < 0:  # else that time would be counted twice
            self.at = now
        more = max(0.0, passed_s) * per_minute / MINUTE_S
        self.level = min(float(per_minute), self.level + more)


class Quota(msgspec.Struct, array_like=True):
    """One key's, as the store has it: rates, and the leases of what is there at once, by holder."""

    rates: dict[str, Rate] = msgspec.field(default_factory=dict)
    leases: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)


class Part:
    """The part of one limit that this gateway has leased. Of a rate, what is spent is `used` until told."""

    def __init__(self, what: str, limit: int) -> None:
        self.what = what
        self.limit = limit
        self.is_limited = False
        self.leased = self.used = 0.0
        self.total = 0.0  # used at all gateways, as last seen
        self.ahead = 0
        self.wait_s = 0.0  # until there may be more
        self.again_at = 0.0  # on the clock

    @property
    def is_rate(self) -> bool:
        return self.what in (REQUESTS, TOKENS)

    @property
    def free(self) -> float:
        return self.leased - self.used

    @property
    def is_to_tell(self) -> bool:
        """Whether others are to know of it: of what was overdrawn, or isn't used any more."""
        return self.free < 0 if self.is_rate else self.free > 2 * self.ahead

    def of_rate(self, quota: Quota, need: float, now: float) -> float:
        """Take of a rate what is needed, and some ahead. The amount that is leased from then on."""
        rate = quota.rates.setdefault(self.what, Rate(self.limit, now))
        rate.fill(self.limit, now)
        owed = max(0.0, -self.free)
        rate.level -= owed
        free = self.free + owed
        more = max(0.0, need - free)
        if more > rate.level:
            more = 0.0  # parts of a unit would be of no use here, and lack elsewhere
        else:
            over = free + more - need
            more += min(max(0.0, self.ahead - over), (rate.level - more) // 2)
        rate.level -= more
        self.wait_s = max(0.0, (need - free - more - rate.level) * MINUTE_S / self.limit)
        self.total = self.limit
        return self.leased + owed + more

    def at_once(
        self, quota: Quota, holder: str, need: float, is_gone: Callable[[str], bool]
    ) -> float:
        """As `of_rate`, of what is there at once."""
        leases = quota.leases.setdefault(self.what, {})
        for each in [each for each in leases if each == holder or is_gone(each)]:
            del leases[each]
        elsewhere = sum(leases.values())
        rest = max(0.0, self.limit - elsewhere - self.used)
        ahead = min(self.ahead, max(0.0, rest - need) // 2)
        leases[holder] = int(self.used + min(need, rest) + ahead)
        self.total = elsewhere + self.used
        self.wait_s = 1.0 if self.what in (RUNNING, BRANCHES) else MINUTE_S
        return leases[holder]


class Shared:
    """The limits of all keys in the gateways' store.

    `others()`: names of the other gateways that live; None: this one is alone for good. `clock` gives seconds
    since the epoch, `new_key()` what no other has.
    """

    def __init__(
        self,
        store: Store,
        *,
        gateway: str,
        others: Callable[[], Collection[str] | None],
        new_key: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self._gateway = gateway
        self._new_key = new_key
        self.others = others
        self.clock = clock
        self._missing: dict[str, float] = {}  # holders, since when
        self.bucket: Bucket[Quota] = store.bucket("quotas", Quota, version=LAYOUT, ttl_s=TTL_S)

    @cached_property
    def holder(self) -> str:
        """The name of its leases: it is of this life of this gateway."""
        return f"{self._gateway}/{self._new_key()}"

    def is_gone(self, holder: str) -> bool:
        """Whether its gateway has died, and not just this one has come, or was cut off."""
        gateway, now = holder.partition("/")[0], self.clock()
        if gateway in (self.others() or ()):
            self._missing.pop(holder, None)
            return False
        is_gone = gateway == self._gateway or now - self._missing.setdefault(holder, now) >= GONE_S
        if is_gone:
            self._missing.pop(holder, None)
        return is_gone


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
        self._turn = asyncio.Lock()
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
        return None if shared is None or shared.others() is None else shared

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
        async with self._turn:
            now = self._clock()
            if all(part.again_at > now for part in self._lacking(wanted)):
                return
            try:
                await self._lease(shared, wanted)
                if any(not part.is_rate for part in self._lacking(need)):
                    await asyncio.sleep(PAUSE_S)
                    await self._lease(shared, wanted)
            except Unavailable:
                if self._lacking(need):
                    raise

    async def _lease(self, shared: Shared, need: Mapping[str, float]) -> None:
        name = blake2b(self.key.name.encode(), digest_size=16).hexdigest()
        while True:
            entry = await shared.bucket.get(COMMON, name, self._known)
            entry, self._known = entry or Entry(Quota(), 0), None
            num = AHEAD * (1 + len(shared.others() or ()))
            now = shared.clock()
            leased = self._take(entry.value, need, now, shared.holder, shared.is_gone, num)
            for part, amount in leased.items():
                if not part.is_rate:  # nothing that is given back is used from now on
                    part.leased = min(part.leased, amount)
            put = await shared.bucket.put(COMMON, name, entry.value, at=entry.revision)
            if put is not None:
                break
        self._known = put
        self._have(leased, need)

    def _take(
        self,
        quota: Quota,
        need: Mapping[str, float],
        now: float,
        holder: str = "",
        is_gone: Callable[[str], bool] = bool,
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
                    leased[part] = part.at_once(quota, holder, wanted, is_gone)
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
                async with self._turn:
                    try:
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


_NAMES: Final = {
    "branches": BRANCHES,
    "capsules": CAPSULES,
    "capsule_tokens": CAPSULE_TOKENS,
}
_FIRST: Final = {RUNNING: 1.0, REQUESTS: 1.0, TOKENS: 1.0}
_MAYBE: Final = {TOKENS: 1.0, BRANCHES: 1.0, CAPSULES: 1.0}


class Visit:
    """One request, as long as the context lasts; it counts in the use of its key, if it has one."""

    __slots__ = ("_num_branches", "_use")

    def __init__(self, use: Use | None) -> None:
        self._use = use
        self._num_branches = 0

    def __enter__(self) -> None:
        """Raises QuotaExceeded."""
        if self._use is not None:
            self._use.begin()

    def __exit__(self, *_: object) -> None:
        if self._use is not None:
            self._use.end(self._num_branches)

    @contextmanager
    def staying(self) -> Iterator["Visit"]:
        """The part of this request that goes on after its answer, as long as the context lasts."""
        if self._use is None:
            yield self
            return
        self._use.stay()
        more = Visit(self._use)
        try:
            yield more
        finally:
            more.__exit__()

    async def ready(self, **need: float) -> None:
        """See `Use.ready`: `branches`, `capsules`, `capsule_tokens`; by default of a request to begin."""
        if self._use is not None:
            await self._use.ready(**need)

    def another(self) -> "Visit":
        """One more request under the same key, which has not begun."""
        return Visit(self._use)

    def begin(self, branches: int, tokens: int) -> None:
        """Count a prompt of so many tokens, and its branches. Raises QuotaExceeded, QuotaTooSmall."""
        if self._use is not None:
            self._use.add_branches(branches)
            self._num_branches += branches
            self._use.charge_prompt(tokens)

    def charge(self, tokens: int) -> None:
        """So many tokens of its answer."""
        if self._use is not None:
            self._use.charge(tokens)

    def unkeep(self, capsule: CapsuleId) -> None:
        """See `Use.unkeep`."""
        if self._use is not None:
            self._use.unkeep(capsule)

    @contextmanager
    def making(
        self, tokens: int, is_kept: Callable[[CapsuleId], bool]
    ) -> Iterator[Callable[[CapsuleId], None]]:
        """See `Use.making`."""
        if self._use is None:
            yield lambda capsule: None
            return
        with self._use.making(tokens, is_kept) as keep:
            yield keep


UNLIMITED: Final = Visit(None)
