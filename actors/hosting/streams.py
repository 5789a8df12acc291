"""The streams of reports from a host to its gateways: one each, bounded, cut without a reader."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from mallee.protocol.codec import encode
from mallee.protocol.parcels import Report

log = logging.getLogger(__name__)

MAX_PENDING_FRAMES = 1024
HEARTBEAT_S = 1.0
GATEWAY_SILENCE_S = 10.0
_NO_REPORTS = encode(())


class Stream:
    """Reports on their way to one gateway."""

    __slots__ = ("in_flight", "is_ended", "last_seen", "pending", "ready")

    def __init__(self, last_seen: float) -> None:
        self.pending: deque[Report] = deque()
        self.ready = asyncio.Event()
        self.is_ended = False
        self.in_flight = 0  # batches that wait for engines: meanwhile the gateway can't speak
        self.last_seen = last_seen  # the gateway's last sign of life

    def end(self) -> None:
        self.is_ended = True
        self.ready.set()

    def take(self) -> bytes:
        """All reports that wait, encoded."""
        reports = tuple(self.pending)
        self.pending.clear()
        return encode(reports)


class Streams:
    """The streams of one host, by gateway. Belongs to one event loop.

    `on_end(gateway)` is called for each that ends, for any reason.
    """

    def __init__(
        self,
        *,
        on_end: Callable[[str], None],
        clock: Callable[[], float],
        max_pending: int = MAX_PENDING_FRAMES,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._on_end = on_end
        self._clock = clock
        self._max_pending = max_pending
        self._heartbeat_s = heartbeat_s
        self._streams: dict[str, Stream] = {}
        self.num_slow = self.num_silent = 0

    @property
    def gateways(self) -> Sequence[str]:
        return tuple(self._streams)

    def get(self, gateway: str) -> Stream | None:
        return self._streams.get(gateway)

    async def read(self, gateway: str) -> AsyncGenerator[bytes, None]:
        """A new stream instead of the gateway's last, until it ends: no reports at once and each second."""
        self.end(gateway)
        stream = self._streams[gateway] = Stream(self._clock())
        try:
            yield _NO_REPORTS
            while True:
                if stream.pending:
                    yield stream.take()
                    continue
                if stream.is_ended:
                    return
                stream.ready.clear()
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await stream.ready.wait()
                except TimeoutError:
                    yield _NO_REPORTS
        finally:
            if self._streams.get(gateway) is stream:
                self.end(gateway)

    def send(self, gateway: str, report: Report) -> bool:
        """Queue a report. False: the gateway does not read, or so slowly that it is given up now."""
        stream = self._streams.get(gateway)
        if stream is None:
            return False
        if len(stream.pending) >= self._max_pending:
            self.num_slow += 1
            log.warning("gateway %s reads too slowly: its requests are cancelled", gateway)
            stream.pending.clear()
            self.end(gateway)
            return False
        stream.pending.append(report)
        stream.ready.set()
        return True

    def end(self, gateway: str) -> None:
        """The gateway gets the reports that wait for it, and no more."""
        stream = self._streams.pop(gateway, None)
        if stream is not None:
            stream.end()
            self._on_end(gateway)

    def end_silent(self) -> None:
        """Cut streams whose gateway is silent: a carrier may never report that a reader was killed."""
        now = self._clock()
        for gateway, stream in list(self._streams.items()):
            if not stream.in_flight and now - stream.last_seen > GATEWAY_SILENCE_S:
                self.num_silent += 1
                log.warning("gateway %s is silent: its requests are cancelled", gateway)
                self.end(gateway)

    def check(self) -> None:
        """Raises AssertionError if too much waits for a reader, or a stream that ended is kept."""
        assert all(len(s.pending) <= self._max_pending for s in self._streams.values())
        assert not any(s.is_ended for s in self._streams.values())
