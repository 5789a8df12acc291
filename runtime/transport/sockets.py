"""A gateway's end of the connections, over Unix sockets and TCP."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias, cast

from mallee.protocol.errors import ConfigError, MalleeError
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.parcels import REFUSED, Life
from mallee.runtime.tasks import Tasks
from mallee.runtime.transport import wire
from mallee.runtime.transport.address import Way, parse_address
from mallee.runtime.transport.greeting import DialerGreeting, Secret
from mallee.runtime.transport.link import Connection, HostLink, Link, LinkTimes, OnFrame, OnLost

log = logging.getLogger(__name__)

Dial: TypeAlias = Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]]
"""Opens a connection for the protocol that it is given. Raises OSError, MalleeError."""


class GatewayConnection(asyncio.Protocol):
    """One connection to a host, from its greeting on. A `Connection`."""

    def __init__(self, link: "HostLink", greeting: DialerGreeting) -> None:
        self._link = link
        self._greeting = greeting
        self._messages = wire.Messages()
        self._transport: asyncio.Transport | None = None
        self._failure: BaseException | None = None
        self._is_open = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, raw in self._messages.feed(data):
                if self._failure is not None:
                    return
                self._take(kind, raw)
        except Exception as error:  # loop top of the link: after any error the host is lost
            if not isinstance(error, MalleeError):
                log.exception("a message of a worker's process was not taken in")
            self.end(error)

    def connection_lost(self, error: Exception | None) -> None:
        how = "it closed the connection" if error is None else f"the connection broke: {error}"
        self._fail(ConnectionError(how))

    def send(self, batch: bytes) -> None:
        self._write(wire.BATCH, batch)

    def end(self, reason: BaseException) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._fail(reason)

    def _take(self, kind: int, raw: bytes) -> None:
        if kind == wire.REPORTS and self._is_open:
            self._link.on_reports(raw)
        elif kind == wire.TAKEN and self._is_open:
            self._link.on_receipt(wire.read_receipt(raw))
        elif kind == wire.REFUSED:
            reason = f"{REFUSED}{raw.decode(errors='replace')}"
            self.end(ConnectionError(reason) if self._is_open else ConfigError(reason))
        elif (answer := self._greeting.take(raw)) is not None:
            self._write(wire.GREETING, answer)
        else:
            self._messages.max_nbytes = wire.MAX_MESSAGE_NBYTES
            self._is_open = True
            if not self.opened.done():
                self.opened.set_result(None)

    def _write(self, kind: int, raw: bytes) -> None:
        if self._transport is not None and self._failure is None:
            self._transport.write(wire.message(kind, raw))

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None:
            return
        self._failure = error
        if self._is_open:
            self._link.lose_all(str(error) or type(error).__name__)
        elif not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # retrieved: its waiter may be gone


class SocketTransport:
    """A `Transport`: one connection to each process of workers, by the address in its lease."""

    def __init__(
        self,
        gateway: str,
        secret: Secret,
        *,
        node: str = "",
        tls: ssl.SSLContext | None = None,
        times: LinkTimes | None = None,
    ) -> None:
        """`node`: the machine whose Unix sockets can be reached. `tls` is for TCP."""
        self._gateway = gateway
        self._secret = secret
        self._node = node
        self._tls = tls
        self._times = times or LinkTimes()
        self._hosts: dict[Way, HostLink] = {}
        self._tasks = Tasks("the connections to workers")
        self._opening: dict[Way, asyncio.Task[None]] = {}
        self._refusal: str | None = None

    @property
    def failure(self) -> BaseException | None:
        return self._tasks.failure

    def link(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        on_frame: OnFrame,
        on_lost: OnLost,
    ) -> Link:
        way, dial = self._way_to(address)
        host = self._hosts.get(way)
        if host is None:
            host = HostLink(partial(self._connect, dial), self._times, partial(self._forget, way))
            self._hosts[way] = host
            self._opening[way] = self._tasks.spawn(host.open())
        return host.attach(Life(worker, incarnation), on_frame, on_lost)

    def _way_to(self, address: str) -> tuple[Way, Dial]:
        loop = asyncio.get_running_loop()
        try:
            way = parse_address(address).way_from(self._node)
        except MalleeError as error:
            return address, partial(_fail, error)
        if isinstance(way, str):
            return way, lambda factory: loop.create_unix_connection(factory, way)
        return way, lambda factory: loop.create_connection(factory, *way, ssl=self._tls)

    async def _connect(self, dial: Dial, link: HostLink) -> Connection:
        connection = GatewayConnection(link, DialerGreeting(self._secret, self._gateway))
        try:
            await dial(lambda: connection)
            await connection.opened
        except BaseException as error:
            connection.end(error)
            if isinstance(error, MalleeError) and str(error) != self._refusal:
                self._refusal = str(error)  # a thousand workers may refuse alike: one line
                log.error("no connection to a worker's process: %s", error)
            raise
        self._refusal = None
        return connection

    def _forget(self, way: Way, host: HostLink) -> None:
        if self._hosts.get(way) is host:
            del self._hosts[way]
            self._tasks.cancel(self._opening.pop(way))


async def _fail(error: MalleeError, factory: Callable[[], asyncio.Protocol]) -> None:
    raise error
