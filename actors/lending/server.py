"""A lender's end of the connections: listens, greets borrowers, sends the blocks that they ask for.

A thread accepts at each place, and one serves each connection: they are few, and copies of memory and writes
to sockets, which are all that they do, let the event loop and the engine go on meanwhile.
"""

import asyncio
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np

from mallee.actors.lending.counts import Counts
from mallee.actors.lending.messages import (
    ASK,
    BLOCKS,
    CHECKSUM,
    END,
    GREETING,
    LENT,
    MAX_ASK_NBYTES,
    MAX_GREETING_NBYTES,
    MAX_READ_NBYTES,
    READ,
    REFUSED,
    Lent,
    blocks_a_chunk,
    checksum,
    pack_refusal,
    read_ask,
    read_places,
)
from mallee.actors.lending.stream import LendingTimes, Stream
from mallee.protocol.codec import encode
from mallee.protocol.errors import CodecError, MalleeError, Unavailable
from mallee.runtime.transport.address import Address
from mallee.runtime.transport.greeting import LENDING, ListenerGreeting, Secret
from mallee.worker.transfer.peers import Lender, Loan

log = logging.getLogger(__name__)

MAX_GREETINGS: Final = 16
MAX_CONNECTIONS: Final = 32
BACKLOG: Final = 1024
JOIN_S: Final = 10.0
PAUSE_S: Final = 0.1  # after an error of `accept`: there may be no file descriptors left


class LendingBounds(NamedTuple):
    """Connections that are greeted at once, and those that are open; each may have one loan."""

    greetings: int = MAX_GREETINGS
    connections: int = MAX_CONNECTIONS


class LendingServer:
    """Serves the loans of `lender` to other processes of the app. All methods may be called from any thread.

    When as many connections are open as may be, the one that was idle longest gives way to a new one;
    without such a one, the new one is refused.
    """

    def __init__(
        self,
        lender: Lender,
        secret: Secret,
        *,
        node: str = "",
        tls: ssl.SSLContext | None = None,
        times: LendingTimes | None = None,
        bounds: LendingBounds | None = None,
    ) -> None:
        """`node` is this machine. `tls` is for TCP; Unix sockets are kept by their folder."""
        self.lender = lender
        self.secret = secret
        self.times = times or LendingTimes()
        self.counts = Counts()
        self.address = Address(node)
        self._bounds = bounds or LendingBounds()
        self._tls = tls
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._sessions: dict[Session, threading.Thread] = {}
        self._wake, self._waker = socket.socketpair()
        self._is_closed = False
        self._failure: BaseException | None = None
        self._told: str | None = None  # the reason why the last connection was refused, if it was
        self._on_end: Callable[[], None] = lambda: None

    @property
    def failure(self) -> BaseException | None:
        """The exception by which a thread ended that should not have: nothing lends reliably since."""
        return self._failure

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._sessions)

    def listen_unix(self, path: str) -> None:
        """Listen on a Unix socket too, which all may open that may enter its folder."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        self.address = self.address._replace(path=path)
        self._listen(listener, None)

    def listen_tcp(self, host: str) -> None:
        """Listen on a TCP port too, which the system chooses."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.bind((host, 0))
        self.address = self.address._replace(tcp=listener.getsockname()[:2])
        self._listen(listener, self._tls)

    async def supervise(self) -> None:
        """Return when it is closed. Raises the failure of a thread of its own."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._on_end = lambda: _post(loop, ended.set)
        if self._failure is None and not self._is_closed:
            await ended.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End every loan, connection and thread; blocks for a bounded time. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            sessions = dict(self._sessions)
        self._waker.close()
        for session in sessions:
            session.stream.cut()
        for thread in (*self._threads, *sessions.values()):
            thread.join(JOIN_S)
            if thread.is_alive():
                log.error("%s did not end within %.0f s", thread.name, JOIN_S)
        self._wake.close()
        if self.address.path is not None:
            with suppress(OSError):
                os.unlink(self.address.path)
        self._on_end()

    def _listen(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        listener.listen(BACKLOG)
        listener.setblocking(False)
        name = f"lender at {listener.getsockname()}"
        thread = threading.Thread(
            target=self._accept_all, args=(listener, tls), name=name, daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _accept_all(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while not self._is_closed:
                poll.poll()
                if self._is_closed:
                    return
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    log.warning("a connection of a borrower was not accepted: %s", error)
                    time.sleep(PAUSE_S)
                    continue
                self._begin(sock, tls)
        except Exception as error:  # loop top of the listener: nobody could borrow any more
            self.fail(error)
        finally:
            listener.close()

    def _begin(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serve a new connection in a thread of its own, if there is room."""
        session = Session(self, sock, tls)
        with self._lock:
            refusal = self._refusal()
            is_told = refusal == self._told  # a thousand may come: one line
            self._told = refusal
            if refusal is None:
                thread = threading.Thread(target=self._serve, args=(session,), daemon=True)
                thread.name = f"lender over {sock.fileno()}"
                self._sessions[session] = thread
                thread.start()
        if refusal is not None:
            if not is_told:
                log.warning("connections of borrowers are refused: %s", refusal)
            self.counts.failed()
            if tls is None:
                session.stream.try_send(REFUSED, pack_refusal(Unavailable(refusal)))
            session.stream.close()

    def _refusal(self) -> str | None:
        """The reason why one more connection finds no room, if so. One that is idle may have to go."""
        if self._is_closed:
            return "the lender is shutting down"
        greeting = sum(session.is_greeting for session in self._sessions)
        if greeting >= self._bounds.greetings:
            return "too many connections at once have not greeted yet"
        staying = [session for session in self._sessions if not session.is_ending]
        if len(staying) < self._bounds.connections:
            return None
        idle = [session for session in staying if session.idle_since is not None]
        if not idle:
            return f"{len(staying)} loans are open, as many as may be; try again later"
        idle[0].is_ending = True  # they lie in the order in which they came
        idle[0].stream.cut()
        return None

    def _serve(self, session: "Session") -> None:
        try:
            session.serve()
        except Exception as error:  # loop top of a connection: only our bugs come so far
            self.fail(error)
        finally:
            session.stream.close()
            with self._lock:
                del self._sessions[session]

    def fail(self, error: BaseException) -> None:
        """Note that a thread ended by a bug."""
        self._failure = self._failure or error
        log.error("%s failed", threading.current_thread().name, exc_info=error)
        self._on_end()


