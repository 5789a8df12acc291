"""Budgets of requests, and of all that is forked below them.

A budget bounds the tokens that are drawn, the branches that are opened, and the time since its request
began. A request that goes on from a capsule of one with a budget spends from that one; with a budget of
its own it reserves that much of its parent's rest, as long as something below it runs, and what it did
not spend goes back then. Of one gateway, in memory: another one doesn't know them.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

from mallee.actors.http.schemas import BudgetFields
from mallee.protocol.errors import BudgetSpent, InvalidParameter
from mallee.protocol.ids import CapsuleId, RequestId, request_of

MAX_KEPT: Final = 1 << 16  # requests whose budgets are remembered
MAX_AMOUNT: Final = 1 << 40
MAX_WALL_S: Final = 86_400.0

Resource: TypeAlias = Literal["tokens", "branches"]
RESOURCES: Final[tuple[Resource, ...]] = ("tokens", "branches")


class Budget(NamedTuple):
    """Bounds of a request and of all below it; None: that of its parent."""

    tokens: int | None = None
    branches: int | None = None
    wall_s: float | None = None


def read_budget(fields: BudgetFields | None) -> Budget | None:
    """Raises InvalidParameter."""
    if fields is None:
        return None
    budget = Budget(fields.tokens, fields.branches, fields.wall_s)
    if budget == Budget():
        raise InvalidParameter("mallee.budget", {}, "give tokens, branches or wall_s")
    for name in RESOURCES:
        value = getattr(budget, name)
        if value is not None and not 1 <= value <= MAX_AMOUNT:
            raise InvalidParameter(f"mallee.budget.{name}", value, f"give 1 to {MAX_AMOUNT}")
    if budget.wall_s is not None and not 0.0 < budget.wall_s <= MAX_WALL_S:
        remedy = f"give up to {MAX_WALL_S:.0f} seconds, more than 0"
        raise InvalidParameter("mallee.budget.wall_s", budget.wall_s, remedy)
    return budget


class Account:
    """One budget. `reserved` is what it may spend: all of its limit, but not what its parent lacks."""

    __slots__ = ("_limit", "_num_open", "_parent", "_reserved", "_used", "due")

    def __init__(self, budget: Budget, parent: "Account | None", now: float) -> None:
        self._parent = parent
        self.due: float
        self._limit: dict[Resource, int] = {
            name: value for name in RESOURCES if (value := getattr(budget, name)) is not None
        }
        self._used = dict.fromkeys(self._limit, 0)
        self._reserved = dict.fromkeys(self._limit, 0)
        self._num_open = 0  # requests that run on it, and accounts that reserve of it
        own = math.inf if budget.wall_s is None else now + budget.wall_s
        self.due = own if parent is None else min(own, parent.due)

    def rest(self, resource: Resource) -> float:
        """The amount that may still be spent, while it is open."""
        if resource in self._limit:
            return self._reserved[resource] - self._used[resource]
        return math.inf if self._parent is None else self._parent.rest(resource)

    def open(self) -> None:
        """Reserve what is left of it, as far as its parent has it."""
        self._num_open += 1
        if self._num_open > 1:
            return
        if self._parent is not None:
            self._parent.open()
        for name, limit in self._limit.items():
            left = limit - self._used[name]
            if self._parent is not None:
                left = int(min(left, self._parent.rest(name)))
                self._parent.spend(name, left)
            self._reserved[name] = self._used[name] + left

    def close(self) -> None:
        """Give back what was not spent, once nothing runs on it any more."""
        self._num_open -= 1
        assert self._num_open >= 0, "an account is closed as often as it was opened"
        if self._num_open:
            return
        for name in self._limit:
            if self._parent is not None:
                self._parent.spend(name, self._used[name] - self._reserved[name])
            self._reserved[name] = self._used[name]
        if self._parent is not None:
            self._parent.close()

    def spend(self, resource: Resource, amount: int) -> None:
        if resource in self._limit:
            self._used[resource] += amount
            assert self._used[resource] <= self._reserved[resource], "more was spent than is there"
        elif self._parent is not None:
            self._parent.spend(resource, amount)

    @property
    def is_idle(self) -> bool:
        return not self._num_open


class Budgets:
    """The accounts of one gateway, by the requests that run on them or ran. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float], max_kept: int = MAX_KEPT) -> None:
        self.clock = clock
        self._max_kept = max_kept
        self._accounts: OrderedDict[RequestId, Account] = OrderedDict()

    def of_request(self, request: RequestId) -> Account | None:
        """The account of a request, or of one that a shard of it is named after."""
        found = self._accounts.get(request)
        if found is None:
            found = self._accounts.get(RequestId(request.rpartition("-")[0]))
        return found

    def begin(
        self, budget: Budget | None, capsule: CapsuleId | None, num_branches: int
    ) -> Account | None:
        """Open an account for branches that go on from `capsule`; None: nothing bounds them.

        Raises BudgetSpent, and InvalidParameter for more than the parent's rest; nothing is open then.
        """
        parent = None if capsule is None else self.of_request(request_of(capsule))
        now = self.clock()
        account = parent
        if budget is not None:
            if parent is not None:
                parent.open()
                try:
                    _check_rest(budget, parent)
                finally:
                    parent.close()
            account = Account(budget, parent, now)
        if account is None:
            return None
        account.open()
        try:
            _check_left(account, num_branches, now)
        except BudgetSpent:
            account.close()
            raise
        account.spend("branches", num_branches)
        return account

    def keep(self, request: RequestId, account: Account) -> None:
        """The capsules of `request` are under `account`."""
        self._accounts[request] = account
        idle = 0
        while len(self._accounts) > self._max_kept and idle < self._max_kept:
            oldest, kept = self._accounts.popitem(last=False)
            if not kept.is_idle:
                self._accounts[oldest] = kept
            idle += 1

    def derive(self, capsule: CapsuleId, parent: RequestId) -> None:
        """`capsule` was taken of a text of `parent`, under a name of its own."""
        account = self.of_request(parent)
        if account is not None:
            self.keep(request_of(capsule), account)


def _check_rest(budget: Budget, parent: Account) -> None:
    for name in RESOURCES:
        asked, rest = getattr(budget, name), parent.rest(name)
        if asked is not None and asked > rest:
            remedy = f"the budget above it has {rest:.0f} left; give at most that"
            raise InvalidParameter(f"mallee.budget.{name}", asked, remedy)


def _check_left(account: Account, num_branches: int, now: float) -> None:
    if account.due <= now:
        raise BudgetSpent("wall_s", "its time is over")
    if account.rest("tokens") < 1:
        raise BudgetSpent("tokens", "none is left")
    if (rest := account.rest("branches")) < num_branches:
        raise BudgetSpent("branches", f"{rest:.0f} are left, {num_branches} are asked for")
