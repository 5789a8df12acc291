"""Accounts and loans: state machines over several gateways, against what was really drawn."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from mallee.api.branches import budgets as module
from mallee.api.branches.accounts import RESOURCES, Account, Budget, Loan, Resource
from mallee.api.branches.budgets import EXPIRE_S, Bound, Budgets
from mallee.gateway.records import SharedRecords
from mallee.protocol.errors import BudgetSpent, InvalidParameter, Unavailable
from mallee.protocol.gateways.loans import Amounts, LoanReturn
from mallee.protocol.ids import COMMON, account_of
from mallee.testing.bus import LocalBus, LocalHub
from support.plain_ids import SCOPES
from support.waiting import until

LIMIT = 60
NOTHING = Amounts()


class Lending(RuleBasedStateMachine):
    """A keeper's account, and holders at other gateways whose messages may be lost both ways.

    `drawn` counts what was really spent; every rule leaves at most the limit.
    """

    loans = Bundle("loans")
    returns = Bundle("returns")
    accounts = Bundle("accounts")

    @initialize(target=accounts, above=st.sampled_from([None, 40, 100]))
    def begin(self, above: int | None) -> Account:
        self.number = 0
        self.drawn = dict.fromkeys(RESOURCES, 0)
        self.lost = 0  # messages, by which tokens may stay counted
        parent = None if above is None else Account("p", Budget(tokens=above), None, 0.0)
        self.parent = parent
        self.root = Account("r", Budget(tokens=LIMIT, branches=LIMIT), parent, 0.0)
        self.most = min(LIMIT, above or LIMIT)
        self.running: list[Account] = []
        self.living: list[Loan] = []
        self.unsent: list[LoanReturn] = []
        return self.root

    def name(self) -> str:
        self.number += 1
        return f"h{self.number}"

    def returned(self, loan: Loan, returned: LoanReturn) -> None:
        self.unsent.append(returned)

    # At the keeper

    @rule(target=accounts, above=accounts, tokens=st.none() | st.integers(1, 30))
    def give_a_budget_below(self, above: Account, tokens: int | None) -> Account:
        return Account(self.name(), Budget(tokens=tokens), above, 0.0)

    @rule(account=accounts)
    def run(self, account: Account) -> None:
        account.open()
        self.running.append(account)

    @rule(pick=st.integers(0, 1 << 16), amount=st.integers(0, 9), name=st.sampled_from(RESOURCES))
    def draw(self, pick: int, amount: int, name: Resource) -> None:
        if self.running:
            self.draw_of(self.running[pick % len(self.running)], amount, name)

    @rule(pick=st.integers(0, 1 << 16))
    def end(self, pick: int) -> None:
        if self.running:
            self.running.pop(pick % len(self.running)).close()

    def draw_of(self, account: Account, amount: int, name: Resource) -> None:
        num = int(min(amount, account.rest(name)))
        account.spend(name, num)
        self.drawn[name] += num

    # Elsewhere

    @rule(target=loans)
    def borrow(self) -> Loan:
        loan = Loan("r", "name", COMMON, self.name, self.returned)
        loan.open()
        self.living.append(loan)
        return loan

    @rule(
        loan=loans,
        need=st.tuples(st.integers(0, 20), st.integers(0, 3)),
        arrives=st.booleans(),
        answered=st.booleans(),
    )
    def ask(self, loan: Loan, need: tuple[int, int], arrives: bool, answered: bool) -> None:
        if loan not in self.living or not arrives:
            return
        told = self.root.lend(loan.ask(Amounts(*need)), 0.0)
        assert told is not None
        if answered:
            loan.hear(told, 0.0)
            lacking = loan.lack(Amounts(*need))
            for name in RESOURCES:
                if lacking is not None and loan.rest(name) < getattr(lacking[1], name):
                    assert self.root.rest(name) == 0  # it got all that there was

    @rule(loan=loans, amount=st.integers(0, 9), name=st.sampled_from(RESOURCES))
    def draw_elsewhere(self, loan: Loan, amount: int, name: Resource) -> None:
        if loan in self.living:
            self.draw_of(loan, amount, name)

    @rule(loan=consumes(loans), arrives=st.booleans())
    def end_elsewhere(self, loan: Loan, arrives: bool) -> None:
        if loan in self.living:
            self.living.remove(loan)
            loan.close()
            self.lost += not arrives
            returned = self.unsent.pop()
            if arrives:
                self.root.take_back(returned)

    @rule(loan=consumes(loans))
    def die(self, loan: Loan) -> None:
        if loan in self.living:
            self.living.remove(loan)
            self.lost += 1

    @rule(loan=loans)
    def be_silent(self, loan: Loan) -> None:
        """The keeper counts all as spent; what comes later is right again."""
        self.root.expire(loan.holder)

    @invariant()
    def no_more_is_drawn_than_there_is(self) -> None:
        if not hasattr(self, "drawn"):
            return
        assert self.drawn["tokens"] <= self.most
        assert self.drawn["branches"] <= LIMIT
        view = self.root.view(0.0)
        for shown, drawn in zip((view.tokens, view.branches), self.drawn.values(), strict=True):
            assert shown is not None
            assert shown.used + shown.reserved >= drawn
            assert min(shown.used, shown.reserved, shown.left) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "drawn"):
            return
        for account in self.running:
            account.close()
        for loan in self.living:
            loan.close()
            self.root.take_back(self.unsent.pop())
        if self.lost:
            return
        view = self.root.view(0.0)
        for shown, drawn in zip((view.tokens, view.branches), self.drawn.values(), strict=True):
            assert shown is not None
            assert (shown.used, shown.reserved, shown.left) == (drawn, 0, LIMIT - drawn)
        assert self.root.is_idle
        if self.parent is not None:
            above = self.parent.view(0.0).tokens
            assert above is not None
            assert (above.used, above.reserved) == (self.drawn["tokens"], 0)


@pytest.mark.slow
def test_holders_never_draw_more_than_the_limit_and_all_returns() -> None:
    """X19, part: whatever is lost, whoever dies; without losses what is unspent is back to the token."""
    run_state_machine_as_test(
        Lending, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )


def figures(account: Account, now: float) -> tuple[float, float, float]:
    """Of its tokens: used, reserved, left."""
    view = account.view(now).tokens
    assert view is not None
    return view.used, view.reserved, view.left


def test_a_holder_takes_at_most_half_of_the_rest_ahead() -> None:
    """X19, part: others go on; what a silent one has counts as spent until it is heard of again."""
    root = Account("r", Budget(tokens=1000, wall_s=10), None, 5.0)
    sent: list[LoanReturn] = []
    loan = Loan("r", "n", COMMON, lambda: "h", lambda _, returned: sent.append(returned))
    loan.open()
    assert loan.lack(NOTHING) is not None  # before it was told
    told = root.lend(loan.ask(Amounts(10, 2)), 6.0)
    assert told is not None
    assert (told.lent, told.rest_s) == ((64, None), 9.0)
    loan.hear(told, 106.0)
    assert (loan.rest("tokens"), loan.rest("branches"), loan.due) == (64, math.inf, 115.0)
    loan.spend("tokens", 60)
    again = root.lend(loan.ask(Amounts(900, 0)), 6.0)
    assert again is not None
    assert again.lent.tokens == 960
    last = root.lend(loan.ask(Amounts(930, 0)), 6.0)
    assert last is not None
    assert last.lent.tokens == 990
    loan.hear(last, 106.0)
    assert figures(root, 6.0) == (60, 930, 10)
    root.expire("h")
    assert figures(root, 6.0) == (990, 0, 10)
    assert root.is_idle
    loan.spend("tokens", 5)
    loan.close()
    root.take_back(sent[0])
    assert figures(root, 6.0) == (65, 0, 935)
    other = Loan("r", "n", COMMON, lambda: "x", lambda _, returned: None)
    other.open()
    other.hear(last, 6.0)
    assert root.lend(other.ask(Amounts(1, 0)), 6.0) is None  # it was never given here


def test_limits_change_while_accounts_run() -> None:
    """X19, part: what was used stays used; new limits count from then on; the parent has its due."""
    above = Account("a", Budget(tokens=100, branches=10), None, 0.0)
    middle = Account("m", Budget(tokens=50), above, 0.0)
    below = Account("b", Budget(tokens=20), middle, 0.0)
    for account in (middle, below):
        account.open()
    below.spend("tokens", 5)
    middle.spend("tokens", 10)
    assert (above.rest("tokens"), middle.rest("tokens")) == (50, 20)
    middle.change(Budget(tokens=80), 0.0)
    assert (above.rest("tokens"), middle.rest("tokens")) == (20, 50)
    middle.change(Budget(tokens=3, wall_s=4), 1.0)
    assert (above.rest("tokens"), middle.rest("tokens"), below.due) == (70, 0, 5.0)
    middle.change(Budget(branches=4), 2.0)
    assert (middle.rest("tokens"), middle.rest("branches")) == (70, 4)
    below.close()
    assert above.rest("tokens") == 85
    middle.close()
    assert figures(above, 9.0) == (15, 0, 85)
    assert middle.view(9.0).tokens is None


# Over the bus


class Gateway:
    """The budgets of one gateway, on a bus in memory."""

    def __init__(
        self, hub: LocalHub, name: str, others: set[str], clock: Callable[[], float]
    ) -> None:
        self.bus = LocalBus(hub)
        self.records = SharedRecords(
            *(self.bus,),
            gateway=name,
            fleet="test",
            others=lambda: others,
            belongs=SCOPES.belongs,
        )
        keys = iter(range(1, 1 << 30))
        number = int(name.removeprefix("g"))
        self.budgets = Budgets(
            clock, self.records, lambda: f"{number:08x}{next(keys):08x}", renew_s=0.02
        )


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def gateways(num: int, clock: Callable[[], float]) -> AsyncIterator[list[Gateway]]:
    hub = LocalHub()
    names = {f"g{i}" for i in range(num)}
    made = [Gateway(hub, name, names - {name}, clock) for name in sorted(names)]
    for each in made:
        await each.bus.connect()
        await each.records.start_up()
    yield made
    for each in made:
        assert each.records.tasks.failure is None
        await each.records.close()
        await each.bus.close()


class Run(NamedTuple):
    """A request that runs: its gateway and account, and the accounts that bound it, as the model has them."""

    gateway: Gateway
    account: Account
    path: tuple[int, ...]


def bound_of(gateway: Gateway, budget: Budget | None, *above: str) -> Bound:
    bound = gateway.budgets.bound(budget, COMMON, *above)
    assert bound is not None
    return bound


def named(bound: Bound) -> str:
    """The name of a request on this account."""
    return SCOPES.new(COMMON, bound.key)


async def used(gateway: Gateway, name: str) -> tuple[float, float, float]:
    view = await gateway.budgets.show(name, COMMON)
    assert view is not None
    assert view.tokens is not None
    return view.tokens.used, view.tokens.reserved, view.tokens.left


STEP = st.tuples(st.integers(0, 4), st.integers(0, 1 << 16), st.integers(1, 30), st.integers(0, 2))


async def _play(steps: list[tuple[int, int, int, int]]) -> None:
    async with gateways(3, Clock()) as made:
        limits, drawn = [LIMIT], [0]
        first = bound_of(made[0], Budget(tokens=LIMIT))
        await made[0].budgets.give(first, Budget(tokens=LIMIT))
        names: list[tuple[str, tuple[int, ...], Gateway]] = [(named(first), (0,), made[0])]
        runs: list[Run] = []
        for kind, pick, amount, where in steps:
            gateway = made[where]
            if kind in (0, 1):
                name, path, _ = names[pick % len(names)]
                budget = Budget(tokens=amount) if kind else None
                bound = bound_of(gateway, budget, name)
                try:
                    account = await gateway.budgets.begin(bound, budget, 1)
                except (BudgetSpent, InvalidParameter):
                    continue
                if kind:
                    path = (*path, len(limits))
                    limits.append(amount)
                    drawn.append(0)
                    names.append((named(bound), path, gateway))
                runs.append(Run(gateway, account, path))
            elif kind == 2 and runs:
                runs.pop(pick % len(runs)).account.close()
            elif runs:
                run = runs[pick % len(runs)]
                await run.gateway.budgets.secure(run.account, Amounts(amount))
                num = int(min(amount, run.account.rest("tokens")))
                run.account.spend("tokens", num)
                for i in run.path:
                    drawn[i] += num
            assert all(n <= limit for n, limit in zip(drawn, limits, strict=True))
        for run in runs:
            run.account.close()
        for _ in range(50):  # what is given back arrives, from gateway to gateway
            await asyncio.sleep(0)
        for name, path, keeper in names:
            assert await used(keeper, name) == (
                drawn[path[-1]],
                0,
                limits[path[-1]] - drawn[path[-1]],
            )
            assert await used(made[1], name) == await used(keeper, name)


@settings(max_examples=80, deadline=None)
@given(st.lists(STEP, max_size=40))
def test_a_tree_over_three_gateways_keeps_to_every_budget(
    steps: list[tuple[int, int, int, int]],
) -> None:
    """X19, part: budgets below budgets, each kept where it was given; at the end all is as it was drawn."""
    asyncio.run(_play(steps))


async def test_a_keeper_that_dies_leaves_its_holders_what_they_have() -> None:
    """X19, part: then they end; new requests are 503 while it may come back, and refused after that."""
    async with gateways(3, Clock()) as (a, b, c):
        bound = bound_of(a, Budget(tokens=1000))
        await a.budgets.give(bound, Budget(tokens=1000))
        name = named(bound)
        account = await b.budgets.begin(bound_of(b, None, name), None, 1)
        assert account.rest("tokens") == 64
        for each in (a, c):
            each.bus.signals.set_up(False)
        with pytest.raises(Unavailable):  # without a broker the keeper alone goes on
            await c.budgets.begin(bound_of(c, None, name), None, 1)
        (await a.budgets.begin(bound_of(a, None, name), None, 1)).close()
        for each in (a, c):
            each.bus.signals.set_up(True)
        a.bus.is_mute = True
        with pytest.raises(Unavailable, match="not answered"):
            await b.budgets.secure(account, Amounts(65))
        account.spend("tokens", 64)
        with pytest.raises(Unavailable):
            await c.budgets.begin(bound_of(c, None, name), None, 1)
        for each, left in ((b, "g2"), (c, "g1")):
            each.records._others = lambda left=left: {left}  # the lease of g0 has run out
            with pytest.raises(BudgetSpent, match="is gone"):
                await each.budgets.begin(
                    bound_of(each, Budget(tokens=1), name), Budget(tokens=1), 1
                )
        account.close()


async def test_what_a_dead_holder_had_counts_as_spent_and_blocks_nobody_else() -> None:
    """X19, part: after the time of a lease; one that was cut off goes on with what it has."""
    clock = Clock()
    async with gateways(3, clock) as (a, b, c):
        top = bound_of(a, Budget(tokens=100))
        await a.budgets.give(top, Budget(tokens=100))
        bound = bound_of(a, Budget(tokens=80), named(top))
        await a.budgets.give(bound, Budget(tokens=80))
        name = named(bound)
        account = await b.budgets.begin(bound_of(b, None, name), None, 1)
        held = int(account.rest("tokens"))
        account.spend("tokens", 3)
        assert await used(c, named(top)) == (0, 80, 20)
        b.bus.is_mute = True
        clock.now += EXPIRE_S + 1
        assert await used(a, name) == (held, 0, 80 - held)
        assert await used(a, named(top)) == (held, 0, 100 - held)
        b.bus.is_mute = False
        account.close()
        kept = a.budgets._kept(name, COMMON)
        assert kept is not None
        await until(lambda: not kept._grants)
        assert await used(c, name) == (3, 0, 77)
        assert await used(c, named(top)) == (3, 0, 97)


async def test_what_runs_elsewhere_is_renewed() -> None:
    """X19, part: a holder that runs for long is not taken for dead."""
    clock = Clock()
    async with gateways(2, clock) as (a, b):
        bound = bound_of(a, Budget(tokens=100))
        await a.budgets.give(bound, Budget(tokens=100))
        account = await b.budgets.begin(bound_of(b, None, named(bound)), None, 1)
        for _ in range(3):
            clock.now += EXPIRE_S - 1
            heard = [*a.budgets._heard.values()]
            await until(lambda heard=heard: [*a.budgets._heard.values()] != heard)  # type: ignore[misc]
        assert (await used(a, named(bound)))[1] > 0
        account.close()
        await until(lambda: not a.budgets._heard)
        assert await used(b, named(bound)) == (0, 0, 100)
        assert not b.budgets._renewing


async def test_budgets_are_nested_to_a_bound_and_forgotten_beyond_another() -> None:
    """X19, part: what is forgotten is spent, not free; what runs is not forgotten."""
    async with gateways(1, Clock()) as [a]:
        bound = bound_of(a, Budget(tokens=9))
        for _ in range(module.MAX_DEPTH - 1):
            await a.budgets.give(bound, Budget(tokens=9))
            bound = bound_of(a, Budget(tokens=9), named(bound))
        await a.budgets.give(bound, Budget(tokens=9))
        with pytest.raises(InvalidParameter, match="64 budgets"):
            await a.budgets.give(bound_of(a, Budget(tokens=9), named(bound)), Budget(tokens=9))
        few = Budgets(Clock(), a.records, lambda: f"{next(keys):016x}", max_kept=2)
        keys = iter(range(1 << 20, 1 << 21))
        made = []
        for i in range(3):
            each = few.bound(Budget(tokens=1), COMMON)
            assert each is not None
            account = await few.begin(each, Budget(tokens=1), 1)
            if i == 1:
                account.close()
            made.append(named(each))
        shown = [await few.show(name, COMMON) for name in made]
        assert [view is not None for view in shown] == [True, False, True]
        assert account_of(made[1])
        again = few.bound(None, COMMON, made[1])
        assert again is not None
        with pytest.raises(BudgetSpent, match="has forgotten it"):
            await few.begin(again, None, 1)
