"""A host with a real engine behind real sockets, and gateways that read nothing, stall or die. K28, part."""

import asyncio
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mallee.actors.transport import wire
from mallee.actors.transport.greeting import DialerGreeting
from mallee.actors.transport.server import BUFFER_NBYTES, SocketServer
from mallee.actors.transport.sockets import SocketTransport
from mallee.protocol.codec import encode
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Frame, Generate, Limits, Sampling, pack_tokens
from mallee.protocol.parcels import Parcel, decode_reports
from support.local_transport import SECRET
from support.waiting import until

LIFE = WorkerId("w0"), Incarnation(1)


@asynccontextmanager
async def served(rig: Any, folder: Path, **options: Any) -> AsyncIterator[Any]:
    """A rig whose host listens at `rig.path`."""
    r = rig(num_blocks=4096, **options)
    r.path = str(folder / "h.sock")
    server = SocketServer(r.host, SECRET)
    await server.listen_unix(r.path)
    r.host.address = str(server.address)
    try:
        async with r:
            yield r
    finally:
        await server.close()


def generate(request: str, max_tokens: int, n: int = 1, logprobs: int = -1) -> Generate:
    return Generate(
        request,
        pack_tokens(range(1, 11)),
        Limits(max_tokens, ignore_eos=True),
        Sampling(logprobs=logprobs),
        n,
    )


def talk(path: str) -> socket.socket:
    """A connection whose greeting was right, with small buffers; blocks."""
    found = socket.socket(socket.AF_UNIX)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(path)
    greeting = DialerGreeting(SECRET, "by hand")
    answer = greeting.take(_body(found))
    assert answer is not None
    found.sendall(wire.message(wire.GREETING, answer))
    assert greeting.take(_body(found)) is None
    return found


def _body(found: socket.socket) -> bytes:
    size = int.from_bytes(found.recv(4, socket.MSG_WAITALL), "little")
    return found.recv(1 + size, socket.MSG_WAITALL)[1:]


class Listener:
    """A gateway that reads."""

    def __init__(self, address: str) -> None:
        self.frames: list[Frame] = []
        self.lost: list[str] = []
        self.transport = SocketTransport("reader", SECRET)
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
        deaf = await asyncio.to_thread(talk, r.path)
        reader = Listener(r.host.address)
        await reader.ask("before", 8)
        commands = tuple(generate(f"x{i}", 1000, n=4, logprobs=8) for i in range(4))
        deaf.sendall(wire.message(wire.BATCH, encode([Parcel(*LIFE, commands)])))
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
        deaf.close()
        await reader.link.close()


async def test_a_gateway_that_stalls_gets_every_token_later(rig: Any, tmp_path: Path) -> None:
    async with served(rig, tmp_path) as r:
        slow = await asyncio.to_thread(talk, r.path)
        commands = tuple(generate(f"x{i}", 600, n=4, logprobs=8) for i in range(2))
        slow.sendall(wire.message(wire.BATCH, encode([Parcel(*LIFE, commands)])))
        await until(lambda: r.host.stats().open_requests == 2)
        await until(lambda: r.engine.stats().jobs == 0)
        assert r.host._streams._streams["by hand"].waiting_nbytes > 0
        got = await asyncio.to_thread(_tokens, slow, 8 * 600)
        assert got == 8 * 600
        slow.close()


def _tokens(found: socket.socket, wanted: int) -> int:
    """The number of tokens that came, once those wanted did: each at its position."""
    got: Counter[tuple[str, int]] = Counter()
    with found.makefile("rb") as stream:
        while got.total() < wanted:
            head = stream.read(5)
            raw = stream.read(int.from_bytes(head[:4], "little"))
            if head[4] == wire.REPORTS:
                for update in (u for r in decode_reports(raw) for u in r.frame.updates):
                    assert update.position == got[update.request, update.branch]
                    got[update.request, update.branch] += len(update.tokens)
    return got.total()


async def test_a_gateway_that_goes_frees_its_branches_at_once(rig: Any, tmp_path: Path) -> None:
    async with served(rig, tmp_path) as r:
        r.forward.delay_s = 0.002
        gone = await asyncio.to_thread(talk, r.path)
        gone.sendall(wire.message(wire.BATCH, encode([Parcel(*LIFE, (generate("x", 900),))])))
        await until(lambda: r.engine.stats().jobs == 1)
        gone.close()
        await until(lambda: r.engine.stats().jobs == 0, 1.0)
        assert not r.host.gateways


DIES = """
import asyncio, sys
from mallee.actors.transport.server import SocketServer
from support.local_transport import SECRET

class Host:
    def open(self, gateway, sink):
        return self
    def submit(self, raw):
        pass
    def close(self):
        pass

async def serve():
    server = SocketServer(Host(), SECRET)
    await server.listen_unix(sys.argv[1])
    await asyncio.Event().wait()

asyncio.run(serve())
"""


async def test_a_worker_that_is_killed_is_lost_within_milliseconds(tmp_path: Path) -> None:
    path = str(tmp_path / "h.sock")
    tests = Path(__file__).parents[2]  # where `support` is
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, path, cwd=tests)
    lost: list[float] = []
    transport = SocketTransport("g", SECRET)
    transport.link(
        *LIFE, f"unix:{path}", lambda frame: None, lambda reason: lost.append(time.monotonic())
    )
    await until(lambda: transport._hosts[path].is_connected)
    child.kill()
    killed = time.monotonic()
    await until(lambda: bool(lost), 1.0)
    assert lost[0] - killed < 0.5
    await child.wait()
