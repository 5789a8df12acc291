"""httpx transports that send all requests of a client over one WebSocket, `/v1/live`.

    from mallee.client import AsyncMallee
    from mallee.client.transports.live import AsyncLiveTransport

    async with AsyncMallee(transport=AsyncLiveTransport("http://127.0.0.1:8000")) as client:
        ...

`LiveTransport` is that of a `Mallee`. OpenAI's clients take them too, by `http_client`. The socket is opened
by the first request, and again after it was lost: requests that ran on it end with `httpx.ReadError`. A
stream that is closed early is cancelled. Events that are not read wait here. Files (exports and imports) need
HTTP.
"""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from mallee.client.calls import KEY_HEADER, SALT_HEADER, checked_url
from mallee.protocol.errors import InvalidParameter

T = TypeVar("T")

NO_HEADERS: Final[Mapping[str, str]] = {}
CLOSE_S: Final = 10.0  # for the last frames, then the socket is left to itself
_PATH: Final = "/v1/live"
_END: Final = b"data: [DONE]\n\n"
_EVENTS: Final = "text/event-stream"


class _Frame(msgspec.Struct, frozen=True, kw_only=True):
    """A frame of the server's: an event, or the last one of a request."""

    status: int
    id: str | None = None
    done: bool = False
    event: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    retry_after: int | None = None

    @property
    def is_last(self) -> bool:
        return self.done or self.error is not msgspec.UNSET

    @property
    def sse(self) -> bytes:
        """The event, or the end, as over HTTP."""
        return _END if self.event is msgspec.UNSET else b"data: " + bytes(self.event) + b"\n\n"

    @property
    def is_whole(self) -> bool:
        """Whether it is an answer in one body."""
        return self.body is not msgspec.UNSET or self.error is not msgspec.UNSET

    def response(self, stream: Any = None) -> httpx.Response:
        """The answer, whole or with its stream."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if not self.is_whole:
            return httpx.Response(
                self.status, headers={**headers, "content-type": _EVENTS}, stream=stream
            )
        if self.error is not msgspec.UNSET:
            raw = b'{"error":' + bytes(self.error) + b"}"
        else:
            assert self.body is not msgspec.UNSET
            raw = bytes(self.body)
        headers["content-type"] = "application/json"
        return httpx.Response(self.status, headers=headers, content=raw)


class _Wire:
    """Names requests, writes their frames, and makes of the server's; no I/O."""

    def __init__(self, base_url: str, api_key: str | None, headers: Mapping[str, str]) -> None:
        """Raises InvalidParameter."""
        self.url = "ws" + checked_url(base_url).removeprefix("http") + _PATH
        self._prefix = urlsplit(self.url).path.removesuffix(_PATH)
        self.headers = dict(headers)
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._names = count()

    def frame(self, request: httpx.Request, content: bytes) -> tuple[str, str]:
        """A request's name and its frame. Raises InvalidParameter for what a frame can't say."""
        name = str(next(self._names))
        path = request.url.raw_path.decode().removeprefix(self._prefix)
        salt = request.headers.get(SALT_HEADER)
        if salt is not None and salt != self.headers.get(SALT_HEADER):
            raise InvalidParameter(
                "cache_salt", salt, f"give {SALT_HEADER} in the transport's headers, for all of it"
            )
        frame: dict[str, Any] = {"id": name, "method": request.method, "path": path}
        if KEY_HEADER in request.headers:
            frame["idempotency_key"] = request.headers[KEY_HEADER]
        if content:
            if not request.headers.get("content-type", "").startswith("application/json"):
                raise InvalidParameter("path", path, "send files by a client without its transport")
            frame["body"] = msgspec.Raw(content)
        return name, msgspec.json.encode(frame).decode()


def _cancel(name: str) -> str:
    return msgspec.json.encode({"id": name, "cancel": True}).decode()


def _read(text: str | bytes) -> _Frame:
    return msgspec.json.decode(text, type=_Frame)


def _limit_s(request: httpx.Request, kind: str) -> float | None:
    limit: float | None = request.extensions.get("timeout", {}).get(kind)
    return limit


