"""Server-sent events, and answers that end as soon as their client hangs up."""

import asyncio
import logging
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

T = TypeVar("T")

_log = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()


def event(body: object) -> bytes:
    """`body` as one event. JSON has no raw newline, so it is one data line."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientGone, with `work` cancelled and over, on a disconnect.

    Runs in the caller's task, which the watcher cancels: a task of its own would cost as much again.
    """
    caller = asyncio.current_task()
    assert caller is not None
    is_gone = is_over = False

    def cancel(watcher: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if not (is_over or watcher.cancelled()):
            is_gone = True
            caller.cancel()

    watcher = asyncio.ensure_future(_disconnected(receive))
    watcher.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and caller.cancelling() == 1:
            raise ClientGone from None
        raise  # this task is cancelled from elsewhere
    finally:
        is_over = True
        watcher.cancel()
        if is_gone:
            caller.uncancel()  # however `work` took it


class EventStream(Response):
    """Sends events as they come, each at once; `close` runs at the end, however it comes about.

    A client that doesn't read loses its stream after `max_write_s`: its connection is cut. Where there is
    no event for `idle_s`, it gets `idle`.
    """

    media_type = "text/event-stream"

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
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
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
        with TimeLimit(self._max_write_s) as limit:
            writer = KeepAlive(send, self._idle, self._idle_s)
            async with aclosing(writer), aclosing(self._events) as events:
                num_sent = 0
                async for chunk in events:
                    is_last = chunk.endswith(DONE)
                    message = {
                        "type": "http.response.body",
                        "body": chunk,
                        "more_body": not is_last,
                    }
                    limit.begin()
                    await writer.write(message)
                    limit.end()
                    if is_last:
                        return
                    num_sent += 1
                    if num_sent % MAX_RUN == 0:
                        await asyncio.sleep(0)  # nothing above suspends while there is a backlog
                await writer.write({"type": "http.response.body", "body": b"", "more_body": False})


class KeepAlive:
    """Sends events, and `idle` after each `seconds` without one. One timer, as `TimeLimit`'s."""

    def __init__(self, send: Send, idle: bytes, seconds: float) -> None:
        self._send = send
        self._message = {"type": "http.response.body", "body": idle, "more_body": True}
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._is_busy = False
        self._writing: asyncio.Future[None] | None = None
        self._timer = self._loop.call_later(seconds, self._look)

    async def write(self, message: Message) -> None:
        """Send an event, after what is being written already."""
        self._is_busy = True
        if self._writing is not None:
            await self._writing
            self._writing = None
        await self._send(message)
        self._is_busy = False
        self._last = self._loop.time()

    async def aclose(self) -> None:
        self._timer.cancel()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
            if not self._writing.cancelled():
                self._writing.exception()  # its client has gone

    def _look(self) -> None:
        now = self._loop.time()
        if now < self._last + self._seconds:
            self._timer = self._loop.call_at(self._last + self._seconds, self._look)
            return
        is_written = self._writing is None or self._writing.done()
        if is_written and not self._is_busy:  # else its client doesn't read
            self._writing = asyncio.ensure_future(self._send(self._message))
        self._last = now
        self._timer = self._loop.call_later(self._seconds, self._look)


class TimeLimit:
    """Raises TimeoutError in its task if one of many short waits takes longer than `seconds`.

    One timer for all of them: a timer of its own would cost a write that doesn't wait as much again.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._since: float | None = None
        self._is_over = False
        self._timer = self._loop.call_later(seconds, self._look)

    def begin(self) -> None:
        """A wait begins."""
        self._since = self._loop.time()

    def end(self) -> None:
        """It is over."""
        self._since = None

    def __enter__(self) -> "TimeLimit":
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: object
    ) -> None:
        self._timer.cancel()
        if self._is_over and self._task.uncancel() == 0 and isinstance(error, CancelledError):
            raise TimeoutError from error

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._seconds
        if due <= now:
            self._is_over = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(due, self._look)
