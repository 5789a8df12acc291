"""Links from a gateway to workers, over one connection to each process of them: a Unix socket or TCP.

Commands go out in order, at most MAX_UNTAKEN_NBYTES of them without a receipt; frames come back as one
stream. Each worker's link gets a loss once; silence is loss.
"""

import asyncio
import logging
import math
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeAlias, cast

from mallee.protocol.codec import encode
from mallee.protocol.errors import ConfigError, MalleeError, Unavailable, WorkerLost
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command, Frame
from mallee.protocol.parcels import REFUSED, Life, decode_reports, pack
from mallee.runtime.tasks import Tasks
from mallee.runtime.transport import wire
from mallee.runtime.transport.address import Way, parse_address
from mallee.runtime.transport.greeting import COMMANDS, DialerGreeting, Secret

log = logging.getLogger(__name__)

OnFrame: TypeAlias = Callable[[Frame], None]
OnLost: TypeAlias = Callable[[str], None]
Dial: TypeAlias = Callable[["Connection"], Awaitable[None]]
"""Opens a connection. Raises OSError, MalleeError."""

MAX_UNTAKEN_NBYTES = 64 << 20
LATE_S = 0.5  # a loop that wakes this much too late was held up itself
_NOTHING = encode(())


class LinkTimes(NamedTuple):
    """Seconds. Hosts send something each second, so `silence_s` must be well above one."""

    connect_s: float = 10.0  # a worker's lease can be here before its address can be reached
    retry_s: float = 0.2
    silence_s: float = 5.0
    keepalive_s: float = 2.0

    @property
    def tick_s(self) -> float:
        """Time between two looks at the clock."""
        return min(self.keepalive_s, self.silence_s / 4)


class Link:
    """A gateway's link to one life of one worker: its share of the connection to the host."""

    __slots__ = ("_on_frame", "_on_lost", "host", "is_over", "life")

    def __init__(self, host: "HostLink", life: Life, on_frame: OnFrame, on_lost: OnLost) -> None:
        self.host = host
        self.life = life
        self._on_frame = on_frame
        self._on_lost = on_lost
        self.is_over = False

    def send(self, command: Command) -> None:
        """Queue a command; the worker takes commands in this order. Ignored after loss or close."""
        if not self.is_over:
            self.host.put(self.life, command)

    @property
    def silence_s(self) -> float:
        """Seconds since the worker's host was heard last; infinite while it is not connected."""
        return self.host.silence_s

    async def close(self) -> None:
        """No more callbacks; the worker ends what this gateway has running. Idempotent."""
        if not self.is_over:
            self.is_over = True
            self.host.detach(self)

    def take(self, frame: Frame) -> None:
        """Take in a frame of the worker."""
        if not self.is_over:
            self._on_frame(frame)

    def lose(self, reason: str) -> None:
        """End the link: this life, or the connection to it, is over."""
        if not self.is_over:
            self.is_over = True
            self._on_lost(reason)


