"""The streams of reports from a host to its gateways: one each, bounded, cut without a reader.

The reports of a turn of the loop are one message. While the gateway's socket is full they are merged, a
branch's tokens one after the other: a gateway that stalls costs the host its tokens, not a frame for each
step. Beyond a bound it is cut, and its requests are cancelled.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from mallee.protocol.codec import encode
from mallee.protocol.messages import CapsuleReply, Frame, TokenLogprobs, Update
from mallee.protocol.parcels import Report
from mallee.runtime.transport.server import Sink

log = logging.getLogger(__name__)

MAX_WAITING_NBYTES = 16 << 20
HEARTBEAT_S = 1.0
GATEWAY_SILENCE_S = 10.0
# Memory of what waits, about.
UPDATE_NBYTES = 512
TOKEN_NBYTES = 40
LOGPROB_NBYTES = 120


class MergedUpdates:
    """Updates of one branch as one; tokens that were injected (`Update.injected`) stay by themselves."""

    __slots__ = ("_drafts", "_last", "_logprobs", "_position", "_tokens")

    def __init__(self, first: Update) -> None:
        self._last = first
        self._drafts = first.drafts
        self._position = first.position
        self._tokens = list(first.tokens)
        self._logprobs: list[TokenLogprobs] = list(first.logprobs)

    def add(self, update: Update) -> bool:
        """Take in the next update; False: it is reported by itself."""
        if self._last.injected or update.injected:
            return False
        self._last = update
        if update.drafts is not None:
            drafted, accepted = self._drafts or (0, 0)
            self._drafts = drafted + update.drafts[0], accepted + update.drafts[1]
        self._tokens += update.tokens
        self._logprobs += update.logprobs
        return True

    def update(self) -> Update:
        return replace(
            self._last,
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            position=self._position,
            drafts=self._drafts,
        )


class MergedReports:
    """Reports of one life of a worker as one."""

    __slots__ = ("_last", "_lost", "_replies", "_updates")

    def __init__(self) -> None:
        self._updates: dict[tuple[str, int], list[MergedUpdates]] = {}
        self._replies: list[CapsuleReply] = []
        self._last: Report | None = None
        self._lost: str | None = None

    def add(self, report: Report) -> int:
        """Take in a report; about how many bytes more wait now."""
        self._last = report
        self._lost = self._lost or report.lost
        self._replies += report.frame.replies
        nbytes = UPDATE_NBYTES * len(report.frame.replies)
        for update in report.frame.updates:
            own = self._updates.setdefault((update.request, update.branch), [])
            if not own or not own[-1].add(update):
                own.append(MergedUpdates(update))
                nbytes += UPDATE_NBYTES
            nbytes += TOKEN_NBYTES * len(update.tokens)
            nbytes += LOGPROB_NBYTES * sum(1 + len(top) for _, top in update.logprobs)
        return nbytes

    def report(self) -> Report:
        assert self._last is not None
        updates = tuple(merged.update() for own in self._updates.values() for merged in own)
        frame = Frame(self._last.frame.step, updates, tuple(self._replies))
        return replace(self._last, frame=frame, lost=self._lost)


class Stream:
    """Batches from one gateway, and reports on their way to it. Its connection's `Inlet`."""

    def __init__(
        self,
        gateway: str,
        sink: Sink,
        *,
        on_batch: Callable[["Stream", bytes], asyncio.Future[None] | None],
        on_close: Callable[["Stream"], None],
        now: float,
    ) -> None:
        self.gateway = gateway
        self.last_seen = now  # the gateway's last sign of life
        self.is_ended = False
        self._sink = sink
        self._on_batch = on_batch
        self._on_close = on_close
        self._pending: list[Report] = []  # of this turn of the loop
        self._merged: dict[tuple[str, int], MergedReports] = {}  # since the socket is full
        self.waiting_nbytes = 0

    def submit(self, raw: bytes) -> asyncio.Future[None] | None:
        return self._on_batch(self, raw)

    def resume(self) -> None:
        merged, self._merged = self._merged, {}
        self.waiting_nbytes = 0
        self._pending = [each.report() for each in merged.values()] + self._pending
        self.flush()

    def close(self) -> None:
        self._on_close(self)

    def put(self, report: Report) -> None:
        """Have a report go out at the end of this turn of the loop, or once the socket has room."""
        if not self._merged and not self._sink.is_slow:
            if not self._pending:
                asyncio.get_running_loop().call_soon(self.flush)
            self._pending.append(report)
            return
        self._merge_pending()  # what came before it: a receipt may have filled the socket meanwhile
        self._merge(report)

    def beat(self, reports: Sequence[Report]) -> None:
        """Send a heartbeat with the workers' progress, unless the gateway doesn't read."""
        if not self._merged and not self._sink.is_slow:
            self._pending += reports
            self._sink.send(encode(self._pending))
            self._pending.clear()

    def flush(self) -> None:
        """Write what waits, if the socket has room."""
        if self._sink.is_slow:
            self._merge_pending()
        elif self._pending:
            pending, self._pending = self._pending, []
            self._sink.send(encode(pending))

    def end(self, refusal: str | None = None) -> None:
        """Write what waits, and no more; `refusal`: the reason for which the gateway is cut."""
        self.is_ended = True
        self.flush()
        self._sink.finish(refusal)

    def _merge_pending(self) -> None:
        pending, self._pending = self._pending, []
        for report in pending:
            self._merge(report)

    def _merge(self, report: Report) -> None:
        life = report.worker, report.incarnation
        self.waiting_nbytes += self._merged.setdefault(life, MergedReports()).add(report)


