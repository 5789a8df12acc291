"""Connections to backends: one answer at a time on each, kept for the next request where HTTP allows it."""

import asyncio
from typing import Final, Protocol, cast

import httptools

from mallee.actors.front.http.messages import Line, line
from mallee.protocol.errors import ConfigError

IDLE_S: Final = 3.0  # a connection is kept for so long: vLLM's server ends it after 5 s
MAX_IDLE: Final = 256  # of one backend
MAX_HEAD_NBYTES: Final = 64 << 10  # of an answer
NO_BODY: Final = (204, 304)


class Taker(Protocol):
    """Takes in one answer. Calls come in this order; `on_lost` ends it early."""

    method: bytes

    def on_answer(self, status: int, phrase: bytes, lines: list[Line], framing: str) -> bool:
        """The head of the answer; False: no more is wanted of it."""
        ...

    def on_body(self, data: bytes, *, ends: bool) -> None:
        """A piece of the body. It may be empty where it ends, and where only the head is there yet."""
        ...

    def on_lost(self, reason: str) -> None:
        """The answer ends here, and is not whole."""
        ...


class Backend(asyncio.Protocol):
    """One connection to a backend."""

    def __init__(self, pool: "Backends", address: str) -> None:
        self._pool = pool
        self.address = address
        self.transport: asyncio.Transport
        self.taker: Taker | None = None
        self.is_fresh = True  # nothing was asked on it before
        self.idle_since = 0.0
        self.is_paused = False
        self._parser = httptools.HttpResponseParser(self)
        self._begin()

    def _begin(self) -> None:
        self._lines: list[Line] = []
        self._phrase = b""
        self._pieces: list[bytes] = []
        self._is_head_in = False
        self._is_over = False
        self._keeps = False
        self._until_close = False
        self._head_nbytes = 0

    def send(self, taker: Taker, message: bytes) -> None:
        """Ask; the answer goes to `taker`."""
        assert self.taker is None, "one answer at a time"
        self.taker = taker
        self.transport.write(message)

    def pause(self, wanted: bool) -> None:
        """Read nothing more for now, or go on."""
        if wanted != self.is_paused and not self.transport.is_closing():
            self.is_paused = wanted
            if wanted:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def abort(self) -> None:
        """Close at once, whatever is under way; the taker hears nothing."""
        self.taker = None
        self.transport.abort()

    # From the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        taker = self.taker
        if taker is None:  # nothing was asked
            self._pool.drop(self)
            self.transport.abort()
            return
        had_head = self._is_head_in
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"its answer is no HTTP: {error.__context__ or error}")
            return
        if not self._is_head_in:
            self._head_nbytes += len(data)
            if self._head_nbytes > MAX_HEAD_NBYTES:
                self._fail(f"the head of its answer has more than {MAX_HEAD_NBYTES} bytes")
            return
        if self.taker is not taker:  # it gave this answer up at its head
            return
        pieces, ends = self._pieces, self._is_over
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if ends:
            self._end()
        if body or ends or not had_head:
            taker.on_body(body, ends=ends)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.drop(self)
        taker, self.taker = self.taker, None
        if taker is None:
            return
        if self._is_head_in and self._until_close and exc is None:
            taker.on_body(b"", ends=True)
        else:
            taker.on_lost(str(exc) if exc else "it closed the connection")

    def _end(self) -> None:
        """The answer is whole: keep the connection for the next one."""
        self.taker = None
        self.pause(False)
        if self._keeps and not self.transport.is_closing():
            self.is_fresh = False
            self._begin()
            self._pool.keep(self)
        else:
            self.transport.abort()

    def _fail(self, reason: str) -> None:
        taker, self.taker = self.taker, None
        self.transport.abort()
        if taker is not None:
            taker.on_lost(reason)

    # From the parser

    def on_message_begin(self) -> None:
        if self._is_over:
            raise ValueError("it sends more than was asked for")

    def on_status(self, phrase: bytes) -> None:
        self._phrase += phrase

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head_in:  # else a trailer
            self._lines.append(line(name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim answer
            return
        taker = self.taker
        assert taker is not None
        self._is_head_in = True
        framing = ""
        for name, _, _ in self._lines:
            if name in (b"content-length", b"transfer-encoding"):
                framing = "length" if name == b"content-length" else "chunked"
        has_body = taker.method != b"HEAD" and status not in NO_BODY
        if not has_body:
            framing = "none"
        self._until_close = not framing
        # A parser goes on to wait for the body that the answer to a HEAD tells of.
        self._keeps = taker.method != b"HEAD" and self._parser.should_keep_alive()
        if not taker.on_answer(status, self._phrase, self._lines, framing):
            self.taker = None
            self.transport.abort()
        elif taker.method == b"HEAD":
            self._is_over = True

    def on_body(self, data: bytes) -> None:
        if self._is_over:
            raise ValueError("it sends a body where there is none")
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._is_head_in:
            self._is_over = True
        else:
            self._lines, self._phrase = [], b""


class _Fetch:
    """The taker of one answer that is wanted whole."""

    method = b"GET"

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._status = 0
        self._body = bytearray()
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def on_answer(self, status: int, phrase: bytes, lines: list[Line], framing: str) -> bool:
        self._status = status
        return True

    def on_body(self, data: bytes, *, ends: bool) -> None:
        self._body += data
        if self.done.done():
            return
        if len(self._body) > self._most_nbytes:
            self.done.set_exception(ConnectionError(f"more than {self._most_nbytes} bytes"))
        elif ends:
            self.done.set_result((self._status, bytes(self._body)))

    def on_lost(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(reason))


class Backends:
    """The connections that are kept, by address. Belongs to one event loop.

    `connect_s`: the longest time for a new one. `key`: the backends' API key, if they want one.
    """

    def __init__(self, connect_s: float, *, key: str = "") -> None:
        """Raises ConfigError."""
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("the backends' API key has other than printable ASCII characters")
        self._connect_s = connect_s
        self.credentials = line(b"authorization", b"Bearer " + key.encode()) if key else None
        self._idle: dict[str, list[Backend]] = {}

    def take(self, address: str) -> Backend | None:
        """A connection that is kept."""
        idle = self._idle.get(address)
        while idle:
            found = idle.pop()
            if not found.transport.is_closing():
                return found
        return None

    async def connect(self, address: str) -> Backend:
        """A new connection. Raises OSError, TimeoutError."""
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(self._connect_s):
            _, backend = await asyncio.get_running_loop().create_connection(
                lambda: Backend(self, address), host.strip("[]"), int(port)
            )
        return backend

    async def fetch(self, address: str, path: str, *, most_nbytes: int) -> tuple[int, bytes]:
        """Status and body of a GET. Raises OSError, TimeoutError.

        ConnectionRefusedError: nothing listens there.
        """
        while True:
            backend = self.take(address) or await self.connect(address)
            asked = _Fetch(most_nbytes)
            own = b"" if self.credentials is None else self.credentials[2]
            head = f"GET {path} HTTP/1.1\r\nhost: {address}\r\n".encode()
            backend.send(asked, head + own + b"\r\n")
            was_fresh = backend.is_fresh
            try:
                return await asked.done
            except ConnectionError:
                if was_fresh:
                    raise
            finally:
                if backend.taker is asked:  # not whole
                    backend.abort()

    def keep(self, backend: Backend) -> None:
        """Nothing is under way on it."""
        idle = self._idle.setdefault(backend.address, [])
        if len(idle) >= MAX_IDLE:
            backend.transport.close()
        else:
            backend.idle_since = asyncio.get_running_loop().time()
            idle.append(backend)

    def drop(self, backend: Backend) -> None:
        """It is closed."""
        idle = self._idle.get(backend.address, [])
        if backend in idle:
            idle.remove(backend)

    def sweep(self) -> None:
        """Close what nobody asked for a while."""
        oldest = asyncio.get_running_loop().time() - IDLE_S
        for address, idle in list(self._idle.items()):
            for backend in [each for each in idle if each.idle_since < oldest]:
                idle.remove(backend)
                backend.transport.close()
            if not idle:
                del self._idle[address]

    def close(self) -> None:
        """Close all that are kept."""
        for idle in self._idle.values():
            for backend in list(idle):
                backend.transport.abort()
        self._idle.clear()
