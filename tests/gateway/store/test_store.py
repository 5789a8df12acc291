"""The gateways' store over buckets in memory: every gateway sees the same values."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from bench.doubles.bus import LocalBus, LocalHub
from mallee.gateway.store.names import key_of, name_of
from mallee.gateway.store.store import (
    MAX_KEY,
    MAX_WAITING_NBYTES,
    NUM_SENT,
    PART_NBYTES,
    Bucket,
    Store,
    StoreTerms,
)
from mallee.protocol.errors import OtherLayout, StoreAway, Unreadable
from mallee.protocol.ids import COMMON, Scope
from support.waiting import until

A, B = Scope("a1"), Scope("b2")


class Note(msgspec.Struct, frozen=True, array_like=True):
    text: str


@asynccontextmanager
async def stores(hub: LocalHub, n: int = 2) -> AsyncIterator[list[Store]]:
    buses = [LocalBus(hub) for _ in range(n)]
    for bus in buses:
        await bus.connect()
    made = [Store(bus, StoreTerms("f")) for bus in buses]
    try:
        yield made
    finally:
        for store, bus in zip(made, buses, strict=True):
            await store.close(0.0)
            await bus.close()


def notes(store: Store, version: int = 1) -> Bucket[Note]:
    return store.bucket("texts", Note, version=version, ttl_s=60.0, max_nbytes=256 << 20)


async def test_a_value_is_the_same_at_every_gateway_and_in_its_scope_alone() -> None:
    async with stores(LocalHub()) as (one, two):
        put = await notes(one).put(A, "x/y z.~", Note("first"))
        entry = await notes(two).get(A, "x/y z.~")
        assert entry is not None
        assert entry == put
        assert await notes(two).get(A, "x/y z.~", entry) is entry
        assert await notes(two).get(B, "x/y z.~") is None
        assert await notes(two).get(COMMON, "x/y z.~") is None
        assert await notes(two).names(A) == ["x/y z.~"]
        await notes(two).delete(A, "x/y z.~")
        assert await notes(one).get(A, "x/y z.~", entry) is None


async def test_of_two_that_change_a_value_one_has_to_look_again() -> None:
    async with stores(LocalHub()) as (one, two):
        first = await notes(one).put(A, "n", Note("1"), at=0)
        assert first is not None
        assert await notes(two).put(A, "n", Note("2"), at=0) is None
        second = await notes(two).put(A, "n", Note("2"), at=first.revision)
        assert second is not None
        assert await notes(one).put(A, "n", Note("3"), at=first.revision) is None
        assert await notes(one).get(A, "n") == second


async def test_a_value_of_any_length_is_whole_or_not_there() -> None:
    hub, long = LocalHub(), Note("x" * (3 * PART_NBYTES))
    async with stores(hub) as (one, two):
        await notes(one).put(A, "n", long)
        await notes(one).put(A, "n.", Note("short"))
        entry = await notes(two).get(A, "n")
        assert entry is not None
        assert entry.value == long
        assert await notes(two).names(A) == ["n", "n."]
        assert await notes(two).put(A, "n", long, at=1) is None, "its parts go with it"
        assert len(hub.kept.buckets["mallee_f_texts"]) == 6
        await notes(two).delete(A, "n")
        assert await notes(one).names(A) == ["n."]
        assert len(hub.kept.buckets["mallee_f_texts"]) == 1


async def test_values_below_a_name_are_read_in_order_and_followed() -> None:
    async with stores(LocalHub()) as (one, two):
        for i in range(3):
            await notes(one).append(A, "n", f"{i}", Note(f"{i}"))
        await notes(one).append(A, "other", "0", Note("other"))
        assert await notes(two).all_below(A, "n") == {f"{i}": Note(f"{i}") for i in range(3)}
        following = notes(two).follow(A, "n")
        assert [await anext(following) for _ in range(3)] == [
            (f"{i}", Note(f"{i}")) for i in range(3)
        ]
        notes(one).append_soon(A, "n", "3", Note("new"))
        assert await anext(following) == ("3", Note("new"))
        await following.aclose()


async def test_what_waits_for_the_store_is_read_here_and_sent_once_it_is_back() -> None:
    hub = LocalHub()
    async with stores(hub) as (one, two):
        hub.set_up(False)
        with pytest.raises(StoreAway, match="retry in 1 s"):
            await notes(one).get(A, "n")
        with pytest.raises(StoreAway):
            await notes(one).put(A, "n", Note("now"))
        for i in range(5):
            notes(one).put_soon(A, "n", Note(f"{i}"))
        notes(one).put_soon(A, "gone", Note("gone"))
        notes(one).delete_soon(A, "gone")
        entry = await notes(one).get(A, "n")
        assert entry is not None
        assert entry.value == Note("4")
        assert not await one.flush(0.05)
        hub.set_up(True)
        await until(lambda: not one.num_waiting)
        assert hub.kept.revision == 1, "the last alone is told"
        found = await notes(two).get(A, "n")
        assert found is not None
        assert found.value == Note("4")


async def test_writes_that_wait_are_bounded_and_those_refused_counted() -> None:
    hub = LocalHub()
    async with stores(hub, 1) as (one,):
        hub.set_up(False)
        for i in range(65):
            notes(one).put_soon(A, f"{i}", Note("x" * (1 << 20)))
        assert one.num_refused == 65 - one.num_waiting > 0
        assert one.waiting_nbytes <= MAX_WAITING_NBYTES
        hub.kept.is_full = True
        hub.set_up(True)
        await until(lambda: one.num_refused == 65)


async def test_a_value_of_another_layout_is_refused_by_name() -> None:
    async with stores(LocalHub()) as (one, two):
        await notes(one, version=2).put(A, "n", Note("new"))
        with pytest.raises(
            OtherLayout, match="'mallee_f_texts' with layout 2, and this gateway reads layout 1"
        ):
            await notes(two).get(A, "n")


async def test_a_value_that_cannot_be_read_is_503_and_harms_nothing_else() -> None:
    hub = LocalHub()
    async with stores(hub, 1) as (one,):
        await notes(one).put(A, "n", Note("1"))
        (values,) = hub.kept.buckets.values()
        for raw in (b"", b"?", b"\x00\x01?", b"\x01?"):
            values[key_of(A, "n")] = values[key_of(A, "n")]._replace(value=raw)
            with pytest.raises(Unreadable, match="'mallee_f_texts' can't be read"):
                await notes(one).get(A, "n")


@pytest.mark.parametrize("name", ["", "a", "a.b", "=", "é/ ~", "\udc80", "a=2E"])
def test_keys_tell_their_names(name: str) -> None:
    assert name_of(key_of(A, name)) == name
    assert key_of(A, name).count(".") == 1


async def test_a_write_that_is_waited_for_comes_after_those_before_and_ahead_of_those_to_come() -> (
    None
):
    hub = LocalHub()
    async with stores(hub) as (one, two):
        here, there = notes(one), notes(two)
        here.put_soon(A, "n", Note("1"))
        assert await here.put(A, "n", Note("2"), at=0) is None
        await here.put(A, "n", Note("2"))
        assert await one.flush(1.0)
        assert (found := await there.get(A, "n")) is not None
        assert found.value == Note("2")
        here.put_soon(A, "n", Note("3"))
        await here.delete(A, "n")
        assert await one.flush(1.0)
        assert await there.get(A, "n") is None
        long = asyncio.create_task(here.put(A, "n", Note("x" * (3 * PART_NBYTES))))
        await asyncio.sleep(0)
        here.put_soon(A, "n", Note("4"))
        await long
        assert await one.flush(1.0)
        assert (found := await there.get(A, "n")) is not None
        assert found.value == Note("4")
        hub.set_up(False)
        here.delete_soon(A, "n")
        begun = asyncio.get_running_loop().time()
        with pytest.raises(StoreAway):
            await here.put(A, "n", Note("5"))
        assert asyncio.get_running_loop().time() - begun < 0.1


async def test_a_new_value_replaces_nothing() -> None:
    hub = LocalHub()
    async with stores(hub) as (one, two):
        await notes(two).put(A, "there", Note("old"))
        hub.set_up(False)
        notes(one).put_soon(A, "waits", Note("old"))
        notes(one).delete_soon(A, "gone")
        for name in ("there", "waits", "gone", "new"):
            notes(one).put_soon(A, name, Note("new"), is_new=True)
        hub.set_up(True)
        assert await one.flush(2.0)
        found = await notes(two).names(A)
        assert found == ["gone", "new", "there", "waits"]
        entries = [await notes(two).get(A, name) for name in found]
        assert [each and each.value.text for each in entries] == ["new", "new", "old", "old"]


async def test_names_are_as_this_gateway_left_them() -> None:
    async with stores(LocalHub(), 1) as (one,):
        await notes(one).put(A, "old", Note(""))
        await notes(one).append(A, "n", "gone", Note(""))
        notes(one).delete_soon(A, "old")
        notes(one).put_soon(A, "new", Note(""))
        notes(one).remove_soon(A, "n", "gone")
        notes(one).append_soon(A, "n", "b", Note("b"))
        assert await notes(one).names(A) == ["new"]
        assert await notes(one).names_below(A, "n") == ["b"]
        assert await notes(one).all_below(A, "n") == {"b": Note("b")}
        assert await one.flush(1.0)
        assert await notes(one).names(A) == ["new"]


async def test_nothing_waits_for_a_write_that_was_refused() -> None:
    hub = LocalHub()
    async with stores(hub, 1) as (one,):
        hub.set_up(False)
        for i in range(NUM_SENT):
            notes(one).put_soon(A, f"{i}", Note(""))
        notes(one).put_soon(A, "n", Note(""))
        settled = asyncio.create_task(notes(one).settled(A, "n", 5.0))
        await asyncio.sleep(0)
        notes(one).put_soon(A, "n", Note("x" * MAX_WAITING_NBYTES))
        async with asyncio.timeout(1.0):
            assert await settled
        assert (one.num_refused, one.num_waiting) == (1, NUM_SENT)


async def test_a_name_that_is_too_long_for_a_broker_is_not_there() -> None:
    async with stores(LocalHub(), 1) as (one,):
        await notes(one).append(A, "😀" * 128, "😀" * 128, Note("the longest of a session"))
        assert await notes(one).get_below(A, "😀" * 128, "😀" * 128) is not None
        assert await notes(one).get(A, "x" * (MAX_KEY + 1)) is None
