"""The CPU of one of many gateways for the fleet: leases, events, others' bookings, own decisions.

    python -m bench.gateway.scale [--gateways 1,4,16] [--seconds 10] [--requests-s 250]

1000 workers and all gateways but one are a script, which a process plays over a real nats-server: a lease of
each worker and a heartbeat of each gateway a second; for each request a worker's batch of events (16 blocks
stored, 16 removed), and its gateway's booking, end of prefill and end. The gateway that is left is a process
of its own with a real router and feeds, and decides its share, `--requests-s`. Each part of the script is
played alone, and then all together: shares of a core. Each gateway hears all of the fleet, and serves a
part of the requests: `others_us` is what a request costs each gateway that doesn't serve it, by the
fewest and the most gateways. The last line of stdout is one JSON object.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, Final, get_args

import numpy as np

from bench import measure
from bench.doubles.members import Members
from bench.gateway.ingest import WORKERS, lease, paced, until
from bench.gateway.ingest_gateway import FLEET, PROMPT_BLOCKS, SPEC, hashes_of
from mallee.gateway.fleet.bookings import BookingFeed
from mallee.gateway.fleet.feed import FleetFeed
from mallee.gateway.metrics import GatewayMetrics
from mallee.protocol.bookings import Booked, BookingBatch, BookingOp, Freed, PrefillDone
from mallee.protocol.codec import encode
from mallee.protocol.events import EventBatch, Removed, Stored, pack_hashes
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.protocol.subjects import BusRole, Subjects
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from mallee.router.sync.outbox import Outbox
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.broker import Broker
from mallee.runtime.bus.nats import NatsBus

BLOCKS: Final = 16  # of an event
LIVE_S: Final = 2.0  # a request
LOGIN: Final = "BENCH_NATS_LOGIN"
PARTS: Final = ("leases", "events", "bookings", "decisions")
SUBJECTS: Final = Subjects.of(FLEET)


class Fleet:
    """The messages of all others, in their order; numbers go on from part to part."""

    def __init__(self, gateways: int, requests_s: float) -> None:
        self.others = [f"g{i}" for i in range(1, gateways)]
        self.requests_s = requests_s * gateways
        self._per_flush = max(1, round(requests_s * 3e-3))  # operations wait 3 ms for each other
        self._event_seqs, self._booking_seqs = Counter[int](), Counter[str]()
        self._held: list[deque[bytes]] = [deque() for _ in range(WORKERS)]
        self._ops: dict[str, list[BookingOp]] = {name: [] for name in self.others}
        self._live: deque[tuple[str, str]] = deque()
        self._names, self._draw = count(), np.random.default_rng(1)

    def lease(self, i: int) -> Iterator[tuple[str, bytes]]:
        worker = i % WORKERS
        yield SUBJECTS.lease(f"w{worker}"), encode(lease(worker, self._event_seqs[worker]))
        if worker < len(self.others):
            yield self._batch(self.others[worker])

    def event(self, i: int) -> Iterator[tuple[str, bytes]]:
        worker = i % WORKERS
        run = pack_hashes(self._draw.integers(0, 1 << 64, size=BLOCKS, dtype=np.uint64))
        self._held[worker].append(run)
        happened: list[Stored | Removed] = [Stored(run)]
        if len(self._held[worker]) > 8:
            happened.append(Removed(self._held[worker].popleft()))
        batch = EventBatch(
            WorkerId(f"w{worker}"), Incarnation(1), self._event_seqs[worker], tuple(happened)
        )
        self._event_seqs[worker] += len(happened)
        yield SUBJECTS.events(f"w{worker}"), encode(batch)

    def booking(self, i: int) -> Iterator[tuple[str, bytes]]:
        """A request at another gateway, and the end of an older one."""
        name, request = self.others[i % len(self.others)], f"o{next(self._names)}"
        waypoints = pack_hashes(hashes_of(i % 256, PROMPT_BLOCKS)[15::16])
        booked = Booked(
            request=request,
            worker=f"w{i * 7 % WORKERS}",
            incarnation=1,
            waypoints=waypoints,
            num_blocks=PROMPT_BLOCKS,
            own_blocks=40,
            prefill_tokens=512,
            rows=1,
            steps=200,
        )
        self._live.append((name, request))
        self._ops[name] += (booked, PrefillDone(request))
        if len(self._live) > LIVE_S * self.requests_s:
            owner, old = self._live.popleft()
            self._ops[owner].append(Freed(old))
        if len(self._ops[name]) >= 3 * self._per_flush:
            yield self._batch(name)

    def _batch(self, name: str) -> tuple[str, bytes]:
        ops, self._ops[name] = tuple(self._ops[name]), []
        batch = BookingBatch(name, 1, self._booking_seqs[name], ops)
        self._booking_seqs[name] += len(ops)
        return SUBJECTS.bookings(name), encode(batch)


class Gateway:
    """The gateway that is looked at. Belongs to one event loop."""

    def __init__(self, access: BrokerAccess) -> None:
        outbox = Outbox("g0", Incarnation(1))
        config = RouterConfig(max_workers=1024, lease_s=30.0)
        self.router = Router(config, clock=time.monotonic, outbox=outbox)
        self._bus = NatsBus(access, fleet=FLEET)
        self.feed = FleetFeed(
            self._bus,
            self.router,
            model=SPEC,
            fleet=FLEET,
            metrics=GatewayMetrics(),
            members=Members(),
            clock=time.monotonic,
        )
        self.bookings = BookingFeed(
            self._bus,
            self.router,
            outbox,
            pump=self.feed.pump,
            fleet=FLEET,
            clock=time.monotonic,
            lease_s=30.0,
        )
        self._prompts = [hashes_of(i, PROMPT_BLOCKS) for i in range(256)]
        self._live: deque[RequestId] = deque()
        self._draw, self._names = random.Random(3), count()

    async def start_up(self) -> None:
        await self._bus.connect()
        await self.feed.start_up()
        await self.bookings.start_up()

    def decide(self, max_live: int, _: int) -> None:
        """Place and book a request, whose prefill ends; the oldest ends."""
        request = RequestId(f"r{next(self._names)}")
        prompt = self._prompts[self._draw.randrange(len(self._prompts))]
        self.router.route(request, prompt, prompt_tokens=16 * PROMPT_BLOCKS + 5, max_tokens=200)
        self.router.first_token(request)
        self._live.append(request)
        if len(self._live) > max_live:
            self.router.free(self._live.popleft())

    def heard(self) -> dict[str, int]:
        """Messages lost or refused on the way; 0 of each, or the figures mean nothing."""
        stats, others = self.router.stats(), self.bookings.replicas.stats()
        return {
            "gaps": stats.gaps + others.gaps,
            "dropped": self.feed.pump.num_dropped,
            "refused": others.refused,
        }


async def watched(access: BrokerAccess) -> None:
    """The gateway's process: a line on stdin begins or ends a part, and is answered with its CPU so far."""
    gateway = Gateway(access)
    await gateway.start_up()
    loop, deciding = asyncio.get_running_loop(), None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if (asked := json.loads(line)).get("join"):
            await until(lambda: gateway.router.stats().num_workers == WORKERS, 60)
        if deciding is not None:
            await deciding
            deciding = None
        await until(lambda: not gateway.feed.pump.is_busy, 60)
        if rate := asked.get("decide_s"):
            decide = partial(gateway.decide, int(LIVE_S * rate))
            seconds = asked["seconds"]
            deciding = asyncio.create_task(paced(seconds, int(seconds * rate), decide))
        print(json.dumps({"cpu_s": time.process_time(), **gateway.heard()}), flush=True)


