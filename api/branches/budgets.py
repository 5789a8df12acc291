"""Budgets of requests and sessions, at whichever gateway they are spent.

The name of a request tells the account that bounds it, and so do those of its capsules: no gateway has to be
asked whether a capsule is bounded. The gateway where a budget was given keeps its account in memory. The
others borrow of it for as long as something runs on it there: what it must have and some tokens ahead. A
keeper that can't be asked lends nothing: what runs elsewhere spends what it has, and ends.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

from mallee.api.branches.accounts import RESOURCES, Account, Budget, Loan
from mallee.gateway.records import SharedRecords
from mallee.protocol.codec import encode
from mallee.protocol.errors import (
    BadRequest,
    BudgetSpent,
    InvalidParameter,
    LookupIncomplete,
    MalleeError,
)
from mallee.protocol.gateways.loans import (
    Amounts,
    BudgetAsk,
    BudgetChange,
    BudgetMessage,
    BudgetView,
    LoanAsk,
    LoanReturn,
    ToKeeper,
    decode_budget_view,
    decode_loan_told,
    decode_to_keeper,
)
from mallee.protocol.ids import Scope, account_of

log = logging.getLogger(__name__)

MAX_KEPT: Final = 1 << 16  # accounts that are remembered
MAX_DEPTH: Final = 64  # accounts above each other
RENEW_S: Final = 10.0  # a holder says so often that it is there
EXPIRE_S: Final = 30.0  # what a silent one was lent counts as spent
NUM_RETURNS: Final = 3  # tries to give back
_KIND: Final = "budget"
_DONE: Final = b"\x01"


class Bound(NamedTuple):
    """The account that bounds a request, by key; names of capsules or sessions whose accounts are above."""

    key: str
    above: tuple[str, ...]
    scope: Scope


class _Key(NamedTuple):
    scope: Scope
    key: str


class Budgets:
    """One gateway's accounts, and its loans of others'. Belongs to one event loop.

    `clock` gives seconds since the epoch, `new_key()` 16 hexadecimal digits that no other has.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        records: SharedRecords,
        new_key: Callable[[], str],
        *,
        max_kept: int = MAX_KEPT,
        renew_s: float = RENEW_S,
    ) -> None:
        self.clock = clock
        self._records = records
        self._new_key = new_key
        self._max_kept = max_kept
        self._renew_s = renew_s
        self._accounts: OrderedDict[_Key, Account] = OrderedDict()  # last used last
        self._heard: OrderedDict[tuple[_Key, str], float] = OrderedDict()  # holders, latest last
        self._renewing: dict[str, asyncio.Task[None]] = {}  # by holder
        records.share(_KIND, self._tell)

    # Requests

    def bound(self, budget: Budget | None, scope: Scope, *names: str) -> Bound | None:
        """The account for a request with `budget` below the accounts of `names`; None: nothing bounds it."""
        above = {key: name for name in names if (key := account_of(name))}
        if budget is None and not above:
            return None
        is_shared = budget is None and len(above) == 1
        key = next(iter(above)) if is_shared else self._new_key()
        return Bound(key, tuple(above.values()), scope)

    async def begin(self, bound: Bound, budget: Budget | None, num_branches: int) -> Account:
        """Open the account for branches to come.

        Raises BudgetSpent, InvalidParameter for more than the rest above, and Unavailable if its keeper
        doesn't answer; nothing is open then.
        """
        async with self._ready(bound, budget, Amounts(1, num_branches)) as account:
            account.open()
            try:
                _check_left(account, num_branches, self.clock())
            except BudgetSpent:
                account.close()
                raise
            account.spend("branches", num_branches)
        return account

    async def give(self, bound: Bound, budget: Budget) -> None:
        """Make the account, for requests to come. Raises as `begin`."""
        async with self._ready(bound, budget, Amounts()):
            pass

    async def secure(self, account: Account, need: Amounts) -> None:
        """Borrow what an account lacks to spend so much, as far as its keeper has it.

        Raises Unavailable, and BudgetSpent if no gateway keeps it any more.
        """
        lacking = account.lack(need)
        if lacking is None:
            return
        loan, _ = lacking
        async with loan.turn:
            lacking = account.lack(need)
            if lacking is not None:
                await self._ask(loan, lacking[1])

    @asynccontextmanager
    async def _ready(
        self, bound: Bound, budget: Budget | None, need: Amounts
    ) -> AsyncIterator[Account]:
        """The account, kept from now on; `need` of it is here, as far as it is anywhere."""
        self._expire()
        place = _Key(bound.scope, bound.key)
        account = self._accounts.get(place)
        is_new = account is None
        if account is None:
            parents = [self._find(name, bound.scope) for name in bound.above]
            if budget is None and len(parents) == 1:
                account = parents[0]
            else:
                parent = await self._lowest(parents)
                account = Account(bound.key, budget or Budget(), parent, self.clock())
        loan = account.loan()
        if loan is not None:
            loan.open()
        try:
            await self.secure(account, need)
            if is_new:
                _check_new(account, budget)
            self._keep(place, account)
            yield account
        finally:
            if loan is not None:
                loan.close()

    async def _lowest(self, accounts: list[Account]) -> Account | None:
        """That of the accounts which is below all others. Raises BadRequest if none is."""
        if len(accounts) <= 1:
            return accounts[0] if accounts else None
        for account in accounts:
            await self._learn(account)
        for account in accounts:
            if all(other.key in account.keys for other in accounts):
                return account
        raise BadRequest(
            "the capsule and the session have budgets, of which neither is below the other: leave "
            "the session out, or send the text instead of the capsule",
            param="mallee.session",
        )

    async def _learn(self, account: Account) -> None:
        """Have the keeper tell what is above."""
        loan = account.loan()
        if loan is None:
            return
        loan.open()
        try:
            await self.secure(account, Amounts())
        finally:
            loan.close()

    def _find(self, name: str, scope: Scope) -> Account:
        place = _Key(scope, account_of(name))
        account = self._accounts.get(place)
        if account is None:
            account = Loan(place.key, name, scope, self._new_key, self._returned)
            self._keep(place, account)
        return account

    def _keep(self, place: _Key, account: Account) -> None:
        self._accounts[place] = account
        self._accounts.move_to_end(place)
        num_seen = 0
        while len(self._accounts) > self._max_kept and num_seen < self._max_kept:
            oldest, kept = self._accounts.popitem(last=False)
            if not kept.is_idle:
                self._accounts[oldest] = kept
            num_seen += 1

    # Sessions

    async def show(self, name: str, scope: Scope) -> BudgetView | None:
        """The budget that `name` belongs to; None: no gateway keeps it any more. Raises LookupIncomplete."""
        self._expire()
        account = self._kept(name, scope)
        if account is not None:
            return account.view(self.clock())
        raw = await self._records.fetch(_KIND, name, scope, given=encode(ToKeeper(BudgetAsk())))
        return None if raw is None else decode_budget_view(raw)

    async def change(self, name: str, scope: Scope, budget: Budget) -> bool:
        """Give a budget new limits. False: no gateway keeps it any more. Raises Unavailable."""
        account = self._kept(name, scope)
        if account is not None:
            async with account.turn:
                account.change(budget, self.clock())
            return True
        given = encode(ToKeeper(BudgetChange(*budget)))
        return await self._records.fetch(_KIND, name, scope, given=given) is not None

    def _kept(self, name: str, scope: Scope) -> Account | None:
        account = self._accounts.get(_Key(scope, account_of(name)))
        return None if account is None or account.loan() is account else account

    # Of others

    async def _ask(self, loan: Loan, need: Amounts) -> None:
        """Ask a loan's keeper. Raises Unavailable; BudgetSpent: there is none."""
        holder = loan.holder
        given = encode(ToKeeper(loan.ask(need)))
        raw = await self._records.fetch(_KIND, loan.name, loan.scope, given=given)
        if raw is None:
            raise BudgetSpent("tokens", "the gateway that kept it is gone, or has forgotten it")
        if loan.holder != holder:
            return  # nothing runs on it any more, and what it was lent is on its way back
        loan.hear(decode_loan_told(raw), self.clock())
        if holder not in self._renewing:
            self._renewing[holder] = self._records.tasks.spawn(self._renew(loan, holder))

    async def _renew(self, loan: Loan, holder: str) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            async with loan.turn:
                try:
                    await self._ask(loan, Amounts())
                except MalleeError as error:
                    log.warning("a loan of a budget was not renewed: %s", error)

    def _returned(self, loan: Loan, returned: LoanReturn) -> None:
        task = self._renewing.pop(returned.holder, None)
        if task is not None:
            self._records.tasks.cancel(task)
        self._records.tasks.spawn(self._give_back(loan.name, loan.scope, returned))

    async def _give_back(self, name: str, scope: Scope, returned: LoanReturn) -> None:
        given = encode(ToKeeper(returned))
        for _ in range(NUM_RETURNS):
            with suppress(LookupIncomplete):
                await self._records.fetch(_KIND, name, scope, given=given)
                return
            await asyncio.sleep(self._renew_s)
        log.warning("what was left of a budget was not given back: its gateway does not answer")

    # For others

    async def _tell(self, name: str, scope: Scope, given: bytes) -> bytes | None:
        """The answer to another gateway, if the account is kept here."""
        account = self._kept(name, scope)
        if account is None:
            return None
        message = decode_to_keeper(given).message
        self._expire()
        async with account.turn:
            return await self._answer(_Key(scope, account.key), account, message)

    async def _answer(self, place: _Key, account: Account, message: BudgetMessage) -> bytes | None:
        match message:
            case LoanAsk():
                return await self._lend(place, account, message)
            case LoanReturn():
                account.take_back(message)
                self._heard.pop((place, message.holder), None)
                return _DONE
            case BudgetChange():
                account.change(
                    Budget(message.tokens, message.branches, message.wall_s), self.clock()
                )
            case BudgetAsk():
                pass
        return encode(account.view(self.clock()))

    async def _lend(self, place: _Key, account: Account, ask: LoanAsk) -> bytes | None:
        loan = account.loan()
        if loan is not None:
            loan.open()
        try:
            try:
                await self.secure(account, ask.need)
            except MalleeError as error:
                log.info("a budget is lent as far as it is here: %s", error)
            told = account.lend(ask, self.clock())
        finally:
            if loan is not None:
                loan.close()
        if told is None:
            return None
        self._heard[place, ask.holder] = self.clock()
        self._heard.move_to_end((place, ask.holder))
        self._keep(place, account)
        return encode(told)

    def _expire(self) -> None:
        """Count as spent what silent holders were lent."""
        before = self.clock() - EXPIRE_S
        while self._heard:
            (place, holder), heard = next(iter(self._heard.items()))
            if heard > before:
                return
            del self._heard[place, holder]
            account = self._accounts.get(place)
            if account is not None:
                account.expire(holder)
                log.warning("a gateway is silent: what it was lent of a budget counts as spent")


def _check_new(account: Account, budget: Budget | None) -> None:
    if len(account.keys) > MAX_DEPTH:
        remedy = f"{MAX_DEPTH} budgets are above each other here; leave it out"
        raise InvalidParameter("mallee.budget", budget, remedy)
    parent = account.parent
    if budget is None or parent is None:
        return
    parent.open()
    try:
        for name in RESOURCES:
            asked, rest = getattr(budget, name), parent.rest(name)
            if asked is not None and asked > rest:
                remedy = f"the budget above it has {rest:.0f} left; give at most that"
                raise InvalidParameter(f"mallee.budget.{name}", asked, remedy)
    finally:
        parent.close()


def _check_left(account: Account, num_branches: int, now: float) -> None:
    if account.due <= now:
        raise BudgetSpent("wall_s", "its time is over")
    if account.rest("tokens") < 1:
        raise BudgetSpent("tokens", "none is left")
    if (rest := account.rest("branches")) < num_branches:
        raise BudgetSpent("branches", f"{rest:.0f} are left, {num_branches} are asked for")
