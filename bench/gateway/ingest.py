"""One gateway's event loop under a fleet's events: how long decisions wait, how far behind the index is.

    python -m bench.gateway.ingest [--seconds 10] [--blocks-per-message 64] [--blocks-s 100000]
    python -m bench.gateway.ingest --cold-join [--pairs 10000000]
    python -m bench.gateway.ingest --idle

1000 workers publish on an in-memory bus in the gateway's own event loop, at a steady pace: events
(half of them stores, half removals, once a worker is full) and a lease each per second. A second
process asks for 1,000 placements a second at random times over a socket, as clients would; a decision's
latency counts from the moment it was sent. `event_lag_ms` is how long the oldest message had waited at
each turn that took some in. `turn_cpu_ms` and `route_cpu_ms` are the CPU time of a turn of the pump
and of a call to the router: what else the machine does is in the latency, but not in these.
`--cold-join`: a fresh router joins workers that hold `--pairs` (worker, block) pairs by snapshots, and
decides meanwhile. `--idle`: nothing but leases. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable

import numpy as np

from bench.doubles.bus import LocalBus, LocalHub
from bench.gateway.ingest_gateway import FLEET, PROMPT_BLOCKS, SPEC, Gateway, hashes_of
from bench.measure import machine, rss_nbytes
from mallee.protocol.codec import encode
from mallee.protocol.events import EventBatch, Lease, Removed, Snapshot, Stored, pack_hashes
from mallee.protocol.hashing import Hashes
from mallee.protocol.subjects import Subjects

WORKERS = 1000
WORKER_BLOCKS = 512  # held by each worker when full, in the ingest run


def lease(worker: int, next_seq: int) -> Lease:
    return Lease(
        worker=f"w{worker}",
        incarnation=1,
        address=f"a{worker}",
        model=SPEC.name,
        fingerprint=SPEC.fingerprint,
        block_size=16,
        num_blocks=65_536,
        max_rows=256,
        max_model_len=1 << 20,
        next_seq=next_seq,
        is_prefix_closed=True,
    )


class Script:
    """Messages of 1000 workers, encoded beforehand to keep the bench's own work out of the figures."""

    def __init__(self, messages: int, blocks_per_message: int) -> None:
        subjects = Subjects.of(FLEET)
        self.messages: list[tuple[str, bytes]] = []
        self.seqs = [0] * WORKERS
        self.held: list[deque[Hashes]] = [deque() for _ in range(WORKERS)]
        draw = np.random.default_rng(1)
        for i in range(messages):
            worker = i % WORKERS
            event = self._event(worker, blocks_per_message, draw)
            batch = EventBatch(f"w{worker}", 1, self.seqs[worker], (event,))
            self.seqs[worker] += 1
            self.messages.append((subjects.events(f"w{worker}"), encode(batch)))

    @property
    def num_pairs(self) -> int:
        return sum(len(run) for runs in self.held for run in runs)

    def _event(self, worker: int, n: int, draw: np.random.Generator) -> Stored | Removed:
        held = self.held[worker]
        if len(held) * n >= WORKER_BLOCKS and draw.integers(2):
            return Removed(pack_hashes(held.popleft()))
        # A quarter of what is stored is from a prompt that others may hold, too.
        if n <= PROMPT_BLOCKS and not draw.integers(4):
            run = hashes_of(int(draw.integers(256)), PROMPT_BLOCKS)[:n]
        else:
            run = draw.integers(0, 1 << 64, size=n, dtype=np.uint64, endpoint=False)
        if any(np.array_equal(run, other) for other in held):
            return Stored(b"")
        held.append(run)
        return Stored(pack_hashes(run))


async def paced(seconds: float, total: int, send: Callable[[int], None]) -> None:
    """`send(i)` for i < total, evenly over `seconds`."""
    begin, done = time.perf_counter(), 0
    while done < total:
        due = min(total, int((time.perf_counter() - begin) / seconds * total) + 1)
        for i in range(done, due):
            send(i)
        done = due
        await asyncio.sleep(max(0.001, seconds / total))


