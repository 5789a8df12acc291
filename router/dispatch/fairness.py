"""Order of waiting requests: weighted fair share between tenants, priority inside one.

Between tenants this is start-time fair queueing (Goyal, Vin, Cheng 1996). A tenant has a tag, the
virtual time at which its next ticket may start; serving cost c moves it by c / weight, and the lowest
tag is served next. Two tenants that both wait all the time therefore get costs in proportion to their
weights within one largest ticket each. A tenant that starts to wait starts at the lowest tag of those
that wait, or at its own if that is higher: it brings no credit from its idle time and leaves no
debt behind by pausing. Deficit round robin was the alternative; it needs a quantum of about the
largest cost, and makes a lone request wait for a round of quanta instead of a round of tickets.

Tenants that wait at other gateways only are among those that wait, and are charged what is served there
(`router.dispatch.elsewhere`), so that all gateways keep about the same tags.

Inside a tenant the highest priority goes first, then the oldest. The oldest may be overtaken
`max_overtakes` times, then it goes next at any priority. An older ticket was overtaken at
least as often as a younger one, so the bound holds for every ticket. It is counted from above:
as overtakes of a ticket count those since it arrived of any older ticket too.

Removing is lazy: a removed entry stays in the heaps until it surfaces or until they are mostly
such entries. Every operation is O(log n), amortised.
"""

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from mallee.protocol.bookings import Lag
from mallee.protocol.ids import WorkerId

_SLACK = 64  # stale entries that a heap may always hold
_STEP = 0.125  # part of the last ticket in a tenant's step


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request that waits. Times are seconds on the queue's clock.

    `cost` in tokens (prompt tokens to compute and tokens to generate) weighs it against other
    tenants' tickets. With `worker`, no other one can take it.
    """

    key: Hashable
    tenant: str
    arrival: float
    cost: float
    priority: int = 0  # higher first
    deadline: float | None = None
    worker: WorkerId | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """A ticket's place. Belongs to its queue."""

    ticket: Ticket
    number: int  # of arrival
    overtakes_before: int  # of its tenant, when it arrived
    is_waiting: bool = True
    is_overtaking: bool = False  # an older one of its tenant waited when it was taken
    tag: float = 0.0  # of its tenant, when it was taken
    turn: int = 0


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's waiting entries and its place among the others. Belongs to its queue."""

    name: str
    weight: float
    tag: float = 0.0
    turn: int = 0  # breaks ties of tags: the tenant that waited longest for one goes first
    version: int = 0  # of its listing; all others are stale
    step: float = 0.0  # by which a ticket moves its tag, about
    num_waiting: int = 0
    num_elsewhere: int = 0  # other gateways at which it waits
    num_overtakes: int = 0
    returned: deque[Entry] = field(default_factory=deque)
    by_age: deque[Entry] = field(default_factory=deque)
    by_rank: list[tuple[int, int, Entry]] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return not (self.num_waiting or self.num_elsewhere)

    def add(self, entry: Entry) -> None:
        entry.overtakes_before = self.num_overtakes
        self.by_age.append(entry)
        heapq.heappush(self.by_rank, (-entry.ticket.priority, entry.number, entry))
        self.num_waiting += 1
        self._tidy()

    def take(self, max_overtakes: int) -> Entry:
        """The next entry, which waits no more. Needs `num_waiting` >= 1."""
        entry = self._next(max_overtakes)
        entry.is_waiting = False
        self.num_waiting -= 1
        self.num_overtakes += entry.is_overtaking
        self._tidy()
        return entry

    def put_back(self, entry: Entry) -> None:
        """Put an entry back as the next, before those put back earlier."""
        entry.is_waiting = True
        self.returned.appendleft(entry)
        self.num_waiting += 1
        self.num_overtakes -= entry.is_overtaking

    def remove(self, entry: Entry) -> None:
        entry.is_waiting = False
        self.num_waiting -= 1
        self._tidy()

    def _next(self, max_overtakes: int) -> Entry:
        while self.returned:
            entry = self.returned.popleft()
            if entry.is_waiting:
                return entry
        while not self.by_age[0].is_waiting:
            self.by_age.popleft()
        oldest = self.by_age[0]
        if self.num_overtakes - oldest.overtakes_before >= max_overtakes:
            oldest.is_overtaking = False
            return oldest
        while not self.by_rank[0][2].is_waiting:
            heapq.heappop(self.by_rank)
        first = heapq.heappop(self.by_rank)[2]
        first.is_overtaking = first is not oldest
        return first

    def _tidy(self) -> None:
        most = 2 * self.num_waiting + _SLACK
        if len(self.returned) > most:
            self.returned = deque(entry for entry in self.returned if entry.is_waiting)
        if len(self.by_age) > most:
            self.by_age = deque(entry for entry in self.by_age if entry.is_waiting)
        if len(self.by_rank) > most:
            self.by_rank = [item for item in self.by_rank if item[2].is_waiting]
            heapq.heapify(self.by_rank)


