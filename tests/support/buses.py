"""Tests of every kind of bus, whose file gives a `place` and imports all of this."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import pytest

from mallee.runtime.bus.buckets import BucketSpec, Stored
from mallee.runtime.bus.bus import Bus
from support.waiting import until


class Place(Protocol):
    """A meeting place of buses: its broker can go away and come back."""

    async def bus(self) -> Bus: ...

    async def down(self) -> None: ...

    async def up(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def connected(place: Place, n: int = 1) -> AsyncIterator[list[Bus]]:
    buses = [await place.bus() for _ in range(n)]
    try:
        for bus in buses:
            await until(lambda bus=bus: bus.is_up)
        yield buses
    finally:
        for bus in buses:
            await bus.close()


async def test_messages_reach_every_subscriber_in_order(place: Place) -> None:
    async with connected(place, 2) as (one, two):
        heard: dict[str, list[bytes]] = {"one": [], "two": []}
        await one.subscribe("mallee.f.events.*", heard["one"].append)
        await two.subscribe("mallee.f.events.w0", heard["two"].append)
        await settle(one, two)
        for i in range(100):
            one.publish("mallee.f.events.w0", b"%d" % i)
        one.publish("mallee.f.events.w1", b"other")
        assert heard["one"] == [], "nobody is called back inside a publisher's own call"
        await until(lambda: len(heard["one"]) == 101 and len(heard["two"]) == 100)
        assert heard["two"] == [b"%d" % i for i in range(100)]
        assert heard["one"] == [*heard["two"], b"other"]
        assert one.num_published >= 101
        assert one.num_dropped == 0


async def settle(*buses: Bus) -> None:
    """Everything that the buses asked of their broker so far has been done by it."""
    for i, bus in enumerate(buses):
        heard: list[bytes] = []
        await bus.subscribe(f"settle.{i}", heard.append)
        bus.publish(f"settle.{i}", b"x")
        await until(lambda heard=heard: bool(heard))


async def test_requests_get_their_answers_and_wait_for_no_other(place: Place) -> None:
    """One that nobody serves fails at once."""

    async def think(raw: bytes) -> bytes:
        if raw == b"hard":
            await asyncio.sleep(60)
        return raw.upper()

    async with connected(place, 2) as (asker, server):
        await server.serve("ask.me", think)
        await settle(server)
        hard = asyncio.ensure_future(asker.request("ask.me", b"hard", 60.0))
        await asyncio.sleep(0)
        assert await asker.request("ask.me", b"easy", 5.0) == b"EASY"
        hard.cancel()
        with pytest.raises(ConnectionError, match="nobody"):
            await asker.request("ask.nobody", b"", 5.0)


async def test_a_server_or_subscriber_that_raises_is_counted_and_goes_on(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A request of such a server times out."""
    heard: list[bytes] = []

    async def fail(raw: bytes) -> bytes:
        raise ValueError(raw)

    def receive(raw: bytes) -> None:
        heard.append(raw)
        if raw == b"bad":
            raise ValueError("bad message")

    async with connected(place) as (bus,):
        await bus.serve("ask.me", fail)
        await bus.subscribe("a.b", receive)
        await settle(bus)
        with pytest.raises(TimeoutError):
            await bus.request("ask.me", b"", 0.1)
        assert bus.signals.num_failed == 1
        bus.publish("a.b", b"bad")
        bus.publish("a.b", b"good")
        await until(lambda: heard == [b"bad", b"good"])
        assert bus.signals.num_failed == 2
        assert "a.b failed" in caplog.text


