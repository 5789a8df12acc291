"""Accounts of budgets, as the gateways' store has them: a budget and all below it are one value.

A budget bounds the tokens that are drawn, the branches that are opened, and the time since it was given. An
account below another reserves its limit of that one's rest, as long as something runs on it at any gateway,
and what it did not spend goes back then.

Gateways spend what they have leased: a lease counts as used from then on, whatever becomes of its gateway,
so that all together never spend more than there is. Leases say totals, so that a gateway that does not know
whether a change of its own was made sees it from the value. Rejected: counts that are told afterwards
(overspent by what all gateways draw until they hear of each other), one write a step (every step of every
branch waits for it), and a value for each account (it and the one above can't be changed in one step).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from mallee.protocol.api.shared import BudgetFields
from mallee.protocol.errors import InvalidParameter

MAX_ACCOUNTS: Final = 1024  # a budget, and those below it that are remembered
MAX_DEPTH: Final = 64  # accounts above each other
MAX_DEAD: Final = 16  # leases of gateways that are gone, which may come back
LEAST_WISH: Final = 64  # tokens that a gateway takes ahead
MOST_WISH: Final = 4096

Resource: TypeAlias = Literal["tokens", "branches"]
RESOURCES: Final[tuple[Resource, ...]] = ("tokens", "branches")


class Place(NamedTuple):
    """The key of an account, and one of the resources that it bounds."""

    key: str
    name: Resource


class Budget(NamedTuple):
    """Bounds of a request or a session and of all below it; None: that of its parent."""

    tokens: int | None = None
    branches: int | None = None
    wall_s: float | None = None


def read_budget(fields: BudgetFields | None, param: str = "mallee.budget") -> Budget | None:
    """Raises InvalidParameter."""
    if fields is None:
        return None
    budget = Budget(fields.tokens, fields.branches, fields.wall_s)
    if budget == Budget():
        raise InvalidParameter(param, {}, "give tokens, branches or wall_s")
    return budget


class ResourceView(NamedTuple):
    """`reserved`: by what runs, and may still return."""

    limit: float
    used: float
    reserved: float
    left: float


class BudgetView(NamedTuple):
    """A budget as it stands; None: it doesn't bound that."""

    tokens: ResourceView | None
    branches: ResourceView | None
    wall_s: ResourceView | None


class Lease(msgspec.Struct, array_like=True):
    """All that a gateway has taken so far, and the part that it has spent, as far as it has told."""

    taken: int
    used: int


class Count(msgspec.Struct, array_like=True):
    """A resource of an account. What is leased or reserved below counts as used until it returns.

    `reserved` of the count above: all of the limit, as far as it was there, while something runs here, else
    as much as is used. No `limit`: it was taken away, and the count goes once nothing runs here.
    """

    limit: int | None
    used: int = 0
    reserved: int = 0
    leases: dict[str, Lease] = msgspec.field(default_factory=dict)

    @property
    def left(self) -> float:
        return math.inf if self.limit is None else max(0, self.limit - self.used)


class Account(msgspec.Struct, array_like=True):
    """One budget; `above` is the key of the next one, "" if there is none."""

    above: str
    counts: dict[Resource, Count] = msgspec.field(default_factory=dict)
    wall_s: float | None = None
    due: float = math.inf