_Listing: TypeAlias = tuple[float, int, int, Tenant]  # tag, turn, version


class FairQueue:
    """Entries of many tenants, in the order above. Knows neither time nor limits."""

    def __init__(
        self, weights: Mapping[str, float], *, max_overtakes: int, max_idle_tenants: int
    ) -> None:
        """A tenant without a weight has 1. Of idle tenants at most so many debts are remembered."""
        self._weights = weights
        self._max_overtakes = max_overtakes
        self._max_idle = max_idle_tenants
        self._tenants: dict[str, Tenant] = {}
        self._waiting: list[_Listing] = []
        self._elsewhere: list[_Listing] = []  # of tenants that wait at other gateways alone
        self._idle: list[_Listing] = []
        self._num_idle = 0
        self._num_waiting = 0
        self._num_turns = 0
        self._num_listings = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, entry: Entry) -> None:
        """Add `entry`, behind the older ones of its tenant and priority."""
        self._forget()
        tenant = self._tenant(entry.ticket.tenant)
        self._num_idle -= tenant.is_idle
        tenant.add(entry)
        self._num_waiting += 1
        if tenant.num_waiting == 1:
            self._list(tenant, self._next_turn())

    def pop(self) -> Entry | None:
        """Remove, charge and return the next entry; None if none waits."""
        if self._top(self._waiting) is None:
            return None
        *_, tenant = heapq.heappop(self._waiting)
        entry = tenant.take(self._max_overtakes)
        self._num_waiting -= 1
        entry.tag, entry.turn = tenant.tag, tenant.turn
        tenant.tag += entry.ticket.cost / tenant.weight
        self._num_idle += tenant.is_idle
        self._list(tenant, self._next_turn())
        return entry

    def push_back(self, entry: Entry) -> None:
        """Undo the pop of `entry`: it is the first of its tenant and nothing is charged.

        Several are pushed back in the reverse order of their pops, and before any `push`.
        """
        tenant = self._tenants.get(entry.ticket.tenant)
        if tenant is None:
            tenant = self._tenant(entry.ticket.tenant)
            tenant.tag = entry.tag
        else:
            tenant.tag -= entry.ticket.cost / tenant.weight
        self._num_idle -= tenant.is_idle
        tenant.put_back(entry)
        self._num_waiting += 1
        self._list(tenant, entry.turn)

    def settle(self, entry: Entry, cost: float) -> None:
        """Correct a popped entry's cost to `cost`. To be called before any `push`."""
        tenant = self._tenants.get(entry.ticket.tenant)
        if tenant is None:
            return
        tenant.step += (cost / tenant.weight - tenant.step) * _STEP
        if cost != entry.ticket.cost:
            tenant.tag += (cost - entry.ticket.cost) / tenant.weight
            self._list(tenant, tenant.turn)

    def remove(self, entry: Entry) -> None:
        """Remove a waiting entry; nothing is charged. O(1), amortised."""
        tenant = self._tenants[entry.ticket.tenant]
        tenant.remove(entry)
        self._num_waiting -= 1
        if not tenant.num_waiting:
            self._num_idle += tenant.is_idle
            self._list(tenant, tenant.turn)

    # Other gateways

    def wait_elsewhere(self, name: str, num: int) -> None:
        """A tenant waits at so many more other gateways; negative: at less."""
        self._forget()
        tenant = self._tenant(name)
        self._num_idle -= tenant.is_idle
        tenant.num_elsewhere += num
        assert tenant.num_elsewhere >= 0, f"{name} waits at {tenant.num_elsewhere} gateways"
        self._num_idle += tenant.is_idle
        self._list(tenant, tenant.turn)

    def charge(self, name: str, cost: float) -> None:
        """Charge what another gateway served of a tenant's. It counts for nothing while nobody waits."""
        if self._lowest() is not None:
            tenant = self._tenant(name)
            tenant.tag += cost / tenant.weight
            self._list(tenant, self._next_turn())

    def next(self) -> tuple[Tenant | None, Tenant | None]:
        """The next of those that wait here, and of those that wait elsewhere alone."""
        here, there = self._top(self._waiting), self._top(self._elsewhere)
        return here and here[3], there and there[3]

    def elsewhere(self) -> dict[str, int]:
        """Numbers of other gateways at which tenants wait."""
        return {t.name: t.num_elsewhere for t in self._tenants.values() if t.num_elsewhere}

    def lags(self, most: int) -> tuple[Lag, ...]:
        """Those that wait, here or elsewhere, by how far their tags are above the lowest."""
        waiting = [(t.tag, t.turn, t.name) for t in self._tenants.values() if not t.is_idle]
        found = heapq.nsmallest(most, waiting)
        return tuple((name, tag - found[0][0]) for tag, _, name in found)

    def adopt(self, lags: Iterable[Lag]) -> None:
        """Have tenants that wait be so far above the lowest tag."""
        lowest = self._lowest()
        for name, lag in lags:
            tenant = self._tenants.get(name)
            if lowest is not None and tenant is not None and not tenant.is_idle:
                tenant.tag = lowest + lag
                self._list(tenant, tenant.turn)

    def check(self) -> None:
        """Raises AssertionError unless counts, heaps and listings follow from the entries."""
        listed = {
            tenant.name: (tag, turn)
            for tag, turn, version, tenant in (*self._waiting, *self._elsewhere, *self._idle)
            if version == tenant.version and self._tenants.get(tenant.name) is tenant
        }
        assert listed == {t.name: (t.tag, t.turn) for t in self._tenants.values()}, "unlisted"
        assert self._num_idle == sum(t.is_idle for t in self._tenants.values())
        assert self._num_waiting == sum(t.num_waiting for t in self._tenants.values())
        for tenant in self._tenants.values():
            held = {id(e) for e in (*tenant.returned, *tenant.by_age) if e.is_waiting}
            ranked = {id(item[2]) for item in tenant.by_rank if item[2].is_waiting}
            assert len(held) == tenant.num_waiting, f"{tenant.name}: {len(held)} by age"
            assert ranked <= held, f"{tenant.name} ranks what does not wait"
            returned = {id(e) for e in tenant.returned if e.is_waiting}
            assert len(ranked | returned) == tenant.num_waiting, f"{tenant.name}: unranked"
            most = 2 * tenant.num_waiting + self._max_overtakes + 2 * _SLACK
            assert max(len(tenant.by_age), len(tenant.by_rank)) <= most, "too many stale entries"

    def _tenant(self, name: str) -> Tenant:
        """The one that begins to wait, or is served: it brings no credit."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._weights.get(name, 1.0))
            self._num_idle += 1
        if tenant.is_idle and (lowest := self._lowest()) is not None:
            tenant.tag = max(tenant.tag, lowest)
        return tenant

    def _next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    def _list(self, tenant: Tenant, turn: int) -> None:
        """Its place is by its tag and `turn`, among those that wait or those that don't."""
        tenant.turn = turn
        self._num_listings += 1
        tenant.version = self._num_listings
        heap = self._waiting
        if not tenant.num_waiting:
            heap = self._elsewhere if tenant.num_elsewhere else self._idle
        heapq.heappush(heap, (tenant.tag, turn, tenant.version, tenant))
        if len(heap) > 2 * len(self._tenants) + _SLACK:
            heap[:] = [item for item in heap if not self._is_stale(item)]
            heapq.heapify(heap)

    def _is_stale(self, item: _Listing) -> bool:
        *_, version, tenant = item
        return version != tenant.version or self._tenants.get(tenant.name) is not tenant

    def _lowest(self) -> float | None:
        """The lowest tag of those that wait."""
        tops = self._top(self._waiting), self._top(self._elsewhere)
        return min((top[0] for top in tops if top), default=None)

    def _top(self, heap: list[_Listing]) -> _Listing | None:
        while heap and self._is_stale(heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _forget(self) -> None:
        """Drop idle tenants without a debt, and the smallest debts beyond the limit.

        Here and not in `pop`, for what was popped may come back.
        """
        lowest = self._lowest()
        if lowest is None:
            self._tenants.clear()
            self._idle.clear()
            self._num_idle = 0
            return
        while self._idle:
            if not self._is_stale(self._idle[0]):
                if self._idle[0][0] > lowest and self._num_idle <= self._max_idle:
                    return
                del self._tenants[self._idle[0][3].name]
                self._num_idle -= 1
            heapq.heappop(self._idle)
