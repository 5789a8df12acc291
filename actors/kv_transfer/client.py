"""The reader's end of KV transfers: dials holders, asks, reads the blocks into rows that it is given."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Final

from mallee.actors.kv_transfer.counts import Counts
from mallee.actors.kv_transfer.messages import (
    ASK,
    BLOCKS,
    CHECKSUM,
    CHUNK_BLOCKS,
    GRANTED,
    MAX_RECORD_NBYTES,
    READ,
    Granted,
    KvTimes,
    checksum,
    pack_places,
    read_granted,
)
from mallee.protocol.codec import encode
from mallee.protocol.errors import (
    CodecError,
    CorruptLoan,
    IncompatibleCapsule,
    MalleeError,
    Unavailable,
    WorkerLost,
)
from mallee.runtime.transport.address import Way, parse_address
from mallee.runtime.transport.greeting import KV, DialerGreeting, Secret
from mallee.runtime.transport.stream import Stream
from mallee.runtime.transport.wire import GREETING, MAX_REFUSAL_NBYTES, REFUSED, read_refusal
from mallee.worker.kv.watch import Rows
from mallee.worker.transfer.values import Ask, Loan

_GRANTED_ROOM: Final = MAX_RECORD_NBYTES + 1024


class KvClient:
    """A `Lender`: the way to those of other processes, by the addresses of their leases.

    Each transfer has a connection of its own; servers bound how many there are.
    """

    def __init__(
        self,
        name: str,
        secret: Secret,
        *,
        node: str = "",
        tls: ssl.SSLContext | None = None,
        times: KvTimes | None = None,
    ) -> None:
        """`node`: the machine whose Unix sockets can be reached. `tls` is for TCP."""
        self.counts = Counts()
        self.times = times or KvTimes()
        self._name = name
        self._secret = secret
        self._node = node
        self._tls = tls
        self._lock = Lock()
        self._ends: set[Callable[[], None]] = set()  # of what is under way
        self._is_closed = False

    def lend(self, ask: Ask) -> Loan:
        """Raises MalleeError: an address that is none, an error of the server, WorkerLost, Unavailable."""
        worker = ask.holder.worker
        try:
            way = parse_address(ask.holder.address).way_from(self._node)
            with self._opening(way) as stream:
                self._greet(stream, None if isinstance(way, str) else self._tls)
                answer = self._ask(stream, ask)
                if isinstance(answer, Granted):
                    found = RemoteBlocks(self, stream, worker, answer)
                    self._until_closed(found.close)
                    self.counts.add(num_open=1, num_granted=1)
                    return found
            stream.close()
            self.counts.add(num_refused=1)
            raise answer
        except OSError as error:
            raise WorkerLost(worker, reason_of(error)) from error

    def close(self) -> None:
        """End every transfer and connection. Idempotent; from any thread."""
        with self._lock:
            self._is_closed = True
            ends = list(self._ends)
        for end in ends:
            end()

    def ended(self, blocks: "RemoteBlocks") -> None:
        """A transfer is over."""
        with self._lock:
            self._ends.discard(blocks.close)
        self.counts.add(num_open=-1)

    def _until_closed(self, end: Callable[[], None]) -> None:
        """Have `end` called once this is closed. Raises Unavailable: it is."""
        with self._lock:
            if self._is_closed:
                raise Unavailable("this process is shutting down")
            self._ends.add(end)

    @contextmanager
    def _opening(self, way: Way) -> Iterator[Stream]:
        """A connection there, which is closed and counted as failed after an error."""
        inet = socket.AF_INET6 if ":" in way[0] else socket.AF_INET
        sock = socket.socket(socket.AF_UNIX if isinstance(way, str) else inet)
        stream = Stream(sock, self.times.message_s)
        try:
            self._until_closed(stream.cut)
            sock.settimeout(self.times.connect_s)
            sock.connect(way)
            sock.sendall(KV.first)
            yield stream
        except BaseException:
            stream.close()
            self.counts.add(num_failed=1)
            raise
        finally:
            with self._lock:
                self._ends.discard(stream.cut)

    def _greet(self, stream: Stream, tls: ssl.SSLContext | None) -> None:
        stream.start(tls, self.times.connect_s)
        greeting = DialerGreeting(self._secret, self._name, KV)
        while True:
            kind, raw = stream.receive(self.times.greeting_s, MAX_REFUSAL_NBYTES)
            if kind == REFUSED:
                raise read_refusal(raw)
            if kind != GREETING:
                raise _unexpected(kind, len(raw), "where a greeting is due")
            if (answer := greeting.take(raw)) is None:
                return
            stream.send(GREETING, answer)

    def _ask(self, stream: Stream, ask: Ask) -> Granted | MalleeError:
        """The answer, or the error with which the server refuses."""
        stream.send(ASK, encode(ask))
        kind, answer = stream.receive(self.times.answer_s, _GRANTED_ROOM)
        if kind == REFUSED:
            return read_refusal(answer)
        if kind != GRANTED:
            raise _unexpected(kind, len(answer), "where blocks are due")
        return read_granted(answer, ask)


class RemoteBlocks:
    """A `Loan` of another process. Threads that read take turns; one may close it meanwhile."""

    def __init__(self, client: KvClient, stream: Stream, worker: str, granted: Granted) -> None:
        self.record = granted.record
        self.num_blocks = granted.num_blocks
        self.block_nbytes = granted.block_nbytes
        self._client = client
        self._stream = stream
        self._worker = worker
        self._turn = Lock()
        self._ahead: list[int] = []  # places that were asked for, and not read yet
        self._lock = Lock()
        self._is_over = self._is_closed = False

    def read(self, places: Sequence[int], rows: Rows) -> None:
        """Raises WorkerLost, CorruptLoan, CodecError, IncompatibleCapsule, or the server's error: no row
        counts then, and these blocks can't be read any more."""
        assert len(places) == len(rows), f"{len(places)} blocks for {len(rows)} rows"
        for row in rows:
            if row.nbytes != self.block_nbytes:
                sizes = ("block_nbytes", str(self.block_nbytes), str(row.nbytes))
                raise IncompatibleCapsule(f"of {self._worker}", [sizes])
        with self._turn:
            if self._is_over or self._is_closed:
                raise WorkerLost(self._worker, "the KV transfer is over")
            began = time.monotonic()
            try:
                self._read(places, rows)
            except BaseException as error:
                # The server is free, whatever comes next.
                self._is_over = True
                self._stream.close()
                self._client.counts.add(num_failed=1)
                if isinstance(error, OSError):
                    raise WorkerLost(self._worker, reason_of(error)) from error
                raise
        nbytes = len(rows) * self.block_nbytes
        self._client.counts.add(nbytes=nbytes, seconds=time.monotonic() - began)

    def close(self) -> None:
        """A thread that reads gets an error, at once."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._stream.cut()
        with self._turn:  # which a thread that reads now gives up
            self._stream.close()
        self._client.ended(self)

    def _read(self, places: Sequence[int], rows: Rows) -> None:
        if self._ahead and self._ahead != list(places):
            self._skip()
        if not self._ahead:
            self._stream.send(READ, pack_places(places))
        # Whoever reads so many in a row reads on: these come while it takes care of those.
        self._ahead = self._following(places)
        if self._ahead:
            self._stream.send(READ, pack_places(self._ahead))
        done = 0
        while done < len(rows):
            sums = self._begin_message(len(rows) - done)
            here = slice(done, done + len(sums))
            for place, row, sent in zip(places[here], rows[here], sums, strict=True):
                self._stream.fill(row.data.cast("B"), self._stream.deadline(row.nbytes))
                if checksum(row.data, place) != sent:
                    raise CorruptLoan(self._worker, place)
            done += len(sums)

    def _following(self, places: Sequence[int]) -> list[int]:
        """The places after a whole chunk of adjoining `places`."""
        if len(places) != CHUNK_BLOCKS or places[-1] - places[0] != CHUNK_BLOCKS - 1:
            return []
        first = places[-1] + 1
        return list(range(first, min(first + CHUNK_BLOCKS, self.num_blocks)))

    def _skip(self) -> None:
        """Take what was asked for in vain off the connection."""
        unread = memoryview(bytearray(self.block_nbytes))
        while self._ahead:
            num = len(self._begin_message(len(self._ahead)))
            for _ in range(num):
                self._stream.fill(unread, self._stream.deadline(len(unread)))
            del self._ahead[:num]

    def _begin_message(self, due: int) -> list[int]:
        """The checksums of the next message's blocks, which follow; `due` of them are to come in all."""
        stream, nbytes = self._stream, self.block_nbytes
        kind, size = stream.receive_head(self._client.times.answer_s)
        if kind == REFUSED:
            raise read_refusal(stream.receive_rest(size, MAX_REFUSAL_NBYTES))
        num, rest = divmod(size, CHECKSUM.size + nbytes)
        if kind != BLOCKS or rest or not 0 < num <= min(CHUNK_BLOCKS, due):
            raise _unexpected(kind, size, f"where {due} blocks of {nbytes} bytes are due")
        sums = stream.receive_rest(num * CHECKSUM.size, num * CHECKSUM.size)
        return [each for (each,) in CHECKSUM.iter_unpack(sums)]


def _unexpected(kind: int, nbytes: int, where: str) -> CodecError:
    return CodecError(f"a message of kind {kind} and {nbytes} bytes {where}", nbytes=nbytes)


def reason_of(error: OSError) -> str:
    """The text of `error`, for a WorkerLost."""
    if isinstance(error, TimeoutError):
        return "it sends no KV in time"
    return f"the connection for KV broke: {error}" if str(error) else type(error).__name__
