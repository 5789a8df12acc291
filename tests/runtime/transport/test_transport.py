"""Links: commands in order, receipts, a loss told once, silence is loss.

K21, part: many workers share one way, and one that is lost takes none of the others with it.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mallee.protocol.codec import encode
from mallee.protocol.errors import WorkerLost
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    Cancel,
    Command,
    Frame,
    Generate,
    Limits,
    Update,
    pack_tokens,
)
from mallee.protocol.parcels import Parcel, Report, decode_parcels
from mallee.runtime.transport import link as links
from mallee.runtime.transport.link import LinkTimes
from mallee.runtime.transport.server import Sink
from support.local_transport import LocalTransport
from support.waiting import until

FAST = LinkTimes(connect_s=0.3, retry_s=0.01, silence_s=0.2, keepalive_s=0.05)
W = WorkerId("w0")
LIFE = Incarnation(1)


class FakeHost:
    """A host set by hand: with `accept`, batches get no receipt before that is done."""

    def __init__(self) -> None:
        self.batches: list[tuple[Command, ...]] = []
        self.parcels: list[tuple[Parcel, ...]] = []
        self.accept: asyncio.Future[None] | None = None
        self.refusal: str | None = None
        self.sink: Sink | None = None
        self.opened = self.closed = 0

    def open(self, gateway: str, sink: Sink) -> "FakeHost":
        self.opened += 1
        self.sink = sink
        return self

    def submit(self, raw: bytes) -> asyncio.Future[None] | None:
        if self.refusal is not None:
            raise WorkerLost("h0", self.refusal)
        if parcels := decode_parcels(raw):
            self.parcels.append(parcels)
            self.batches.append(tuple(c for parcel in parcels for c in parcel.commands))
        return self.accept

    def resume(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1

    def say(self, frame: Frame, worker: str = W, lost: str | None = None) -> None:
        self.write(encode([Report(worker, LIFE, frame, lost)]))

    def write(self, raw: bytes) -> None:
        assert self.sink is not None
        self.sink.send(raw)

    def end(self) -> None:
        assert self.sink is not None
        self.sink.finish()


class Seen:
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.lost: list[str] = []


@asynccontextmanager
async def linked(worker: FakeHost | None, times: LinkTimes = FAST) -> AsyncGenerator[Any, None]:
    seen = Seen()
    transport = LocalTransport("g0", {"a": worker} if worker else {}, times=times)
    link = transport.link(W, LIFE, "a", seen.frames.append, seen.lost.append)
    way = transport._hosts["a"]
    try:
        yield link, seen
    finally:
        await link.close()
        way.check()
        assert not transport._hosts
        await transport._tasks.finish()
        assert transport._tasks.failure is None


PATIENT = FAST._replace(silence_s=5.0)


async def test_commands_of_a_turn_travel_as_one_batch_and_wait_for_no_receipt() -> None:
    worker = FakeHost()
    async with linked(worker, PATIENT) as (link, _):
        await until(lambda: link.host.is_connected)
        worker.accept = asyncio.get_running_loop().create_future()
        link.send(Cancel("0"))
        await until(lambda: len(worker.batches) == 1)
        for i in range(1, 100):
            link.send(Cancel(str(i)))
        await until(lambda: sum(map(len, worker.batches)) == 100)
        assert [len(b) for b in worker.batches] == [1, 99]
        assert [c.request for b in worker.batches for c in b] == [str(i) for i in range(100)]
        waiting: int = link.host._untaken_nbytes
        assert waiting > 0
        worker.accept.set_result(None)
        await until(lambda: link.host._untaken_nbytes < waiting)


async def test_a_host_that_takes_nothing_is_lost_beyond_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "MAX_UNTAKEN_NBYTES", 4000)
    worker = FakeHost()
    async with linked(worker, PATIENT) as (link, seen):
        await until(lambda: link.host.is_connected)
        worker.accept = asyncio.get_running_loop().create_future()
        for i in range(3):
            link.send(Generate(f"r{i}", pack_tokens(range(400)), Limits(1)))
            await until(lambda i=i: len(worker.batches) == i + 1 or bool(seen.lost))  # type: ignore[misc]
        await until(lambda: bool(seen.lost))
        assert "takes no commands" in seen.lost[0]


async def test_a_worker_that_cannot_be_reached_is_lost_after_the_connect_time() -> None:
    async with linked(None) as (link, seen):
        link.send(Cancel("a"))
        await until(lambda: bool(seen.lost), 2.0)
        assert seen.lost == ["there is no host at a"]
        link.send(Cancel("b"))
        assert link.is_over
        assert not link.host.is_connected


async def test_silence_and_a_refused_batch_are_loss() -> None:
    silent, refusing = FakeHost(), FakeHost()
    refusing.refusal = "every engine failed"
    async with linked(silent) as (_, seen_silence), linked(refusing, PATIENT) as (link, refused):
        silent.accept = asyncio.get_running_loop().create_future()  # no receipts either
        link.send(Cancel("a"))
        await until(lambda: bool(seen_silence.lost and refused.lost))
        assert "gone silent" in seen_silence.lost[0]
        assert refused.lost == ["it refused: every engine failed"]


async def test_bytes_that_are_no_frame_are_loss() -> None:
    worker = FakeHost()
    async with linked(worker, PATIENT) as (link, seen):
        await until(lambda: link.host.is_connected)
        worker.write(b"\xff\xff")
        await until(lambda: bool(seen.lost))
        assert "not a run of reports" in seen.lost[0]


async def test_an_idle_gateway_says_that_it_lives() -> None:
    worker = FakeHost()
    async with linked(worker, PATIENT) as (link, _):
        await until(lambda: link.host.num_batches >= 2)


@asynccontextmanager
async def pair(host: FakeHost) -> AsyncGenerator[Any, None]:
    """Links to two workers of one host, and what they heard."""
    transport = LocalTransport("g0", {"a": host}, times=PATIENT)
    heard = Seen(), Seen()
    names = "w0", "w1"
    pair_of_links: list[Any] = [
        transport.link(WorkerId(name), LIFE, "a", seen.frames.append, seen.lost.append)
        for name, seen in zip(names, heard, strict=True)
    ]
    try:
        await until(lambda: pair_of_links[0].host.is_connected)
        yield pair_of_links, heard
    finally:
        for link in pair_of_links:
            await link.close()
        assert not transport._hosts
        await transport._tasks.finish()


async def test_workers_of_a_host_share_one_way_and_each_hears_its_own() -> None:
    host = FakeHost()
    async with pair(host) as (both, heard):
        for i in range(7):
            both[i % 2].send(Cancel(str(i)))
        await until(lambda: sum(map(len, host.batches)) == 7)
        assert host.opened == 1
        assert len(host.batches) == 1
        got = {
            name: [c.request for ps in host.parcels for p in ps if p.worker == name
                   for c in p.commands]
            for name in ("w0", "w1")
        }  # fmt: skip
        assert got == {"w0": ["0", "2", "4", "6"], "w1": ["1", "3", "5"]}
        said = [Frame(1, (Update("a", 0, (1,)),)), Frame(7, ())]  # the last tells that it goes on
        for frame in said:
            host.say(frame, "w1")
        await until(lambda: heard[1].frames == said)
        assert not heard[0].frames


async def test_a_lost_worker_leaves_the_others_their_way() -> None:
    """Their way ends with the last one that is lost."""
    host = FakeHost()
    async with pair(host) as (both, heard):
        last = Frame(1, (Update("a", 0, (), "error"),))
        host.say(last, "w0", lost="it broke")
        await until(lambda: bool(heard[0].lost))
        assert heard[0].frames == [last]
        assert heard[0].lost == ["it broke"]
        both[0].send(Cancel("x"))
        both[1].send(Cancel("y"))
        await until(lambda: bool(host.batches))
        assert host.batches == [(Cancel("y"),)]
        assert not heard[1].lost
        host.say(Frame(1, ()), "w1", lost="it crashed, too")
        await until(lambda: host.closed == 1)
        assert [seen.lost for seen in heard] == [["it broke"], ["it crashed, too"]]


async def test_who_fails_to_take_in_a_loss_does_not_keep_it_from_others() -> None:
    def fail(_: str) -> None:
        raise RuntimeError("a bug")

    host, lost = FakeHost(), list[str]()
    transport = LocalTransport("g0", {"a": host}, times=PATIENT)
    for name, on_lost in (("w0", fail), ("w1", lost.append)):
        transport.link(WorkerId(name), LIFE, "a", lambda frame: None, on_lost)
    await until(lambda: transport._hosts["a"].is_connected)
    host.end()
    await until(lambda: lost == ["it closed the connection"])
    assert not transport._hosts


async def test_a_closed_link_says_so_and_the_way_stays_for_the_rest() -> None:
    host = FakeHost()
    async with pair(host) as (both, heard):
        both[0].send(Cancel("x"))
        await both[0].close()
        await until(lambda: bool(host.parcels))
        sent = [parcel for batch in host.parcels for parcel in batch]
        assert sent == [Parcel("w0", 1, (Cancel("x"),), True)]
        host.say(Frame(1, (Update("a", 0, (1,)),)), "w0")
        host.say(Frame(1, (Update("b", 0, (1,)),)), "w1")
        await until(lambda: bool(heard[1].frames))
        assert not heard[0].frames
        assert not heard[0].lost
        assert not host.closed
        await both[1].close()
        await until(lambda: host.closed == 1)
