"""`/v1/live`: requests and their answers over one WebSocket, both ways at once.

A frame of the client's begins a request (`id`, `method`, `path`, `body`) or gives one up (`id`, `cancel`).
Each frame that goes back has the `id` of its request: one for each event of a stream, and exactly one that
is `done`, with the status. Requests run through the whole app (`live.inner`).

A gateway that stops lets the requests of its sockets end, begins none, and closes with STOPPING.

Nothing is collected for a client that doesn't read: its streams wait, and are given up as over HTTP.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from mallee.api.entry.decoding import parse
from mallee.api.entry.gate import CLOSING
from mallee.api.errors import error_body, error_response
from mallee.api.live.inner import check_path, run_inner
from mallee.api.sse import MAX_WRITE_S
from mallee.protocol.errors import (
    BadRequest,
    InvalidParameter,
    MalleeError,
    QuotaExceeded,
    Unavailable,
)

MAX_RUNNING: Final = 64  # requests of one socket
MAX_ID: Final = 64  # characters
INLINE_BYTES: Final = 32 << 10  # larger frames are read off the event loop
TOO_BIG, UNREAD, FAILED, STOPPING = 1009, 1008, 1011, 1012  # codes with which a socket is closed
_BEGINNINGS: Final = ("/v1/",)
_FILES: Final = ("/export", "/import", "/record")

_log = logging.getLogger(__name__)


class LiveFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A client's frame. `id` names its request, of this socket."""

    id: str
    cancel: bool = False
    method: Literal["GET", "POST", "DELETE"] = "POST"
    path: str = ""
    body: dict[str, Any] | None = None
    idempotency_key: str = ""


def is_foreign(headers: Headers) -> bool:
    """Whether a page of another origin asks: any site may open a socket to any server."""
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")


class LiveSocket:
    """The route, an ASGI app for WebSockets. Frames have at most `max_nbytes`."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        if is_foreign(socket.headers):
            await socket.close(UNREAD, "pages of another origin may not connect")  # answers 403
            return
        await socket.accept()
        talk = _Talk(socket, self._max_nbytes, scope.get(CLOSING) or asyncio.Event())
        code = FAILED
        try:
            async with asyncio.TaskGroup() as group:
                code = await talk.listen(group)
        except* TimeoutError:
            _log.warning("a client took nothing of its socket for %g s", MAX_WRITE_S)
            code = UNREAD
        except* (OSError, WebSocketDisconnect):
            code = 0  # it has gone
        if code:
            with suppress(TimeoutError):  # the server cuts the connection
                async with asyncio.timeout(MAX_WRITE_S):
                    await socket.close(code)


@dataclass(slots=True)
class _Running:
    """A request of the socket, and its client's wish that it end."""

    gone: asyncio.Event = field(default_factory=asyncio.Event)