class Session:
    """One connection of a borrower, from its greeting on."""

    def __init__(
        self, server: LendingServer, sock: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        self._server = server
        self._sock = sock
        self._tls = tls
        self._times = server.times
        self._borrower = "not greeted yet"
        self._rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]] | None = None
        self.stream = Stream(sock, self._times.message_s)
        self.is_greeting = True
        self.is_ending = False
        self.idle_since: float | None = None

    def serve(self) -> None:
        """Greet, then lend until the borrower is silent or gone. Raises nothing that a borrower can cause."""
        try:
            self._greet()
            while self._take():
                pass
        except MalleeError as error:
            self._server.counts.failed()
            log.warning("the connection of borrower %s ends: %s", self._borrower, error)
            with suppress(OSError):
                self.stream.send(REFUSED, pack_refusal(error))
        except OSError as error:
            if not self.is_ending:
                self._server.counts.failed()
                log.info("the connection of borrower %s ended: %s", self._borrower, error)

    def _greet(self) -> None:
        times = self._times
        if self._tls is not None:
            self._sock.settimeout(times.greeting_s)
            self.stream.wrap(self._tls)
        greeting = ListenerGreeting(self._server.secret, LENDING)
        self.stream.send(GREETING, greeting.challenge())
        _, raw = self.stream.receive(times.greeting_s, MAX_GREETING_NBYTES)
        self._borrower, welcome = greeting.take(raw)
        self.stream.send(GREETING, welcome)
        self.is_greeting = False

    def _take(self) -> bool:
        """Take one question and all of its loan; False: the borrower has gone, or is silent."""
        self.idle_since = time.monotonic()
        try:
            kind, size = self.stream.receive_head(self._times.idle_s)
        except OSError:
            return False
        self.idle_since = None
        raw = self.stream.receive_rest(size, MAX_ASK_NBYTES)
        if kind != ASK:
            raise CodecError(f"a message of kind {kind} where a question is due", nbytes=size)
        ask = read_ask(raw)
        try:
            loan = self._server.lender.lend(ask)
        except MalleeError as error:
            self._server.counts.refused()
            log.info("borrower %s is refused: %s", self._borrower, error)
            self.stream.send(REFUSED, pack_refusal(error))
            return True
        self._server.counts.opened()
        try:
            self._lend(loan)
        finally:
            loan.close()
            self._server.counts.closed()
        return True

    def _lend(self, loan: Loan) -> None:
        """Send the blocks of `loan` that the borrower asks for, until it ends it."""
        lent = Lent.of(loan)
        self.stream.send(LENT, encode(lent))
        while True:
            kind, raw = self.stream.receive(self._times.unread_s, MAX_READ_NBYTES)
            if kind == END:
                return
            if kind != READ:
                raise CodecError(f"a message of kind {kind} within a loan", nbytes=len(raw))
            began = time.monotonic()
            places = read_places(raw, lent.num_blocks)
            self._send_blocks(loan, places, lent.block_nbytes)
            taken_s = time.monotonic() - began
            self._server.counts.moved(len(places) * lent.block_nbytes, taken_s)

    def _send_blocks(self, loan: Loan, places: Sequence[int], nbytes: int) -> None:
        step = blocks_a_chunk(nbytes) if places else 1
        for i in range(0, len(places), step):
            part = places[i : i + step]
            rows = self._staging(nbytes)[: len(part)]
            loan.read(part, rows)
            sums = b"".join(
                CHECKSUM.pack(checksum(row.data, place))
                for place, row in zip(part, rows, strict=True)
            )
            self.stream.send(BLOCKS, sums, rows.reshape(-1).data)

    def _staging(self, nbytes: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        if self._rows is None or self._rows.shape[1] != nbytes:
            self._rows = np.empty((blocks_a_chunk(nbytes), nbytes), dtype=np.uint8)
        return self._rows


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop was closed: its service is over
        loop.call_soon_threadsafe(call)