async def played(
    process: asyncio.subprocess.Process,
    buses: Mapping[BusRole, NatsBus],
    fleet: Fleet,
    seconds: float,
) -> Any:
    """CPU shares of the gateway by part, and of all parts at once."""
    assert process.stdin is not None
    assert process.stdout is not None
    said, heard = process.stdin, process.stdout

    async def ask(**words: Any) -> Any:
        said.write(f"{json.dumps(words)}\n".encode())
        return json.loads(await heard.readline())

    def send(messages: Iterator[tuple[str, bytes]]) -> None:
        for subject, raw in messages:
            is_gateways = subject.startswith(SUBJECTS.bookings(""))
            buses["gateway" if is_gateways else "worker"].publish(subject, raw)

    async def play(parts: tuple[str, ...], seconds: float) -> Any:
        own = fleet.requests_s / (len(fleet.others) + 1)
        calls = {
            "leases": (WORKERS, lambda i: send(fleet.lease(i))),
            "events": (fleet.requests_s, lambda i: send(fleet.event(i))),
            "bookings": (fleet.requests_s - own, lambda i: send(fleet.booking(i))),
        }
        decides = {"decide_s": own, "seconds": seconds} if "decisions" in parts else {}
        begin = await ask(**decides)
        pacings = [
            paced(seconds, int(seconds * calls[part][0]), calls[part][1])
            for part in parts
            if part in calls and calls[part][0] >= 1
        ]
        await asyncio.gather(asyncio.sleep(seconds), *pacings)
        await asyncio.sleep(0.1)
        end = await ask()
        return {"share": (end.pop("cpu_s") - begin["cpu_s"]) / seconds, **end}

    await ask()  # it is there
    # Twice: the first may come before the gateway's subscriptions.
    await asyncio.gather(ask(join=True), paced(2.0, 2 * WORKERS, lambda i: send(fleet.lease(i))))
    await play(PARTS, min(3.0, seconds))  # fills what a fleet in its stride holds
    shares = {part: (await play((part,), seconds))["share"] for part in (*PARTS, "nothing")}
    idle = shares.pop("nothing")
    together = await play(PARTS, seconds)
    return {
        "requests_s": fleet.requests_s,
        "shares": {"idle": idle, **{part: share - idle for part, share in shares.items()}},
        "together": together.pop("share"),
        **together,
    }


async def bench(gateways: int, requests_s: float, seconds: float) -> Any:
    broker = Broker(fleet=FLEET)
    await broker.start()
    access = broker.access("gateway")
    buses = {role: NatsBus(broker.access(role), fleet=FLEET) for role in get_args(BusRole)}
    for bus in buses.values():
        await bus.connect()
    command = (sys.executable, "-m", "bench.gateway.scale", "--watch", access.url)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env=os.environ | {LOGIN: access.login or ""}
    )
    try:
        return await played(process, buses, Fleet(gateways, requests_s), seconds)
    finally:
        process.kill()
        await process.wait()
        for bus in buses.values():
            await bus.close()
        await broker.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gateways", default="1,4,16")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--requests-s", type=float, default=250.0, help="of each gateway")
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    if args.watch:
        asyncio.run(watched(BrokerAccess(args.watch, login=os.environ[LOGIN])))
        return 0
    found: dict[str, Any] = {"workers": WORKERS, "requests_s": args.requests_s, "gateways": {}}
    for n in map(int, args.gateways.split(",")):
        run = asyncio.run(bench(n, args.requests_s, args.seconds))
        found["gateways"][n] = run
        print(f"{n:>3} gateways  {run}", file=sys.stderr, flush=True)
    few, many = (found["gateways"][of(found["gateways"])] for of in (min, max))
    if (more_s := many["requests_s"] - few["requests_s"]) > 0:
        found["others_us"] = (many["together"] - few["together"]) / more_s * 1e6
    print(json.dumps(found | measure.machine()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
