"""Links: one ordered batch in flight, loss told once, silence is loss."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from mallee.actors.transport import ChannelLink, LinkTimes, LocalTransport
from mallee.protocol.ids import WorkerId
from mallee.protocol.messages import (
    Cancel,
    Command,
    Frame,
    Generate,
    Limits,
    Update,
    decode_commands,
    encode_frame,
    pack_tokens,
)

FAST = LinkTimes(connect_s=0.3, retry_s=0.01, silence_s=0.2, keepalive_s=0.05)
W = WorkerId("w0")


class FakeWorker:
    """A channel set by hand: batches wait until `accept`, frames come from a queue."""

    def __init__(self, *, failures: int = 0) -> None:
        self.batches: list[tuple[Command, ...]] = []
        self.accept = asyncio.Event()
        self.out: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.in_flight = self.most_in_flight = 0
        self.opened = self.closed = 0
        self.failures = failures
        self.say(Frame(0, ()))

    def say(self, frame: Frame) -> None:
        self.out.put_nowait(encode_frame(frame))

    async def submit(self, raw: bytes) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await self.accept.wait()
        self.in_flight -= 1
        if batch := decode_commands(raw):
            self.batches.append(batch)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        self.opened += 1
        if self.opened <= self.failures:
            raise ConnectionError("not there yet")
        try:
            while (item := await self.out.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1


class Seen:
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.lost: list[str] = []


@asynccontextmanager
async def linked(worker: FakeWorker, times: LinkTimes = FAST) -> AsyncGenerator[Any, None]:
    seen = Seen()
    link = ChannelLink(W, worker, seen.frames.append, seen.lost.append, times)
    try:
        yield link, seen
    finally:
        await link.close()
        link.check()


PATIENT = FAST._replace(silence_s=5.0)


def test_commands_travel_in_order_with_one_batch_in_flight(in_loop: Any, eventually: Any) -> None:
    async def body() -> None:
        worker = FakeWorker()
        async with linked(worker, PATIENT) as (link, _):
            link.send(Cancel("0"))
            await eventually(lambda: worker.in_flight == 1)
            for i in range(1, 100):
                link.send(Cancel(str(i)))
            worker.accept.set()
            await eventually(lambda: sum(map(len, worker.batches)) == 100)
            assert [len(b) for b in worker.batches] == [1, 99]
            assert [c.request for b in worker.batches for c in b] == [str(i) for i in range(100)]
            assert worker.most_in_flight == 1

    in_loop(body())


def test_nothing_is_sent_before_the_stream_of_answers_stands(in_loop: Any, eventually: Any) -> None:
    async def body() -> None:
        worker = FakeWorker(failures=3)
        worker.accept.set()
        async with linked(worker, PATIENT) as (link, seen):
            link.send(Cancel("a"))
            await asyncio.sleep(0)
            assert not worker.batches
            await eventually(lambda: bool(worker.batches))
            assert worker.opened == 4
            assert not seen.lost

    in_loop(body())


def test_a_worker_that_cannot_be_reached_is_lost_after_the_connect_time(
    in_loop: Any, eventually: Any
) -> None:
    async def body() -> None:
        worker = FakeWorker(failures=10_000)
        async with linked(worker) as (link, seen):
            link.send(Cancel("a"))
            await eventually(lambda: bool(seen.lost), 2.0)
            assert seen.lost == ["not there yet"]
            link.send(Cancel("b"))
            assert link.stats().is_over
            assert not link.stats().is_connected

    in_loop(body())


def test_a_broken_stream_is_loss_at_once_and_told_once(in_loop: Any, eventually: Any) -> None:
    async def body() -> None:
        worker = FakeWorker()
        async with linked(worker, PATIENT) as (link, seen):
            await eventually(lambda: link.stats().is_connected)
            worker.out.put_nowait(ConnectionError("the process died"))
            await eventually(lambda: bool(seen.lost), 1.0)
            await link.close()
            assert seen.lost == ["the process died"]
            assert worker.opened == 1

    in_loop(body())


def test_the_end_of_the_stream_and_silence_are_loss(in_loop: Any, eventually: Any) -> None:
    async def body() -> None:
        ended, silent = FakeWorker(), FakeWorker()
        async with linked(ended, PATIENT) as (_, seen_end), linked(silent) as (_, seen_silence):
            ended.out.put_nowait(None)
            await eventually(lambda: bool(seen_end.lost and seen_silence.lost))
            assert "ended the stream" in seen_end.lost[0]
            assert "gone silent" in seen_silence.lost[0]

    in_loop(body())


def test_bytes_that_are_no_frame_are_loss(in_loop: Any, eventually: Any) -> None:
    async def body() -> None:
        worker = FakeWorker()
        async with linked(worker, PATIENT) as (_, seen):
            worker.out.put_nowait(b"\xff\xff")
            await eventually(lambda: bool(seen.lost))
            assert "not a frame" in seen.lost[0]

    in_loop(body())


def test_close_is_no_loss_and_closes_the_stream(in_loop: Any, eventually: Any) -> None:
    async def body() -> None:
        worker = FakeWorker()
        async with linked(worker, PATIENT) as (link, seen):
            await eventually(lambda: link.stats().is_connected)
            await link.close()
            await link.close()
            assert worker.closed == 1
            worker.say(Frame(1, (Update("a", 0, (1,)),)))
            await asyncio.sleep(0.02)
            assert not seen.lost
            assert not seen.frames

    in_loop(body())


def test_an_idle_gateway_says_that_it_lives(in_loop: Any, eventually: Any) -> None:
    async def body() -> None:
        worker = FakeWorker()
        worker.accept.set()
        async with linked(worker, PATIENT) as (link, _):
            await eventually(lambda: link.stats().batches >= 2)
            assert link.stats().commands == 0

    in_loop(body())


def generate(request: str, max_tokens: int) -> Generate:
    return Generate(request, pack_tokens(range(1, 11)), Limits(max_tokens, ignore_eos=True))


def finished(seen: Seen) -> dict[str, str]:
    return {u.request: u.finish for f in seen.frames for u in f.updates if u.finish is not None}


def test_a_local_link_carries_requests_to_a_host_and_back(
    rig: Any, in_loop: Any, eventually: Any
) -> None:
    async def body() -> None:
        async with rig(address="here") as r:
            seen = Seen()
            transport = LocalTransport("g", {"here": r.host})
            link = transport.link(W, "here", seen.frames.append, seen.lost.append)
            link.send(generate("a", 3))
            link.send(generate("b", 2))
            await eventually(lambda: finished(seen) == {"a": "length", "b": "length"})
            tokens = [t for f in seen.frames for u in f.updates for t in u.tokens]
            assert len(tokens) == 5
            await link.close()
            await eventually(lambda: r.host.stats().gateways == 0)
            assert not seen.lost

    in_loop(body())


def test_closing_a_link_frees_its_branches(rig: Any, in_loop: Any, eventually: Any) -> None:
    async def body() -> None:
        async with rig() as r:
            r.forward.delay_s = 0.002
            seen = Seen()
            transport = LocalTransport("g", {"a0": r.host})
            link = transport.link(W, "a0", seen.frames.append, seen.lost.append)
            link.send(generate("a", 900))
            await eventually(lambda: bool(seen.frames))
            await link.close()
            await eventually(lambda: r.engine.stats().jobs == 0)

    in_loop(body())


def test_an_unknown_address_and_a_failed_host_are_losses(
    rig: Any, in_loop: Any, eventually: Any
) -> None:
    async def body() -> None:
        async with rig() as r:
            nowhere, broken = Seen(), Seen()
            transport = LocalTransport("g", {"a0": r.host}, times=PATIENT)
            one = transport.link(W, "nowhere", nowhere.frames.append, nowhere.lost.append)
            two = transport.link(W, "a0", broken.frames.append, broken.lost.append)
            r.forward.is_broken = True
            two.send(generate("a", 9))
            await eventually(lambda: bool(nowhere.lost and broken.lost))
            assert nowhere.lost == ["there is nobody at nowhere"]
            assert finished(broken) == {"a": "error"}
            await one.close()
            await two.close()

    in_loop(body())
