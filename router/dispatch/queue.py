"""The admission queue: requests that no worker has room for now, and the order in which they are tried.

A request that any worker may take waits in the common lane, one that a single worker can take (its
capsule is there) in that worker's lane, so that neither stands in the way of the other. One whose
capsule is being computed again is in the lane HELD, where none is tried. Shares and
order (`router.dispatch.fairness`) hold within a lane; limits, deadlines and the drain rate over all of them.
The owner pops a ticket, tries to place it, then settles it or pushes it back; it does so before it
offers the next one. The other gateways are told of the common lane's tenants (`router.dispatch.elsewhere`).
"""

import heapq
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final

from mallee.protocol.errors import Overloaded, TenantQueueFull
from mallee.protocol.ids import WorkerId
from mallee.router.config import check_figures
from mallee.router.dispatch.fairness import Entry, FairQueue, Ticket

HELD: Final = WorkerId("")  # the lane of tickets that wait for something else than room


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Raises ValueError for a limit below 0, or a time or weight that is not positive.

    `weights` by tenant; others have 1. With `max_waiting` 0 a request without room is refused.
    """

    max_waiting: int = 4096
    max_waiting_per_tenant: int = 1024
    max_wait_s: float = 60.0
    weights: Mapping[str, float] = field(default_factory=dict)
    max_overtakes: int = 64  # of one ticket, by younger ones of its tenant
    max_idle_tenants: int = 1024  # remembered because they are ahead of their share

    def __post_init__(self) -> None:
        counts = ("max_waiting", "max_waiting_per_tenant", "max_overtakes", "max_idle_tenants")
        check_figures(self, counts, lambda x: x >= 0, "at least 0")
        check_figures(self, ("max_wait_s",), lambda x: x > 0.0, "above 0")
        for tenant, weight in self.weights.items():
            if not 0.0 < weight < math.inf:
                raise ValueError(f"weight {weight} of tenant {tenant!r}: must be above 0")


class AdmissionQueue:
    """Tickets in lanes. Methods that take `now` (seconds) never see it run backwards.

    `tell(tenant, cost)` is called when a tenant begins to wait in the common lane, or some of it leaves.
    """

    def __init__(
        self,
        config: AdmissionConfig,
        tell: Callable[[str, float], None] = lambda tenant, cost: None,
    ) -> None:
        self.config = config
        self._tell = tell
        self.common: dict[str, int] = {}  # tickets of the common lane, waiting or tried, by tenant
        self.shared = self._new_lane()  # the common one
        self._lanes: dict[WorkerId | None, FairQueue] = {None: self.shared}
        self._waiting: dict[Hashable, Entry] = {}
        self.tickets: Mapping[Hashable, Entry] = (
            self._waiting
        )  # that wait, by key; not to be changed
        self.trying: dict[Hashable, Entry] = {}  # those that were popped
        self._per_tenant: dict[str, int] = {}  # waiting or tried
        self._total_weight = 0.0  # of those tenants
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._watched: set[int] = set()  # numbers of the entries in there
        self._due: dict[Hashable, Ticket] = {}  # their time is over
        self._rate = DrainRate()
        self._num_offered = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self, worker: WorkerId | None) -> int:
        """Tickets in one lane."""
        lane = self._lanes.get(worker)
        return 0 if lane is None else len(lane)

    def lanes(self) -> tuple[WorkerId | None, ...]:
        """Lanes with waiting tickets that may be tried."""
        return tuple(worker for worker, lane in self._lanes.items() if len(lane) and worker != HELD)

    def offer(self, ticket: Ticket, *, is_limited: bool = True) -> None:
        """Add `ticket`, which waits from its arrival on.

        Raises TenantQueueFull, or Overloaded, if it `is_limited`; ValueError if its key is here already.
        """
        if ticket.key in self._waiting or ticket.key in self.trying:
            raise ValueError(f"{ticket.key} waits already")
        if is_limited:
            self._check_room(ticket)
        self._num_offered += 1
        if ticket.tenant not in self._per_tenant:
            self._per_tenant[ticket.tenant] = 0
            self._total_weight += self._weight(ticket.tenant)
        self._per_tenant[ticket.tenant] += 1
        entry = Entry(ticket, self._num_offered, 0)
        self._waiting[ticket.key] = entry
        lane = self._lanes.get(ticket.worker)
        if lane is None:
            lane = self._lanes[ticket.worker] = self._new_lane()
        lane.push(entry)
        self._watch(entry)
        if ticket.worker is None:
            num = self.common[ticket.tenant] = self.common.get(ticket.tenant, 0) + 1
            if num == 1:
                self._tell(ticket.tenant, 0.0)

    def pop(self, now: float, worker: WorkerId | None = None) -> Ticket | None:
        """The ticket of `worker`'s lane to be tried next, or None; never one whose time is over.

        It has to be settled or pushed back.
        """
        self._retire(now)
        lane = self._lanes.get(worker)
        entry = None if lane is None else lane.pop()
        if entry is None:
            return None
        ticket = entry.ticket
        self.trying[ticket.key] = self._waiting.pop(ticket.key)
        return ticket

    def push_back(self, ticket: Ticket) -> None:
        """Return a ticket that no worker could take to its place, the first of its tenant.

        Several are pushed back in the reverse order of their pops.
        """
        entry = self.trying.pop(ticket.key)
        self._lanes[ticket.worker].push_back(entry)
        self._waiting[ticket.key] = entry
        self._watch(entry)

    def settle(self, ticket: Ticket, cost: float, now: float) -> None:
        """End a popped ticket, placed or failed, and charge its tenant `cost`."""
        entry = self.trying.pop(ticket.key)
        lane = self._lanes[ticket.worker]
        lane.settle(entry, cost)
        self._left(ticket, cost)
        self._rate.departed(now)

    def cancel(self, key: Hashable) -> bool:
        """Drop a waiting ticket. False if it does not wait. O(1), amortised."""
        entry = self._waiting.get(key)
        if entry is None:
            return self._due.pop(key, None) is not None
        self._remove(entry)
        return True

    def expire(self, now: float) -> Ticket | None:
        """Remove and return a ticket with a deadline or longest wait at or before `now`, if there is one."""
        self._retire(now)
        return self._due.pop(next(iter(self._due))) if self._due else None

    def next_deadline(self) -> float | None:
        """The time of the next deadline; None without tickets."""
        if self._due:
            return self.deadline(next(iter(self._due.values())))
        return self._earliest()

    def deadline(self, ticket: Ticket) -> float:
        """The end of the time that `ticket` may wait."""
        latest = ticket.arrival + self.config.max_wait_s
        return latest if ticket.deadline is None else min(latest, ticket.deadline)

    def retry_after_s(self, now: float, tenant: str | None = None) -> float:
        """Seconds until all tickets that wait now (of `tenant`, at its share) are taken, 1 to 60."""
        waiting = float(len(self._waiting) + len(self.trying))
        if tenant is not None:
            of_tenant = self._per_tenant.get(tenant, 0)
            share = self._weight(tenant) / max(self._total_weight, self._weight(tenant))
            waiting = min(waiting, of_tenant / share)
        return self._rate.retry_after_s(waiting, now)

    def check(self) -> None:
        """Raises AssertionError unless lanes, counts and deadlines follow from the tickets."""
        for lane in self._lanes.values():
            lane.check()
        assert sum(map(len, self._lanes.values())) == len(self._waiting), "lanes disagree"
        counts: dict[str, int] = {}
        for entry in (*self._waiting.values(), *self.trying.values()):
            counts[entry.ticket.tenant] = counts.get(entry.ticket.tenant, 0) + 1
        assert counts == self._per_tenant, "tenant counts disagree"
        watched = {id(item[2]) for item in self._deadlines if item[2].is_waiting}
        assert watched == {id(entry) for entry in self._waiting.values()}, "deadlines disagree"

    def _new_lane(self) -> FairQueue:
        return FairQueue(
            self.config.weights,
            max_overtakes=self.config.max_overtakes,
            max_idle_tenants=self.config.max_idle_tenants,
        )

    def _check_room(self, ticket: Ticket) -> None:
        of_tenant = self._per_tenant.get(ticket.tenant, 0)
        waiting = len(self._waiting) + len(self.trying)
        now = ticket.arrival
        if waiting >= self.config.max_waiting:
            raise Overloaded(waiting, self.config.max_waiting, self.retry_after_s(now))
        if of_tenant >= self.config.max_waiting_per_tenant:
            raise TenantQueueFull(
                of_tenant,
                self.config.max_waiting_per_tenant,
                self.retry_after_s(now, ticket.tenant),
            )

    def _weight(self, tenant: str) -> float:
        return self.config.weights.get(tenant, 1.0)

    def _watch(self, entry: Entry) -> None:
        if entry.number in self._watched:
            return
        heapq.heappush(self._deadlines, (self.deadline(entry.ticket), entry.number, entry))
        self._watched.add(entry.number)
        if len(self._deadlines) > 2 * len(self._waiting) + 64:
            self._deadlines = [item for item in self._deadlines if item[2].is_waiting]
            self._watched = {number for _, number, _ in self._deadlines}
            heapq.heapify(self._deadlines)

    def _earliest(self) -> float | None:
        while self._deadlines and not self._deadlines[0][2].is_waiting:
            self._watched.discard(heapq.heappop(self._deadlines)[1])
        return self._deadlines[0][0] if self._deadlines else None

    def _retire(self, now: float) -> None:
        while (earliest := self._earliest()) is not None and earliest <= now:
            entry = self._deadlines[0][2]
            self._remove(entry)
            self._due[entry.ticket.key] = entry.ticket

    def _remove(self, entry: Entry) -> None:
        self._lanes[entry.ticket.worker].remove(entry)
        del self._waiting[entry.ticket.key]
        self._left(entry.ticket)

    def _left(self, ticket: Ticket, cost: float = 0.0) -> None:
        self._per_tenant[ticket.tenant] -= 1
        if not self._per_tenant[ticket.tenant]:
            del self._per_tenant[ticket.tenant]
            # Sums of floats drift; an empty one is exact again.
            weight = self._total_weight - self._weight(ticket.tenant)
            self._total_weight = weight if self._per_tenant else 0.0
        lane = ticket.worker
        if lane is None:
            num = self.common[ticket.tenant] = self.common[ticket.tenant] - 1
            if not num:
                del self.common[ticket.tenant]
            if cost or not num:
                self._tell(ticket.tenant, cost)
        elif not self._lanes[lane] and all(e.ticket.worker != lane for e in self.trying.values()):
            del self._lanes[lane]


# The drain rate of a queue, and from it the time to retry after a refusal.

RATE_WINDOW_S: Final = 10.0
MIN_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 60.0


class DrainRate:
    """Departures per second, over about the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = -math.inf
        self._since: float | None = None

    def departed(self, now: float) -> None:
        if self._since is None:
            self._since = now
        self._rate = self._decayed(now) + 1.0 / RATE_WINDOW_S
        self._at = now

    def retry_after_s(self, waiting: float, now: float) -> float:
        """Until `waiting` have departed at this rate, within the bounds; the least before any has."""
        if self._since is None:
            return MIN_RETRY_S
        # A young average has not seen a whole window yet.
        seen = -math.expm1(-max(now - self._since, 1.0) / RATE_WINDOW_S)
        rate = self._decayed(now) / seen
        if waiting >= MAX_RETRY_S * rate:
            return MAX_RETRY_S
        return max(MIN_RETRY_S, waiting / rate)

    def _decayed(self, now: float) -> float:
        return self._rate * math.exp(min(0.0, self._at - now) / RATE_WINDOW_S)