class AsyncLiveTransport(httpx.AsyncBaseTransport):
    """All requests over one WebSocket, of one event loop. `headers` go with the handshake."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        self._wire = _Wire(base_url, api_key, headers)
        self._opening = asyncio.Lock()
        self._socket: ClientConnection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Queue[_Frame | Exception]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx's errors, InvalidParameter."""
        name, text = self._wire.frame(request, await request.aread())
        socket = await self._open(request)
        frames = self._waiting[name] = asyncio.Queue()
        try:
            await socket.send(text)
            first = await self._next(frames, request)
        except ConnectionClosed as error:
            self._waiting.pop(name, None)
            raise httpx.ReadError(f"the live connection ended: {error}", request=request) from error
        except BaseException:
            await self._give_up(name)
            raise
        if first.is_whole:
            self._waiting.pop(name, None)
            return first.response()
        return first.response(_AsyncEvents(self, request, name, first))

    async def _open(self, request: httpx.Request) -> ClientConnection:
        async with self._opening:
            if self._socket is None or self._reading is None or self._reading.done():
                limit_s = _limit_s(request, "connect")
                try:
                    self._socket = await connect(
                        self._wire.url,
                        additional_headers=self._wire.headers,
                        open_timeout=limit_s,
                        max_size=None,
                    )
                except (OSError, InvalidHandshake) as error:
                    raise httpx.ConnectError(str(error), request=request) from error
                self._reading = asyncio.create_task(self._receive(self._socket, self._waiting))
            return self._socket

    async def _receive(
        self, socket: ClientConnection, waiting: dict[str, asyncio.Queue[_Frame | Exception]]
    ) -> None:
        try:
            async for text in socket:
                frame = _read(text)
                if (frames := waiting.get(frame.id or "")) is not None:
                    frames.put_nowait(frame)
            end = "closed"
        except ConnectionClosed as error:
            end = str(error)
        finally:
            self._waiting = {}
        if socket.close_code is not None:
            end = f"{end} ({socket.close_code})"
        for frames in waiting.values():
            frames.put_nowait(httpx.ReadError(f"the live connection ended: {end}"))

    async def _next(
        self, frames: "asyncio.Queue[_Frame | Exception]", request: httpx.Request
    ) -> _Frame:
        try:
            async with asyncio.timeout(_limit_s(request, "read")):
                found = await frames.get()
        except TimeoutError as error:
            raise httpx.ReadTimeout("no frame came in time", request=request) from error
        if isinstance(found, Exception):
            raise found
        return found

    async def _give_up(self, name: str) -> None:
        """Forget a request, and have it cancelled."""
        if self._waiting.pop(name, None) is not None and self._socket is not None:
            with suppress(ConnectionClosed):
                await self._socket.send(_cancel(name))

    async def aclose(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._reading is not None:
            await self._reading


class _AsyncEvents(httpx.AsyncByteStream):
    def __init__(
        self, transport: AsyncLiveTransport, request: httpx.Request, name: str, first: _Frame
    ) -> None:
        self._transport = transport
        self._request = request
        self._name = name
        self._frames = transport._waiting[name]
        self._first = first

    async def __aiter__(self) -> AsyncIterator[bytes]:
        frame = self._first
        yield frame.sse
        while not frame.is_last:
            frame = await self._transport._next(self._frames, self._request)
            if frame.is_last:
                self._transport._waiting.pop(self._name, None)
            yield frame.sse

    async def aclose(self) -> None:
        if not self._first.is_last:
            await self._transport._give_up(self._name)


class LiveTransport(httpx.BaseTransport):
    """All requests over one WebSocket, for any number of threads: an `AsyncLiveTransport` in one thread."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        self._inner = AsyncLiveTransport(base_url, api_key=api_key, headers=headers)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="live", daemon=True)
        self._thread.start()
        # A program that closes nothing ends, too: streams that are left then find the loop closed.
        self._end = weakref.finalize(self, _end, self._inner, self._loop, self._thread)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx's errors, InvalidParameter."""
        request.read()
        found = self._run(self._inner.handle_async_request(request))
        if not isinstance(found.stream, httpx.SyncByteStream):
            assert isinstance(found.stream, httpx.AsyncByteStream)
            found.stream = _Events(self, found.stream)
        return found

    def close(self) -> None:
        self._end()

    def _run(self, step: Coroutine[Any, Any, T]) -> T:
        """The step's result; an interrupt cancels it. Raises httpx.ReadError once the transport is closed."""
        if self._loop.is_closed():
            step.close()
            raise httpx.ReadError("the transport is closed")
        running = asyncio.run_coroutine_threadsafe(step, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise


def _end(
    inner: AsyncLiveTransport, loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    """Close the socket and end the thread, which may be the one that collects garbage here."""
    if threading.current_thread() is thread:
        loop.stop()
        return
    closing = asyncio.run_coroutine_threadsafe(asyncio.wait_for(inner.aclose(), CLOSE_S), loop)
    with suppress(TimeoutError):
        closing.result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class _Events(httpx.SyncByteStream):
    def __init__(self, transport: LiveTransport, inner: httpx.AsyncByteStream) -> None:
        self._transport = transport
        self._inner = inner

    def __iter__(self) -> Iterator[bytes]:
        chunks = self._inner.__aiter__()

        async def following() -> bytes | None:
            return await anext(chunks, None)

        while (chunk := self._transport._run(following())) is not None:
            yield chunk

    def close(self) -> None:
        with suppress(httpx.ReadError):  # the transport was closed, and with it the stream
            self._transport._run(self._inner.aclose())
