"""Tenants that wait at other gateways, and the turns that this gateway leaves to them.

All gateways place requests on the same workers, and room comes free first where its request ended. So each
tells the others which tenants wait in its common lane and what it serves of them, and all of them keep about
the same tags (`router.dispatch.fairness`). One whose next tenant is clearly ahead of a tenant that waits
elsewhere alone leaves room to that one's gateway, as it does to one at which its own tenant was passed over.
Clearly, because room that changes hands is idle for two messages: within some tickets each gateway keeps what
it frees, which is right on average.

Room is left for `YIELD_S`. A gateway that has not taken it by then has died, is slow, or its requests fit
nowhere: it is passed over for a while, which doubles each time until it takes its turn again.

Rejected: one gateway that gives out all room (each placement waits for its answer, and all for its
successor), and shares of the rows for each gateway (room stays idle where tenants have nothing to do).
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from mallee.protocol.bookings import Lag
from mallee.router.dispatch.queue import AdmissionQueue
from mallee.router.sync.outbox import Outbox

YIELD_S: Final = 0.04
PASSED_S: Final = (0.25, 4.0)  # the first and the longest time for which a gateway is passed over
SLACK: Final = 4.0  # tickets by which a tenant is clearly ahead
MAX_TURNS: Final = 8  # of this gateway, before another one at which the same tenant waits has one
MAX_LAGS: Final = 256


@dataclass(slots=True)
class _Claim:
    """One tenant that waits at one other gateway."""

    gateway: str
    turns: int  # that this tenant had there, since it waits at several
    is_passed: bool = False
    passed_s: float = 0.0


@dataclass(slots=True)
class _Claims:
    """One tenant's, by gateway."""

    turns: int = 0  # that it had here
    by_gateway: dict[str, _Claim] = field(default_factory=dict)

    def heard(self) -> Iterator[_Claim]:
        return (claim for claim in self.by_gateway.values() if not claim.is_passed)