async def test_subscriptions_and_servers_survive_the_brokers_absence(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages that are published meanwhile are dropped and counted; a request fails."""
    caplog.set_level(logging.DEBUG)

    async def echo(raw: bytes) -> bytes:
        return raw

    async with connected(place, 2) as (one, two):
        states: list[bool] = []
        heard: list[bytes] = []
        two.on_state(states.append)
        await two.subscribe("a.b", heard.append)
        await two.serve("ask.me", echo)
        await place.down()
        await until(lambda: not one.is_up and not two.is_up)
        before = one.num_dropped
        one.publish("a.b", b"lost")
        assert one.num_dropped == before + 1
        with pytest.raises(ConnectionError):
            await one.request("ask.me", b"", 1.0)
        await place.up()
        await until(lambda: one.is_up and two.is_up)
        await settle(two)
        one.publish("a.b", b"found")
        await until(lambda: bool(heard))
        assert heard == [b"found"]
        assert await one.request("ask.me", b"x", 5.0) == b"x"
        assert states == [False, True]


async def test_a_bus_starts_before_its_broker(place: Place) -> None:
    await place.down()
    bus = await place.bus()
    heard: list[bytes] = []
    await bus.subscribe("a.b", heard.append)
    assert not bus.is_up
    await place.up()
    await until(lambda: bus.is_up)
    bus.publish("a.b", b"x")
    await until(lambda: heard == [b"x"])
    await bus.close()


async def test_close_is_quick_and_may_be_repeated_without_a_broker(place: Place) -> None:
    async with connected(place) as (bus,):
        await place.down()
        await until(lambda: not bus.is_up)
        await closed_twice(bus)


async def closed_twice(bus: Bus) -> None:
    async with asyncio.timeout(3.0):
        await bus.close()
        await bus.close()
    assert not bus.is_up


async def test_what_is_published_just_before_close_arrives(place: Place) -> None:
    async with connected(place, 2) as (one, two):
        heard: list[bytes] = []
        await two.subscribe("a.b", heard.append)
        await settle(two)
        for i in range(50):
            one.publish("a.b", b"%d" % i)
        await closed_twice(one)
        await until(lambda: len(heard) == 50)


BUCKET = BucketSpec("mallee_f_texts", ttl_s=600.0, max_nbytes=64 << 20)


async def test_a_value_is_kept_for_everybody_and_changed_by_its_revision(place: Place) -> None:
    async with connected(place, 2) as (one, two):
        assert await two.buckets.get(BUCKET, "a.b") is None
        first = await one.buckets.put(BUCKET, "a.b", b"1", 0)
        assert first is not None
        assert await two.buckets.get(BUCKET, "a.b") == Stored(b"1", first)
        assert await two.buckets.put(BUCKET, "a.b", b"2", 0) is None
        second = await two.buckets.put(BUCKET, "a.b", b"2", first)
        assert second is not None
        assert second > first
        assert await one.buckets.put(BUCKET, "a.b", b"", None) is not None
        assert (await two.buckets.get(BUCKET, "a.b") or Stored(b"?", 0)).value == b""


async def test_what_is_below_a_key_is_listed_followed_and_deleted_with_it(place: Place) -> None:
    async with connected(place, 2) as (one, two):
        for i in range(3):
            await one.buckets.put(BUCKET, f"a.b.{i}", b"%d" % i)
        await one.buckets.put(BUCKET, "a.b", b"head")
        await one.buckets.put(BUCKET, "a.bc.0", b"other")
        assert sorted(await two.buckets.keys(BUCKET, "a.b")) == ["a.b.0", "a.b.1", "a.b.2"]
        assert len(await two.buckets.keys(BUCKET, "a")) == 5
        following = two.buckets.follow(BUCKET, "a.b")
        found = [await anext(following) for _ in range(3)]
        assert [(key, each.value) for key, each in found] == [
            (f"a.b.{i}", b"%d" % i) for i in range(3)
        ]
        soon = asyncio.ensure_future(anext(following))
        await one.buckets.put(BUCKET, "a.b.1", b"new")
        key, stored = await soon
        assert (key, stored.value) == ("a.b.1", b"new")
        await following.aclose()
        await two.buckets.delete(BUCKET, "a.b")
        assert await one.buckets.keys(BUCKET, "a") == ["a.bc.0"]
        assert await one.buckets.get(BUCKET, "a.b") is None
        assert await one.buckets.put(BUCKET, "a.b", b"again", 0) is not None


async def test_nothing_is_kept_while_the_broker_is_away_nor_said_to_be_missing(
    place: Place,
) -> None:
    async with connected(place) as (bus,):
        await bus.buckets.put(BUCKET, "a.b", b"1")
        following = bus.buckets.follow(BUCKET, "a")
        await anext(following)
        await place.down()
        await until(lambda: not bus.is_up)
        with pytest.raises(ConnectionError):
            await bus.buckets.get(BUCKET, "a.b")
        with pytest.raises(ConnectionError):
            await bus.buckets.put(BUCKET, "a.b", b"2")
        with pytest.raises(ConnectionError):
            await anext(following)
        await place.up()
        await until(lambda: bus.is_up)
        assert await bus.buckets.put(BUCKET, "a.c", b"3") is not None