class _Talk:
    """One socket's requests. Belongs to one event loop."""

    def __init__(self, socket: WebSocket, max_nbytes: int, closing: asyncio.Event) -> None:
        self._socket = socket
        self._closing = closing  # set when the gateway stops
        self._max_nbytes = max_nbytes
        self._running: dict[str, _Running] = {}
        self._untold: set[asyncio.Task[None]] = set()  # whose last frame is not written
        self._turn = asyncio.Lock()  # to write
        self._is_over = False  # nothing is written any more

    async def listen(self, group: asyncio.TaskGroup) -> int:
        """Take frames until the client leaves; the code to close with, or 0. Ends all its requests."""
        stay = asyncio.timeout(None)
        leaving = group.create_task(self._leave(stay))
        try:
            async with stay:
                return await self._listen(group)
        except TimeoutError:
            if not stay.expired():
                raise
            return STOPPING
        finally:
            leaving.cancel()
            self._is_over = True
            for each in self._running.values():
                each.gone.set()

    async def _leave(self, stay: asyncio.Timeout) -> None:
        """End the stay once the gateway stops and every request has had its last frame."""
        await self._closing.wait()
        while self._untold:
            await asyncio.wait(self._untold)
        stay.reschedule(0.0)

    async def _listen(self, group: asyncio.TaskGroup) -> int:
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            text = message.get("text") or ""
            if len(text) > self._max_nbytes:
                return TOO_BIG
            name = None
            try:
                if not text:
                    raise BadRequest("send text frames, each a JSON object")
                frame = await _read(text)
                name = frame.id
                self._take(frame, group)
            except MalleeError as error:
                await self._tell(_refusal(name, error))
        return 0

    def _take(self, frame: LiveFrame, group: asyncio.TaskGroup) -> None:
        """Raises InvalidParameter, QuotaExceeded, Unavailable."""
        if not 0 < len(frame.id) <= MAX_ID:
            raise InvalidParameter("id", frame.id, f"give 1 to {MAX_ID} characters")
        running = self._running.get(frame.id)
        if frame.cancel:
            if running is None:
                raise InvalidParameter("id", frame.id, "no request of this id runs on this socket")
            running.gone.set()
            return
        if running is not None:
            raise InvalidParameter("id", frame.id, "a request of this id runs: give another")
        if len(self._running) >= MAX_RUNNING:
            raise QuotaExceeded("requests of one socket", MAX_RUNNING, MAX_RUNNING, 1.0)
        if self._closing.is_set():
            raise Unavailable("this gateway is stopping; send again over another socket")
        check_path(frame.path, _BEGINNINGS, _FILES, param="path")
        self._running[frame.id] = running = _Running()
        task = group.create_task(self._run(frame, running))
        self._untold.add(task)
        task.add_done_callback(self._untold.discard)

    async def _run(self, frame: LiveFrame, running: _Running) -> None:
        status, is_stream, parts = 0, False, list[bytes]()
        wait: dict[str, int] = {}

        async def send(message: Message) -> None:
            nonlocal status, is_stream, wait
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
                is_stream = headers.get("content-type", "").startswith("text/event-stream")
                wait = _wait(headers)
            elif not is_stream:
                parts.append(message.get("body", b""))
            else:
                for data in _events(message.get("body", b"")):
                    await self._tell({"id": frame.id, "status": status, "event": data})

        async def gone() -> Message:
            await running.gone.wait()
            return {"type": "http.disconnect"}

        body = frame.body if frame.body is not None or frame.method != "POST" else {}
        outer: HTTPConnection = self._socket
        try:
            await run_inner(
                outer,
                frame.method,
                frame.path,
                body,
                frame.idempotency_key,
                gone=gone,
                send=send,
            )
        finally:
            del self._running[frame.id]
        last: dict[str, Any] = {"id": frame.id, "status": status, "done": True, **wait}
        if running.gone.is_set():
            last["cancelled"] = True
        elif not is_stream:
            last["body"] = msgspec.Raw(b"".join(parts) or b"null")
        await self._tell(last)

    async def _tell(self, body: dict[str, Any]) -> None:
        """Raises TimeoutError if the client takes nothing, OSError if it has gone."""
        async with self._turn, asyncio.timeout(MAX_WRITE_S):
            if not self._is_over:
                await self._socket.send_text(msgspec.json.encode(body).decode())


def _refusal(name: str | None, error: MalleeError) -> dict[str, Any]:
    """The frame for a frame that was refused."""
    wait = _wait(error_response(error).headers)
    return {"id": name, "status": error.status, **wait, **error_body(error)}


def _wait(headers: Headers) -> dict[str, int]:
    told = headers.get("retry-after")
    return {} if told is None else {"retry_after": int(told)}


async def _read(text: str) -> LiveFrame:
    """Raises BadRequest."""
    if len(text) <= INLINE_BYTES:
        return parse(text.encode(), LiveFrame)
    return await asyncio.to_thread(lambda: parse(text.encode(), LiveFrame))


def _events(chunk: bytes) -> list[msgspec.Raw]:
    """The data of whole server-sent events, without the mark of the end."""
    lines = (line.partition(b"data: ") for line in chunk.split(b"\n"))
    data = (rest for head, mark, rest in lines if mark and not head)
    return [msgspec.Raw(each) for each in data if each != b"[DONE]"]