class Streams:
    """The streams of one host, by gateway. Belongs to one event loop.

    `on_end(gateway)` is called for each that ends, for any reason.
    """

    def __init__(
        self,
        *,
        on_batch: Callable[[Stream, bytes], asyncio.Future[None] | None],
        on_end: Callable[[str], None],
        clock: Callable[[], float],
        max_waiting_nbytes: int = MAX_WAITING_NBYTES,
    ) -> None:
        self._on_batch = on_batch
        self._on_end = on_end
        self._clock = clock
        self._max_waiting_nbytes = max_waiting_nbytes
        self._streams: dict[str, Stream] = {}
        self.num_slow = self.num_silent = 0

    @property
    def gateways(self) -> Sequence[str]:
        return tuple(self._streams)

    def open(self, gateway: str, sink: Sink) -> Stream:
        """A new stream instead of the gateway's last."""
        self.end(gateway)
        stream = self._streams[gateway] = Stream(
            gateway,
            sink,
            on_batch=self._on_batch,
            on_close=self._close,
            now=self._clock(),
        )
        return stream

    def send(self, gateway: str, report: Report) -> bool:
        """Queue a report. False: the gateway does not read, or so slowly that it is given up now."""
        stream = self._streams.get(gateway)
        if stream is None:
            return False
        stream.put(report)
        if stream.waiting_nbytes > self._max_waiting_nbytes:
            self.num_slow += 1
            log.warning("gateway %s reads too slowly: its requests are cancelled", gateway)
            self.end(gateway, "this gateway reads too slowly")
            return False
        return True

    def beat(self, gateway: str, reports: Sequence[Report]) -> None:
        """Send the gateway a heartbeat with the progress of workers that have nothing else to report."""
        if (stream := self._streams.get(gateway)) is not None:
            stream.beat(reports)

    def end(self, gateway: str, refusal: str | None = None) -> None:
        """The gateway gets the reports that wait for it, if its socket has room, and no more."""
        stream = self._streams.pop(gateway, None)
        if stream is not None:
            stream.end(refusal)
            self._on_end(gateway)

    def end_silent(self) -> None:
        """Cut streams whose gateway is silent: it hangs, or was cut off with its machine."""
        now = self._clock()
        for gateway, stream in list(self._streams.items()):
            if now - stream.last_seen > GATEWAY_SILENCE_S:
                self.num_silent += 1
                log.warning("gateway %s is silent: its requests are cancelled", gateway)
                self.end(gateway, "this gateway has gone silent")

    def check(self) -> None:
        """Raises AssertionError if too much waits for a reader, or a stream that ended is kept."""
        assert all(s.waiting_nbytes <= self._max_waiting_nbytes for s in self._streams.values())
        assert not any(s.is_ended for s in self._streams.values())

    def _close(self, stream: Stream) -> None:
        if self._streams.get(stream.gateway) is stream:
            self.end(stream.gateway)
