"""The parts of a key's limits that a gateway has leased: of rates, and of what is there at once."""

from collections.abc import Collection
from typing import Final

import msgspec

MINUTE_S: Final = 60.0

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

    @property
    def holders(self) -> set[str]:
        return set().union(*self.leases.values())


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

    def at_once(self, quota: Quota, holder: str, need: float, gone: Collection[str]) -> float:
        """As `of_rate`, of what is there at once; `gone`: holders that use it no more."""
        leases = quota.leases.setdefault(self.what, {})
        for each in (holder, *gone):
            leases.pop(each, None)
        elsewhere = sum(leases.values())
        rest = max(0.0, self.limit - elsewhere - self.used)
        ahead = min(self.ahead, max(0.0, rest - need) // 2)
        leases[holder] = int(self.used + min(need, rest) + ahead)
        self.total = elsewhere + self.used
        self.wait_s = 1.0 if self.what in (RUNNING, BRANCHES) else MINUTE_S
        return leases[holder]
