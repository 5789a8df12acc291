"""The holder's end of KV transfers: greets clients, sends the blocks that they ask for.

A thread serves each connection: they are few, and copies of memory and writes to sockets, which are all that
they do, let the event loop and the engine go on meanwhile.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import numpy as np

from mallee.actors.kv_transfer.counts import Counts
from mallee.actors.kv_transfer.messages import (
    ASK,
    BLOCKS,
    CHECKSUM,
    GRANTED,
    MAX_ASK_NBYTES,
    MAX_READ_NBYTES,
    READ,
    KvTimes,
    blocks_a_chunk,
    checksum,
    pack_granted,
    read_ask,
    read_places,
)
from mallee.protocol.errors import CodecError, MalleeError, Unavailable
from mallee.runtime.transport.greeting import KV, ListenerGreeting, Secret
from mallee.runtime.transport.listener import MAX_GREETINGS
from mallee.runtime.transport.stream import Stream
from mallee.runtime.transport.wire import GREETING, MAX_GREETING_NBYTES, REFUSED, refusal
from mallee.worker.kv.watch import Rows
from mallee.worker.transfer.values import Lender, Loan

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 32


class KvServer:
    """Serves blocks of `lender` to other processes of the app. A `Server` of KV.

    Each transfer has a connection of its own; beyond `max_connections` they are refused.
    """

    kind = KV

    def __init__(
        self,
        lender: Lender,
        secret: Secret,
        *,
        times: KvTimes | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.lender = lender
        self.secret = secret
        self.times = times or KvTimes()
        self.counts = Counts()
        self.sessions: list[Session] = []
        self.max_connections = max_connections
        self._threads = ThreadPoolExecutor(
            max_connections + MAX_GREETINGS, thread_name_prefix="a KV transfer"
        )
        self._is_ended = False

    async def serve(
        self, sock: socket.socket, tls: ssl.SSLContext | None, on_greeted: Callable[[], None]
    ) -> None:
        """Raises what a bug raises: nothing that a client can cause."""
        session, loop = Session(self, sock, tls), asyncio.get_running_loop()
        self.sessions.append(session)
        try:
            if self._is_ended:
                return
            is_right = await loop.run_in_executor(self._threads, session.greet)
            on_greeted()
            if is_right and not self._is_ended:
                num_open = sum(each.is_open for each in self.sessions)
                session.is_open = num_open < self.max_connections
                await loop.run_in_executor(self._threads, session.serve)
        finally:
            session.stream.close()
            self.sessions.remove(session)

    def end(self) -> None:
        self._is_ended = True
        for session in self.sessions:
            session.cut()
        self._threads.shutdown(wait=False)


class Session:
    """One connection of a client, from its greeting on. `is_open`: it has greeted and found room."""

    def __init__(self, server: KvServer, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self._server = server
        self._tls = tls
        self._times = server.times
        self._client = "not greeted yet"
        self._rows: Rows | None = None
        self._is_cut = False
        self.stream = Stream(sock, self._times.message_s)
        self.is_open = False

    def greet(self) -> bool:
        """Whether the other end is a client of this app."""
        return self._run(self._greet)

    def serve(self) -> None:
        """Answer the client's question, and send blocks until it has gone or is silent."""
        self._run(self._serve)

    def cut(self) -> None:
        """Have it end soon. From any thread."""
        self._is_cut = True
        self.stream.cut()

    def _run(self, work: Callable[[], None]) -> bool:
        """Whether `work` ends without an error that the client or the network has caused."""
        try:
            work()
        except MalleeError as error:
            self._server.counts.add(num_failed=1)
            log.warning("the connection of KV client %s ends: %s", self._client, error)
            with suppress(OSError):
                self.stream.send(REFUSED, refusal(error))
        except OSError as error:
            if not self._is_cut:
                self._server.counts.add(num_failed=1)
                log.info("the connection of KV client %s ended: %s", self._client, error)
        else:
            return True
        return False

    def _greet(self) -> None:
        self.stream.start(self._tls, self._times.greeting_s)
        greeting = ListenerGreeting(self._server.secret, KV)
        self.stream.send(GREETING, greeting.challenge())
        _, raw = self.stream.receive(self._times.greeting_s, MAX_GREETING_NBYTES)
        self._client, welcome = greeting.take(raw)
        self.stream.send(GREETING, welcome)

    def _serve(self) -> None:
        kind, raw = self.stream.receive(self._times.greeting_s, MAX_ASK_NBYTES)
        if kind != ASK:
            raise CodecError(f"a message of kind {kind} where a question is due", nbytes=len(raw))
        ask, counts = read_ask(raw), self._server.counts
        try:
            if not self.is_open:
                text = f"{self._server.max_connections} KV transfers are open, as many as may be"
                raise Unavailable(f"{text}; try again later")
            loan = self._server.lender.lend(ask)
        except MalleeError as error:
            counts.add(num_refused=1)
            log.info("KV client %s is refused: %s", self._client, error)
            self.stream.send(REFUSED, refusal(error))
            return
        counts.add(num_open=1, num_granted=1)
        try:
            self._send(loan)
        finally:
            loan.close()
            counts.add(num_open=-1)

    def _send(self, loan: Loan) -> None:
        """Send the blocks of `loan` that the client asks for, until it closes the connection."""
        self.stream.send(GRANTED, pack_granted(loan))
        while True:
            try:
                kind, size = self.stream.receive_head(self._times.unread_s)
            except ConnectionError:
                return
            raw = self.stream.receive_rest(size, MAX_READ_NBYTES)
            if kind != READ:
                raise CodecError(f"a message of kind {kind} within a transfer", nbytes=size)
            began = time.monotonic()
            places = read_places(raw, loan.num_blocks)
            self._send_blocks(loan, places, loan.block_nbytes)
            taken_s, nbytes = time.monotonic() - began, len(places) * loan.block_nbytes
            self._server.counts.add(nbytes=nbytes, seconds=taken_s)

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

    def _staging(self, nbytes: int) -> Rows:
        if self._rows is None or self._rows.shape[1] != nbytes:
            self._rows = np.empty((blocks_a_chunk(nbytes), nbytes), dtype=np.uint8)
        return self._rows