class HostLink:
    """The connection to one host, until its last worker is given up. Belongs to one event loop."""

    def __init__(
        self,
        connect: Callable[["HostLink"], Awaitable["Connection"]],
        times: LinkTimes,
        on_over: Callable[["HostLink"], None],
    ) -> None:
        """`connect` returns an open connection for it; raises OSError, or MalleeError for good."""
        self._connect = connect
        self._times = times
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._links: dict[Life, Link] = {}
        self._queue: list[tuple[Life, Command | None]] = []  # None: the gateway gives this life up
        self._connection: Connection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = self._looked = self._said = 0.0
        self._untaken_nbytes = 0
        self._is_flushing = False
        self.is_over = False
        self.num_batches = 0

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def silence_s(self) -> float:
        return self._loop.time() - self._heard if self.is_connected else math.inf

    def attach(self, life: Life, on_frame: OnFrame, on_lost: OnLost) -> Link:
        """A link to one more life there, which has no other link."""
        assert not self.is_over, "the connection to this host is over"
        assert life not in self._links, f"{life} is linked already"
        link = self._links[life] = Link(self, life, on_frame, on_lost)
        return link

    def put(self, life: Life, command: Command | None) -> None:
        """Queue a command, or (None) that this life is given up."""
        self._queue.append((life, command))
        if self._connection is not None and not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def detach(self, link: Link) -> None:
        """Remove a closed link; with the last one the connection ends."""
        if self._links.get(link.life) is not link:
            return
        del self._links[link.life]
        if self._links:
            self.put(link.life, None)
        else:
            self._end(ConnectionError("no worker there is wanted any more"))

    def check(self) -> None:
        """Raises AssertionError if commands wait on a connection that is over, or a link on it is over."""
        assert not (self.is_over and (self._queue or self._links))
        assert not any(link.is_over for link in self._links.values())
        assert self._untaken_nbytes >= 0

    async def open(self) -> None:
        """Connect, trying again while the process may not listen yet; else every link is lost."""
        deadline = self._loop.time() + self._times.connect_s
        while not self.is_over:
            try:
                async with asyncio.timeout_at(deadline):
                    connection = await self._connect(self)
            except MalleeError as error:
                self.lose_all(str(error))
            except OSError as error:
                if self._loop.time() + self._times.retry_s > deadline:
                    self.lose_all(str(error) or "it could not be reached in time")
                    return
                log.debug("not reachable yet: %r", error)
                await asyncio.sleep(self._times.retry_s)
            else:
                self._begin(connection)
                return

    def _begin(self, connection: "Connection") -> None:
        if self.is_over:
            connection.end(ConnectionError("it is not wanted any more"))
            return
        self._connection = connection
        self._heard = self._looked = self._said = self._loop.time()
        self._timer = self._loop.call_later(self._times.tick_s, self._tick)
        self._flush()

    # The connection

    def on_reports(self, raw: bytes) -> None:
        """Take in frames, and losses of single workers."""
        self._heard = self._loop.time()
        for report in decode_reports(raw):
            life = Life(WorkerId(report.worker), Incarnation(report.incarnation))
            link = self._links.get(life)
            if link is None:
                continue  # given up meanwhile
            link.take(report.frame)
            if report.lost is not None:
                self._links.pop(life, None)
                link.lose(report.lost)
                if not self._links and not self.is_over:
                    self._end(ConnectionError("no worker of ours is left there"))

    def on_receipt(self, nbytes: int) -> None:
        """Take note that the host has taken so much."""
        self._heard = self._loop.time()
        self._untaken_nbytes -= nbytes

    def lose_all(self, reason: str) -> None:
        """End every link: the connection is over. Idempotent."""
        if self.is_over:
            return
        links, self._links = list(self._links.values()), {}
        self._end(ConnectionError(reason))
        for link in links:
            try:
                link.lose(reason)
            except Exception:  # loop top, as in `data_received`: the others are lost, too
                log.exception("the loss of worker %s was not taken in", link.life.worker)

    def _flush(self) -> None:
        """Send what has been queued, as one batch."""
        self._is_flushing = False
        if not self._queue or self._connection is None:
            return
        batch, self._queue = self._queue, []
        self._send(encode(pack(batch)))
        if self._untaken_nbytes > MAX_UNTAKEN_NBYTES:
            self.lose_all(f"it takes no commands: {self._untaken_nbytes} bytes of them wait")

    def _send(self, raw: bytes) -> None:
        assert self._connection is not None
        self.num_batches += 1
        self._untaken_nbytes += len(raw)
        self._said = self._loop.time()
        self._connection.send(raw)

    def _tick(self) -> None:
        """Say that this gateway lives, and find out whether the host does."""
        now = self._loop.time()
        if now > self._looked + self._times.tick_s + LATE_S:
            # This loop was held up: messages may wait to be read.
            self._heard = max(self._heard, now - self._times.silence_s + LATE_S)
        self._looked = now
        if now > self._heard + self._times.silence_s:
            self.lose_all("it has gone silent")
            return
        if now >= self._said + self._times.keepalive_s:
            self._send(_NOTHING)
        self._timer = self._loop.call_later(self._times.tick_s, self._tick)

    def _end(self, reason: BaseException) -> None:
        self.is_over = True
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end(reason)
        self._on_over(self)