class Elsewhere:
    """The claims of other gateways to the room that `queue`'s common lane is served from.

    `outbox` None: there are no other gateways. Implements `router.sync.replicas.Room`.
    """

    def __init__(self, queue: AdmissionQueue, outbox: Outbox | None) -> None:
        self._queue = queue
        self._lane = queue.shared
        self._outbox = outbox
        self.claims: dict[str, _Claims] = {}  # by tenant; mostly none
        self._passed: list[tuple[float, str, str]] = []  # until when; gateway, tenant
        self._yields_to = ""  # a tenant
        self.yields_until = math.inf  # inf: room is left to none

    def tell(self, tenant: str, cost: float) -> None:
        """A tenant begins to wait here, or some of it leaves: tell the others."""
        if self._outbox is None:
            return
        waits = tenant in self._queue.common
        self._outbox.queued(tenant, cost, waits=waits)
        if (claims := self.claims.get(tenant)) is not None:
            if cost:
                claims.turns += 1
            elif waits:
                least = min((claim.turns for claim in claims.heard()), default=0)
                claims.turns = max(claims.turns, least)

    # The other gateways, as `Room`

    def queued_elsewhere(self, gateway: str, tenant: str, cost: float, *, waits: bool) -> None:
        if cost:
            self._lane.charge(tenant, cost)
        claims = self.claims.get(tenant)
        claim = None if claims is None else claims.by_gateway.get(gateway)
        if waits and claim is None:
            self._add(gateway, tenant)
        elif claim is not None and cost:
            claim.turns += 1
            claim.passed_s = 0.0
            self._count(claim, tenant)
            if tenant == self._yields_to:
                self.yields_until = math.inf
        if claim is not None and not waits:
            self._remove(claim, tenant)

    def left(self, gateway: str) -> None:
        for tenant, claims in list(self.claims.items()):
            if (claim := claims.by_gateway.get(gateway)) is not None:
                self._remove(claim, tenant)

    def adopt(self, lags: Iterable[Lag]) -> None:
        if self.claims:
            self._lane.adopt(lags)

    def lags(self) -> tuple[Lag, ...]:
        """The lags of tenants that wait; none if nobody waits elsewhere."""
        return self._lane.lags(MAX_LAGS) if self.claims else ()

    # Turns

    def is_turn(self) -> bool:
        """Whether the next of all that wait anywhere waits here."""
        here, there = self._lane.next()
        if here is None or (there is not None and there.tag < here.tag):
            return False
        claims = self.claims.get(here.name)
        if claims is None:
            return True
        assert self._outbox is not None
        own = (claims.turns, self._outbox.gateway)
        return all(own < (claim.turns, claim.gateway) for claim in claims.heard())

    def must_yield(self, now: float, has_room: Callable[[], bool]) -> bool:
        """Whether another gateway has the turn, and has had less than `YIELD_S` to take it."""
        if not self.claims:
            return False
        while self._passed and self._passed[0][0] <= now:
            _, gateway, tenant = heapq.heappop(self._passed)
            claims = self.claims.get(tenant)
            if claims is not None and (claim := claims.by_gateway.get(gateway)) is not None:
                self._count(claim, tenant)
        behind = next(self._behind(), None)
        is_behind = behind is not None
        if behind is not None and has_room():
            if now < self.yields_until:
                self._yields_to = behind[0]
                self.yields_until = min(self.yields_until, now + YIELD_S)
                return True
            self._pass_over(now)
            is_behind = False
        self.yields_until = math.inf
        return is_behind

    def _pass_over(self, now: float) -> None:
        """Count those to which room was left as not there, for a while."""
        while behind := list(self._behind()):
            for tenant, claim in behind:
                shortest, longest = PASSED_S
                claim.passed_s = min(longest, max(shortest, 2 * claim.passed_s))
                claim.is_passed = True
                self._lane.wait_elsewhere(tenant, -1)
                heapq.heappush(self._passed, (now + claim.passed_s, claim.gateway, tenant))

    def _behind(self) -> Iterator[tuple[str, _Claim]]:
        """A tenant's claims to which the next one here has to give way."""
        here, there = self._lane.next()
        if here is None:
            return
        if there is not None and there.tag < here.tag - SLACK * here.step:
            yield from ((there.name, claim) for claim in self.claims[there.name].heard())
        elif (claims := self.claims.get(here.name)) is not None:
            for claim in claims.heard():
                if claims.turns - claim.turns >= MAX_TURNS:
                    yield here.name, claim

    # Claims

    def _add(self, gateway: str, tenant: str) -> None:
        claims = self.claims.setdefault(tenant, _Claims())
        claims.by_gateway[gateway] = _Claim(gateway, self._least(tenant, claims))
        self._lane.wait_elsewhere(tenant, 1)

    def _count(self, claim: _Claim, tenant: str) -> None:
        """Have a claim that was passed over count again. It brings no credit from that time."""
        if claim.is_passed:
            claim.turns = max(claim.turns, self._least(tenant, self.claims[tenant]))
            claim.is_passed = False
            self._lane.wait_elsewhere(tenant, 1)

    def _least(self, tenant: str, claims: _Claims) -> int:
        """The fewest turns that a tenant had at one of the gateways where it waits."""
        turns = [claim.turns for claim in claims.heard()]
        if tenant in self._queue.common:
            turns.append(claims.turns)
        return min(turns, default=claims.turns)

    def _remove(self, claim: _Claim, tenant: str) -> None:
        claims = self.claims[tenant]
        del claims.by_gateway[claim.gateway]
        if not claims.by_gateway:
            del self.claims[tenant]
        if not self.claims:
            self.yields_until = math.inf
        if not claim.is_passed:
            self._lane.wait_elsewhere(tenant, -1)

    def check(self) -> None:
        """Raises AssertionError unless the lane counts the claims that are not passed over."""
        assert all(claims.by_gateway for claims in self.claims.values()), "a tenant without claims"
        counted = {t: sum(1 for _ in claims.heard()) for t, claims in self.claims.items()}
        found = self._lane.elsewhere()
        assert found == {t: num for t, num in counted.items() if num}, f"{found}: {counted}"
