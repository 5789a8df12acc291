"""The connection of a gateway to one host, shared by its workers: a queue there, a stream back.

Commands travel in order with one batch in flight. Each worker's link gets a loss once; silence is
loss. The rules are the same for every carrier, which is only a `Channel`: it hands over one batch and
reads the stream. A `Transport` has one connection for each address.
"""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple, Protocol, TypeAlias

from mallee.protocol.codec import encode
from mallee.protocol.errors import WorkerLost
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command, Frame
from mallee.protocol.parcels import Life, decode_reports, pack

log = logging.getLogger(__name__)

OnFrame: TypeAlias = Callable[[Frame], None]
OnLost: TypeAlias = Callable[[str], None]

CLOSE_TIMEOUT_S = 2.0
LATE_S = 0.5  # a loop that wakes this much too late was held up itself


class LinkTimes(NamedTuple):
    """Seconds. Hosts send something each second, so `silence_s` must be well above one."""

    connect_s: float = 10.0  # a worker's lease can be here before its address can be reached
    retry_s: float = 0.2
    silence_s: float = 5.0
    keepalive_s: float = 2.0


class Channel(Protocol):
    """Carries bytes to one host. Errors of any type mean that it can't be reached."""

    async def submit(self, raw: bytes) -> None:
        """The host took the batch."""
        ...

    def frames(self) -> AsyncGenerator[bytes, None]:
        """Encoded reports. Closing the generator ends the stream at the host."""
        ...


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

    async def close(self) -> None:
        if not self.is_over:
            self.is_over = True
            await self.host.detach(self)

    def take(self, frame: Frame) -> None:
        """Take in a frame of the worker."""
        if frame.updates and not self.is_over:
            self._on_frame(frame)

    def lose(self, reason: str) -> None:
        """End the link: this life, or the connection to it, is over."""
        if not self.is_over:
            self.is_over = True
            self._on_lost(reason)