async def until(claim: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def join_all(gateway: Gateway, bus: LocalBus) -> None:
    """1000 workers are known, with nothing held."""
    subjects = Subjects.of(FLEET)
    for worker in range(WORKERS):
        bus.publish(subjects.lease(f"w{worker}"), encode(lease(worker, 0)))
    await until(lambda: gateway.router.stats().num_workers == WORKERS, 60)


async def ingest(options: argparse.Namespace) -> dict[str, object]:
    seconds, n = options.seconds, options.blocks_per_message
    script = Script(int(seconds * options.blocks_s / n), n)
    hub = LocalHub()
    bus, gateway = LocalBus(hub), Gateway(hub)
    await bus.connect()
    await gateway.start_up()
    await join_all(gateway, bus)
    gateway.decide(time.perf_counter())
    gateway.begin()
    subjects = Subjects.of(FLEET)
    said = [0] * WORKERS

    def say(i: int) -> None:
        bus.publish(*script.messages[i])
        said[i % WORKERS] += 1

    def renew(i: int) -> None:
        worker = i % WORKERS
        bus.publish(subjects.lease(f"w{worker}"), encode(lease(worker, said[worker])))

    begin, cpu = time.perf_counter(), time.process_time()
    with gateway.clients(options.requests_s, seconds):
        await asyncio.gather(
            paced(seconds, len(script.messages), say),
            paced(seconds, int(seconds * WORKERS), renew),
        )
        await until(lambda: not gateway.feed.pump.is_busy, 60)
    wall = time.perf_counter() - begin
    stats = gateway.router.stats()
    result: dict[str, object] = {
        "blocks_per_message": n,
        "blocks_s": round(len(script.messages) * n / wall),
        **gateway.times_ms(),
        "decisions_s": round(len(gateway.latencies_s) / wall),
        "cpu_share": round((time.process_time() - cpu) / wall, 3),
        "dropped": gateway.feed.pump.num_dropped,
        "gaps": stats.gaps,
        "refused": gateway.refused,
        "pairs": stats.index.num_entries,
        "pairs_expected": script.num_pairs,
    }
    await gateway.close()
    await bus.close()
    return result


async def cold_join(options: argparse.Namespace) -> dict[str, object]:
    per_worker = options.pairs // WORKERS
    hub = LocalHub()
    bus = LocalBus(hub)
    await bus.connect()
    subjects = Subjects.of(FLEET)

    def server(worker: int) -> Callable[[bytes], Awaitable[bytes]]:
        held = pack_hashes(hashes_of(10_000 + worker, per_worker))
        raw = encode(Snapshot(f"w{worker}", 1, 1, held, ()))

        async def answer(_: bytes) -> bytes:
            return raw

        return answer

    for worker in range(WORKERS):
        await bus.serve(subjects.host(f"w{worker}"), server(worker))
    gateway = Gateway(hub)
    await gateway.start_up()
    gateway.begin()
    before, peak = rss_nbytes(), 0

    def renew(i: int) -> None:
        nonlocal peak
        bus.publish(subjects.lease(f"w{i % WORKERS}"), encode(lease(i % WORKERS, 1)))
        if not i % 20:
            peak = max(peak, rss_nbytes())

    def is_whole() -> bool:
        stats = gateway.router.stats()
        is_busy = gateway.feed.pump.is_busy
        return stats.num_workers == WORKERS and not stats.num_incomplete and not is_busy

    with gateway.clients(options.requests_s, 600):
        await asyncio.sleep(0.3)  # the client is there, no worker yet
        refused, gateway.refused = gateway.refused, 0
        begin = time.perf_counter()
        renewals = asyncio.create_task(paced(60, 60 * WORKERS, renew))
        while not is_whole():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        seconds = time.perf_counter() - begin
        renewals.cancel()
    stats = gateway.router.stats()
    result: dict[str, object] = {
        "pairs": stats.index.num_entries,
        "seconds": round(seconds, 2),
        "pairs_s": round(stats.index.num_entries / seconds),
        "rss_growth_mb": round((max(peak, rss_nbytes()) - before) / 1e6, 1),
        "index_mb": round(stats.index.nbytes / 1e6, 1),
        **gateway.times_ms(),
        "refused": gateway.refused,
        "refused_before": refused,
    }
    await gateway.close()
    await bus.close()
    return result


async def idle(options: argparse.Namespace) -> dict[str, object]:
    """CPU share of leases alone; less the cost of publishing them without readers. Medians of turns."""
    subjects = Subjects.of(FLEET)
    leases = [(subjects.lease(f"w{i}"), encode(lease(i, 0))) for i in range(WORKERS)]
    hub = LocalHub()
    heard, unheard, gateway = LocalBus(hub), LocalBus(LocalHub()), Gateway(hub)
    for bus in (heard, unheard):
        await bus.connect()
    await gateway.start_up()
    await join_all(gateway, heard)
    shares: dict[LocalBus, list[float]] = {heard: [], unheard: []}
    for _ in range(5):
        for bus, found in shares.items():
            begin, cpu = time.perf_counter(), time.process_time()
            await paced(1.0, WORKERS, lambda i, bus=bus: bus.publish(*leases[i]))
            found.append((time.process_time() - cpu) / (time.perf_counter() - begin))
    whole, publishing = (statistics.median(found) for found in shares.values())
    await gateway.close()
    return {
        "leases_s": WORKERS,
        "cpu_share": round(whole - publishing, 4),
        "with_publishing": round(whole, 4),
        "us_per_lease": round((whole - publishing) / WORKERS * 1e6, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--blocks-s", type=float, default=100_000)
    parser.add_argument("--blocks-per-message", type=int, default=64)
    parser.add_argument("--requests-s", type=float, default=1000)
    parser.add_argument("--cold-join", action="store_true")
    parser.add_argument("--pairs", type=int, default=10_000_000)
    parser.add_argument("--idle", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    result: dict[str, object] = {"workers": WORKERS}
    if options.cold_join:
        result["cold_join"] = asyncio.run(cold_join(options))
    if options.idle:
        result["idle"] = asyncio.run(idle(options))
    if not (options.cold_join or options.idle):
        result["ingest"] = asyncio.run(ingest(options))
    result |= machine()
    for key, value in result.items():
        print(f"{key:>12}  {value}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
