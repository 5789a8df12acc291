"""The HTTP server of a gateway that no proxy stands before: uvicorn, with limits on its connections.

uvicorn waits for ever for a request's head and for a client that takes nothing of its answer, keeps heads
of any length, and any number of connections. Here each connection is looked at once a second: one that
keeps the server waiting for longer than it may is cut. A body's time is the application's to limit.
"""

import contextlib
import json
import logging
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mallee.actors.hooks import check_hooks

HEAD_S: Final = 10.0  # for a request's head, and for the rest of a body whose answer is written
MAX_HEAD_BYTES: Final = 64 << 10
WRITE_S: Final = 60.0
"""In which a client takes something of an answer; with a second for each MIN_READ_RATE bytes, all of it."""
MIN_READ_RATE: Final = 16 << 10
REFUSED_S: Final = 1.0  # for a refused client to read why
OTHER_FILES: Final = 1024  # that a process has open beside connections
_TICKS: Final = 10  # of uvicorn between two looks, a tenth of a second each

_log = logging.getLogger(__name__)


class _Wait(Enum):
    """For something of the client's."""

    REQUEST = auto()  # its first byte
    HEAD = auto()
    REST = auto()  # of a body whose answer is written
    READ = auto()  # of an answer to which nothing is added now
    FAREWELL = auto()  # a refused client reads why


class LimitedServer(uvicorn.Server):
    """Leaves the process's signals alone. WebSockets are refused unless it `takes_sockets`.

    Beyond `max_connections`, and `max_per_client` of one address, connections are refused with 503.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_connections: int,
        max_per_client: int,
        takes_sockets: bool = False,
        **options: Any,
    ) -> None:
        ws: Any = _Socket if takes_sockets else "none"
        self._connections = _Connections(max_connections, max_per_client)
        protocol: Any = partial(_Connection, self._connections)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws=ws,
                lifespan="off",
                access_log=False,
                **options,
            )
        )
        _allow_files(max_connections + OTHER_FILES)

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS == 0:
            self._connections.cut_late()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connections:
    """The open connections of a server. Belongs to one event loop."""

    def __init__(self, most: int, most_of_client: int) -> None:
        self._most = most
        self._most_of_client = most_of_client
        self._open: set[_Connection] = set()
        self._by_client: Counter[str] = Counter()

    def add(self, connection: "_Connection") -> None:
        self._open.add(connection)
        client = connection.address
        self._by_client[client] += 1
        if len(self._open) > 2 * self._most:  # more than can be told why
            connection.transport.abort()
        elif (num := self._by_client[client]) > self._most_of_client:
            connection.refuse(f"{num} connections of one client, of {self._most_of_client}")
        elif len(self._open) > self._most:
            connection.refuse(f"{len(self._open)} connections, of {self._most}")

    def remove(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        client = connection.address
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def cut_late(self) -> None:
        """Cut the connections that wait for their clients for too long."""
        late: Counter[str] = Counter()
        for connection in list(self._open):
            if (wait := connection.cut_if_late()) is not None:
                late[wait.name.lower()] += 1
        if late:
            reasons = ", ".join(f"{num} at the {name}" for name, num in sorted(late.items()))
            _log.warning("slow connections cut: %s", reasons)


class _Socket(WebSocketsSansIOProtocol):
    """A connection that has become a WebSocket; uvicorn asks every 20 s whether its client is there."""

    over: Callable[[], None]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.over()


class _Connection(HttpToolsProtocol):
    """One connection, which knows what it waits for."""

    def __init__(self, connections: _Connections, **options: Any) -> None:
        super().__init__(**options)
        self._limits = connections
        self._num_heads = 0
        self._num_unread = 0  # bytes that are neither of a finished head nor of a body
        self._is_between = True  # requests
        self._is_in_head = True
        self._is_refused = False
        self._is_socket = False
        self._waits_for: tuple[_Wait, int] | None = None
        self._due = 0.0
        self._unread = 0  # bytes of an answer, at the last look
        self._taken_due = 0.0  # something of them

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limits.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._limits.remove(self)

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        self._is_socket = True
        socket = self.transport.get_protocol()
        assert isinstance(socket, _Socket)
        socket.over = partial(self._limits.remove, self)

    def refuse(self, reason: str) -> None:
        """Answer whatever comes with 503."""
        self._is_refused = True
        self._answer(503, "Service Unavailable", "too_many_connections", f"{reason}; try again")
        if not self.transport.is_closing():
            self.transport.write_eof()  # to close at once could reset what was just written

    def cut_if_late(self) -> _Wait | None:
        """The reason, if the connection was cut."""
        now, wait = self.loop.time(), self._wait()
        if wait is None:
            self._waits_for = None
            return None
        unread, before = self.transport.get_write_buffer_size(), self._unread
        if unread != before:
            self._unread = unread
            self._taken_due = now + WRITE_S
        # More is unread than before: the client took enough for more to be written.
        if (wait, self._num_heads) != self._waits_for or unread > before:
            self._waits_for = (wait, self._num_heads)
            self._due = now + self._patience_s(wait)
            self._taken_due = now + WRITE_S
            return None
        if now < self._due and (wait is not _Wait.READ or now < self._taken_due):
            return None
        if wait is _Wait.HEAD:
            text = f"the head of the request did not come within {HEAD_S:g} s"
            self._answer(408, "Request Timeout", "slow_head", text)
        if wait in (_Wait.HEAD, _Wait.REQUEST):
            self.transport.close()
        else:
            self.transport.abort()
        return wait

    def _wait(self) -> _Wait | None:
        if self._is_refused:
            return _Wait.FAREWELL
        if self._is_socket:
            return _Wait.READ if self.transport.get_write_buffer_size() else None
        is_answered = self.cycle is None or self.cycle.response_complete
        is_closing = self.transport.is_closing()
        if self.transport.get_write_buffer_size() and (
            is_answered or is_closing or self.flow.write_paused
        ):
            return _Wait.READ
        if is_closing or not is_answered:
            return None
        if self._is_between:
            return _Wait.REQUEST
        return _Wait.HEAD if self._is_in_head else _Wait.REST

    def _patience_s(self, wait: _Wait) -> float:
        if wait is _Wait.READ:
            return WRITE_S + self._unread / MIN_READ_RATE
        return REFUSED_S if wait is _Wait.FAREWELL else HEAD_S

    def _answer(self, status: int, phrase: str, code: str, text: str) -> None:
        kind = "service_unavailable_error" if status == 503 else "invalid_request_error"
        error = {"message": text, "type": kind, "param": None, "code": code}
        body = json.dumps({"error": error})
        self.transport.write(
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
        )

    # The parser's calls

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._num_unread += len(data)
        super().data_received(data)
        if self._num_unread > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                text = f"the head of the request is longer than {MAX_HEAD_BYTES} bytes"
                self._answer(431, "Request Header Fields Too Large", "head_too_large", text)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_between = False
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._num_heads += 1
        self._num_unread = 0
        self._is_in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unread = 0
        self._is_between = True
        super().on_message_complete()


check_hooks(uvicorn.Server, "on_tick", "capture_signals", needs="uvicorn>=0.35,<0.55")
check_hooks(
    HttpToolsProtocol,
    *("connection_made", "connection_lost", "data_received", "handle_websocket_upgrade"),
    *("on_message_begin", "on_headers_complete", "on_body", "on_message_complete"),
    needs="uvicorn>=0.35,<0.55",
)


def _allow_files(num: int) -> None:
    """Let the process open `num` files, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num:
        most = num if hard == resource.RLIM_INFINITY else min(num, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
