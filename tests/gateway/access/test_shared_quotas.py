"""Limits of keys that hold for several gateways together, over one store."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.doubles.bus import LocalBus, LocalHub
from mallee.gateway.access import quotas as module
from mallee.gateway.access.keys import Key
from mallee.gateway.access.quotas import Shared, Use
from mallee.gateway.access.visits import Visit
from mallee.gateway.store.store import MAX_FAILED, Store, StoreTerms
from mallee.protocol.errors import QuotaExceeded, StoreAway
from mallee.protocol.ids import CapsuleId
from support.lessees import lessee
from support.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Gateway:
    """The use that one gateway's callers make of a key."""

    def __init__(self, hub: LocalHub, name: str, living: set[str], clock: Clock, key: Key) -> None:
        self.name, self.living, self.clock, self.ahead_s = name, living, clock, 0.0
        self.bus = LocalBus(hub)
        self.store = Store(self.bus, StoreTerms("f"))
        living.add(name)
        holder = lessee(name, living, lambda: "life")
        shared = Shared(self.store, holder, clock=lambda: clock() + self.ahead_s)
        self.use = Use(key, clock, lambda: shared)

    async def request(self, branches: int = 1, tokens: int = 1) -> Visit | None:
        """One that runs, if it is admitted; its owner ends it."""
        visit = Visit(self.use)
        self.clock.now += 0.002
        try:
            await visit.ready()
            visit.__enter__()
        except QuotaExceeded:
            return None
        try:
            await visit.ready(branches=branches)
            visit.begin(branches, tokens)
        except QuotaExceeded:
            visit.__exit__()
            return None
        return visit

    async def told(self) -> None:
        """Return once the others may know of all."""
        await until(lambda: not self.store.num_waiting)


@asynccontextmanager
async def gateways(
    num: int, monkeypatch: pytest.MonkeyPatch, **limits: Any
) -> AsyncIterator[tuple[list[Gateway], Clock]]:
    monkeypatch.setattr(module, "AGAIN_S", 0.001)
    hub, living, clock = LocalHub(), set[str](), Clock()
    key = Key(name="k", sha256="0" * 64, **limits)
    made = [Gateway(hub, f"g{i}", living, clock, key) for i in range(num)]
    for each in made:
        each.bus.connect_now()
    yield made, clock
    for each in made:
        await each.store.close(0.0)
        await each.bus.close()


