"""Records of one gateway, asked for by another over a bus in memory."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from mallee.gateway.records import ASK_S, MAX_PARTS, PART_NBYTES, SharedRecords
from mallee.protocol.errors import LookupIncomplete, Unavailable
from mallee.protocol.ids import COMMON, Scope
from mallee.protocol.subjects import Subjects
from mallee.testing.bus import LocalBus, LocalHub
from support.plain_ids import SCOPES
from support.waiting import until

EVE = Scope("eve")


class Gateway:
    """The records of one gateway, by name and scope."""

    def __init__(self, hub: LocalHub, name: str, others: set[str] | None) -> None:
        self.bus = LocalBus(hub)
        self.kept: dict[tuple[str, Scope], bytes] = {}
        self.told: list[str] = []
        self.records = SharedRecords(
            self.bus,
            gateway=name,
            fleet="test",
            others=lambda: others,
            belongs=SCOPES.belongs,
        )
        self.records.share("thing", self._tell, lambda *key: self.kept.pop(key, None), self._hear)

    def _hear(self, name: str, scope: Scope, record: bytes) -> None:
        self.kept[name, scope] = self.kept.get((name, scope), b"") + record

    async def _tell(self, name: str, scope: Scope, given: bytes) -> bytes | None:
        self.told.append(name)
        if given and (name, scope) in self.kept:
            self.kept[name, scope] += given
        return self.kept.get((name, scope))


@pytest.fixture
async def three() -> AsyncIterator[list[Gateway]]:
    hub = LocalHub()
    names = {f"g{i}" for i in range(3)}
    made = [Gateway(hub, name, names - {name}) for name in sorted(names)]
    for each in made:
        await each.bus.connect()
        await each.records.start_up()
    yield made
    for each in made:
        assert each.records.tasks.failure is None
        assert not each.records._asked
        await each.records.close()


async def test_what_all_gateways_tell_is_gathered(three: list[Gateway]) -> None:
    a, b, c = three
    name = SCOPES.new(COMMON)
    assert await a.records.gather("thing", name, COMMON) == ([], True)
    b.kept[name, COMMON], c.kept[name, COMMON] = b"b", b"c"
    found, is_whole = await a.records.gather("thing", name, COMMON)
    assert (sorted(found), is_whole) == ([b"b", b"c"], True)
    await c.bus.close()
    began = time.monotonic()
    assert await a.records.gather("thing", name, COMMON) == ([b"b"], False)
    assert time.monotonic() - began == pytest.approx(ASK_S)
    await a.bus.close()
    assert await a.records.gather("thing", name, COMMON) == ([], False)
    alone = Gateway(LocalHub(), "g0", None)
    assert await alone.records.gather("thing", name, COMMON) == ([], True)


async def test_another_scope_gets_no_answer_and_is_not_asked_for(three: list[Gateway]) -> None:
    a, b, _ = three
    name = SCOPES.new(COMMON)
    a.kept[name, COMMON] = a.kept[name, EVE] = b"text"
    assert await b.records.fetch("thing", name, EVE) is None
    assert await b.records.fetch("thing", "req_forged", COMMON) is None
    assert b.bus.num_published == 0
    assert a.told == []


async def test_a_deleted_record_is_forgotten_by_all_and_never_found_again(
    three: list[Gateway],
) -> None:
    a, b, c = three
    name = SCOPES.new(COMMON)
    a.kept[name, COMMON] = b.kept[name, COMMON] = b"text"
    asking = asyncio.create_task(c.records.fetch("thing", name, COMMON))
    await asyncio.sleep(0)  # it is asked for, not answered
    b.records.forget("thing", name, COMMON)
    assert await asking is None
    assert not a.kept
    a.kept[name, COMMON] = b"late"
    assert await c.records.fetch("thing", name, COMMON) is None


async def test_what_is_copied_outlives_its_gateway_until_it_is_deleted(
    three: list[Gateway],
) -> None:
    a, b, c = three
    name = SCOPES.new(COMMON)
    a.records.copy("thing", name, COMMON, b"one ")
    a.records.copy("thing", name, COMMON, b"two")
    a.records.copy("thing", name, EVE, b"forged")  # the name is of another scope
    await until(lambda: c.kept.get((name, COMMON)) == b"one two")
    assert b.kept == c.kept == {(name, COMMON): b"one two"}
    assert not a.kept
    await a.bus.close()
    b.records.forget("thing", name, COMMON)
    await until(lambda: not c.kept)
    c.records.copy("thing", name, COMMON, b"late")
    later = SCOPES.new(COMMON)
    c.records.copy("thing", later, COMMON, b"new")
    await until(lambda: (later, COMMON) in b.kept)
    assert name not in {each for each, _ in c.kept}
    num_before = c.bus.num_published
    alone = Gateway(LocalHub(), "g0", None)
    alone.records.copy("thing", name, COMMON, b"for nobody")
    assert (alone.bus.num_published, c.bus.num_published) == (0, num_before)


async def test_malformed_messages_and_failing_owners_hurt_nobody(three: list[Gateway]) -> None:
    a, b, c = three
    subjects = Subjects.of("test")
    for subject in (
        *(subjects.record_asks(), subjects.records_forgotten(), subjects.records_copied()),
        *(subjects.record_told(each) for each in ("g0", "g1", "g2")),
    ):
        for raw in (b"", b"\xc1", b"\x91\xa1x", b"\x92\x01\xc4", b"\x93" * 3000):
            c.bus.publish(subject, raw)

    async def fail(name: str, scope: Scope, given: bytes) -> bytes | None:
        raise ValueError(name)

    c.records.share("thing", fail)
    name = SCOPES.new(COMMON)
    with pytest.raises(LookupIncomplete):  # it may be at the one that failed
        await b.records.fetch("thing", name, COMMON)
    a.kept[name, COMMON] = b"text"
    assert await b.records.fetch("thing", name, COMMON, wait_s=60) == b"text"


async def test_what_a_silent_gateway_may_have_is_not_called_unknown(three: list[Gateway]) -> None:
    """Only answers of all that are there, or the end of a silent one's lease, make it certain."""
    a, b, c = three
    name = SCOPES.new(COMMON)
    assert await a.records.fetch("thing", name, COMMON) is None
    c.bus.is_mute = True
    late = Gateway(a.bus._hub, "g3", set())  # that nobody knows yet: its answer is none of c's
    await late.bus.connect()
    await late.records.start_up()
    with pytest.raises(LookupIncomplete, match="1 other gateways have not answered"):
        await a.records.fetch("thing", name, COMMON)
    b.kept[name, COMMON] = b"text"
    assert await a.records.fetch("thing", name, COMMON) == b"text"
    asking = asyncio.create_task(a.records.fetch("thing", SCOPES.new(COMMON), COMMON))
    await asyncio.sleep(0)
    a.records._others = lambda: {"g1"}
    assert await asking is None
    a.bus.signals.set_up(False)
    with pytest.raises(LookupIncomplete, match="the broker is away"):
        await a.records.fetch("thing", name, COMMON)
    assert a.records.outcomes == {"unknown": 2, "unanswered": 2, "found": 1}
    await late.records.close()


async def test_a_long_record_comes_in_parts_and_an_error_as_itself(three: list[Gateway]) -> None:
    """Beyond the megabyte that a broker takes at once."""
    a, b, c = three
    name = SCOPES.new(COMMON)
    b.kept[name, COMMON] = bytes(range(256)) * (3 * PART_NBYTES // 256) + b"end"
    c.kept[name, COMMON] = b"c" * PART_NBYTES
    found, is_whole = await a.records.gather("thing", name, COMMON)
    assert is_whole
    assert sorted(found, key=len) == [c.kept[name, COMMON], b.kept[name, COMMON]]
    del c.kept[name, COMMON]
    assert await a.records.fetch("thing", name, COMMON) == b.kept[name, COMMON]
    b.kept[name, COMMON] = bytes(MAX_PARTS * PART_NBYTES + 1)
    with pytest.raises(Unavailable, match="33554433 bytes are more than the 33554432"):
        await a.records.fetch("thing", name, COMMON)
