"""Connections of clients: requests parsed, bounded, and answered in their order."""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol, cast

import httptools

from mallee.actors.front.http.messages import (
    CONTINUE,
    Page,
    line,
    plain_answer,
    refusal_answer,
)
from mallee.actors.front.placement import Refusal
from mallee.actors.front.proxy.exchange import Exchange, Relay, Request
from mallee.actors.front.proxy.selection import SELECT, Selection
from mallee.protocol.ids import RequestId

MAX_HEAD_NBYTES: Final = 64 << 10
MAX_LINES: Final = 256
MAX_PIPELINED: Final = 8  # requests of a connection that wait; then nothing more of it is read
LINGER_S: Final = 2.0  # after a refusal, for a client that is still sending
OWN_PATHS: Final = (b"/router/", b"/v1/router/")
OWN_PAGES: Final = (b"/health", b"/metrics")
_BAD: Final = "bad_request"


class Stage(Enum):
    """The part of a request that comes next."""

    IDLE = 0
    HEAD = 1
    BODY = 2


class Hub(Relay, Protocol):
    """All that connections share."""

    max_body_nbytes: int
    max_buffered_nbytes: int
    max_connections: int
    head_s: float
    body_s: float
    keep_alive_s: float
    num_buffered: int  # bytes of bodies
    connections: "set[ClientConnection]"

    def new_id(self) -> RequestId: ...

    def admit(self, request: Request) -> Refusal | None:
        """Whether the sender may ask."""
        ...

    def hand_over(self, request: Request) -> None:
        """Put the backends' credentials in place of the router's."""
        ...

    def page(self, request: Request) -> Page | Refusal:
        """The page of our own that a request asks for."""
        ...


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self.write: Callable[[bytes], None]
        self._queue: deque[Request | Refusal] = deque()
        self._exchange: Exchange | None = None
        self._request = Request()
        self._pieces: list[bytes] = []
        self._nbytes = 0  # of the body so far
        self._head_nbytes = 0
        self._stage = Stage.IDLE
        self._is_closing = False  # nothing more is read
        self._is_held = False  # too many requests wait
        self._is_turning = False
        self.is_paused = False
        self._began = hub.now
        self._deadline = hub.now + hub.head_s

    # From the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.write = self._transport.write
        self._hub.connections.add(self)
        if len(self._hub.connections) > self._hub.max_connections:
            self._reject(503, "too_many_requests", "as many connections are open as may be", 1)

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._request.keeps = False
            self._is_closing = True  # what follows would be of another protocol
        except httptools.HttpParserError as error:
            if not self._is_closing:
                self._reject(400, _BAD, f"no HTTP/1.1: {error}")
        if self._stage is Stage.HEAD:
            self._head_nbytes += len(data)
            if self._head_nbytes > MAX_HEAD_NBYTES and not self._is_closing:
                self._reject(
                    431, "head_too_large", f"give a head of at most {MAX_HEAD_NBYTES} bytes"
                )
        self._turn()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._hub.connections.discard(self)
        self._is_closing = True
        for waiting in self._queue:
            if isinstance(waiting, Request):
                self._hub.num_buffered -= len(waiting.body)
        self._queue.clear()
        self._hub.num_buffered -= self._nbytes
        self._nbytes = 0
        if self._exchange is not None:
            self._exchange.abandon()
            self._over()

    def pause_writing(self) -> None:
        self.is_paused = True
        if self._exchange is not None:
            self._exchange.pause(True)

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._exchange is not None:
            self._exchange.pause(False)

    # From the parser

    def on_message_begin(self) -> None:
        self._request = Request()
        self._stage = Stage.HEAD
        self._head_nbytes = 0
        self._began = self._hub.now
        self._deadline = self._began + self._hub.head_s

    def on_url(self, target: bytes) -> None:
        self._request.target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage is Stage.HEAD:  # else a trailer
            self._request.lines.append(line(name, value))

    def on_headers_complete(self) -> None:
        self._stage = Stage.BODY
        if self._is_closing:
            return
        hub, request, parser = self._hub, self._request, self._parser
        request.method = parser.get_method()
        version = parser.get_http_version()
        request.is_http10 = version == "1.0"
        request.keeps = parser.should_keep_alive()
        self._deadline = self._began + hub.body_s
        values = {name: value for name, value, _ in request.lines}
        refusal = self._refusal(version, values) or hub.admit(request)
        if refusal is not None:
            self._deny(refusal)
        elif b"expect" in values and not (request.is_http10 or self._exchange or self._queue):
            self._transport.write(CONTINUE)

    def _refusal(self, version: str, values: dict[bytes, bytes]) -> Refusal | None:
        """The fault of a head, if it has one."""
        request, num = self._request, len(self._request.lines)
        if version not in ("1.0", "1.1"):
            return Refusal(505, _BAD, f"HTTP/{version} is not spoken here")
        if num > MAX_LINES or sum(len(raw) for _, _, raw in request.lines) > MAX_HEAD_NBYTES:
            message = f"give at most {MAX_LINES} header lines, and {MAX_HEAD_NBYTES} bytes"
            return Refusal(431, "head_too_large", message)
        is_twice = len(values) < num and sum(name == b"host" for name, _, _ in request.lines) > 1
        if is_twice or (b"host" not in values and not request.is_http10):
            return Refusal(400, _BAD, "give one Host header")
        if b"transfer-encoding" in values and (b"content-length" in values or request.is_http10):
            return Refusal(400, _BAD, "the body's length is told in two ways")
        if b"transfer-encoding" in values:
            codings = [value for name, value, _ in request.lines if name == b"transfer-encoding"]
            if any(each.lower() != b"chunked" for each in codings):
                return Refusal(501, "not_implemented", "give no transfer coding but chunked")
        if request.method == b"CONNECT":
            return Refusal(501, "not_implemented", "CONNECT is not forwarded")
        if values.get(b"upgrade", b"").lower() == b"websocket":
            return Refusal(501, "not_implemented", "WebSockets are not forwarded")
        if int(values.get(b"content-length", 0)) > self._hub.max_body_nbytes:
            return self._too_large()
        return None

    def _too_large(self) -> Refusal:
        most = self._hub.max_body_nbytes >> 20
        message = f"the request's body is larger than {most} MiB, the router's max_body_mb"
        return Refusal(413, "request_too_large", message)

    def on_body(self, data: bytes) -> None:
        if self._is_closing:
            return
        hub = self._hub
        self._nbytes += len(data)
        hub.num_buffered += len(data)
        if self._nbytes > hub.max_body_nbytes:
            self._deny(self._too_large())
        elif hub.num_buffered > hub.max_buffered_nbytes:
            message = "the bodies of other requests fill the router's max_buffered_mb"
            self._deny(Refusal(503, "too_many_requests", message, 1))
        else:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._is_closing:
            return
        pieces = self._pieces
        self._request.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._nbytes = 0  # counted with the request
        self._queue.append(self._request)
        self._stage = Stage.IDLE
        self._deadline = self._hub.now + self._hub.keep_alive_s

    # One request after the other

    def _turn(self) -> None:
        """Begin the next request if none is under way."""
        if self._is_turning:
            return
        self._is_turning = True
        while self._queue and self._exchange is None and not self._transport.is_closing():
            waiting = self._queue.popleft()
            if isinstance(waiting, Refusal):
                self._answer_last(waiting)
            elif waiting.target.startswith(SELECT):
                self._exchange = Selection(self._hub, self, waiting, self._hub.new_id())
                self._exchange.begin()
            elif (
                waiting.target.startswith(OWN_PATHS)
                or waiting.target.partition(b"?")[0] in OWN_PAGES
            ):
                self._hub.num_buffered -= len(waiting.body)
                self._answer_own(waiting)
            else:
                self._begin(waiting)
        self._is_turning = False
        is_held = len(self._queue) >= MAX_PIPELINED
        if is_held != self._is_held and not self._transport.is_closing():
            self._is_held = is_held
            if is_held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _begin(self, request: Request) -> None:
        self._hub.hand_over(request)
        self._exchange = Exchange(self._hub, self, request, self._hub.new_id())
        self._exchange.begin()

    def _answer_own(self, request: Request) -> None:
        page = self._hub.page(request)
        keeps, is_head = request.keeps and not self._is_closing, request.method == b"HEAD"
        if isinstance(page, Refusal):
            self.write(refusal_answer(page, closes=not keeps, is_head=is_head))
        else:
            self.write(plain_answer(page, closes=not keeps, is_head=is_head))
        if not keeps:
            self._transport.close()

    def _reject(
        self, status: int, code: str, message: str, retry_after_s: int | None = None
    ) -> None:
        self._deny(Refusal(status, code, message, retry_after_s))
        self._turn()

    def _deny(self, refusal: Refusal) -> None:
        """Read nothing more, and answer so when it is this request's turn."""
        self._is_closing = True
        self._hub.num_buffered -= self._nbytes
        self._nbytes = 0
        self._pieces.clear()
        self._queue.append(refusal)

    def _answer_last(self, refusal: Refusal) -> None:
        """Refuse and close; what the client still sends is read for a while, so that it sees the answer."""
        self._queue.clear()
        self._hub.counts.denied(refusal.status)
        self._transport.write(refusal_answer(refusal, closes=True))
        if not self._transport.is_closing():
            self._transport.write_eof()
        self._deadline = self._hub.now + LINGER_S

    # From the exchange

    def refuse(self, refusal: Refusal) -> None:
        request = self._over()
        keeps = request.keeps and not self._is_closing and not self._hub.is_draining
        is_head = request.method == b"HEAD"
        self._transport.write(refusal_answer(refusal, closes=not keeps, is_head=is_head))
        self._go_on(keeps=keeps)

    def finished(self, *, keeps: bool) -> None:
        self._over()
        self._go_on(keeps=keeps)

    def cut(self, *, is_framed: bool) -> None:
        self._over()
        self._is_closing = True
        if is_framed:
            self._transport.close()
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None:  # reset: an end would look like that of the answer
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def _over(self) -> Request:
        assert self._exchange is not None
        request, self._exchange = self._exchange.request, None
        self._hub.num_buffered -= len(request.body)
        self._deadline = self._hub.now + self._hub.keep_alive_s
        return request

    def _go_on(self, *, keeps: bool) -> None:
        if keeps and not (self._is_closing and not self._queue):
            self._turn()
        else:
            self._is_closing = True
            self._transport.close()

    # From the clock

    def sweep(self) -> None:
        """Look for what has taken too long."""
        if self._exchange is not None:
            self._exchange.sweep()
        elif self._hub.now > self._deadline:
            if self._stage is not Stage.IDLE and not self._is_closing:
                self._reject(408, "request_timeout", "the request did not arrive in time")
            else:
                self._transport.abort()

    def cut_off(self) -> None:
        """Close now."""
        self._transport.abort()

    def close_if_idle(self) -> None:
        """Close unless a request is under way."""
        if self._exchange is None and not self._queue:
            self._transport.close()
