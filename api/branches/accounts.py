"""Accounts of budgets: what is reserved of one for another below it, and lent to other gateways.

A budget bounds the tokens that are drawn, the branches that are opened, and the time since it was given. An
account below another reserves its limit of that one's rest, as long as something runs on it, and what it did
not spend goes back then.

One gateway keeps an account. Another spends of it by a `Loan`: what it is lent is spent at the keeper from
that moment on, so that all gateways together never spend more than there is, whatever becomes of them or of
their messages. Messages say totals, so that one that is lost or comes twice changes nothing. Rejected: counts
that are told afterwards (overspent by what all gateways draw until they hear of each other), and one call to
the keeper a step (every step of every branch waits for it).
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from mallee.protocol.api.shared import BudgetFields
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.gateways.loans import (
    Amounts,
    BudgetView,
    Lent,
    LoanAsk,
    LoanReturn,
    LoanTold,
    ResourceView,
)
from mallee.protocol.ids import Scope

MAX_HOLDERS: Final = 1024  # of one account: those of gateways that died stay
LEAST_WISH: Final = 64  # tokens that a gateway takes ahead
MOST_WISH: Final = 4096

Resource: TypeAlias = Literal["tokens", "branches"]
RESOURCES: Final[tuple[Resource, ...]] = ("tokens", "branches")


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


@dataclass(slots=True)
class _Grant:
    """The amounts that a holder was lent and has told to have used. Not `is_open`: all of it is used up."""

    lent: dict[Resource, int]
    used: dict[Resource, int]
    is_open: bool


class Account:
    """One budget. `reserved` is what it may spend: all of its limit, but not what its parent lacks.

    What is reserved below it, or lent, counts as used until it returns. Whoever changes what others have
    of it holds `turn`.
    """

    __slots__ = (
        *("_children", "_grants", "_limit", "_num_open", "_own_due", "_reserved"),
        *("_used", "_wall_s", "key", "parent", "turn"),
    )

    def __init__(self, key: str, budget: Budget, parent: "Account | None", now: float) -> None:
        self.key = key
        self.turn = asyncio.Lock()
        self.parent = parent
        self._limit: dict[Resource, int] = {}
        self._used: dict[Resource, int] = {}
        self._reserved: dict[Resource, int] = {}
        self._num_open = 0  # requests that run on it, accounts that reserve of it, holders
        self._children: dict[Account, None] = {}  # that are open
        self._grants: dict[str, _Grant] = {}
        self._wall_s: float | None = None
        self._own_due = math.inf
        self.change(budget, now)

    @property
    def keys(self) -> tuple[str, ...]:
        """Its own, and those of the accounts above, the nearest first."""
        return (self.key,) if self.parent is None else (self.key, *self.parent.keys)

    @property
    def due(self) -> float:
        """The end of its time, in seconds on the clock."""
        return self._own_due if self.parent is None else min(self._own_due, self.parent.due)

    @property
    def is_idle(self) -> bool:
        return not self._num_open

    def rest(self, resource: Resource) -> float:
        """The amount that may still be spent, while it is open."""
        if resource in self._limit:
            return self._reserved[resource] - self._used[resource]
        return math.inf if self.parent is None else self.parent.rest(resource)

    def open(self) -> None:
        """Reserve what is left of it, as far as its parent has it."""
        self._num_open += 1
        if self._num_open > 1:
            return
        if self.parent is not None:
            self.parent.open()
            self.parent._children[self] = None
        for name in self._limit:
            self._reserve(name)

    def close(self) -> None:
        """Give back what was not spent, once nothing runs on it any more."""
        self._num_open -= 1
        assert self._num_open >= 0, "an account is closed as often as it was opened"
        if self._num_open:
            return
        for name in self._limit:
            self._give_back(name)
        if self.parent is not None:
            del self.parent._children[self]
            self.parent.close()

    def spend(self, resource: Resource, amount: int) -> None:
        if resource in self._limit:
            self._used[resource] += amount
            assert self._used[resource] <= self._reserved[resource], "more was spent than is there"
        elif self.parent is not None:
            self.parent.spend(resource, amount)

    def change(self, budget: Budget, now: float) -> None:
        """Limits from now on, and the time since now. What was used of a limit that goes on stays used."""
        for name in RESOURCES:
            limit = getattr(budget, name)
            if name not in self._limit and limit is not None:
                # What is reserved below was spent above, and returns here.
                self._used[name] = self._reserved[name] = self.outstanding(name)
            elif name in self._limit and not self.is_idle:
                self._give_back(name)
            if limit is not None:
                self._limit[name] = limit
                if not self.is_idle:
                    self._reserve(name)
            elif name in self._limit:
                del self._limit[name], self._used[name], self._reserved[name]
        self._wall_s = budget.wall_s
        self._own_due = math.inf if budget.wall_s is None else now + budget.wall_s

    def _reserve(self, name: Resource) -> None:
        left = self._left(name)
        if self.parent is not None:
            left = int(min(left, self.parent.rest(name)))
            self.parent.spend(name, left)
        self._reserved[name] = self._used[name] + left

    def _give_back(self, name: Resource) -> None:
        if self.parent is not None:
            self.parent.spend(name, self._used[name] - self._reserved[name])
        self._reserved[name] = self._used[name]

    def _left(self, name: Resource) -> int:
        return max(0, self._limit[name] - self._used[name])

    def outstanding(self, resource: Resource) -> int:
        """The part of what is used that was reserved or lent, and may return."""
        total = sum(child._may_return(resource) for child in self._children)
        for grant in self._grants.values():
            if grant.is_open and resource in grant.lent:
                total += grant.lent[resource] - grant.used.get(resource, 0)
        return total

    def _may_return(self, resource: Resource) -> int:
        """The part of what its parent has spent for it that may return."""
        below = self.outstanding(resource)
        if resource not in self._limit:
            return below
        return self._reserved[resource] - self._used[resource] + below

    def view(self, now: float) -> BudgetView:
        wall = None
        if self._wall_s is not None:
            left_s = min(self._wall_s, max(0.0, self._own_due - now))
            wall = ResourceView(self._wall_s, self._wall_s - left_s, 0.0, left_s)
        return BudgetView(self._viewed("tokens"), self._viewed("branches"), wall)

    def _viewed(self, name: Resource) -> ResourceView | None:
        if name not in self._limit:
            return None
        reserved = self.outstanding(name)
        used = self._used[name] - reserved
        return ResourceView(self._limit[name], used, reserved, self._left(name))

    # Loans

    def loan(self) -> "Loan | None":
        """The loan that all of it is spent of, if it is kept elsewhere."""
        return None if self.parent is None else self.parent.loan()

    def lack(self, need: Amounts) -> "tuple[Loan, Amounts] | None":
        """The loan, and what it has to be lent before so much of it can be spent; None: nothing."""
        if self.parent is None:
            return None
        above = [self._need_above(name, getattr(need, name)) for name in RESOURCES]
        return self.parent.lack(Amounts(*above))

    def _need_above(self, name: Resource, need: int) -> int:
        if name not in self._limit:
            return need
        return self._left(name) if self.is_idle else 0

    def lend(self, ask: LoanAsk, now: float) -> LoanTold | None:
        """The amounts that a holder gets: all it needs, if it is there; of its wish at most half of the rest.

        None: the loan that it speaks of was never given here.
        """
        grant = self._grants.get(ask.holder)
        if grant is None:
            if any(ask.lent) or not self._has_room():
                return None
            grant = self._grants[ask.holder] = _Grant({}, {}, is_open=False)
        if not grant.is_open:
            self.open()
            grant.is_open = True
        for name in RESOURCES:
            self._lend(grant, name, ask)
        return LoanTold(
            Lent(grant.lent.get("tokens"), grant.lent.get("branches")),
            None if self.due == math.inf else max(0.0, self.due - now),
            self.keys[1:],
        )

    def _lend(self, grant: _Grant, name: Resource, ask: LoanAsk) -> None:
        used = getattr(ask.used, name)
        if self.rest(name) == math.inf:
            grant.lent.pop(name, None)
            return
        held = grant.lent.setdefault(name, max(used, getattr(ask.lent, name)))
        more = int(min(max(0, used + getattr(ask.need, name) - held), self.rest(name)))
        if name == "tokens":
            ahead = max(0, ask.wish - max(0, held + more - used))
            more += min(ahead, int(self.rest(name) - more) // 2)
        self.spend(name, more)
        grant.lent[name] = held + more
        grant.used[name] = min(used, held + more)

    def _has_room(self) -> bool:
        """For one more holder; the oldest whose loan counts as spent goes."""
        if len(self._grants) < MAX_HOLDERS:
            return True
        over = next((holder for holder, g in self._grants.items() if not g.is_open), None)
        if over is not None:
            del self._grants[over]
        return over is not None

    def take_back(self, returned: LoanReturn) -> None:
        """A holder has ended. One that had expired before still gets its due."""
        grant = self._grants.pop(returned.holder, None)
        if grant is None:
            return
        if not grant.is_open:
            self.open()
        for name, lent in grant.lent.items():
            if self.rest(name) != math.inf:
                self.spend(name, min(getattr(returned.used, name), lent) - lent)
        self.close()

    def expire(self, holder: str) -> None:
        """A holder is silent: all that it was lent counts as spent, unless it is heard of again."""
        grant = self._grants.get(holder)
        if grant is not None and grant.is_open:
            grant.is_open = False
            self.close()


class Loan(Account):
    """The part that this gateway has of an account that another keeps, while something runs on it here.

    `name` belongs to the account's scope and names the account. `new_holder()` names a loan from its first
    open to its last close, when `on_return` gets what is to be sent.
    """

    __slots__ = ("_above", "_is_told", "_new_holder", "_on_return", "holder", "name", "scope")

    def __init__(
        self,
        key: str,
        name: str,
        scope: Scope,
        new_holder: Callable[[], str],
        on_return: Callable[["Loan", LoanReturn], None],
    ) -> None:
        super().__init__(key, Budget(), None, 0.0)
        self.name = name
        self.scope = scope
        self.holder = ""
        self._new_holder = new_holder
        self._on_return = on_return
        self._above: tuple[str, ...] = ()
        self._is_told = False

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *self._above)

    def open(self) -> None:
        """Nothing can be spent before the keeper was asked."""
        self._num_open += 1
        if self._num_open > 1:
            return
        self.holder, self._is_told = self._new_holder(), False
        for name in RESOURCES:
            self._limit[name] = self._used[name] = self._reserved[name] = 0

    def close(self) -> None:
        self._num_open -= 1
        assert self._num_open >= 0, "a loan is closed as often as it was opened"
        if not self._num_open:
            returned = LoanReturn(self.holder, self._amounts(self._used))
            for name in self._limit:
                self._reserved[name] = self._used[name]
            self.holder = ""
            self._on_return(self, returned)

    def loan(self) -> "Loan | None":
        return self

    def lack(self, need: Amounts) -> "tuple[Loan, Amounts] | None":
        is_enough = all(self.rest(name) >= getattr(need, name) for name in RESOURCES)
        return None if self._is_told and is_enough else (self, need)

    def ask(self, need: Amounts) -> LoanAsk:
        """The question that gets `need` on top of what is used."""
        wish = min(MOST_WISH, max(LEAST_WISH, self._used.get("tokens", 0))) if any(need) else 0
        used, lent = self._amounts(self._used), self._amounts(self._reserved)
        return LoanAsk(self.holder, used, lent, need, wish)

    def hear(self, told: LoanTold, now: float) -> None:
        """Take in the answer to `ask`, of the same holder."""
        self._is_told = True
        self._above = told.above
        self._own_due = math.inf if told.rest_s is None else now + told.rest_s
        for name in RESOURCES:
            lent = getattr(told.lent, name)
            if lent is None:
                for amounts in (self._limit, self._used, self._reserved):
                    amounts.pop(name, None)
            else:
                self._used.setdefault(name, 0)
                self._limit[name] = self._reserved[name] = max(lent, self._used[name])

    @staticmethod
    def _amounts(found: dict[Resource, int]) -> Amounts:
        return Amounts(found.get("tokens", 0), found.get("branches", 0))
