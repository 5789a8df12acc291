"""The listener of a process: accepts connections, reads their kind, passes each to the server of that kind.

The kind is one byte in the clear, before TLS: commands are served by the event loop and KV by threads, which
each have a TLS of their own. Bytes beyond it stay in the socket, which changes hands.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, cast

from mallee.protocol.errors import Unavailable
from mallee.runtime.tasks import Tasks
from mallee.runtime.transport import wire
from mallee.runtime.transport.address import Address
from mallee.runtime.transport.greeting import Kind

log = logging.getLogger(__name__)

GREETING_S: Final = 5.0
CLOSE_S: Final = 10.0
MAX_GREETINGS: Final = 64  # connections of one kind, or none yet, that have not greeted


class Server(Protocol):
    """Serves the connections of one kind. Belongs to the event loop of its listener."""

    @property
    def kind(self) -> Kind: ...

    async def serve(
        self, sock: socket.socket, tls: ssl.SSLContext | None, on_greeted: Callable[[], None]
    ) -> None:
        """Take over `sock`, from TLS and the greeting on, until it is over.

        `on_greeted` is called once the greeting is. Raises OSError: it broke before it was open.
        """
        ...

    def end(self) -> None:
        """Have every connection end, after its last bytes, and those that come. Idempotent."""
        ...


class Opening(asyncio.BufferedProtocol):
    """A connection until its kind is known."""

    def __init__(self, listener: "Listener", tls: ssl.SSLContext | None) -> None:
        self._listener = listener
        self._tls = tls
        self._kind = bytearray(1)  # no byte more leaves the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(GREETING_S, self._refuse, "it did not greet in time")
        self._admit(b"")

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._kind

    def buffer_updated(self, nbytes: int) -> None:
        kind = bytes(self._kind)
        if self._transport.is_closing() or not self._admit(kind):
            return
        self._transport.pause_reading()
        sock = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        sock.setblocking(False)
        self._timer.cancel()
        self._listener.begin(self, kind, sock, self._tls)
        self._transport.abort()  # its own descriptor alone

    def connection_lost(self, error: Exception | None) -> None:
        if not self._timer.cancelled():
            self._timer.cancel()
            self._listener.greeted(self)

    def abort(self) -> None:
        """End it at once."""
        self._transport.abort()

    def _admit(self, kind: bytes) -> bool:
        is_admitted = self._listener.admit(self, kind)
        if not is_admitted:
            self._refuse("too many connections at once have not greeted yet")
        return is_admitted

    def _refuse(self, reason: str) -> None:
        if self._tls is None:
            raw = wire.refusal(Unavailable(reason))
            self._transport.write(wire.message(wire.REFUSED, raw))
        log.warning("a connection is refused: %s", reason)
        self._transport.close()


class Listener:
    """Listens for connections to one process. Belongs to one event loop."""

    def __init__(self, *servers: Server, node: str = "", tls: ssl.SSLContext | None = None) -> None:
        """`node` is this machine. `tls` is for TCP; Unix sockets are kept by their folder."""
        self.address = Address(node)
        self.tasks = Tasks("the connections of this process")
        self._servers = {server.kind.first: server for server in servers}
        self._tls = tls
        self._accepting: list[asyncio.Server] = []
        self._greeting: dict[Opening, bytes] = {}  # with their kinds, as far as known

    async def listen_unix(self, path: str) -> None:
        """Listen on a Unix socket too, which all may open that may enter its folder."""
        loop = asyncio.get_running_loop()
        self._accepting.append(await loop.create_unix_server(partial(Opening, self, None), path))
        self.address = self.address._replace(path=path)

    async def listen_tcp(self, host: str) -> None:
        """Listen on a TCP port too, which the system chooses."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(partial(Opening, self, self._tls), host, 0)
        self._accepting.append(server)
        self.address = self.address._replace(tcp=server.sockets[0].getsockname()[:2])

    async def close(self) -> None:
        """End every connection once its last bytes are out, or after `CLOSE_S`. Idempotent."""
        accepting, self._accepting = self._accepting, []
        for each in accepting:
            each.close()
        for opening in list(self._greeting):
            opening.abort()
        for server in self._servers.values():
            server.end()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.tasks.finish()
        except TimeoutError:
            log.error("connections did not end within %.0f s", CLOSE_S)
        if self.address.path is not None:
            with suppress(OSError):
                os.unlink(self.address.path)

    # Connections that are opening

    def admit(self, opening: Opening, kind: bytes) -> bool:
        """Whether there is room for one more of this kind: no kind takes the room of another."""
        self._greeting[opening] = kind
        return sum(each == kind for each in self._greeting.values()) <= MAX_GREETINGS

    def greeted(self, opening: Opening) -> None:
        """It has greeted, or is over. Idempotent."""
        self._greeting.pop(opening, None)

    def begin(
        self, opening: Opening, kind: bytes, sock: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        """Have the connection served as one of `kind`."""
        self.tasks.spawn(self._serve(opening, kind, sock, tls), name="a connection")

    async def _serve(
        self, opening: Opening, kind: bytes, sock: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        on_greeted = partial(self.greeted, opening)
        try:
            if (server := self._servers.get(kind)) is None:
                raise ConnectionError(f"its kind {kind!r} is not served here")
            await server.serve(sock, tls, on_greeted)
        except OSError as error:
            log.info("a connection ended before it was open: %s", error)
            sock.close()
        finally:
            on_greeted()
