"""Links over Unix sockets: commands and frames between processes of one machine, without Ray.

A message is its length (u32, little-endian), a kind (one byte) and its bytes. A gateway sends its name
first, then batches; the host answers each with a receipt, and sends its stream of reports in between.
"""

import asyncio
import contextlib
import logging
import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing

from mallee.actors.transport.link import ChannelTransport, HostLike, LinkTimes, reason_of
from mallee.protocol.errors import CodecError, MalleeError

log = logging.getLogger(__name__)

HELLO, BATCH, TAKEN, REFUSED, REPORTS = b"h", b"b", b"t", b"x", b"r"
MAX_MESSAGE_NBYTES = 256 << 20
_HEAD = struct.Struct("<IB")


def _message(kind: bytes, raw: bytes) -> bytes:
    return _HEAD.pack(len(raw), kind[0]) + raw


async def _read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(kind, bytes). Raises IncompleteReadError at the end, CodecError."""
    size, kind = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if size > MAX_MESSAGE_NBYTES:
        raise CodecError(f"a message of {size} bytes: at most {MAX_MESSAGE_NBYTES}", nbytes=size)
    return bytes((kind,)), await reader.readexactly(size)


class SocketServer:
    """A host's end: listens on `path`, which only its owner may open if the folder is private."""

    def __init__(self, host: HostLike, path: str) -> None:
        self._host = host
        self._path = path
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def close(self) -> None:
        """No connection is left."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            _, name = await _read(reader)
            gateway = name.decode()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_reports(gateway, writer))
                await self._listen(gateway, reader, writer)
        except* (asyncio.IncompleteReadError, ConnectionError):
            pass  # the gateway has gone
        except* (MalleeError, UnicodeDecodeError) as errors:
            log.info("a gateway's connection ends: %s", errors.exceptions[0])
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _send_reports(self, gateway: str, writer: asyncio.StreamWriter) -> None:
        async with aclosing(self._host.frames(gateway)) as frames:
            async for raw in frames:
                writer.write(_message(REPORTS, raw))
                await writer.drain()
        raise ConnectionError("the host ended the stream")

    async def _listen(
        self, gateway: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            _, raw = await _read(reader)
            try:
                await self._host.submit(gateway, raw)
            except MalleeError as error:
                writer.write(_message(REFUSED, reason_of(error).encode()))
                raise
            writer.write(_message(TAKEN, b""))


def socket_transport(gateway: str, *, times: LinkTimes | None = None) -> ChannelTransport:
    """Links to hosts behind a `SocketServer`; an address is its path."""
    return ChannelTransport(lambda address: _SocketChannel(gateway, address), times=times)


class _SocketChannel:
    def __init__(self, gateway: str, path: str) -> None:
        self._gateway = gateway
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._taken: asyncio.Future[None] | None = None

    async def submit(self, raw: bytes) -> None:
        if self._writer is None:
            raise ConnectionError(f"not connected to {self._path}")
        self._taken = asyncio.get_running_loop().create_future()
        self._writer.write(_message(BATCH, raw))
        await self._taken

    async def frames(self) -> AsyncGenerator[bytes, None]:
        reader, self._writer = await asyncio.open_unix_connection(self._path)
        self._writer.write(_message(HELLO, self._gateway.encode()))
        try:
            while True:
                kind, raw = await _read(reader)
                if kind == REPORTS:
                    yield raw
                elif kind == TAKEN:
                    self._answer(None)
                else:
                    refusal = ConnectionError(raw.decode(errors="replace"))
                    self._answer(refusal)
                    raise refusal
        except asyncio.IncompleteReadError:
            return  # the stream of frames is over
        finally:
            self._answer(ConnectionError("the connection is closed"))
            self._writer.close()
            self._writer = None

    def _answer(self, error: Exception | None) -> None:
        taken, self._taken = self._taken, None
        if taken is None or taken.done():
            return
        if error is None:
            taken.set_result(None)
        else:
            taken.set_exception(error)
            taken.exception()  # retrieved: its waiter may be gone