class Connection(asyncio.Protocol):
    """One connection to a host, from its greeting on. Tells `link` of reports, receipts and its end."""

    def __init__(self, link: HostLink, greeting: DialerGreeting) -> None:
        self._link = link
        self._greeting = greeting
        self._messages = wire.Messages()
        self._transport: asyncio.Transport | None = None
        self._failure: BaseException | None = None
        self._is_open = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(COMMANDS.first)

    async def secure(self, tls: ssl.SSLContext) -> None:
        """Go on with TLS, after the kind. Raises OSError."""
        assert self._transport is not None, "it is connected"
        loop = asyncio.get_running_loop()
        self._transport = await loop.start_tls(self._transport, self, tls)

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
        """Write a batch, unless the connection is over."""
        self._write(wire.BATCH, batch)

    def end(self, reason: BaseException) -> None:
        """Close at once. Idempotent."""
        if self._transport is not None:
            self._transport.abort()
        self._fail(reason)

    def _take(self, kind: int, raw: bytes) -> None:
        if kind == wire.REPORTS and self._is_open:
            self._link.on_reports(raw)
        elif kind == wire.TAKEN and self._is_open:
            self._link.on_receipt(wire.read_receipt(raw))
        elif kind == wire.REFUSED:
            refusal = wire.read_refusal(raw)
            reason, is_passing = f"{REFUSED}{refusal.message}", isinstance(refusal, Unavailable)
            is_passing = is_passing or self._is_open
            self.end(ConnectionError(reason) if is_passing else ConfigError(reason))
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


class Transport:
    """Makes links: one connection to each process of workers, by the address in its lease."""

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
        """The exception that ended a background task: no link can be relied upon then."""
        return self._tasks.failure

    def link(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        on_frame: OnFrame,
        on_lost: OnLost,
    ) -> Link:
        """`on_lost(reason)` is called at most once, and not after `close`.

        `on_frame` gets frames with updates, and each second of a worker with open requests of this gateway
        one without: its `step` tells whether a worker that has nothing to report goes on.
        """
        way, dial = self._way_to(address)
        host = self._hosts.get(way)
        if host is None:
            host = HostLink(partial(self._connect, dial), self._times, partial(self._forget, way))
            self._hosts[way] = host
            self._opening[way] = self._tasks.spawn(host.open())
        return host.attach(Life(worker, incarnation), on_frame, on_lost)

    def _way_to(self, address: str) -> tuple[Way, Dial]:
        try:
            way = parse_address(address).way_from(self._node)
        except MalleeError as error:
            return address, partial(_fail, error)
        return way, partial(dial, way, None if isinstance(way, str) else self._tls)

    async def _connect(self, dial: Dial, link: HostLink) -> Connection:
        connection = Connection(link, DialerGreeting(self._secret, self._gateway, COMMANDS))
        try:
            await dial(connection)
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


async def dial(way: Way, tls: ssl.SSLContext | None, connection: Connection) -> None:
    """Open `connection` to the place `way`. Raises OSError."""
    loop = asyncio.get_running_loop()
    if isinstance(way, str):
        await loop.create_unix_connection(lambda: connection, way)
    else:
        await loop.create_connection(lambda: connection, *way)
    if tls is not None:
        await connection.secure(tls)


async def _fail(error: MalleeError, connection: Connection) -> None:
    raise error


def reason_of(error: BaseException) -> str:
    """The cause of a worker's loss, without the sentence that clients get around it."""
    if isinstance(error, WorkerLost):
        return str(error.fields["reason"])
    return str(error) or type(error).__name__
