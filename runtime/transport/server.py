"""A host's end of the connections: listens, greets gateways, passes batches in and reports out."""

import asyncio
import logging
import os
import ssl
from contextlib import suppress
from functools import partial
from typing import Protocol, cast

from mallee.protocol.errors import MalleeError
from mallee.runtime.transport import wire
from mallee.runtime.transport.address import Address
from mallee.runtime.transport.greeting import ListenerGreeting, Secret
from mallee.runtime.transport.link import reason_of

log = logging.getLogger(__name__)

GREETING_S = 5.0
MAX_GREETINGS = 64  # connections that have not greeted yet
BUFFER_NBYTES = 256 << 10  # beyond it a reader is slow, and reports are merged
LINGER_S = 2.0  # for the last bytes of a connection that ends


class Sink(Protocol):
    """The way to one gateway, for encoded reports."""

    @property
    def is_slow(self) -> bool:
        """Whether so much waits for the gateway that no more should be written."""
        ...

    def send(self, raw: bytes) -> None: ...

    def finish(self, refusal: str | None = None) -> None:
        """Close, after what was sent and, if the gateway is turned away, the reason."""
        ...


class Inlet(Protocol):
    """A host's stream for one gateway."""

    def submit(self, raw: bytes) -> asyncio.Future[None] | None:
        """Take a batch; done when the engines have, None: they will before any that comes later.

        Raises CodecError and WorkerLost: nothing was taken.
        """
        ...

    def resume(self) -> None:
        """The sink is slow no more."""
        ...

    def close(self) -> None:
        """The gateway has gone. Idempotent."""
        ...


class HostLike(Protocol):
    """A host as servers need it."""

    def open(self, gateway: str, sink: Sink) -> Inlet:
        """Begin a stream, instead of the gateway's last; nothing is sent yet. Raises WorkerLost."""
        ...


class HostConnection(asyncio.Protocol):
    """One connection, from its greeting on. A `Sink`."""

    def __init__(self, server: "SocketServer") -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._messages = wire.Messages()
        self._greeting = ListenerGreeting(server.secret)
        self._inlet: Inlet | None = None
        self._taken_nbytes = 0  # that no receipt is out for
        self.is_slow = False

    @property
    def is_greeting(self) -> bool:
        return self._inlet is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=BUFFER_NBYTES)
        self._timer = self._loop.call_later(GREETING_S, self._refuse, "it did not greet in time")
        self._server.connections.add(self)
        if sum(c.is_greeting for c in self._server.connections) > MAX_GREETINGS:
            self._refuse("too many connections at once have not greeted yet")
        else:
            self._transport.write(wire.message(wire.GREETING, self._greeting.challenge()))

    def data_received(self, data: bytes) -> None:
        try:
            for kind, raw in self._messages.feed(data):
                if self._transport.is_closing():
                    return
                if self._inlet is None:
                    self._greet(raw)
                elif kind == wire.BATCH:
                    self._take(self._inlet, raw)
        except MalleeError as error:
            self._refuse(reason_of(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._server.forget(self)
        if self._inlet is not None:
            self._inlet.close()

    def pause_writing(self) -> None:
        self.is_slow = True

    def resume_writing(self) -> None:
        self.is_slow = False
        if self._inlet is not None:
            self._inlet.resume()

    def send(self, raw: bytes) -> None:
        self._transport.write(self._receipts() + wire.message(wire.REPORTS, raw))

    def finish(self, refusal: str | None = None) -> None:
        if not self._transport.is_closing():
            if refusal is not None:
                self._transport.write(wire.message(wire.REFUSED, refusal.encode()))
            self._timer.cancel()
            self._timer = self._loop.call_later(LINGER_S, self._transport.abort)
            self._transport.close()

    def _greet(self, raw: bytes) -> None:
        gateway, welcome = self._greeting.take(raw)
        self._inlet = self._server.host.open(gateway, self)
        self._timer.cancel()
        self._messages.max_nbytes = wire.MAX_MESSAGE_NBYTES
        self._transport.write(wire.message(wire.GREETING, welcome))

    def _take(self, inlet: Inlet, raw: bytes) -> None:
        taken = inlet.submit(raw)
        if taken is None:
            self._owe(len(raw))
        else:
            taken.add_done_callback(partial(self._taken, len(raw)))

    def _taken(self, nbytes: int, taken: asyncio.Future[None]) -> None:
        """Give the receipt: of a worker that failed meanwhile its own report tells."""
        if taken.cancelled():
            return
        error = taken.exception()
        if error is not None and not isinstance(error, MalleeError):
            log.error("a batch was not taken", exc_info=error)
            self._refuse("a batch was not taken")
        else:
            self._owe(nbytes)

    def _owe(self, nbytes: int) -> None:
        """Have a receipt go out with the next reports, or at the end of this turn of the loop."""
        if not self._taken_nbytes:
            self._loop.call_soon(self._give_receipts)
        self._taken_nbytes += nbytes

    def _give_receipts(self) -> None:
        if self._taken_nbytes and not self._transport.is_closing():
            self._transport.write(self._receipts())

    def _receipts(self) -> bytes:
        nbytes, self._taken_nbytes = self._taken_nbytes, 0
        return wire.receipt(nbytes) if nbytes else b""

    def _refuse(self, reason: str) -> None:
        if not self._transport.is_closing():
            log.warning("a gateway's connection is refused: %s", reason)
            self.finish(reason)


class SocketServer:
    """Listens for the gateways of one host. Belongs to one event loop."""

    def __init__(
        self, host: HostLike, secret: Secret, *, node: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        """`node` is this machine. `tls` is for TCP; Unix sockets are kept by their folder."""
        self.host = host
        self.secret = secret
        self.connections: set[HostConnection] = set()
        self.address = Address(node)
        self._tls = tls
        self._servers: list[asyncio.Server] = []
        self._is_empty = asyncio.Event()

    async def listen_unix(self, path: str) -> None:
        """Listen on a Unix socket too, which all may open that may enter its folder."""
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_unix_server(self._connection, path))
        self.address = self.address._replace(path=path)

    async def listen_tcp(self, host: str) -> None:
        """Listen on a TCP port too, which the system chooses."""
        loop = asyncio.get_running_loop()
        limit_s = None if self._tls is None else GREETING_S
        server = await loop.create_server(
            self._connection, host, 0, ssl=self._tls, ssl_handshake_timeout=limit_s
        )
        self._servers.append(server)
        self.address = self.address._replace(tcp=server.sockets[0].getsockname()[:2])

    async def close(self) -> None:
        """No connection is left, after the last bytes of each are out. Idempotent."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        for connection in list(self.connections):
            connection.finish()
        if self.connections:
            self._is_empty.clear()
            await self._is_empty.wait()  # at most LINGER_S
        if self.address.path is not None:
            with suppress(OSError):
                os.unlink(self.address.path)

    def _connection(self) -> HostConnection:
        return HostConnection(self)

    def forget(self, connection: HostConnection) -> None:
        """A connection is over."""
        self.connections.discard(connection)
        if not self.connections:
            self._is_empty.set()
