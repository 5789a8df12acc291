"""Budgets of requests and sessions, at whichever gateway they are spent.

The name of a request tells the account that bounds it, and so do those of its capsules: a key of 16 digits
for a budget that none is above, and that budget's key and one more for those below it. Accounts are in the
gateways' store. A gateway leases of them what its requests must have and some tokens ahead, spends that
without asking, and gives back what is left once nothing runs on it here.

A budget that begins here is stored in the background: until then nobody else can know its name. While the
store is away its requests go on as if there was none; those of other budgets spend what is leased, and end.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from mallee.api.branches.accounts import (
    Budget,
    BudgetTree,
    BudgetView,
    Place,
    Resource,
)
from mallee.gateway.store.leases import Lessee
from mallee.gateway.store.store import Bucket, ChangeLock, Entry, Store
from mallee.protocol.errors import BadRequest, BudgetSpent, StoreAway, Unavailable
from mallee.protocol.ids import Scope, account_of

log = logging.getLogger(__name__)

LAYOUT: Final = 1
TTL_S: Final = 7 * 86_400.0  # for which nothing of a budget was used
RETRY_S: Final = 0.2
MAX_KEPT: Final = 1 << 14  # budgets that wait for the store
_KEY: Final = 16  # digits


class Bound(NamedTuple):
    """The account that bounds a request, by key; keys of the accounts above it, if it is new."""

    scope: Scope
    key: str
    above: tuple[str, ...]


class Share:
    """The part of a place that this gateway has leased, for all that runs on it here."""

    __slots__ = ("num_open", "taken", "used")

    def __init__(self) -> None:
        self.num_open = self.taken = self.used = 0

    @property
    def rest(self) -> int:
        return self.taken - self.used


class Held:
    """A budget and those below it, while this gateway has to do with them. Who changes it holds `turn`."""

    def __init__(self, scope: Scope, root: str) -> None:
        self.scope, self.root = scope, root
        self.turn = ChangeLock()
        self.tree = BudgetTree({})  # as last seen
        self.stored: Entry[BudgetTree] | None = None  # the same, if it is in the store so
        self.made: BudgetTree | None = None  # here, and not known to be in the store
        self.is_private = False  # and was never sent there
        self.is_unsure = False  # whether the last change was made
        self.is_settling = False
        self.shares: dict[Place, Share] = {}

    def make(self, tree: BudgetTree, *, is_private: bool) -> None:
        self.tree = self.made = tree
        self.is_private = is_private

    @property
    def is_settled(self) -> bool:
        """Whether the store has all that it is to have."""
        is_open = all(share.num_open for share in self.shares.values())
        return is_open and self.made is None and not self.is_unsure


class Spending:
    """The part of a budget that one request may spend here; its owner closes it."""

    def __init__(self, held: Held, key: str, on_close: Callable[[Held], None]) -> None:
        self.held = held
        self._key = key
        self._on_close = on_close
        self.places: dict[Resource, Place] = {each.name: each for each in held.tree.places(key)}
        self._shares = {place.name: held.shares[place] for place in self.places.values()}
        for share in self._shares.values():
            share.num_open += 1

    @property
    def due(self) -> float:
        """The end of its time, in seconds since the epoch."""
        tree = self.held.tree
        return tree.due(self._key) if self._key in tree.accounts else 0.0

    def rest(self, name: Resource) -> float:
        """The amount that can be spent without asking for more."""
        share = self._shares.get(name)
        return math.inf if share is None else share.rest

    def spend(self, name: Resource, amount: int) -> None:
        share = self._shares.get(name)
        if share is not None:
            share.used += amount
            assert share.used <= share.taken, "more was spent than is there"

    def close(self) -> None:
        """Give back what is left, if nothing else runs on it here."""
        for share in self._shares.values():
            share.num_open -= 1
            assert share.num_open >= 0, "a spending is closed once"
        self._on_close(self.held)


class Budgets:
    """One gateway's part of all budgets. Belongs to one event loop.

    `clock` gives seconds since the epoch, `new_key()` 16 hexadecimal digits that no other has.
    """

    def __init__(
        self,
        store: Store,
        lessee: Lessee,
        *,
        clock: Callable[[], float],
        new_key: Callable[[], str],
    ) -> None:
        self.clock = clock
        self._store = store
        self._bucket: Bucket[BudgetTree] = store.bucket(
            "budgets", BudgetTree, version=LAYOUT, ttl_s=TTL_S
        )
        self._lessee = lessee
        self._new_key = new_key
        self._held: WeakValueDictionary[tuple[Scope, str], Held] = WeakValueDictionary()

    # Requests

    def bound(self, budget: Budget | None, scope: Scope, *names: str) -> Bound | None:
        """The account for a request with `budget` below the accounts of `names`; None: nothing bounds it."""
        above = tuple(dict.fromkeys(key for name in names if (key := account_of(name))))
        if budget is None and len(above) <= 1:
            return Bound(scope, above[0], ()) if above else None
        root = above[0][:_KEY] if above else ""
        return Bound(scope, root + self._new_key(), above)

    async def begin(self, bound: Bound, budget: Budget | None, num_branches: int) -> Spending:
        """Lease what branches to come must have.

        Raises BudgetSpent, InvalidParameter for more than the rest above, and StoreAway.
        """
        held, key = self._hold(bound.scope, bound.key)
        need: dict[Resource, int] = {"tokens": 1, "branches": num_branches}

        def lease(tree: BudgetTree) -> None:
            self._make(tree, bound, budget)
            self._check_left(held, tree, key, need)
            for place in tree.places(key):
                used = held.shares[place].used if place in held.shares else 0
                tree.take(place, self._lessee.name, used, need[place.name])

        is_new = budget is not None
        while is_new or not self._is_here(held, key, need):
            if budget is not None and is_new and not bound.above:
                held.make(BudgetTree.of(key, budget, self.clock()), is_private=True)
                lease(held.tree)
                self._settle_soon(held)
            else:
                await self._change(held, lease)
            for place in held.tree.places(key):
                held.shares.setdefault(place, Share())
            self._hear(held)
            is_new = False
        spending = Spending(held, key, self._settle_soon)
        spending.spend("branches", num_branches)
        return spending

    async def give(self, bound: Bound, budget: Budget) -> None:
        """Store a new account, for requests to come. Raises as `begin`."""
        held, key = self._hold(bound.scope, bound.key)
        if not self._store.is_up:
            raise StoreAway("the broker is away")
        if not bound.above:
            held.make(BudgetTree.of(key, budget, self.clock()), is_private=False)
        try:
            await self._change(held, lambda tree: self._make(tree, bound, budget))
        finally:
            if not bound.above:
                held.made = None

    async def secure(self, spending: Spending, tokens: int) -> None:
        """Lease what is lacking to spend so many tokens, as far as it is there. Raises Unavailable."""
        place, held = spending.places.get("tokens"), spending.held
        if place is None:
            return

        def lease(tree: BudgetTree) -> None:
            tree.take(place, self._lessee.name, held.shares[place].used, tokens)

        is_more = True
        while is_more and spending.rest("tokens") < tokens:  # others may spend it meanwhile
            await self._change(held, lease)
            is_more = held.tree.rest(place) >= 1

    # Sessions

    async def show(self, name: str, scope: Scope) -> BudgetView | None:
        """The budget that `name` belongs to; None: it is not kept any more. Raises StoreAway."""
        held, key = self._hold(scope, account_of(name))
        try:
            await self._change(held, lambda tree: None, is_kept=False)
        except BudgetSpent:
            return None
        except StoreAway:
            if key not in held.tree.accounts:
                raise
        is_there = key in held.tree.accounts
        if not is_there:
            return None
        return held.tree.view(key, await self._lessee.gone(held.tree.holders), self.clock())

    async def change(self, name: str, scope: Scope, budget: Budget) -> bool:
        """Give a budget new limits. False: it is not kept any more. Raises StoreAway."""
        (held, key), now = self._hold(scope, account_of(name)), self.clock()
        try:
            await self._change(held, lambda tree: _there(tree, key).change(key, budget, now))
        except BudgetSpent:
            return False
        return True

    # Accounts

    def _hold(self, scope: Scope, key: str) -> tuple[Held, str]:
        """The budget of an account, and the account's key in it."""
        root = key[:_KEY]
        held = self._held.get((scope, root))
        if held is None:
            held = self._held[scope, root] = Held(scope, root)
        return held, key[-_KEY:]

    def _is_here(self, held: Held, key: str, need: dict[Resource, int]) -> bool:
        """Whether what is leased suffices."""
        tree, shares = held.tree, held.shares
        if key not in tree.accounts or tree.due(key) <= self.clock():
            return False
        return all(
            place in shares and shares[place].rest >= need[place.name] for place in tree.places(key)
        )

    def _make(self, tree: BudgetTree, bound: Bound, budget: Budget | None) -> None:
        """Have the account in the tree. Raises BudgetSpent, BadRequest, InvalidParameter."""
        key, above = bound.key[-_KEY:], [each[-_KEY:] for each in bound.above]
        if not above:
            _there(tree, key)
        if key in tree.accounts:
            return
        lowest = None
        if all(each.startswith(bound.key[:_KEY]) for each in bound.above):
            paths = {each: set(_there(tree, each).path(each)) for each in above}
            lowest = next((each for each, path in paths.items() if path.issuperset(above)), None)
        if lowest is None:
            raise BadRequest(
                "the capsule and the session have budgets, of which neither is below the other: leave "
                "the session out, or send the text instead of the capsule",
                param="mallee.session",
            )
        tree.add(key, lowest, budget or Budget(), self.clock())

    def _check_left(
        self, held: Held, tree: BudgetTree, key: str, need: dict[Resource, int]
    ) -> None:
        if tree.due(key) <= self.clock():
            raise BudgetSpent("wall_s", "its time is over")
        shares = held.shares
        rests = {
            place.name: tree.rest(place) + (shares[place].rest if place in shares else 0)
            for place in tree.places(key)
        }
        if rests.get("tokens", 1) < 1:
            raise BudgetSpent("tokens", "none is left")
        if (rest := rests.get("branches", math.inf)) < need["branches"]:
            raise BudgetSpent("branches", f"{rest:.0f} are left, {need['branches']} are asked for")

    # The store

    async def _change(
        self, held: Held, act: Callable[[BudgetTree], object], *, is_kept: bool = True
    ) -> None:
        """Do `act` to what is stored, which may be more than once, and store it, unless `is_kept` is False.

        Raises what `act` raises, BudgetSpent (it is not in the store any more), and Unavailable.
        """
        is_done = False

        async def changed(found: BudgetTree | None) -> BudgetTree | None:
            nonlocal is_done
            tree = found or held.made
            if tree is None:
                raise _gone()
            gone = await self._lessee.gone(tree.holders)
            held.tree = tree
            self._tell(held)
            tree.settle(gone)
            act(tree)
            is_done = is_kept
            return tree if is_kept else None

        async with held.turn.hold():
            known, held.stored = held.stored, None
            if held.is_private and not (is_kept and self._store.is_up):
                await changed(held.made)
            else:
                if held.is_private:
                    assert held.made is not None
                    known = Entry(held.made, 0)
                held.is_private = False
                try:
                    stored = await self._bucket.change(held.scope, held.root, changed, known)
                except BaseException:  # also of a client that is gone: it may be stored
                    if is_done:
                        held.is_unsure = True
                        self._settle_soon(held)
                    raise
                if stored is not None:
                    held.stored, held.made, held.is_unsure = stored, None, False
            if is_kept:
                self._hear(held)

    def _tell(self, held: Held) -> None:
        """Say what was spent here, and give back what nothing needs here any more."""
        for place, share in held.shares.items():
            share.taken = held.tree.tell(place, self._lessee.name, share.used)
            if not share.num_open:
                share.taken = share.used  # nothing of it is spent from now on
        kept = [place for place, share in held.shares.items() if share.num_open]
        held.tree.give_back(self._lessee.name, kept)

    def _hear(self, held: Held) -> None:
        """Have what is leased now."""
        for place, share in list(held.shares.items()):
            lease = held.tree.lease(place, self._lessee.name)
            if lease is not None:
                share.taken = lease.taken
            elif not share.num_open:
                del held.shares[place]

    def _settle_soon(self, held: Held) -> None:
        if not (held.is_settling or held.is_settled):
            held.is_settling = True
            self._store.spawn(self._settle(held), name="a budget")

    async def _settle(self, held: Held) -> None:
        """Have the store know all that it is to know, once it takes it."""
        try:
            while not held.is_settled:
                try:
                    if self._store.is_up:
                        await self._change(held, lambda tree: None)
                        continue
                except BudgetSpent:
                    return  # it is forgotten
                except Unavailable as error:
                    log.info("a budget was not stored: %s", error)
                if len(self._held) > MAX_KEPT:
                    log.warning("a budget was not stored: %d others wait already", MAX_KEPT)
                    return
                await asyncio.sleep(RETRY_S)
        finally:
            held.is_settling = False


def _there(tree: BudgetTree, key: str) -> BudgetTree:
    if key not in tree.accounts:
        raise _gone()
    return tree


def _gone() -> BudgetSpent:
    return BudgetSpent(
        "tokens",
        "the gateways' store has forgotten it: give the session a new one, or send the text",
    )
