"""A borrower's end of the connections: dials lenders, asks, reads the blocks into rows that it is given."""

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock
from typing import Final

from mallee.actors.lending.counts import Counts
from mallee.actors.lending.messages import (
    ASK,
    BLOCKS,
    CHECKSUM,
    CHECKSUM_NBYTES,
    CHUNK_BLOCKS,
    END,
    GREETING,
    LENT,
    MAX_GREETING_NBYTES,
    MAX_RECORD_NBYTES,
    MAX_REFUSAL_NBYTES,
    READ,
    REFUSED,
    Lent,
    checksum,
    pack_ask,
    pack_places,
    read_lent,
    read_refusal,
)
from mallee.actors.lending.stream import LendingTimes, Stream
from mallee.protocol.errors import (
    CodecError,
    CorruptLoan,
    IncompatibleCapsule,
    MalleeError,
    Unavailable,
    WorkerLost,
)
from mallee.runtime.transport.address import Way, parse_address
from mallee.runtime.transport.greeting import LENDING, DialerGreeting, Secret
from mallee.worker.kv.watch import Rows
from mallee.worker.transfer.peers import Ask, Loan

MAX_LOANS: Final = 16
MAX_IDLE: Final = 8
_LENT_ROOM = MAX_RECORD_NBYTES + 1024


