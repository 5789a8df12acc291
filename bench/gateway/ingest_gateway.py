"""The gateway that `bench/gateway/ingest.py` watches: a router behind its feed, asked by another process."""

import asyncio
import gc
import random
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from bench.doubles.bus import LocalBus, LocalHub
from bench.doubles.members import Members
from mallee.gateway.fleet.feed import FleetFeed
from mallee.gateway.metrics import GatewayMetrics
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import KVMemoryExceeded, NoWorker
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import RequestId
from mallee.router.config import RouterConfig
from mallee.router.router import Router

FLEET = "bench"
PROMPT_BLOCKS = 128
LIVE_REQUESTS = 2000
SPEC = mock_spec()

# What the second process runs: the time of sending, 8 bytes a request, Poisson in time.
CLIENT = """
import random, socket, struct, sys, time
sock, rate, seconds = socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), float(sys.argv[3])
draw, due, end = random.Random(5), time.perf_counter(), time.perf_counter() + seconds
while due < end:
    due += draw.expovariate(rate)
    time.sleep(max(0.0, due - time.perf_counter()))
    sock.sendall(struct.pack("d", time.perf_counter()))
"""


class Metrics(GatewayMetrics):
    """Also keeps what the histogram would blur."""

    def __init__(self) -> None:
        super().__init__()
        self.lags_s: list[float] = []

    def pumped(self, lag_s: float, queued: int) -> None:
        super().pumped(lag_s, queued)
        self.lags_s.append(lag_s)


class Gateway:
    """A router, its feed, and the decisions it was asked for."""

    def __init__(self, hub: LocalHub) -> None:
        self.router = Router(RouterConfig(max_workers=1024, lease_s=10.0), clock=time.monotonic)
        self.metrics = Metrics()
        self.bus = LocalBus(hub)
        self.feed = FleetFeed(
            self.bus,
            self.router,
            model=SPEC,
            fleet=FLEET,
            metrics=self.metrics,
            members=Members(),
            clock=time.monotonic,
        )
        self.latencies_s: list[float] = []
        self.routes_s: list[float] = []
        self.turns_s: list[float] = []
        turn = self.feed.pump._turn

        def timed_turn() -> None:
            begin = time.thread_time()
            turn()
            self.turns_s.append(time.thread_time() - begin)

        self.feed.pump._turn = timed_turn  # type: ignore[method-assign]
        self.prompts: list[Hashes] = [hashes_of(i, PROMPT_BLOCKS) for i in range(256)]
        self._live: deque[RequestId] = deque()
        self._names = count()
        self._draw = random.Random(3)
        self.refused = 0

    async def start_up(self) -> None:
        await self.bus.connect()
        await self.feed.start_up()

    async def close(self) -> None:
        await self.feed.close()
        await self.bus.close()

    def begin(self) -> None:
        """Times count from now; what is there now is never collected, as in the service."""
        gc.collect()
        gc.freeze()
        for times in (self.latencies_s, self.routes_s, self.turns_s, self.metrics.lags_s):
            times.clear()

    def times_ms(self) -> dict[str, object]:
        return {
            "decision_ms": percentiles_ms(self.latencies_s),
            "event_lag_ms": percentiles_ms(self.metrics.lags_s),
            "turn_cpu_ms": percentiles_ms(self.turns_s),
            "route_cpu_ms": percentiles_ms(self.routes_s),
        }

    def decide(self, sent: float) -> None:
        """Place a request that was sent at `sent`; an old one gets its first token, an older ends."""
        request = RequestId(f"r{next(self._names)}")
        prompt = self.prompts[self._draw.randrange(len(self.prompts))]
        begin = time.thread_time()
        try:
            self.router.route(request, prompt, prompt_tokens=16 * PROMPT_BLOCKS + 5, max_tokens=200)
        except (KVMemoryExceeded, NoWorker):
            self.refused += 1
            return
        self.routes_s.append(time.thread_time() - begin)
        self.latencies_s.append(time.perf_counter() - sent)
        self._live.append(request)
        if len(self._live) > LIVE_REQUESTS // 2:
            self.router.first_token(self._live[len(self._live) // 2])
        if len(self._live) > LIVE_REQUESTS:
            self.router.free(self._live.popleft())

    @contextmanager
    def clients(self, rate: float, seconds: float) -> Iterator[None]:
        """Requests arrive on a socket meanwhile."""
        if not rate:
            yield
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()

        def read() -> None:
            for (sent,) in struct.iter_unpack("d", ours.recv(8 * 4096)):
                self.decide(sent)

        arguments = [str(theirs.fileno()), str(rate), str(seconds)]
        child = subprocess.Popen(
            [sys.executable, "-c", CLIENT, *arguments], pass_fds=[theirs.fileno()]
        )
        loop.add_reader(ours, read)
        try:
            yield
        finally:
            child.kill()
            child.wait()
            loop.remove_reader(ours)
            ours.close()
            theirs.close()


def hashes_of(document: int, num_blocks: int) -> Hashes:
    """Stands for the chain hashes of one document."""
    return np.random.default_rng(document).integers(
        0, 1 << 64, size=num_blocks, dtype=np.uint64, endpoint=False
    )


def percentiles_ms(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = np.percentile(np.array(seconds) * 1000, [50, 99, 99.9, 100]).round(3).tolist()
    return dict(zip(("p50", "p99", "p999", "max"), found, strict=True))