@pytest.mark.parametrize("num", [1, 2, 8])
@pytest.mark.parametrize("limit", [7, 60, 1000])
async def test_requests_per_minute_are_counted_over_all_gateways(
    num: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a minute and those after it, within a tenth, wherever they come; one alone gets all."""
    async with gateways(num, monkeypatch, requests_per_minute=limit) as (made, clock):
        draw, admitted, start = random.Random(num * limit), 0, clock.now
        for step in range(120):  # of two seconds; from half of them on at one gateway
            some = made if step < 60 else made[:1]
            asked = [draw.choice(some).request() for _ in range(max(1, limit // 10))]
            for visit in await asyncio.gather(*asked):
                if visit is not None:
                    admitted += 1
                    visit.__exit__()
            clock.now += 2
            if step >= 30 and step != 60:
                there = limit * (1 + (clock.now - start) / 60)  # a full bucket, and what came in
                assert abs(admitted - there) <= max(2.0, limit / 10)


@pytest.mark.parametrize("num", [1, 2, 8])
async def test_what_is_there_at_once_is_counted_over_all_gateways(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests, branches; never more than the limit, and nine tenths at least; it comes back."""
    limits = {"max_running": 100, "max_branches": 160}
    async with gateways(num, monkeypatch, **limits) as (made, _):
        draw, running = random.Random(num), list[tuple[Gateway, Visit, int]]()
        for _ in range(600):
            gateway, n = draw.choice(made), draw.choice((1, 1, 2))
            visit = await gateway.request(n)
            if visit is not None:
                running.append((gateway, visit, n))
            elif draw.random() < 0.5:
                running.pop(draw.randrange(len(running)))[1].__exit__()
            assert len(running) <= 100
            assert sum(n for *_, n in running) <= 160
        for each in made:
            await each.told()
        for _ in range(100):
            gateway = draw.choice(made)
            if (visit := await gateway.request()) is not None:
                running.append((gateway, visit, 1))
        assert len(running) >= 90 or sum(n for *_, n in running) >= 144
        for _, visit, _ in running:
            visit.__exit__()
        for each in made:
            await each.told()
        found = [await made[-1].request() for _ in range(100)]
        assert sum(visit is not None for visit in found) >= 90


async def test_a_gateway_that_dies_frees_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another comes under its name."""
    async with gateways(2, monkeypatch, max_running=10) as ([a, b], _):
        assert all([await a.request() for _ in range(10)])
        assert await b.request() is None
        a.living.discard("g0")
        b.clock.now += 1
        assert all([await b.request() for _ in range(10)])


async def test_tokens_that_are_owed_are_known_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a long answer, while it runs."""
    async with gateways(2, monkeypatch, tokens_per_minute=600) as ([a, b], clock):
        visit = await a.request(tokens=10)
        assert visit is not None
        visit.charge(1200)
        await a.told()
        clock.now += 1
        assert await b.request() is None
        clock.now += 62
        assert await b.request() is not None


async def test_capsules_are_counted_over_all_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number and by tokens."""
    limits = {"max_capsules": 4, "max_capsule_tokens": 100}
    async with gateways(2, monkeypatch, **limits) as ([a, b], clock):

        async def make(gateway: Gateway, name: str, tokens: int) -> None:
            visit = Visit(gateway.use)
            await visit.ready(capsules=1, capsule_tokens=tokens)
            with visit.making(tokens, lambda capsule: True) as keep:
                keep(CapsuleId(name))

        await make(a, "1", 60)
        with pytest.raises(QuotaExceeded, match="tokens in capsules"):
            await make(b, "2", 50)
        await make(b, "2", 20)
        clock.now += 0.002
        await make(b, "3", 1)
        await make(a, "4", 1)
        with pytest.raises(QuotaExceeded, match="4 of 4 capsules"):
            await make(a, "5", 1)
        b.use.unkeep(CapsuleId("3"))
        await b.told()
        clock.now += 0.002
        await make(a, "5", 1)


async def test_without_the_store_a_gateway_goes_on_with_what_it_leased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then it is 503, not 429: the key may have more."""
    async with gateways(2, monkeypatch, requests_per_minute=800) as ([a, b], _):
        assert await a.request() is not None
        a.bus._hub.set_up(False)
        found = [await a.request() for _ in range(20)]
        assert sum(visit is not None for visit in found) == 20
        with pytest.raises(StoreAway):
            await a.request()
        with pytest.raises(StoreAway):
            await b.request()
        a.bus._hub.set_up(True)
        assert await b.request() is not None


async def test_clocks_that_differ_fill_no_rate_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that was set back lock a key out."""
    async with gateways(2, monkeypatch, requests_per_minute=60) as (made, clock):
        made[1].ahead_s, admitted, start = 2.0, 0, clock.now
        for step in range(2000):
            if (visit := await made[step % 2].request()) is not None:
                admitted += 1
                visit.__exit__()
            clock.now += 0.05
        assert abs(admitted - 60 - (clock.now - start)) <= 6
        made[1].ahead_s = -3600.0
        clock.now += 3
        await made[1].request()
        clock.now += 3
        assert await made[1].request() is not None


async def test_a_refusal_says_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a limit that is raised holds at once."""
    async with gateways(2, monkeypatch, requests_per_minute=1) as ([a, _], clock):
        assert await a.request() is not None
        assert await a.request() is None
        clock.now += 50
        await a.use.ready()
        with pytest.raises(QuotaExceeded) as refused:
            a.use.begin()
        assert 5 <= refused.value.fields["retry_after_s"] <= 11
        a.use.limit(a.use.key.model_copy(update={"requests_per_minute": 10_000}))
        assert await a.request() is not None


async def test_capsules_that_go_by_themselves_free_room_at_other_gateways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their times end, or there is no room, though their own gateway is asked for nothing."""
    async with gateways(2, monkeypatch, max_capsules=1) as ([a, b], clock):
        kept = {CapsuleId("1")}

        async def make(gateway: Gateway, name: str) -> None:
            visit = Visit(gateway.use)
            await visit.ready(capsules=1, capsule_tokens=1)
            with visit.making(1, kept.__contains__) as keep:
                keep(CapsuleId(name))

        await make(a, "1")
        with pytest.raises(QuotaExceeded):
            await make(b, "2")
        kept.clear()
        a.use.sweep()
        await a.told()
        clock.now += 0.002
        await make(b, "2")


async def test_prompts_that_come_at_once_have_what_the_key_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though each takes more than was leased ahead."""
    async with gateways(2, monkeypatch, tokens_per_minute=1000) as ([a, _], _clock):
        for _ in range(8):
            await a.use.ready()
            a.use.begin()
        for _ in range(8):  # their bodies were read meanwhile
            await a.use.ready(branches=1)
            a.use.charge_prompt(100)


async def test_requests_do_not_wait_for_a_silent_store_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked twice for all that wait, and again for those that come later."""
    async with gateways(2, monkeypatch, max_running=100) as (made, _):
        use, asked = made[0].use, 0

        async def silent(*_: object) -> None:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0)
            raise TimeoutError("no answer")

        monkeypatch.setattr(made[0].bus.buckets, "get", silent)
        for times in (1, 2):
            found = await asyncio.gather(*(use.ready() for _ in range(50)), return_exceptions=True)
            assert {type(each) for each in found} == {StoreAway}
            assert asked == times * MAX_FAILED
        monkeypatch.undo()
        assert await made[0].request() is not None