class Borrower:
    """A `Lender`: the way to those of other processes, by the addresses of their leases.

    At most MAX_LOANS loans are open at once; connections that are idle are used again.
    """

    def __init__(
        self,
        name: str,
        secret: Secret,
        *,
        node: str = "",
        tls: ssl.SSLContext | None = None,
        times: LendingTimes | None = None,
    ) -> None:
        """`node`: the machine whose Unix sockets can be reached. `tls` is for TCP."""
        self.counts = Counts()
        self.times = times or LendingTimes()
        self._name = name
        self._secret = secret
        self._node = node
        self._tls = tls
        self._room = BoundedSemaphore(MAX_LOANS)
        self._lock = Lock()
        self._idle: list[tuple[Way, Stream, float]] = []  # with the time since when
        self._open: set[BorrowedLoan] = set()
        self._asking: set[Stream] = set()
        self._is_closed = False

    def lend(self, ask: Ask) -> Loan:
        """Raises MalleeError: an address that is none, an error of the lender, WorkerLost, Unavailable."""
        worker = ask.holder.worker
        if not self._room.acquire(timeout=self.times.connect_s):
            raise Unavailable(f"{MAX_LOANS} loans from other workers are open, as many as may be")
        try:
            way = parse_address(ask.holder.address).way_from(self._node)
            stream, lent = self._ask(way, ask)
            loan = BorrowedLoan(self, way, stream, worker, lent)
            with self._lock:
                is_wanted = not self._is_closed
                self._open.add(loan)
        except BaseException as error:
            self._room.release()
            if isinstance(error, OSError):
                self.counts.failed()
                raise WorkerLost(worker, reason_of(error)) from error
            raise
        self.counts.opened()
        if not is_wanted:
            loan.close()
        return loan

    def close(self) -> None:
        """End every loan and connection. Idempotent; from any thread."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            loans, asking = list(self._open), list(self._asking)
        for _, stream, _ in idle:
            stream.close()
        for stream in asking:
            stream.cut()
        for loan in loans:
            loan.close()

    def _ask(self, way: Way, ask: Ask) -> tuple[Stream, Lent]:
        """A connection with a loan. Raises OSError, MalleeError."""
        raw = pack_ask(ask)
        while (stream := self._take_idle(way)) is not None:
            try:
                return stream, self._answer(way, stream, ask, raw)
            except (ConnectionError, ssl.SSLError):
                pass  # the lender gave it up meanwhile, as it may: a new one tells more
        stream = self._dial(way)
        return stream, self._answer(way, stream, ask, raw)

    def _answer(self, way: Way, stream: Stream, ask: Ask, raw: bytes) -> Lent:
        """The lender's answer; a refusal leaves the connection for the next question."""
        try:
            with self._cut_at_close(stream):
                stream.send(ASK, raw)
                kind, answer = stream.receive(self.times.answer_s, _LENT_ROOM)
            if kind == LENT:
                return read_lent(answer, ask)
            if kind != REFUSED:
                raise CodecError(
                    f"a message of kind {kind} where a loan is due", nbytes=len(answer)
                )
            refusal = read_refusal(answer)
        except BaseException as error:
            stream.close()
            if isinstance(error, MalleeError):
                self.counts.failed()
            raise
        self.counts.refused()
        self._keep(way, stream)
        raise refusal

    def _dial(self, way: Way) -> Stream:
        """A connection that is greeted. Raises OSError, ConfigError, CodecError."""
        times = self.times
        family = (
            socket.AF_UNIX
            if isinstance(way, str)
            else socket.AF_INET6
            if ":" in way[0]
            else socket.AF_INET
        )
        sock = socket.socket(family)
        stream = Stream(sock, times.message_s)
        try:
            with self._cut_at_close(stream):
                sock.settimeout(times.connect_s)
                sock.connect(way)
                if self._tls is not None and not isinstance(way, str):
                    stream.wrap(self._tls)
                self._greet(stream)
            return stream
        except BaseException as error:
            stream.close()
            if isinstance(error, MalleeError):
                self.counts.failed()
            raise

    def _greet(self, stream: Stream) -> None:
        greeting = DialerGreeting(self._secret, self._name, LENDING)
        while True:
            kind, raw = stream.receive(self.times.greeting_s, MAX_REFUSAL_NBYTES)
            if kind == REFUSED:
                raise read_refusal(raw)
            if kind != GREETING or len(raw) > MAX_GREETING_NBYTES:
                raise CodecError("it does not greet as a lender does", nbytes=len(raw))
            if (answer := greeting.take(raw)) is None:
                return
            stream.send(GREETING, answer)

    @contextmanager
    def _cut_at_close(self, stream: Stream) -> Iterator[None]:
        """Have waits for `stream` end with an error once this is closed."""
        with self._lock:
            if self._is_closed:
                raise Unavailable("nothing more is borrowed: this process is shutting down")
            self._asking.add(stream)
        try:
            yield
        finally:
            with self._lock:
                self._asking.discard(stream)

    def _take_idle(self, way: Way) -> Stream | None:
        """A connection there that was used a short while ago, if there is one."""
        oldest = time.monotonic() - self.times.idle_s / 2
        with self._lock:
            old = [stream for _, stream, since in self._idle if since < oldest]
            self._idle = [each for each in self._idle if each[2] >= oldest]
            found = [each for each in self._idle if each[0] == way]
            if found:
                self._idle.remove(found[-1])
        for stream in old:
            stream.close()
        return found[-1][1] if found else None

    def _keep(self, way: Way, stream: Stream) -> None:
        """Keep a connection without a loan for the next question."""
        with self._lock:
            if not self._is_closed:
                self._idle.append((way, stream, time.monotonic()))
                stream_to_close = self._idle.pop(0)[1] if len(self._idle) > MAX_IDLE else None
            else:
                stream_to_close = stream
        if stream_to_close is not None:
            stream_to_close.close()

    def ended(self, loan: "BorrowedLoan", way: Way, stream: Stream | None) -> None:
        """Take note that `loan` is over. Its connection goes on if it is given back."""
        with self._lock:
            self._open.discard(loan)
        self._room.release()
        self.counts.closed()
        if stream is not None:
            self._keep(way, stream)


