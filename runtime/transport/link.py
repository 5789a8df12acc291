"""Links from a gateway to workers, over one connection to each process of them.

Commands go out in order, at most MAX_UNTAKEN_NBYTES of them without a receipt; frames come back as one
stream. Each worker's link gets a loss once; silence is loss.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeAlias

from mallee.protocol.codec import encode
from mallee.protocol.errors import MalleeError, WorkerLost
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command, Frame
from mallee.protocol.parcels import Life, decode_reports, pack

log = logging.getLogger(__name__)

OnFrame: TypeAlias = Callable[[Frame], None]
OnLost: TypeAlias = Callable[[str], None]

MAX_UNTAKEN_NBYTES = 64 << 20
LATE_S = 0.5  # a loop that wakes this much too late was held up itself
_NOTHING = encode(())


class Link(Protocol):
    """A gateway's connection to one life of one worker."""

    def send(self, command: Command) -> None:
        """Queue a command; the worker takes commands in this order. Ignored after loss or close."""
        ...

    @property
    def silence_s(self) -> float:
        """Seconds since the worker's host was heard last; infinite while it is not connected."""
        ...

    async def close(self) -> None:
        """No more callbacks; the worker ends what this gateway has running. Idempotent."""
        ...


class Transport(Protocol):
    """Makes links. `on_lost(reason)` is called at most once, and not after `close`.

    `on_frame` gets frames with updates, and each second of a worker with open requests of this gateway
    one without: its `step` tells whether a worker that has nothing to report goes on.
    """

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended a background task: no link can be relied upon then."""
        ...

    def link(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        on_frame: OnFrame,
        on_lost: OnLost,
    ) -> Link: ...


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


class WorkerLink:
    """One worker's share of the connection to its host. A `Link`."""

    __slots__ = ("_on_frame", "_on_lost", "host", "is_over", "life")

    def __init__(self, host: "HostLink", life: Life, on_frame: OnFrame, on_lost: OnLost) -> None:
        self.host = host
        self.life = life
        self._on_frame = on_frame
        self._on_lost = on_lost
        self.is_over = False

    def send(self, command: Command) -> None:
        if not self.is_over:
            self.host.put(self.life, command)

    @property
    def silence_s(self) -> float:
        return self.host.silence_s

    async def close(self) -> None:
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


class Connection(Protocol):
    """An open connection to a host, which tells its `HostLink` of reports, receipts and its end."""

    def send(self, batch: bytes) -> None:
        """Write a batch, unless the connection is over."""
        ...

    def end(self, reason: BaseException) -> None:
        """Close at once. Idempotent."""
        ...


class HostLink:
    """The connection to one host, until its last worker is given up. Belongs to one event loop."""

    def __init__(
        self,
        connect: Callable[["HostLink"], Awaitable[Connection]],
        times: LinkTimes,
        on_over: Callable[["HostLink"], None],
    ) -> None:
        """`connect` returns an open connection for it; raises OSError, or MalleeError for good."""
        self._connect = connect
        self._times = times
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._links: dict[Life, WorkerLink] = {}
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
        """Seconds since it was heard last; infinite while it is not connected."""
        return self._loop.time() - self._heard if self.is_connected else math.inf

    def attach(self, life: Life, on_frame: OnFrame, on_lost: OnLost) -> WorkerLink:
        """A link to one more life there, which has no other link."""
        assert not self.is_over, "the connection to this host is over"
        assert life not in self._links, f"{life} is linked already"
        link = self._links[life] = WorkerLink(self, life, on_frame, on_lost)
        return link

    def put(self, life: Life, command: Command | None) -> None:
        """Queue a command, or (None) that this life is given up."""
        self._queue.append((life, command))
        if self._connection is not None and not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def detach(self, link: WorkerLink) -> None:
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

    def _begin(self, connection: Connection) -> None:
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


def reason_of(error: BaseException) -> str:
    """The cause of a worker's loss, without the sentence that clients get around it."""
    if isinstance(error, WorkerLost):
        return str(error.fields["reason"])
    return str(error) or type(error).__name__
