"""Ordered commands to one worker, its frames back: the link between a gateway and a life of a worker.

The rules (one batch in flight, loss is told once, silence is loss) are the same for every carrier; a
carrier is only a `Channel`: how to hand over one batch, how to read the frames.
"""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import NamedTuple, Protocol, TypeAlias

from mallee.actors.worker_host import WorkerHost
from mallee.protocol.errors import WorkerLost
from mallee.protocol.ids import WorkerId
from mallee.protocol.messages import Command, Frame, decode_frame, encode_commands

log = logging.getLogger(__name__)

OnFrame: TypeAlias = Callable[[Frame], None]
OnLost: TypeAlias = Callable[[str], None]

CLOSE_TIMEOUT_S = 2.0
LATE_S = 0.5  # a loop that wakes this much too late was held up itself


class LinkTimes(NamedTuple):
    """Seconds. Workers send a frame each second, so `silence_s` must be well above one."""

    connect_s: float = 10.0  # a worker's lease can be here before the way to it is known
    retry_s: float = 0.2
    silence_s: float = 5.0
    keepalive_s: float = 2.0


class LinkStats(NamedTuple):
    commands: int
    batches: int
    frames: int
    is_connected: bool
    is_over: bool


class Link(Protocol):
    """One life of one worker, as a gateway sees it."""

    def send(self, command: Command) -> None:
        """Queue a command; the worker takes commands in this order. Ignored after loss or close."""
        ...

    async def close(self) -> None:
        """No more callbacks; the worker ends what this gateway has running. Idempotent."""
        ...

    def stats(self) -> LinkStats: ...


class Transport(Protocol):
    """Makes links. `on_lost(reason)` is called at most once, and not after `close`."""

    def link(self, worker: WorkerId, address: str, on_frame: OnFrame, on_lost: OnLost) -> Link: ...


class Channel(Protocol):
    """How bytes get to one worker. Errors of any type mean the worker can't be reached."""

    async def submit(self, raw: bytes) -> None:
        """The worker took the batch."""
        ...

    def frames(self) -> AsyncGenerator[bytes, None]:
        """Encoded frames. Closing the generator tells the worker."""
        ...


class ChannelLink:
    """A `Link` over a `Channel`. Belongs to one event loop."""

    def __init__(
        self,
        worker: WorkerId,
        channel: Channel,
        on_frame: OnFrame,
        on_lost: OnLost,
        times: LinkTimes,
    ) -> None:
        self.worker = worker
        self._channel = channel
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._times = times
        self._queue: list[Command] = []
        self._news = asyncio.Event()
        self._connected = asyncio.Event()
        self._is_over = False
        self._commands = self._batches = self._frames = 0
        # An empty context: a carrier must not take these for parts of the request now being served.
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    def send(self, command: Command) -> None:
        if self._is_over:
            return
        self._queue.append(command)
        self._news.set()

    async def close(self) -> None:
        self._is_over = True
        self._queue.clear()
        if self._task is asyncio.current_task():
            return  # called from on_lost: the task is at its end
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)

    def stats(self) -> LinkStats:
        return LinkStats(
            self._commands,
            self._batches,
            self._frames,
            self._connected.is_set(),
            self._is_over,
        )

    def check(self) -> None:
        """Raises AssertionError if commands wait on a link that is over."""
        assert not (self._is_over and self._queue)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                group.create_task(self._send())
        except* Exception as errors:  # loop top of the link: whatever broke it, the worker is lost
            reason = "; ".join(_reason(error) for error in errors.exceptions)
            log.info("link to worker %s is over: %s", self.worker, reason)
            if not self._is_over:
                self._is_over = True
                self._queue.clear()
                self._on_lost(reason)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._times.connect_s
        while True:
            try:
                await self._read_stream(deadline)
            except Exception as error:
                if self._connected.is_set() or loop.time() + self._times.retry_s > deadline:
                    raise
                log.debug("worker %s is not reachable yet: %r", self.worker, error)
            await asyncio.sleep(self._times.retry_s)

    async def _read_stream(self, deadline: float) -> None:
        """Until the stream breaks. Raises always."""
        loop = asyncio.get_running_loop()
        async with aclosing(self._channel.frames()) as frames:
            while True:
                is_new = not self._connected.is_set()
                until = deadline if is_new else loop.time() + self._times.silence_s
                raw = await self._next_until(frames, until)
                if raw is None:
                    raise WorkerLost(self.worker, "it ended the stream of frames")
                self._take(raw)

    async def _next_until(self, frames: AsyncGenerator[bytes, None], until: float) -> bytes | None:
        """The next frame, None at the end. Raises WorkerLost at the loop's time `until`.

        If the loop itself was held up, the frame may wait to be read: then it gets another moment.
        """
        loop = asyncio.get_running_loop()
        coming = asyncio.ensure_future(anext(frames, None))
        try:
            while not (await asyncio.wait({coming}, timeout=max(0.0, until - loop.time())))[0]:
                if loop.time() < until + LATE_S:
                    what = "has gone silent" if self._connected.is_set() else "could not be reached"
                    raise WorkerLost(self.worker, f"it {what} in time")
                until = loop.time() + LATE_S
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming})

    def _take(self, raw: bytes) -> None:
        frame = decode_frame(raw)
        self._connected.set()
        self._frames += 1
        if frame.updates and not self._is_over:
            self._on_frame(frame)

    async def _send(self) -> None:
        await self._connected.wait()
        while True:
            try:
                async with asyncio.timeout(self._times.keepalive_s):
                    await self._news.wait()
            except TimeoutError:
                pass  # an empty batch then says that this gateway lives
            self._news.clear()
            batch, self._queue = self._queue, []
            self._commands += len(batch)
            self._batches += 1
            await self._channel.submit(encode_commands(batch))


def _reason(error: BaseException) -> str:
    if isinstance(error, WorkerLost):
        return str(error.fields["reason"])
    return str(error) or type(error).__name__


class LocalTransport:
    """A `Transport` to hosts in this process, by address."""

    def __init__(
        self, gateway: str, hosts: Mapping[str, WorkerHost], *, times: LinkTimes | None = None
    ) -> None:
        self._gateway = gateway
        self._hosts = hosts
        self._times = times or LinkTimes()

    def link(self, worker: WorkerId, address: str, on_frame: OnFrame, on_lost: OnLost) -> Link:
        channel = _LocalChannel(self._gateway, worker, address, self._hosts)
        return ChannelLink(worker, channel, on_frame, on_lost, self._times)


class _LocalChannel:
    def __init__(
        self, gateway: str, worker: WorkerId, address: str, hosts: Mapping[str, WorkerHost]
    ) -> None:
        self._gateway = gateway
        self._worker = worker
        self._address = address
        self._hosts = hosts

    async def submit(self, raw: bytes) -> None:
        await self._host().submit(self._gateway, raw)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._host().frames(self._gateway)) as frames:
            async for raw in frames:
                yield raw

    def _host(self) -> WorkerHost:
        host = self._hosts.get(self._address)
        if host is None:
            raise WorkerLost(self._worker, f"there is nobody at {self._address}")
        return host
