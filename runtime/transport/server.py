"""A host's end of the connections for commands: greets gateways, passes batches in and reports out."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from mallee.protocol.errors import ConfigError, MalleeError
from mallee.runtime.transport import wire
from mallee.runtime.transport.greeting import COMMANDS, ListenerGreeting, Secret
from mallee.runtime.transport.link import reason_of
from mallee.runtime.transport.listener import GREETING_S

log = logging.getLogger(__name__)

BUFFER_NBYTES = 256 << 10  # beyond it a reader is slow, and reports are merged
LINGER_S = 2.0  # for the last bytes of a connection that ends
MAX_OWED_NBYTES = 1 << 20  # of batches whose receipt may wait for reports or a heartbeat


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

    def __init__(self, server: "CommandServer", on_greeted: Callable[[], None]) -> None:
        self._server = server
        self._on_greeted = on_greeted
        self._loop = asyncio.get_running_loop()
        self._messages = wire.Messages()
        self._greeting = ListenerGreeting(server.secret, COMMANDS)
        self._inlet: Inlet | None = None
        self._taken_nbytes = 0  # that no receipt is out for
        self.is_slow = False
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=BUFFER_NBYTES)
        self._timer = self._loop.call_later(GREETING_S, self._refuse, "it did not greet in time")
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
        if not self.lost.done():
            self.lost.set_result(None)
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
                raw = wire.refusal(ConfigError(refusal))
                self._transport.write(wire.message(wire.REFUSED, raw))
            self._timer.cancel()
            self._timer = self._loop.call_later(LINGER_S, self._transport.abort)
            self._transport.close()

    def _greet(self, raw: bytes) -> None:
        gateway, welcome = self._greeting.take(raw)
        self._inlet = self._server.host.open(gateway, self)
        self._timer.cancel()
        self._on_greeted()
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
        """Have a receipt go out with the next reports, or at once if much is owed."""
        self._taken_nbytes += nbytes
        if self._taken_nbytes > MAX_OWED_NBYTES and not self._transport.is_closing():
            self._transport.write(self._receipts())

    def _receipts(self) -> bytes:
        nbytes, self._taken_nbytes = self._taken_nbytes, 0
        return wire.receipt(nbytes) if nbytes else b""

    def _refuse(self, reason: str) -> None:
        if not self._transport.is_closing():
            log.warning("a gateway's connection is refused: %s", reason)
            self.finish(reason)


class CommandServer:
    """Serves the gateways of one host. A `Server` of commands."""

    kind = COMMANDS

    def __init__(self, host: HostLike, secret: Secret) -> None:
        self.host = host
        self.secret = secret
        self.connections: set[HostConnection] = set()
        self._is_ended = False

    async def serve(
        self, sock: socket.socket, tls: ssl.SSLContext | None, on_greeted: Callable[[], None]
    ) -> None:
        connection = HostConnection(self, on_greeted)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: connection,
            sock,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else GREETING_S,
        )
        self.connections.add(connection)
        if self._is_ended:
            connection.finish()
        try:
            await connection.lost
        finally:
            self.connections.discard(connection)

    def end(self) -> None:
        """Each connection is over after LINGER_S at most."""
        self._is_ended = True
        for connection in self.connections:
            connection.finish()
