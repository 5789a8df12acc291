"""A borrower's end of the connections: dials lenders, asks, reads the blocks into rows that it is given."""

import socket
import ssl
import time
from collections import deque
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
from mallee.actors.transport.address import Way, parse_address
from mallee.actors.transport.greeting import LENDING, DialerGreeting, Secret
from mallee.protocol.errors import (
    CodecError,
    CorruptLoan,
    IncompatibleCapsule,
    MalleeError,
    Unavailable,
    WorkerLost,
)
from mallee.worker.kv.tiers.peers import Ask, Loan
from mallee.worker.kv.watch import Row

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
                if is_wanted:
                    self._open.add(loan)
            if not is_wanted:
                stream.close()
                raise Unavailable("no more is borrowed: this process is shutting down")
        except BaseException as error:
            self._room.release()
            if isinstance(error, OSError):
                self.counts.failed()
                raise WorkerLost(worker, reason_of(error)) from error
            raise
        self.counts.opened()
        return loan

    def close(self) -> None:
        """End every loan and connection. Idempotent; from any thread."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            loans = list(self._open)
        for _, stream, _ in idle:
            stream.close()
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
            sock.settimeout(times.connect_s)
            sock.connect(way)
            if self._tls is not None and not isinstance(way, str):
                stream.wrap(self._tls)
            greeting = DialerGreeting(self._secret, self._name, LENDING)
            while True:
                kind, raw = stream.receive(times.greeting_s, MAX_REFUSAL_NBYTES)
                if kind == REFUSED:
                    raise read_refusal(raw)
                if kind != GREETING or len(raw) > MAX_GREETING_NBYTES:
                    raise CodecError("it does not greet as a lender does", nbytes=len(raw))
                if (answer := greeting.take(raw)) is None:
                    return stream
                stream.send(GREETING, answer)
        except BaseException as error:
            stream.close()
            if isinstance(error, MalleeError):
                self.counts.failed()
            raise

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
    """A `Loan` of another process. One thread reads; another may close it meanwhile."""

    __slots__ = (
        "_borrower",
        "_coming",
        "_is_closed",
        "_is_sound",
        "_is_used",
        "_lent",
        "_lock",
        "_stream",
        "_sums",
        "_way",
        "_worker",
    )

    def __init__(
        self, borrower: Borrower, way: Way, stream: Stream, worker: str, lent: Lent
    ) -> None:
        self._borrower = borrower
        self._way = way
        self._stream = stream
        self._worker = worker
        self._lent = lent
        self._lock = Lock()
        self._coming: deque[int] = deque()  # places that were asked for
        self._sums: deque[int] = deque()  # of the blocks to come of the message under way
        self._is_sound = True
        self._is_used = self._is_closed = False

    @property
    def record(self) -> bytes:
        return self._lent.record

    @property
    def num_blocks(self) -> int:
        return self._lent.num_blocks

    @property
    def block_nbytes(self) -> int:
        return self._lent.block_nbytes

    def expect(self, places: Sequence[int]) -> None:
        """Raises WorkerLost."""
        assert not self._coming, "blocks that were expected are not read yet"
        with self._using():
            self._stream.send(READ, pack_places(places))
            self._coming.extend(places)

    def read(self, places: Sequence[int], rows: Sequence[Row]) -> None:
        """Raises WorkerLost, CorruptLoan, CodecError, IncompatibleCapsule, or the lender's error: no row
        counts then, and the loan is of no more use."""
        assert len(places) == len(rows), f"{len(places)} blocks for {len(rows)} rows"
        for row in rows:
            if row.nbytes != self.block_nbytes:
                sizes = ("block_nbytes", str(self.block_nbytes), str(row.nbytes))
                raise IncompatibleCapsule(f"lent by {self._worker}", [sizes])
        if not self._coming:
            self.expect(places)
        began = time.monotonic()
        with self._using():
            for place, row in zip(places, rows, strict=True):
                self._read(place, row)
        self._borrower.counts.moved(len(rows) * self.block_nbytes, time.monotonic() - began)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._is_used:
                self._is_sound = False
                self._stream.cut()  # the reader ends it
                return
        self._end()

    def _end(self) -> None:
        """Give the connection back, or close it if it does not stand between two messages."""
        if self._is_sound and not self._coming and self._stream.try_send(END):
            self._borrower.ended(self, self._way, self._stream)
        else:
            self._stream.close()
            self._borrower.ended(self, self._way, None)

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Use the connection. After an error it is closed: the lender is free, whatever comes next."""
        with self._lock:
            assert not self._is_used, "two threads read one loan"
            if self._is_closed or not self._is_sound:
                raise WorkerLost(self._worker, "the loan is over")
            self._is_used = True
        is_sound = False
        try:
            yield
            is_sound = True
        except OSError as error:
            self._borrower.counts.failed()
            raise WorkerLost(self._worker, reason_of(error)) from error
        except MalleeError:
            self._borrower.counts.failed()
            raise
        finally:
            with self._lock:
                is_over = self._is_closed
                self._is_sound = is_sound and not is_over
                self._is_used = False
            if not self._is_sound:
                self._stream.close()
            if is_over:
                self._end()

    def _read(self, place: int, row: Row) -> None:
        """Receive the next block, which is that at `place`."""
        if not self._sums:
            self._sums.extend(self._begin_message())
        assert self._coming.popleft() == place, "blocks are read in the order in which they come"
        self._stream.fill(row.data.cast("B"), self._stream.deadline(row.nbytes))
        if checksum(row.data, place) != self._sums.popleft():
            raise CorruptLoan(self._worker, place)

    def _begin_message(self) -> list[int]:
        """The checksums of the next message's blocks, which follow."""
        stream, nbytes, due = self._stream, self.block_nbytes, len(self._coming)
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