class BorrowedLoan:
    """A `Loan` of another process. Threads that read take turns; one may close it meanwhile."""

    __slots__ = (
        *(
            "_ahead",
            "_borrower",
            "_is_closed",
            "_is_sound",
            "_lent",
            "_lock",
            "_num_using",
            "_stream",
        ),
        *("_turn", "_way", "_worker"),
    )

    def __init__(
        self, borrower: Borrower, way: Way, stream: Stream, worker: str, lent: Lent
    ) -> None:
        self._borrower = borrower
        self._way = way
        self._stream = stream
        self._worker = worker
        self._lent = lent
        self._turn = Lock()
        self._ahead: list[int] = []  # places that were asked for, and not read yet
        self._lock = Lock()  # of what follows
        self._num_using = 0
        self._is_sound = True
        self._is_closed = False

    @property
    def record(self) -> bytes:
        return self._lent.record

    @property
    def num_blocks(self) -> int:
        return self._lent.num_blocks

    @property
    def block_nbytes(self) -> int:
        return self._lent.block_nbytes

    def read(self, places: Sequence[int], rows: Rows) -> None:
        """Raises WorkerLost, CorruptLoan, CodecError, IncompatibleCapsule, or the lender's error: no row
        counts then, and the loan is of no more use."""
        assert len(places) == len(rows), f"{len(places)} blocks for {len(rows)} rows"
        for row in rows:
            if row.nbytes != self.block_nbytes:
                sizes = ("block_nbytes", str(self.block_nbytes), str(row.nbytes))
                raise IncompatibleCapsule(f"lent by {self._worker}", [sizes])
        with self._using():
            began = time.monotonic()
            self._read(places, rows)
        self._borrower.counts.moved(len(rows) * self.block_nbytes, time.monotonic() - began)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._num_using:
                self._stream.cut()  # the last reader ends it
                return
        self._end()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Use the connection. After an error it is closed: the lender is free, whatever comes next."""
        with self._lock:
            self._check()
            self._num_using += 1
        try:
            with self._turn:
                self._check()
                try:
                    yield
                except BaseException:
                    self._is_sound = False
                    self._stream.close()
                    self._borrower.counts.failed()
                    raise
        except OSError as error:
            raise WorkerLost(self._worker, reason_of(error)) from error
        finally:
            with self._lock:
                self._num_using -= 1
                is_last = self._is_closed and not self._num_using
            if is_last:
                self._is_sound = False  # it was cut
                self._end()

    def _check(self) -> None:
        if self._is_closed or not self._is_sound:
            raise WorkerLost(self._worker, "the loan is over")

    def _end(self) -> None:
        """Give the connection back, or close it if it is of no more use."""
        if self._is_sound and not self._ahead and self._stream.try_send(END):
            self._borrower.ended(self, self._way, self._stream)
        else:
            self._stream.close()
            self._borrower.ended(self, self._way, None)

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
            for place, row, told in zip(places[here], rows[here], sums, strict=True):
                self._stream.fill(row.data.cast("B"), self._stream.deadline(row.nbytes))
                if checksum(row.data, place) != told:
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
        kind, size = stream.receive_head(self._borrower.times.answer_s)
        if kind == REFUSED:
            raise read_refusal(stream.receive_rest(size, MAX_REFUSAL_NBYTES))
        num, rest = divmod(size, CHECKSUM_NBYTES + nbytes)
        if kind != BLOCKS or rest or not 0 < num <= min(CHUNK_BLOCKS, due):
            raise CodecError(
                f"a message of kind {kind} and {size} bytes where {due} blocks of {nbytes} are due",
                nbytes=size,
            )
        sums = stream.receive_rest(num * CHECKSUM_NBYTES, num * CHECKSUM_NBYTES)
        return [told for (told,) in CHECKSUM.iter_unpack(sums)]


def reason_of(error: OSError) -> str:
    """The text of `error`, for a WorkerLost."""
    if isinstance(error, TimeoutError):
        return "it lends nothing in time"
    return f"the connection for loans broke: {error}" if str(error) else type(error).__name__
