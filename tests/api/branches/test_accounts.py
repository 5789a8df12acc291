"""Budgets over several gateways and one store, against what was really drawn."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.doubles.bus import LocalBus, LocalHub
from mallee.api.branches import budgets as module
from mallee.api.branches.accounts import MAX_ACCOUNTS, MAX_DEPTH, Budget, BudgetTree
from mallee.api.branches.budgets import Bound, Budgets, Spending
from mallee.gateway.store.store import Store, StoreTerms
from mallee.protocol.errors import (
    BadRequest,
    BudgetSpent,
    InvalidParameter,
    OtherLayout,
    StoreAway,
    StoreFull,
    Unavailable,
)
from mallee.protocol.ids import COMMON, account_of
from mallee.runtime.bus.buckets import Buckets, BucketSpec, Stored
from support.lessees import lessee
from support.plain_ids import SCOPES
from support.waiting import until, until_asked

LIMIT = 60


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Unsure(Buckets):
    """Buckets of which some puts time out: before they are made, or after."""

    def __init__(self, inner: Buckets) -> None:
        self.inner = inner
        self.next_puts: list[str] = []
        self.num_puts = 0

    async def get(self, bucket: BucketSpec, key: str) -> Stored | None:
        return await self.inner.get(bucket, key)

    async def put(
        self, bucket: BucketSpec, key: str, value: bytes, revision: int | None = None
    ) -> int | None:
        self.num_puts += 1
        how = self.next_puts.pop(0) if self.next_puts else ""
        if how == "before":
            raise TimeoutError("lost on its way")
        found = await self.inner.put(bucket, key, value, revision)
        if how == "after":
            raise TimeoutError("its answer is lost")
        return found


class Gateway:
    """The budgets of one gateway, on a bus in memory."""

    def __init__(
        self, hub: LocalHub, name: str, living: set[str], clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.bus = LocalBus(hub)
        self.bus.buckets = self.buckets = Unsure(self.bus.buckets)
        self.store = Store(self.bus, StoreTerms("f"))
        self.tasks = self.store.tasks
        keys, number = iter(range(1, 1 << 30)), len(living)

        def new_key() -> str:
            return f"{number:08x}{next(keys):08x}"

        self.budgets = Budgets(
            self.store, lessee(name, living, new_key), clock=clock, new_key=new_key
        )
        self.living = living
        living.add(name)

    async def bound(self, budget: Budget, *above: str) -> str:
        """The name of a request with this budget, which is stored."""
        bound = bound_of(self, budget, *above)
        await self.budgets.give(bound, budget)
        return named(bound)

    async def begin(self, name: str, n: int = 1) -> Spending:
        return await self.budgets.begin(bound_of(self, None, name), None, n)

    async def close(self) -> None:
        assert self.tasks.failure is None
        await self.tasks.close()
        await self.bus.close()


@asynccontextmanager
async def gateways(num: int, clock: Callable[[], float]) -> AsyncIterator[list[Gateway]]:
    hub, living = LocalHub(), set[str]()
    with mock.patch.object(module, "RETRY_S", 0.001):
        made = [Gateway(hub, f"g{i}", living, clock) for i in range(num)]
        for each in made:
            await each.bus.connect()
        yield made
        for each in made:
            await each.close()


def bound_of(gateway: Gateway, budget: Budget | None, *above: str) -> Bound:
    bound = gateway.budgets.bound(budget, COMMON, *above)
    assert bound is not None
    return bound


def named(bound: Bound) -> str:
    """The name of a request on this account."""
    name = SCOPES.new(COMMON, bound.key)
    assert SCOPES.belongs(f"{name}.0", COMMON)
    assert account_of(f"{name}.0") == bound.key
    return name


async def used(gateway: Gateway, name: str) -> tuple[float, float, float]:
    view = await gateway.budgets.show(name, COMMON)
    assert view is not None
    assert view.tokens is not None
    return view.tokens.used, view.tokens.reserved, view.tokens.left


async def shown(gateway: Gateway, name: str, *expected: float) -> None:
    """Return once the tokens of a budget are so: what is given back comes in the background."""

    async def is_so() -> bool:
        is_there = await gateway.budgets.show(name, COMMON) is not None
        return is_there and await used(gateway, name) == expected

    await until_asked(is_so)


class Run(NamedTuple):
    """A request that runs, and the accounts that bound it, as the model has them."""

    gateway: Gateway
    spending: Spending
    path: tuple[int, ...]


KINDS = (*["request"] * 2, "new", *["own"] * 2, *["draw"] * 5, *["end"] * 2, "change", "show")
FAULTS = ("before", "after", "away", "back", "cancel", "kill")


class Step(NamedTuple):
    """`waits`: the next one comes once this is done."""

    kind: str
    pick: int
    amount: int
    where: int
    waits: bool


def steps_of(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Step]]:
    numbers = st.integers(0, 1 << 16), st.integers(1, 30), st.integers(0, 2)
    return st.lists(st.builds(Step, st.sampled_from(kinds), *numbers, st.booleans()), max_size=50)


@dataclass
class Play:
    """Three gateways, the requests that run, and what was drawn of each account, with its limit.

    `has_lost`: gateways died, with all that they had leased.
    """

    living: list[Gateway]
    limits: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    names: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    under_way: list[asyncio.Task[None]] = field(default_factory=list)
    has_lost: bool = False

    def add(self, name: str, limit: int, above: tuple[int, ...]) -> tuple[int, ...]:
        path = (*above, len(self.limits))
        self.limits.append(limit)
        self.drawn.append(0)
        self.names.append((name, path))
        return path

    async def do(self, step: Step) -> None:
        gateway = self.living[step.where % len(self.living)]
        match step.kind:
            case "before" | "after" as fault:
                gateway.buckets.next_puts.append(fault)
            case "away" | "back" as state:
                gateway.bus._hub.set_up(state == "back")
            case "cancel" if self.under_way:
                self.under_way[step.pick % len(self.under_way)].cancel()
            case "kill" if len(self.living) > 1:
                await self.kill(gateway)
            case "end" if self.runs:
                self.runs.pop(step.pick % len(self.runs)).spending.close()
            case _:
                task = asyncio.create_task(self.ask(step, gateway))
                self.under_way.append(task)
                await (asyncio.wait([task]) if step.waits else asyncio.sleep(0))
        self.check()

    async def ask(self, step: Step, gateway: Gateway) -> None:
        try:
            match step.kind:
                case "request":
                    await self.begin(gateway, step.pick, None)
                case "own":
                    await self.begin(gateway, step.pick, step.amount)
                case "new":
                    budget = Budget(tokens=step.amount)
                    bound = bound_of(gateway, budget)
                    spending = await gateway.budgets.begin(bound, budget, 1)
                    path = self.add(named(bound), step.amount, ())
                    self.runs.append(Run(gateway, spending, path))
                case "show":
                    name, _ = self.names[step.pick % len(self.names)]
                    await gateway.budgets.show(name, COMMON)
                case "change":
                    await self.change(gateway, step.pick, step.amount)
                case "draw" if self.runs:
                    await self.draw(self.runs.pop(step.pick % len(self.runs)), step.amount)
        except (BudgetSpent, InvalidParameter, StoreAway):
            pass

    async def begin(self, gateway: Gateway, pick: int, limit: int | None) -> None:
        name, path = self.names[pick % len(self.names)]
        budget = None if limit is None else Budget(tokens=limit)
        bound = bound_of(gateway, budget, name)
        spending = await gateway.budgets.begin(bound, budget, 1)
        if limit is not None:
            path = self.add(named(bound), limit, path)
        self.runs.append(Run(gateway, spending, path))

    async def draw(self, run: Run, amount: int) -> None:
        try:
            await run.gateway.budgets.secure(run.spending, amount)
            held = run.spending.held
            rest = held.tree.rest(run.spending.places["tokens"])
            assert run.spending.rest("tokens") >= amount or rest < 1
        finally:
            if run.gateway in self.living:
                num = int(min(amount, run.spending.rest("tokens")))
                run.spending.spend("tokens", num)
                for i in run.path:
                    self.drawn[i] += num
                self.runs.append(run)

    async def change(self, gateway: Gateway, pick: int, amount: int) -> None:
        name, path = self.names[pick % len(self.names)]
        self.limits[path[-1]] = max(amount, self.limits[path[-1]])  # what is leased may be drawn
        await gateway.budgets.change(name, COMMON, Budget(tokens=amount))

    async def kill(self, gateway: Gateway) -> None:
        self.living.remove(gateway)
        self.runs = [run for run in self.runs if run.gateway is not gateway]
        self.has_lost = True
        gateway.living.discard(gateway.name)
        await gateway.close()

    def check(self) -> None:
        assert all(n <= most for n, most in zip(self.drawn, self.limits, strict=True))

    async def end(self) -> None:
        """Have all given back, and see that it is so."""
        self.living[0].bus._hub.set_up(True)
        if self.under_way:
            done, _ = await asyncio.wait(self.under_way)
            assert not [
                task.exception() for task in done if not task.cancelled() and task.exception()
            ]
        for run in self.runs:
            run.spending.close()
        for each in self.living:
            each.buckets.next_puts.clear()
            await until(lambda each=each: not each.tasks._tasks)  # type: ignore[misc]
        for name, path in self.names:
            views = [await each.budgets.show(name, COMMON) for each in self.living]
            assert views == views[:1] * len(views)
            if views[0] is None:  # it began while the store was away, at a gateway that died
                assert self.has_lost
                continue
            tokens, drawn = views[0].tokens, self.drawn[path[-1]]
            assert tokens is not None
            assert tokens.reserved == 0
            assert tokens.left == max(0, tokens.limit - tokens.used)
            assert drawn <= tokens.used if self.has_lost else drawn == tokens.used


async def _play(steps: list[Step]) -> None:
    async with gateways(3, Clock()) as made:
        play = Play(list(made))
        play.add(await made[0].bound(Budget(tokens=LIMIT)), LIMIT, ())
        for step in steps:
            await play.do(step)
        await play.end()


@settings(max_examples=80, deadline=None)
@given(steps_of(KINDS))
def test_a_tree_over_three_gateways_keeps_to_every_budget(
    steps: list[Step],
) -> None:
    """X19, part: budgets below budgets, at any gateway; at the end all is as it was drawn, to the token."""
    asyncio.run(_play(steps))


@settings(max_examples=80, deadline=None)
@given(steps_of(KINDS + FAULTS))
def test_no_death_and_no_lost_answer_overspends_a_budget(
    steps: list[Step],
) -> None:
    """X19, part: gateways die, the store is away, and puts time out that were made, or were not."""
    asyncio.run(_play(steps))


def figures(tree: BudgetTree, key: str) -> tuple[float, float, float]:
    """Of its tokens: used, reserved, left."""
    view = tree.view(key, (), 0.0).tokens
    assert view is not None
    return view.used, view.reserved, view.left


def test_limits_change_while_accounts_run() -> None:
    """X19, part: what was used stays used; new limits count from then on; the one above has its due."""
    tree = BudgetTree.of("a", Budget(tokens=100, branches=10), 0.0)
    tree.add("m", "a", Budget(tokens=50), 0.0)
    tree.add("b", "m", Budget(tokens=20), 0.0)
    [tokens, branches] = tree.places("b")
    [own, _] = tree.places("m")
    assert (tokens.key, branches.key) == ("b", "a")
    tree.take(tokens, "g", 0, 5)
    tree.take(own, "h", 0, 10)
    assert (figures(tree, "a"), figures(tree, "m")) == ((0, 50, 50), (0, 40, 10))
    tree.change("m", Budget(tokens=80), 0.0)
    tree.take(own, "h", 0, 10)
    assert (figures(tree, "a"), figures(tree, "m")) == ((0, 80, 20), (0, 60, 20))
    tree.change("m", Budget(tokens=3, wall_s=4), 1.0)
    tree.settle(())
    assert (figures(tree, "a"), figures(tree, "m")) == ((0, 60, 40), (0, 60, 0))
    assert tree.due("b") == 5.0
    tree.change("m", Budget(branches=4), 2.0)
    assert (tree.view("m", (), 2.0).tokens, tree.places("b")[1].key) == (None, "m")
    tree.tell(tokens, "g", 5)
    tree.tell(own, "h", 10)
    for holder in "gh":
        tree.give_back(holder, ())
        tree.settle(tree.holders - {"h"})
    assert tree.places("m")[0].key == "a"  # its own has gone
    assert figures(tree, "a") == (15, 0, 85)
    assert figures(tree, "b") == (5, 0, 15)
    tree.change("m", Budget(tokens=30), 3.0)
    tree.take(tree.places("b")[0], "g", 0, 15)
    assert (figures(tree, "a"), figures(tree, "m")) == ((15, 30, 55), (0, 15, 15))


async def test_a_gateway_takes_at_most_half_of_the_rest_ahead() -> None:
    """X19, part: others go on; it asks again when that is spent, and gives back what is left."""
    async with gateways(2, Clock()) as (a, b):
        name = await a.bound(Budget(tokens=1000, branches=5))
        first = await a.begin(name, 2)
        assert (first.rest("tokens"), first.rest("branches"), first.due) == (64, 0, math.inf)
        assert await used(b, name) == (0, 64, 936)
        num = a.buckets.num_puts
        first.spend("tokens", 60)
        second = await a.begin(await a.bound(Budget(wall_s=9), name), 1)  # of what is here
        second.close()
        await a.budgets.secure(first, 900)
        assert (first.rest("tokens"), await used(b, name)) == (900, (60, 900, 40))
        await a.budgets.secure(first, 900)
        assert a.buckets.num_puts == num + 3  # of an account, a branch, and this
        with pytest.raises(BudgetSpent, match="2 are left, 3 are asked for"):
            await b.begin(name, 3)
        first.close()
        await shown(b, name, 60, 0, 940)
        assert not a.tasks._tasks


async def test_a_budget_of_one_gateway_waits_for_no_store() -> None:
    """X19, part: two puts, in the background; with the store away it is whole, and stored later."""
    async with gateways(2, Clock()) as (a, b):
        bound, hub = bound_of(a, Budget(tokens=100)), a.bus._hub
        spending = await a.budgets.begin(bound, Budget(tokens=100), 1)
        assert a.buckets.num_puts == 0
        spending.spend("tokens", 40)
        await until(lambda: not a.tasks._tasks)
        assert await used(b, named(bound)) == (40, 10, 50)
        spending.close()
        await shown(b, named(bound), 40, 0, 60)
        assert a.buckets.num_puts == 2
        hub.set_up(False)
        bound = bound_of(a, Budget(tokens=100))
        spending = await a.budgets.begin(bound, Budget(tokens=100), 1)
        below = bound_of(a, Budget(tokens=30), named(bound))
        inner = await a.budgets.begin(below, Budget(tokens=30), 1)
        for amount in (30, 20, 20):
            await a.budgets.secure(spending, amount)
            spending.spend("tokens", amount)
        await a.budgets.secure(spending, 1)
        assert spending.rest("tokens") == 0
        inner.spend("tokens", 10)
        inner.close()
        with pytest.raises(StoreAway):
            await b.begin(named(bound))
        hub.set_up(True)
        await shown(b, named(bound), 80, 0, 20)
        spending.close()


async def test_without_the_store_what_is_leased_is_spent_and_no_more() -> None:
    """X19, part: new requests of a gateway that has leased nothing are 503; what is unspent returns later."""
    async with gateways(2, Clock()) as (a, b):
        name = await a.bound(Budget(tokens=1000))
        spending = await a.begin(name)
        a.bus._hub.set_up(False)
        second = await a.begin(name)
        second.spend("tokens", 50)
        second.close()
        with pytest.raises(StoreAway):
            await a.budgets.secure(spending, 15)
        with pytest.raises(StoreAway):
            await b.begin(name)
        with pytest.raises(StoreAway):
            await b.budgets.show(name, COMMON)
        assert await used(a, name) == (0, 64, 936)  # as it was told last
        spending.spend("tokens", 14)
        spending.close()
        a.bus._hub.set_up(True)
        await shown(b, name, 64, 0, 936)


async def test_what_a_dead_gateway_had_counts_as_spent_and_blocks_nobody_else() -> None:
    """X19, part: what was reserved for it returns above; one that was cut off still gets its due."""
    async with gateways(3, Clock()) as (a, b, c):
        top = await a.bound(Budget(tokens=100))
        name = await a.bound(Budget(tokens=80), top)
        spending = await b.begin(name)
        held = int(spending.rest("tokens"))
        spending.spend("tokens", 3)
        assert await used(c, top) == (0, 80, 20)
        a.living.discard("g1")
        assert await used(a, name) == (held, 0, 80 - held)
        assert await used(a, top) == (held, 0, 100 - held)
        assert (await c.begin(top)).rest("tokens") == 30
        spending.close()
        await shown(c, name, 3, 0, 77)
        again = Gateway(a.bus._hub, "g1", a.living, Clock())  # its name, in another life
        await again.bus.connect()
        lost = await b.begin(name)
        old, new = b.budgets._lessee, again.budgets._lessee
        old.name, new.name = new.name, "g1/x"
        assert (await used(again, name))[:2] == (3 + lost.rest("tokens"), 0)
        await again.close()


async def test_gateways_that_come_and_go_leave_a_bounded_value() -> None:
    """X19, part: the leases of those that died long ago are forgotten, and stay spent."""
    tree = BudgetTree.of("a", Budget(tokens=100), 0.0)
    [place] = tree.places("a")
    for i in range(99):
        tree.take(place, f"g{i}", 0, 1)
        tree.settle(tree.holders)
    assert figures(tree, "a")[2] == 0
    assert len(tree.accounts["a"].counts["tokens"].leases) == 16
    tree.give_back("g0", ())
    assert tree.tell(place, "g0", 1) == 1


async def test_a_store_that_was_set_back_hands_nothing_out_twice() -> None:
    """X19, part: what is known to be spent here counts."""
    async with gateways(2, Clock()) as (a, b):
        name = await a.bound(Budget(tokens=100))
        spending = await a.begin(name)
        [(key, before)] = a.bus._hub.kept.buckets["mallee_f_budgets"].items()
        await a.budgets.secure(spending, 90)
        spending.spend("tokens", 90)
        await a.buckets.put(a.budgets._bucket._spec, key, before.value)
        await a.budgets.secure(spending, 11)
        assert spending.rest("tokens") == 10
        assert await used(b, name) == (90, 10, 0)
        spending.close()


async def test_budgets_are_nested_to_a_bound_and_forgotten_beyond_another() -> None:
    """X19, part: what is forgotten is spent, not free; what runs is not forgotten."""
    async with gateways(1, Clock()) as [a]:
        name = await a.bound(Budget(tokens=9))
        with pytest.raises(InvalidParameter, match="has 9 left"):
            await a.bound(Budget(tokens=10), name)
        for _ in range(MAX_DEPTH - 1):
            name = await a.bound(Budget(tokens=9), name)
        with pytest.raises(InvalidParameter, match="64 budgets"):
            await a.bound(Budget(tokens=9), name)
    tree = BudgetTree.of("r", Budget(tokens=9999), 0.0)
    for i in range(MAX_ACCOUNTS - 1):
        tree.add(f"{i}", "r", Budget(tokens=1), 0.0)
    tree.take(tree.places("0")[0], "g", 0, 1)
    tree.add("new", "1", Budget(tokens=1), 0.0)
    tree.add("newer", "r", Budget(tokens=1), 0.0)
    assert [key for key in ("r", "0", "1", "2", "3", "new") if key not in tree.accounts] == [
        "2",
        "3",
    ]
    for key in list(tree.accounts)[1:]:
        tree.take(tree.places(key)[0], "g", 0, 1)
    with pytest.raises(InvalidParameter, match="1024 budgets run"):
        tree.add("last", "r", Budget(tokens=1), 0.0)


async def test_what_is_not_in_the_store_any_more_bounds_still() -> None:
    """X19, part: refused by name, as is what another version has stored; a full store is 503."""
    async with gateways(2, Clock()) as (a, b):
        name, other = await a.bound(Budget(tokens=100)), await a.bound(Budget(tokens=100))
        below = bound_of(b, Budget(tokens=1), name)
        spending = await a.begin(name)
        with pytest.raises(BadRequest, match="neither is below the other"):
            await b.budgets.begin(bound_of(b, None, name, other), None, 1)
        kept = a.bus._hub.kept.buckets["mallee_f_budgets"]
        mine = next(key for key in kept if account_of(name) in key)
        raw = kept[mine].value
        await a.buckets.put(a.budgets._bucket._spec, mine, raw[:1] + b"\x07" + raw[2:])
        with pytest.raises(OtherLayout):
            await b.begin(name)
        del kept[mine]
        for trying in (b.begin(name), b.budgets.begin(below, Budget(tokens=1), 1)):
            with pytest.raises(BudgetSpent, match="has forgotten it"):
                await trying
        assert await b.budgets.show(name, COMMON) is None
        assert not await b.budgets.change(name, COMMON, Budget(tokens=9))
        spending.spend("tokens", 3)
        spending.close()
        a.bus._hub.kept.is_full = True
        with pytest.raises(StoreFull):
            await a.bound(Budget(tokens=5))
        with pytest.raises(Unavailable):
            await b.begin(other)
        a.bus._hub.kept.is_full = False
        (await b.begin(other)).close()


async def test_a_client_that_leaves_while_it_is_asked_for_takes_nothing_along() -> None:
    """X19, part: what was leased for it returns."""
    async with gateways(2, Clock()) as (a, b):
        name = await a.bound(Budget(tokens=100))
        beginning = asyncio.create_task(b.begin(name))
        while not b.buckets.num_puts:  # noqa: ASYNC110
            await asyncio.sleep(0)
        beginning.cancel()
        await shown(a, name, 0, 0, 100)