class BudgetTree(msgspec.Struct, array_like=True):
    """A budget and those below it, by key, each after the one above it."""

    accounts: dict[str, Account]

    @classmethod
    def of(cls, key: str, budget: Budget, now: float) -> "BudgetTree":
        tree = cls({key: Account("")})
        tree.change(key, budget, now)
        return tree

    def path(self, key: str) -> Iterator[str]:
        """The account's key and those of the ones above it, the nearest first."""
        while key:
            yield key
            key = self.accounts[key].above

    def places(self, key: str) -> list[Place]:
        """The nearest accounts that bound what runs on `key`."""
        found = (self._bounding(key, name) for name in RESOURCES)
        return [place for place in found if place is not None]

    def due(self, key: str) -> float:
        """The end of its time, in seconds since the epoch."""
        return min(self.accounts[each].due for each in self.path(key))

    def rest(self, place: Place | None) -> float:
        """The amount that may still be leased there."""
        if place is None:
            return math.inf
        if (count := self._find(place)) is None:
            return 0
        held = count.reserved - count.used
        return max(0, min(count.left, held + self.rest(self._above(place))))

    def add(self, key: str, above: str, budget: Budget, now: float) -> None:
        """A new account. Raises InvalidParameter: too many are there, or it asks for more than the rest."""
        if len(list(self.path(above))) >= MAX_DEPTH:
            remedy = f"{MAX_DEPTH} budgets are above each other here; leave it out"
            raise InvalidParameter("mallee.budget", budget, remedy)
        for name in RESOURCES:
            asked, rest = getattr(budget, name), self.rest(self._bounding(above, name))
            if asked is not None and asked > rest:
                remedy = f"the budget above it has {rest:.0f} left; give at most that"
                raise InvalidParameter(f"mallee.budget.{name}", asked, remedy)
        if len(self.accounts) >= MAX_ACCOUNTS:
            self._forget_one({above})
        limits = [(name, getattr(budget, name)) for name in RESOURCES]
        counts = {name: Count(limit) for name, limit in limits if limit is not None}
        self.accounts[key] = Account(above, counts)
        self.change(key, budget, now)

    def _forget_one(self, kept: set[str]) -> None:
        """Forget the oldest account that nothing runs on, and none is below; it stays spent."""
        kept |= {account.above for account in self.accounts.values()}
        for key, account in self.accounts.items():
            if key not in kept and not any(count.leases for count in account.counts.values()):
                del self.accounts[key]
                return
        remedy = f"{MAX_ACCOUNTS} budgets run below one already; leave it out"
        raise InvalidParameter("mallee.budget", None, remedy)

    def change(self, key: str, budget: Budget, now: float) -> None:
        """Limits from now on, and the time since now. What was used of a limit that goes on stays used."""
        account = self.accounts[key]
        for name in RESOURCES:
            limit, count = getattr(budget, name), account.counts.get(name)
            if count is not None:
                count.limit = limit
            elif limit is not None:
                account.counts[name] = count = Count(limit)
                # What is reserved below was spent above, and returns here.
                returning = self._outstanding()[Place(key, name)]
                count.used = count.reserved = returning
        account.wall_s = budget.wall_s
        account.due = math.inf if budget.wall_s is None else now + budget.wall_s

    def view(self, key: str, gone: Collection[str], now: float) -> BudgetView:
        account, returning = self.accounts[key], self._outstanding(gone)
        found: dict[str, ResourceView | None] = dict.fromkeys(Budget._fields)
        for name, count in account.counts.items():
            if count.limit is not None:
                reserved = returning[Place(key, name)]
                used = count.used - reserved
                found[name] = ResourceView(count.limit, used, reserved, count.left)
        if (wall_s := account.wall_s) is not None:
            left_s = min(wall_s, max(0.0, account.due - now))
            found["wall_s"] = ResourceView(wall_s, wall_s - left_s, 0.0, left_s)
        return BudgetView(**found)

    # Leases

    def lease(self, place: Place, holder: str) -> Lease | None:
        count = self._find(place)
        return None if count is None else count.leases.get(holder)

    def take(self, place: Place, holder: str, used: int, need: int) -> None:
        """Have a holder that has `used` so much get what it needs beyond it, as far as it is there.

        Of tokens it gets some ahead, at most half of the rest.
        """
        if self._find(place) is None:
            return  # it was forgotten
        self._reserve(place)
        rest, leases = self.rest(place), self._count(place).leases
        lease = leases.setdefault(holder, Lease(used, used))
        more = int(min(max(0, used + need - lease.taken), rest))
        if place.name == "tokens":
            wish = min(MOST_WISH, max(LEAST_WISH, used))
            more += int(min(max(0, used + wish - lease.taken - more), (rest - more) / 2))
        self._spend(place, more)
        lease.taken += more

    def tell(self, place: Place, holder: str, used: int) -> int:
        """Hear how much a holder has used. The amount that it has taken."""
        lease = self.lease(place, holder)
        if lease is None:
            return used
        if used > lease.taken:  # the store was set back to what it was before
            self._spend(place, used - lease.taken)
            lease.taken = used
        lease.used = used
        return lease.taken

    def give_back(self, holder: str, kept: Collection[Place]) -> None:
        """Have a holder keep nothing of what it has leased, but of `kept`."""
        for place in self._moving():
            count = self._count(place)
            if place not in kept and (lease := count.leases.pop(holder, None)) is not None:
                count.used -= lease.taken - lease.used

    @property
    def holders(self) -> set[str]:
        return {holder for place in self._moving() for holder in self._count(place).leases}

    def settle(self, gone: Collection[str]) -> None:
        """Give back above what is reserved for accounts that nothing runs on any more.

        `gone`: holders that are not there, as far as is known. One too many overspends nothing.
        """
        in_use = set[Place]()
        for place in (moving := self._moving()):
            leases = self._count(place).leases
            dead = [holder for holder in leases if holder in gone]
            if len(dead) < len(leases):
                in_use.update(self._chain(place))
            for holder in dead[:-MAX_DEAD]:
                del leases[holder]
        over = {above for place in moving for above in self._chain(place)}
        for place in sorted(over, key=lambda each: -len(list(self.path(each.key)))):
            count, above = self._count(place), self._above(place)
            least = count.used
            if place in in_use and count.limit is not None:
                least = max(least, min(count.limit, count.reserved))
            if above is not None:
                self._count(above).used -= count.reserved - least
            count.reserved = least
            if count.limit is None and place not in in_use:
                del self.accounts[place.key].counts[place.name]

    def _outstanding(self, gone: Collection[str] = ()) -> Counter[Place]:
        """The part of what is used that is leased or reserved, and may return."""
        found: Counter[Place] = Counter()
        for place in self._moving():
            count, (own, *above) = self._count(place), self._chain(place)
            leases = (each for holder, each in count.leases.items() if holder not in gone)
            leased = sum(each.taken - each.used for each in leases)
            found[own] += leased
            for each in above:
                found[each] += leased + count.reserved - count.used
        return found

    def _moving(self) -> list[Place]:
        """Those with leases, with more reserved than is used, or without a limit."""
        return [
            Place(key, name)
            for key, account in self.accounts.items()
            for name, count in account.counts.items()
            if count.leases or count.reserved != count.used or count.limit is None
        ]

    def _chain(self, place: Place) -> list[Place]:
        """A place and those above it, the nearest first."""
        above = (Place(key, place.name) for key in self.path(place.key))
        return [each for each in above if each.name in self.accounts[each.key].counts]

    def _reserve(self, place: Place) -> None:
        """Have the whole limit reserved above, as far as it is there."""
        above, count = self._above(place), self._count(place)
        if above is None:
            return
        self._reserve(above)
        if count.limit is not None:
            more = int(min(count.limit - count.reserved, self.rest(above)))
            if more > 0:
                count.reserved += more
                self._spend(above, more)

    def _spend(self, place: Place, amount: int) -> None:
        count = self._count(place)
        count.used += amount
        above, lacking = self._above(place), count.used - count.reserved
        count.reserved = max(count.reserved, count.used)
        if above is not None and lacking > 0:
            self._spend(above, lacking)

    def _find(self, place: Place) -> Count | None:
        account = self.accounts.get(place.key)
        return None if account is None else account.counts.get(place.name)

    def _count(self, place: Place) -> Count:
        return self.accounts[place.key].counts[place.name]

    def _above(self, place: Place) -> Place | None:
        return self._bounding(self.accounts[place.key].above, place.name)

    def _bounding(self, key: str, name: Resource) -> Place | None:
        for each in self.path(key):
            if name in self.accounts[each].counts:
                return Place(each, name)
        return None