class HostLink:
    """The connection to one host over a `Channel`, until its last worker is given up.

    Belongs to one event loop.
    """

    def __init__(
        self,
        address: str,
        channel: Channel,
        times: LinkTimes,
        on_over: Callable[["HostLink"], None],
    ) -> None:
        self.address = address
        self._channel = channel
        self._times = times
        self._on_over = on_over
        self._links: dict[Life, WorkerLink] = {}
        self._queue: list[tuple[Life, Command | None]] = []  # None: the gateway gives this life up
        self._filled = asyncio.Event()
        self._connected = asyncio.Event()
        self._is_over = False
        self.num_batches = 0
        # An empty context: a carrier must not take these for parts of the request now being served.
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    def attach(self, life: Life, on_frame: OnFrame, on_lost: OnLost) -> WorkerLink:
        """A link to one more life there, which has no other link."""
        assert not self._is_over, "the connection to this host is over"
        assert life not in self._links, f"{life} is linked already"
        link = self._links[life] = WorkerLink(self, life, on_frame, on_lost)
        return link

    def put(self, life: Life, command: Command | None) -> None:
        """Queue a command, or (None) that this life is given up."""
        self._queue.append((life, command))
        self._filled.set()

    async def detach(self, link: WorkerLink) -> None:
        """Remove a closed link; with the last one the connection ends."""
        if self._links.get(link.life) is not link:
            return
        del self._links[link.life]
        if self._links:
            self.put(link.life, None)
            return
        self._end()
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)

    def check(self) -> None:
        """Raises AssertionError if commands wait on a connection that is over, or a link on it is over."""
        assert not (self._is_over and (self._queue or self._links))
        assert not any(link.is_over for link in self._links.values())

    def _end(self) -> None:
        self._is_over = True
        self._queue.clear()
        self._on_over(self)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                group.create_task(self._send())
        except* Exception as errors:  # loop top of the link: after any error the host is lost
            reason = "; ".join(reason_of(error) for error in errors.exceptions)
            log.info("the link to %s is over: %s", self.address, reason)
            if not self._is_over:
                self._lose_all(reason)

    def _lose_all(self, reason: str) -> None:
        self._end()
        links, self._links = list(self._links.values()), {}
        for link in links:
            try:
                link.lose(reason)
            except Exception:  # loop top, as in `_run`: the others are lost, too
                log.exception("the loss of worker %s was not taken in", link.life.worker)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._times.connect_s
        while True:
            try:
                await self._read_stream(deadline)
            except Exception as error:
                if self.is_connected or loop.time() + self._times.retry_s > deadline:
                    raise
                log.debug("%s is not reachable yet: %r", self.address, error)
            await asyncio.sleep(self._times.retry_s)

    async def _read_stream(self, deadline: float) -> None:
        """Read until the stream breaks. Raises always."""
        loop = asyncio.get_running_loop()
        async with aclosing(self._channel.frames()) as frames:
            while True:
                is_new = not self.is_connected
                until = deadline if is_new else loop.time() + self._times.silence_s
                raw = await self._next_until(frames, until)
                if raw is None:
                    raise ConnectionError("it ended the stream of frames")
                self._take(raw)

    async def _next_until(self, frames: AsyncGenerator[bytes, None], until: float) -> bytes | None:
        """The next message, None at the end. Raises ConnectionError at the loop's time `until`.

        If the loop itself was held up, a message may wait to be read: then it gets another moment.
        """
        loop = asyncio.get_running_loop()
        coming = asyncio.ensure_future(anext(frames, None))
        try:
            while not (await asyncio.wait({coming}, timeout=max(0.0, until - loop.time())))[0]:
                if loop.time() < until + LATE_S:
                    what = "has gone silent" if self.is_connected else "could not be reached"
                    raise ConnectionError(f"it {what} in time")
                until = loop.time() + LATE_S
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming})
            if not coming.cancelled():
                coming.exception()  # retrieved, even if the other half of the link broke first

    def _take(self, raw: bytes) -> None:
        reports = decode_reports(raw)
        self._connected.set()
        for report in reports:
            life = Life(WorkerId(report.worker), Incarnation(report.incarnation))
            link = self._links.get(life)
            if link is None:
                continue  # given up meanwhile
            link.take(report.frame)
            if report.lost is not None:
                self._links.pop(life, None)
                link.lose(report.lost)
                if not self._links:
                    raise ConnectionError("no worker of ours is left there")

    async def _send(self) -> None:
        await self._connected.wait()
        while True:
            try:
                async with asyncio.timeout(self._times.keepalive_s):
                    await self._filled.wait()
            except TimeoutError:
                pass  # an empty batch is then this gateway's sign of life
            self._filled.clear()
            batch, self._queue = self._queue, []
            self.num_batches += 1
            await self._channel.submit(encode(pack(batch)))


def reason_of(error: BaseException) -> str:
    """The cause of a worker's loss, without the sentence that clients get around it."""
    if isinstance(error, WorkerLost):
        return str(error.fields["reason"])
    return str(error) or type(error).__name__


class Link(Protocol):
    """A gateway's connection to one life of one worker."""

    def send(self, command: Command) -> None:
        """Queue a command; the worker takes commands in this order. Ignored after loss or close."""
        ...

    async def close(self) -> None:
        """No more callbacks; the worker ends what this gateway has running. Idempotent."""
        ...


class Transport(Protocol):
    """Makes links. `on_lost(reason)` is called at most once, and not after `close`."""

    def link(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        on_frame: OnFrame,
        on_lost: OnLost,
    ) -> Link: ...


class ChannelTransport:
    """A `Transport` over channels: one connection to each address, shared by the workers there."""

    def __init__(
        self, open_channel: Callable[[str], Channel], *, times: LinkTimes | None = None
    ) -> None:
        self._open = open_channel
        self._times = times or LinkTimes()
        self._hosts: dict[str, HostLink] = {}

    def link(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        address: str,
        on_frame: OnFrame,
        on_lost: OnLost,
    ) -> Link:
        host = self._hosts.get(address)
        if host is None:
            host = HostLink(address, self._open(address), self._times, self._forget)
            self._hosts[address] = host
        return host.attach(Life(worker, incarnation), on_frame, on_lost)

    def _forget(self, host: HostLink) -> None:
        if self._hosts.get(host.address) is host:
            del self._hosts[host.address]


class HostLike(Protocol):
    """A host as channels and socket servers need it."""

    async def submit(self, gateway: str, raw: bytes) -> None: ...

    def frames(self, gateway: str) -> AsyncGenerator[bytes, None]: ...
