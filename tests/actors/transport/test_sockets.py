"""Links over Unix sockets: the rules of links hold, refusals and losses cross."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from mallee.actors.transport.link import LinkTimes
from mallee.actors.transport.sockets import SocketServer, socket_transport
from mallee.protocol.codec import encode
from mallee.protocol.errors import WorkerLost
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Cancel, Frame, Generate, Limits, Update, pack_tokens
from mallee.protocol.parcels import Parcel, Report, decode_parcels
from support.waiting import until

TIMES = LinkTimes(connect_s=2.0, retry_s=0.01, silence_s=5.0, keepalive_s=0.05)
W, LIFE = WorkerId("w0"), Incarnation(1)


class Echo:
    """A host that answers each command with its request, told twice over."""

    def __init__(self) -> None:
        self.batches: list[tuple[Parcel, ...]] = []
        self.out: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.refusal: str | None = None
        self.readers: list[str] = []

    async def submit(self, gateway: str, raw: bytes) -> None:
        if self.refusal is not None:
            raise WorkerLost("h0", self.refusal)
        parcels = decode_parcels(raw)
        if not parcels:
            return
        self.batches.append(parcels)
        for parcel in parcels:
            updates = tuple(Update(c.request, 0, (1,)) for c in parcel.commands)  # type: ignore[union-attr]
            report = Report(parcel.worker, parcel.incarnation, Frame(1, updates))
            self.out.put_nowait(encode([report, report]))

    async def frames(self, gateway: str) -> AsyncGenerator[bytes, None]:
        self.readers.append(gateway)
        try:
            yield encode([])
            while (raw := await self.out.get()) is not None:
                yield raw
        finally:
            self.readers.remove(gateway)


class Place:
    def __init__(self, folder: Path) -> None:
        self.host = Echo()
        self.path = str(folder / "h.sock")
        self.server = SocketServer(self.host, self.path)
        self.transport = socket_transport("g0", times=TIMES)
        self.frames: list[Frame] = []
        self.lost: list[str] = []

    def link(self) -> Any:
        return self.transport.link(W, LIFE, self.path, self.frames.append, self.lost.append)


async def test_commands_cross_in_order_and_news_come_back(tmp_path: Path) -> None:
    place = Place(tmp_path)
    link = place.link()  # before the host listens: it is tried again
    sent = [Cancel(f"r{i}") for i in range(300)]
    for command in sent[:150]:
        link.send(command)
    await place.server.start()
    await until(lambda: len(place.frames) == 2)
    for command in sent[150:]:
        link.send(command)
    await until(lambda: sum(len(f.updates) for f in place.frames) == 600)
    got = [c for batch in place.host.batches for parcel in batch for c in parcel.commands]
    assert got == sent
    assert place.host.readers == ["g0"]
    await link.close()
    await until(lambda: not place.host.readers)
    assert not place.lost
    await place.server.close()


async def test_large_messages_cross_whole(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.server.start()
    link = place.link()
    big = Generate("big", pack_tokens(range(1_000_000)), Limits(1))
    link.send(big)
    await until(lambda: bool(place.frames))
    assert place.host.batches[0][0].commands == (big,)
    await link.close()
    await place.server.close()


async def test_a_refused_batch_and_the_end_of_the_stream_are_losses(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.server.start()
    link = place.link()
    link.send(Cancel("a"))
    await until(lambda: bool(place.frames))
    place.host.refusal = "every engine failed"
    link.send(Cancel("b"))
    await until(lambda: bool(place.lost))
    assert "every engine failed" in place.lost[0]
    place.host.refusal = None
    again = place.link()
    again.send(Cancel("c"))
    await until(lambda: len(place.frames) == 4)
    place.host.out.put_nowait(None)
    await until(lambda: len(place.lost) == 2)
    await until(lambda: not place.host.readers)
    await again.close()
    await place.server.close()


async def test_a_host_that_closes_is_lost_and_nothing_hangs(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.server.start()
    link = place.link()
    link.send(Cancel("a"))
    await until(lambda: bool(place.frames))
    await place.server.close()
    await until(lambda: bool(place.lost))
    await link.close()
