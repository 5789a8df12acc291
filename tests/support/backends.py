"""Backends that answer by a script, a router in front of them, and raw HTTP to it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from mallee.actors.front.proxy.config import ProxyConfig
from mallee.actors.front.proxy.proxy import Proxy
from support.waiting import until

PAGE = """\
vllm:num_requests_running 0
vllm:num_requests_waiting 0
vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="4096"}} 1
process_start_time_seconds {started}
"""
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Received(NamedTuple):
    """One request as it arrived, its body by its framing."""

    head: bytes
    body: bytes

    @property
    def lines(self) -> list[bytes]:
        return self.head.split(b"\r\n")[1:]


Script = Callable[["Backend", Received, asyncio.StreamWriter], Awaitable[None]]


async def answer_plainly(
    backend: "Backend", request: Received, writer: asyncio.StreamWriter
) -> None:
    writer.write(PLAIN)


def answer(*pieces: bytes) -> Script:
    """These bytes, a write each."""

    async def script(_: "Backend", __: Received, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return script


class Backend:
    """A server with vLLM's metrics, whose other answers a script writes.

    A script that raises ends the connection.
    """

    def __init__(
        self, script: Script = answer_plainly, *, port: int = 0, models: str = "{}"
    ) -> None:
        self.script = script
        self.received: list[Received] = []
        self.num_open = 0
        self.block_size = 16
        self.started = 1_700_000_000
        self.metrics_status = b"200 OK"
        self.models = models
        self.key = b""  # that all of /v1 wants
        self._wanted_port = port
        self._writers: dict[asyncio.StreamWriter, asyncio.StreamReader] = {}

    async def __aenter__(self) -> "Backend":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._wanted_port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await until(lambda: not self._writers)

    def stop_listening(self) -> None:
        """Take no new connections; those that are open stay."""
        self._server.close()

    async def left(self, writer: asyncio.StreamWriter) -> None:
        """Return once the other side has ended the connection."""
        with suppress(OSError):
            assert not await self._writers[writer].read(1)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[writer] = reader
        self.num_open += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                request = await received(reader)
                await self._answer(request, writer)
                await writer.drain()
        self.num_open -= 1
        del self._writers[writer]
        writer.transport.abort()

    async def _answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        path = request.head.split(b" ")[1]
        if path == b"/metrics":
            page = PAGE.format(size=self.block_size, started=self.started).encode()
            head = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (self.metrics_status, len(page))
            writer.write(head + page)
        elif self.key and b"authorization: Bearer " + self.key not in request.lines:
            writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")
        elif path == b"/v1/models" and b"x-test" not in request.head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(self.models))
            writer.write(self.models.encode())
        else:
            self.received.append(request)
            await self.script(self, request, writer)


async def received(reader: asyncio.StreamReader) -> Received:
    """The next request. Raises IncompleteReadError at the end."""
    head = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n")
    values = {
        line.partition(b":")[0].lower(): line.partition(b":")[2].strip()
        for line in head.split(b"\r\n")[1:]
    }
    if values.get(b"transfer-encoding") == b"chunked":
        return Received(head, await chunks(reader))
    return Received(head, await reader.readexactly(int(values.get(b"content-length", 0))))


async def chunks(reader: asyncio.StreamReader) -> bytes:
    """A chunked body. Raises IncompleteReadError if it is cut."""
    body = b""
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        piece = await reader.readexactly(size + 2)
        assert piece.endswith(b"\r\n")
        if not size:
            return body
        body += piece[:-2]


class Answered(NamedTuple):
    """An answer as a client reads it."""

    status: int
    lines: list[bytes]
    body: bytes

    def value(self, name: str) -> str | None:
        found = [line for line in self.lines if line.lower().startswith(name.encode() + b":")]
        return found[0].partition(b":")[2].strip().decode() if found else None

    @property
    def passed(self) -> list[tuple[bytes, bytes]]:
        """Names and values of its lines, but for those of one hop and those that the router adds."""
        own = (b"x-mallee-", b"transfer-encoding:")
        lines = [line for line in self.lines if not line.lower().startswith(own)]
        return [
            (name, value.strip()) for name, _, value in (each.partition(b":") for each in lines)
        ]


class Wire:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)

    async def answer(self, *, is_head: bool = False) -> Answered:
        """The next answer. Raises IncompleteReadError if it is cut."""
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n")
            first, *lines = head.split(b"\r\n")
            found = Answered(int(first.split(b" ")[1]), lines, b"")
            if is_head or found.status in (100, 204, 304):
                return found
            if found.value("transfer-encoding") == "chunked":
                return found._replace(body=await chunks(self.reader))
            length = found.value("content-length")
            if length is None:
                return found._replace(body=await self.reader.read())
            return found._replace(body=await self.reader.readexactly(int(length)))

    async def ask(self, message: bytes, **options: Any) -> Answered:
        self.send(message)
        return await self.answer(**options)

    async def is_closed(self) -> bool:
        async with asyncio.timeout(10):
            return await self.reader.read(1) == b""


@asynccontextmanager
async def wire(port: int) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def routed(
    backends: Sequence[Backend], num_ready: int | None = None, **more: Any
) -> AsyncIterator[Proxy]:
    """A router before backends, once it has asked them."""
    endpoints = tuple(each.address for each in backends)
    config = ProxyConfig(listen="127.0.0.1:0", endpoints=endpoints, **{"scrape_s": 0.05, **more})
    async with Proxy(config) as proxy:
        wanted = len(backends) if num_ready is None else num_ready
        await until(lambda: proxy.is_ready and len(proxy.router.workers()) == wanted)
        yield proxy
        await until(lambda: proxy.router.stats().booked_requests == 0)
        assert (proxy.num_buffered, proxy.room.num_kept) == (0, 0)
        assert proxy.failure is None
        proxy.router.check()


def post(body: bytes, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    head = "\r\n".join((f"POST {path} HTTP/1.1", "Host: router", *lines))
    return head.encode() + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"
