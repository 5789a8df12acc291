"""Server-sent events, and answers that end as soon as their client hangs up."""

import asyncio
import logging
import math
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mallee.api.errors import ClientGone

DONE = b"data: [DONE]\n\n"
MAX_RUN = 64  # events of one write, and writes without a turn of the loop
MAX_WRITE_S = 60.0  # in which a client takes something of what was written
IDLE_S = 15.0  # of silence, after which proxies and clients are told that the stream lives
COMMENT = b": the answer goes on\n\n"  # which clients skip
LATE_S = 0.05  # of an answer, before its client is watched: a short one is over by then

_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()


def event(body: object) -> bytes:
    """`body` as one event. JSON has no raw newline, so it is one data line."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Client:
    """The receiving end of a request, and the one task that notices when its client has gone.

    It begins with the first work for the client, or `late_s` after it: a task costs more than a timer.
    """

    __slots__ = (
        "_caller",
        "_is_cancelled",
        "_receive",
        "_timer",
        "_watcher",
        "is_gone",
        "late_s",
    )

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._caller: asyncio.Task[Any] | None = None  # to be cancelled
        self._is_cancelled = False
        self.is_gone = False
        self.late_s = 0.0

    async def __call__(self) -> Message:
        return await self._receive()

    async def waits_for(self, work: Coroutine[Any, Any, T]) -> T:
        """As `unless_gone`."""
        if self._watcher is None and self._timer is None:
            if self.late_s:
                self._timer = asyncio.get_running_loop().call_later(self.late_s, self._watch)
            else:
                self._watch()
        if self.is_gone:
            work.close()
            raise ClientGone
        caller = asyncio.current_task()
        assert caller is not None
        assert self._caller is None, "one task at a time waits for one work"
        self._caller = caller
        try:
            return await work
        except asyncio.CancelledError:
            if self._is_cancelled and caller.cancelling() == 1:
                raise ClientGone from None
            raise  # this task is cancelled from elsewhere
        finally:
            self._caller = None
            if self._is_cancelled:
                caller.uncancel()  # however `work` took it

    def close(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    def _watch(self) -> None:
        self._timer = None
        self._watcher = asyncio.ensure_future(_disconnected(self._receive))
        self._watcher.add_done_callback(self._on_gone)

    def _on_gone(self, watcher: asyncio.Task[None]) -> None:
        if watcher.cancelled():
            return
        self.is_gone = True
        if self._caller is not None:
            self._is_cancelled = self._caller.cancel()


def watch_late(receive: Receive) -> None:
    """Have work that leaves nothing behind go on for `LATE_S` after its client has gone."""
    if isinstance(receive, Client):
        receive.late_s = LATE_S


def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """The result of `work`. Raises ClientGone, with `work` cancelled and over, on a disconnect.

    Runs in the caller's task, which the watcher cancels: a task of its own would cost as much again.
    """
    return receive.waits_for(work) if isinstance(receive, Client) else _waits_for(receive, work)


async def _waits_for(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    client = Client(receive)
    try:
        return await client.waits_for(work)
    finally:
        client.close()


class EventStream(Response):
    """Sends events as they come, each at once; `close` runs at the end, however it comes about.

    A client that doesn't read loses its stream after `max_write_s`: its connection is cut. Where there is
    no event for `idle_s`, it gets `idle`.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
        *,
        idle: bytes = COMMENT,
        idle_s: float = IDLE_S,
        max_write_s: float = MAX_WRITE_S,
    ) -> None:
        self.status_code, self.background = 200, None  # Response's own would give it a length
        self.raw_headers = [*_HEADERS, *((k.encode(), v.encode()) for k, v in headers.items())]
        self._events = events
        self._close = close
        self._idle = idle
        self._idle_s = idle_s
        self._max_write_s = max_write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except TimeoutError:
            # The answer is not complete, so the server cuts the connection.
            _log.warning("a client took nothing of its stream for %g s", self._max_write_s)
        except (ClientGone, OSError):
            return  # no reader is left
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        writer = Writer(send, self._max_write_s, self._idle, self._idle_s)
        async with writer, aclosing(self._events) as events:
            num_sent = 0
            async for chunk in events:
                is_last = chunk.endswith(DONE)
                await writer.write(
                    {"type": "http.response.body", "body": chunk, "more_body": not is_last}
                )
                if is_last:
                    return
                num_sent += 1
                if num_sent % MAX_RUN == 0:
                    await asyncio.sleep(0)  # nothing above suspends while there is a backlog
            await writer.write({"type": "http.response.body", "body": b"", "more_body": False})


class Writer:
    """Sends the messages of an answer, and `idle` (if it is some) after each `idle_s` without one.

    Its task gets TimeoutError if a message is not taken for `max_write_s`. One timer for all: one for each
    message would cost a write that doesn't wait as much again.
    """

    def __init__(
        self,
        send: Send,
        max_write_s: float = MAX_WRITE_S,
        idle: bytes = b"",
        idle_s: float = IDLE_S,
    ) -> None:
        self._send = send
        self._max_write_s = max_write_s
        self._idle = idle
        self._idle_s = idle_s if idle else math.inf
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._since: float | None = None  # of the write under way
        self._last = self._loop.time()  # end of the last one
        self._idling: asyncio.Future[None] | None = None
        self._is_over = False
        self._timer = self._loop.call_later(min(self._idle_s, max_write_s), self._look)

    async def write(self, message: Message) -> None:
        """Send a message, after what is being written already."""
        self._since = self._loop.time()
        if self._idling is not None:
            await self._idling
            self._idling = None
        await self._send(message)
        self._last, self._since = self._loop.time(), None

    async def __aenter__(self) -> "Writer":
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: object
    ) -> None:
        self._timer.cancel()
        if self._idling is not None:
            self._idling.cancel()
            await asyncio.wait([self._idling])
            if not self._idling.cancelled():
                self._idling.exception()  # its client has gone
        if self._is_over and self._task.uncancel() == 0 and isinstance(error, CancelledError):
            raise TimeoutError from error

    def _look(self) -> None:
        now = self._loop.time()
        if self._since is not None:
            due = self._since + self._max_write_s
            if due <= now:
                self._is_over = True
                self._task.cancel()
                return
        else:
            due = self._last + self._idle_s
            if due <= now:
                if self._idling is None or self._idling.done():  # else its client doesn't read
                    message = {"type": "http.response.body", "body": self._idle, "more_body": True}
                    self._idling = asyncio.ensure_future(self._send(message))
                self._last, due = now, now + self._idle_s
        self._timer = self._loop.call_at(min(due, now + self._max_write_s), self._look)
