"""Copies of a bucket's values: what they serve for, and what bounds them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

import msgspec
import pytest

from bench.doubles.bus import LocalBus, LocalHub
from mallee.gateway.store.copies import CopiedBucket
from mallee.gateway.store.store import MAX_TRIES, Store, StoreTerms
from mallee.protocol.errors import Contended, StoreAway
from mallee.protocol.ids import COMMON


class Note(msgspec.Struct, frozen=True, array_like=True):
    text: str


class Scene(NamedTuple):
    hub: LocalHub
    here: CopiedBucket[Note]
    there: CopiedBucket[Note]


def bucket(bus: LocalBus, max_nbytes: int) -> CopiedBucket[Note]:
    store = Store(bus, StoreTerms("test"))
    made = store.bucket("responses", Note, version=1, ttl_s=60.0, max_nbytes=1 << 20)
    return CopiedBucket(made, max_nbytes)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    hub = LocalHub()
    buses = [LocalBus(hub) for _ in range(2)]
    for bus in buses:
        await bus.connect()
    yield Scene(hub, *(bucket(bus, 1000) for bus in buses))
    for bus in buses:
        await bus.close()


async def test_a_copy_serves_while_the_store_is_away_and_is_believed_no_longer(
    scene: Scene,
) -> None:
    hub, here, there = scene
    await here.put(COMMON, "n", Note("1"))
    await there.put(COMMON, "gone", Note("1"))
    await here.get(COMMON, "gone")
    await there.change(COMMON, "n", lambda note: Note(note.text + "2"))
    await there.delete(COMMON, "gone")
    hub.set_up(False)
    found = await here.get(COMMON, "n")
    assert found is not None
    assert found.value == Note("1")
    with pytest.raises(StoreAway):
        await here.get(COMMON, "unknown")
    hub.set_up(True)
    found = await here.get(COMMON, "n")
    assert found is not None
    assert found.value == Note("12")
    assert await here.get(COMMON, "n") is found
    assert await here.get(COMMON, "gone") is None
    hub.set_up(False)
    with pytest.raises(StoreAway):
        await here.get(COMMON, "gone")


async def test_copies_are_bounded_and_the_least_recently_used_goes_first(scene: Scene) -> None:
    hub, here, _ = scene
    for name in "abc":
        await here.put(COMMON, name, Note("x" * 300))
    await here.get(COMMON, "a")
    await here.put(COMMON, "d", Note("x" * 300))
    await here.put(COMMON, "too long", Note("x" * 1001))
    await here.put(COMMON, "e", Note("x" * 300))
    hub.set_up(False)
    kept = set()
    for name in (*"abcde", "too long"):
        with suppress(StoreAway):
            await here.get(COMMON, name)
            kept.add(name)
    assert kept == {"a", "d", "e"}


async def test_a_change_that_others_forestall_all_the_time_is_given_up(scene: Scene) -> None:
    _, here, there = scene
    await here.put(COMMON, "n", Note(""))
    tries = 0

    def change(note: Note) -> Note:
        nonlocal tries
        tries += 1
        return Note(note.text + "x")

    get = here.bucket.get

    async def forestalled(*_: object) -> object:
        found = await get(COMMON, "n")
        await there.put(COMMON, "n", Note("other"))
        return found

    here.bucket.get = forestalled  # type: ignore[method-assign, assignment]
    with pytest.raises(Contended, match=f"{MAX_TRIES} times"):
        await here.change(COMMON, "n", change)
    assert tries == MAX_TRIES
    assert await there.change(COMMON, "unknown", change) is None


async def test_changes_of_one_gateway_do_not_forestall_each_other(scene: Scene) -> None:
    _, here, there = scene
    await here.put(COMMON, "n", Note(""))
    num = 3 * MAX_TRIES
    changes = (
        each.change(COMMON, "n", lambda note: Note(note.text + "x")) for each in [here] * num
    )
    await asyncio.gather(*changes)
    found = await there.get(COMMON, "n")
    assert found is not None
    assert found.value == Note("x" * num)


async def test_a_copy_is_not_taken_for_another_value_of_its_revision(scene: Scene) -> None:
    """As of a broker that was set back to an older backup."""
    hub, here, there = scene
    await here.put(COMMON, "other", Note("1"))
    first = await here.put(COMMON, "n", Note("lost"))
    hub.kept.revision -= 1
    new = await there.put(COMMON, "n", Note("new"))
    assert first is not None
    assert new is not None
    assert new.revision == first.revision
    found = await here.get(COMMON, "n")
    assert found is not None
    assert found.value == Note("new")


async def test_a_value_is_encoded_once_to_be_put_and_copied(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, here, _ = scene
    packed, num = here.bucket._packed, 0

    def counted(note: Note) -> bytes:
        nonlocal num
        num += 1
        return packed(note)

    monkeypatch.setattr(here.bucket, "_packed", counted)
    await here.put(COMMON, "n", Note("x" * 300))
    await here.get(COMMON, "n")
    assert num == 1
