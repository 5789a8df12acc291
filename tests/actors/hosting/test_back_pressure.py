"""A host with a real engine behind real sockets, and gateways that read nothing, stall or die. K28, part."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mallee.actors.hosting.streams import Stream
from mallee.protocol.codec import encode
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Frame, Generate, Limits, Sampling, Update, pack_tokens
from mallee.protocol.parcels import Parcel, Report, decode_reports
from mallee.runtime.transport import wire
from mallee.runtime.transport.link import Transport
from mallee.runtime.transport.listener import Listener
from mallee.runtime.transport.server import BUFFER_NBYTES, CommandServer
from support.local_transport import SECRET, ByHand
from support.waiting import until

LIFE = WorkerId("w0"), Incarnation(1)


@asynccontextmanager
async def served(rig: Any, folder: Path, **options: Any) -> AsyncIterator[Any]:
    """A rig whose host listens at `rig.path`."""
    r = rig(num_blocks=4096, **options)
    r.path = str(folder / "h.sock")
    listener = Listener(CommandServer(r.host, SECRET))
    await listener.listen_unix(r.path)
    r.host.address = str(listener.address)
    try:
        async with r:
            yield r
    finally:
        await listener.close()


def generate(request: str, max_tokens: int, n: int = 1, logprobs: int = -1) -> Generate:
    return Generate(
        request,
        pack_tokens(range(1, 11)),
        Limits(max_tokens, ignore_eos=True),
        Sampling(logprobs=logprobs),
        n,
    )


def ask(connection: ByHand, num: int) -> None:
    """So many requests with four branches of a thousand tokens."""
    commands = tuple(generate(f"x{i}", 1000, n=4, logprobs=8) for i in range(num))
    connection.send(wire.BATCH, encode([Parcel(*LIFE, commands)]))


class ReadingGateway:
    """A gateway that reads."""

    def __init__(self, address: str) -> None:
        self.frames: list[Frame] = []
        self.lost: list[str] = []
        self.transport = Transport("reader", SECRET)
        self.link = self.transport.link(*LIFE, address, self.frames.append, self.lost.append)

    async def ask(self, request: str, max_tokens: int) -> None:
        """Return when it has all tokens."""
        begin = len(self.frames)
        self.link.send(generate(request, max_tokens))

        def got() -> int:
            return sum(len(u.tokens) for f in self.frames[begin:] for u in f.updates)

        await until(lambda: got() == max_tokens)
        assert not self.lost


async def test_a_gateway_that_reads_nothing_is_cut_at_a_bound_and_others_go_on(
    rig: Any, tmp_path: Path
) -> None:
    bound = 1 << 20
    async with served(rig, tmp_path, max_waiting_nbytes=bound) as r:
        deaf = await ByHand.to(r.path)
        reader = ReadingGateway(r.host.address)
        await reader.ask("before", 8)
        ask(deaf, 4)
        await until(lambda: "by hand" in r.host.gateways)
        stream = r.host._streams._streams["by hand"]
        most = 0

        def is_cut() -> bool:
            nonlocal most
            waits = stream.waiting_nbytes + stream._sink._transport.get_write_buffer_size()
            most = max(most, waits)
            return bool(r.host.stats().slow_streams)

        await until(is_cut)
        await reader.ask("meanwhile", 8)
        assert BUFFER_NBYTES < most < bound + 2 * BUFFER_NBYTES
        await until(lambda: r.engine.stats().jobs == 0)
        assert r.host.gateways == ("reader",)
        r.host.check()
        deaf.writer.close()
        await reader.link.close()


async def test_a_gateway_that_stalls_gets_every_token_later(rig: Any, tmp_path: Path) -> None:
    """K28, part: it costs tokens, not frames: what waits is merged, and none of it is lost."""
    async with served(rig, tmp_path) as r:
        slow = await ByHand.to(r.path)
        ask(slow, 4)
        await until(lambda: r.engine.stats().jobs > 0)
        await until(lambda: r.engine.stats().jobs == 0)
        assert r.host._streams._streams["by hand"].waiting_nbytes > 0
        got: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        num_messages = 0
        while sum(map(len, got.values())) < 16_000:
            kind, raw = await slow.receive()
            num_messages += kind == wire.REPORTS
            if kind == wire.REPORTS:
                for update in (u for r in decode_reports(raw) for u in r.frame.updates):
                    assert update.position == len(got[update.request, update.branch])
                    got[update.request, update.branch] += update.tokens
        assert [len(tokens) for tokens in got.values()] == [1000] * 16
        assert len({tuple(tokens) for tokens in got.values()}) == 1, "of one prompt"
        assert num_messages < 500, "of a thousand steps"
        slow.writer.close()


class Socket:
    """A `Sink` that is slow when the test says so, as one is that a receipt fills."""

    def __init__(self) -> None:
        self.is_slow = False
        self.updates: list[Update] = []

    def send(self, raw: bytes) -> None:
        self.updates += [u for report in decode_reports(raw) for u in report.frame.updates]

    def finish(self, refusal: str | None = None) -> None:
        """Nothing is to be closed."""


@pytest.mark.parametrize("seed", range(20))
async def test_reports_stay_in_order_whenever_the_socket_fills(seed: int) -> None:
    """In the middle of a turn, too; injected tokens stay apart, and drafts are counted once."""
    rng, socket = random.Random(seed), Socket()
    stream = Stream(
        "g", socket, on_batch=lambda *given: None, on_close=lambda stream: None, now=0.0
    )
    updates = [
        Update(
            *("r", 0, (2 * i, 2 * i + 1)),
            position=2 * i,
            finish="length" if i == 39 else None,
            drafts=rng.choice([None, (3, 1)]),
            injected=rng.choice(["", "", "", f"i{i}"]),
        )
        for i in range(40)
    ]
    for update in updates:
        stream.put(Report(*LIFE, Frame(1, (update,))))
        event = rng.randrange(4)
        if event == 0:
            await asyncio.sleep(0)
        elif event == 1 and not socket.is_slow:
            socket.is_slow = True
        elif event == 2 and socket.is_slow:
            socket.is_slow = False
            stream.resume()
    socket.is_slow = False
    stream.resume()
    assert [t for u in socket.updates for t in u.tokens] == list(range(80))
    assert [u.position for u in socket.updates] == [u.tokens[0] for u in socket.updates]
    assert [u.finish for u in socket.updates if u.finish] == ["length"]
    assert [u for u in socket.updates if u.injected] == [u for u in updates if u.injected]
    assert sum((u.drafts or (0,))[0] for u in socket.updates) == sum(3 for u in updates if u.drafts)
