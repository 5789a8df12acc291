"""Budgets and limits of keys in a real broker's store."""

import asyncio
import time
from typing import Any

import pytest

from mallee.api.branches.accounts import Budget
from mallee.api.branches.budgets import Budgets
from mallee.gateway.access.keys import Key
from mallee.gateway.access.quotas import Shared, Use
from mallee.gateway.access.visits import Visit
from mallee.gateway.store.store import Store, StoreTerms
from mallee.protocol.errors import QuotaExceeded
from mallee.protocol.ids import COMMON
from mallee.runtime.bus.broker import Broker
from mallee.runtime.bus.nats import NatsBus
from support.lessees import lessee
from support.plain_ids import SCOPES
from support.waiting import until, until_asked

pytestmark = [pytest.mark.process, pytest.mark.nats]


async def test_two_gateways_that_lease_at_once_overspend_nothing() -> None:
    """X19, part: neither a budget nor a key's limit; in the end all is as it was spent."""
    broker, names = Broker(fleet="test"), {"g0", "g1"}
    await broker.start()
    buses = [NatsBus(broker.access("gateway"), fleet="test") for _ in names]
    stores = [Store(bus, StoreTerms("test")) for bus in buses]
    made: list[tuple[Budgets, Use]] = []
    for name, bus, store in zip(sorted(names), buses, stores, strict=True):
        await bus.connect()
        keys = iter(range(1, 1 << 30))
        new_key: Any = lambda name=name, keys=keys: f"{name[1:]:>08}{next(keys):08x}"  # noqa: E731
        holder = lessee(name, names, new_key)
        shared = Shared(store, holder, clock=time.time)
        key = Key(name="k", sha256="0" * 64, requests_per_minute=40)
        use = Use(key, time.monotonic, lambda shared=shared: shared)
        made.append((Budgets(store, holder, clock=time.time, new_key=new_key), use))
    await until(lambda: all(bus.is_up for bus in buses))
    bound = made[0][0].bound(Budget(tokens=2000, branches=30), COMMON)
    assert bound is not None
    await made[0][0].give(bound, Budget(tokens=2000, branches=30))
    name, drawn = SCOPES.new(COMMON, bound.key), 0

    async def run(budgets: Budgets) -> int:
        mine, own = 0, budgets.bound(None, COMMON, name)
        assert own is not None
        spending = await budgets.begin(own, None, 1)
        for _ in range(20):
            await budgets.secure(spending, 7)
            num = int(min(7, spending.rest("tokens")))
            spending.spend("tokens", num)
            mine += num
        spending.close()
        return mine

    drawn = sum(await asyncio.gather(*(run(budgets) for budgets, _ in made * 10)))
    assert drawn == 2000  # of 20 that want 140 each

    async def is_told() -> bool:
        views = [await budgets.show(name, COMMON) for budgets, _ in made]
        assert all(view is not None for view in views)
        return all(view.tokens[1:] == (2000, 0, 0) for view in views)  # type: ignore[union-attr,index]

    await until_asked(is_told)

    async def is_admitted(use: Use) -> bool:
        visit = Visit(use)
        try:
            await visit.ready()
            with visit:
                return True
        except QuotaExceeded:
            return False

    admitted = await asyncio.gather(*(is_admitted(use) for _, use in made * 50))
    assert 38 <= sum(admitted) <= 44
    for store, bus in zip(stores, buses, strict=True):
        await store.close()
        await bus.close()
    await broker.stop()
