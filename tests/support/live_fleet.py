"""Gateways and workers with real engines over a mocked model, on one in-memory bus."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import count
from typing import Any

from bench.doubles.bus import LocalBus, LocalHub
from bench.doubles.forward import MockForward
from mallee.actors.hosting.engine import add_engine
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.weights import WeightSource
from mallee.actors.hosting.worker import Capacity
from mallee.gateway.capsules.capsules import CapsuleFiles
from mallee.gateway.gateway import Gateway
from mallee.gateway.metrics import GatewayMetrics
from mallee.gateway.recording.recorder import Recorder
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.request import RunningRequest
from mallee.gateway.requests.spans import RequestSpans
from mallee.gateway.shell import GatewayContext, RequestIds
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import ModelSpec
from mallee.protocol.subjects import BusRole
from mallee.router.config import RouterConfig
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.router.router import Router
from mallee.router.sync.outbox import Outbox
from mallee.runtime.bus.bus import Bus
from mallee.runtime.telemetry.tracing.provider import Tracing
from mallee.runtime.transport.link import Transport
from mallee.worker.engine import Engine, MakeTiers
from mallee.worker.forward import Forward
from mallee.worker.records import EngineConfig
from mallee.worker.speculation.drafters import Drafter
from support.local_transport import LocalTransport
from support.plain_ids import PlainIds
from support.waiting import until


def make_gateway(
    name: str, bus: Bus, transport: Transport, router: Router, model: ModelSpec, **options: Any
) -> Gateway:
    """A gateway of the fleet "test" that numbers its requests; `options` are of GatewayContext or Gateway."""
    ids = count()
    process = GatewayContext(
        gateway=name,
        fleet="test",
        model=model,
        bus=bus,
        router=router,
        metrics=GatewayMetrics(),
        ids=PlainIds(lambda: f"{name}-r{next(ids)}"),
        clock=time.monotonic,
        wall_clock=time.time,
    )
    own = {key: value for key, value in options.items() if key in GatewayContext._fields}
    rest = {key: value for key, value in options.items() if key not in own}
    return Gateway(process._replace(**own), transport, **rest)


def make_engine(
    forward: Forward,
    worker: str,
    life: int = 1,
    config: EngineConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
    below: MakeTiers | None = None,
    draft_model: Drafter | None = None,
    structures: Any = None,
) -> Engine:
    return Engine(
        forward,
        config=config or EngineConfig(),
        clock=clock,
        worker=WorkerId(worker),
        incarnation=Incarnation(life),
        below=below,
        draft_model=draft_model,
        structures=structures,
    )


@dataclass(eq=False)
class LiveFleet:
    """Gateways and workers that come one by one; `rows` is how many branches a worker says it runs.

    With `syncs`, gateways tell each other what they book; with a `source` weights can change. `below` makes
    the tiers below a worker's device, `draft_by` its draft model. `clock_of` a gateway (g0, g1, ...) or a
    worker. `ids` of a gateway name its requests; without, gateways number theirs.
    """

    model: ModelSpec
    routing: RouterConfig
    _: KW_ONLY
    forward: type[MockForward] = MockForward
    num_blocks: int = 256
    rows: int = 256
    syncs: bool = False
    make_bus: Callable[[BusRole], Bus] | None = None
    source: Callable[[Host, MockForward, Capacity], WeightSource] | None = None
    make_recorder: Callable[[str], Recorder] | None = None
    below: Callable[[str], MakeTiers | None] = lambda worker: None
    files: CapsuleFiles | None = None
    config: EngineConfig | None = None
    draft_by: Callable[[], Drafter | None] = lambda: None
    structures: Callable[[], Any] = lambda: None
    tracing: Tracing | None = None
    clock_of: Callable[[str], Callable[[], float]] = lambda process: time.monotonic
    ids: Callable[[str], RequestIds] | None = None
    wall_clock: Callable[[], float] = time.time
    admission: AdmissionConfig | None = None

    def __post_init__(self) -> None:
        self.hub = LocalHub()
        self.hosts: dict[str, Host] = {}  # by address
        self.engines: dict[str, Engine] = {}
        self.forwards: dict[str, Any] = {}
        self.gateways: list[Gateway] = []
        self.routers: list[Router] = []
        self.buses: list[Bus] = []
        self.lives = count(1)
        self._gateway_numbers = count()

    async def bus(self, role: BusRole) -> Bus:
        bus = LocalBus(self.hub) if self.make_bus is None else self.make_bus(role)
        await bus.connect()
        self.buses.append(bus)
        return bus

    async def add_worker(self, name: str) -> Host:
        life, block_size, clock = next(self.lives), self.routing.block_size, self.clock_of(name)
        forward = self.forward(self.model, num_blocks=self.num_blocks, block_size=block_size)
        engine = make_engine(
            *(forward, name, life, self.config, clock),
            below=self.below(name),
            draft_model=self.draft_by(),
            structures=self.structures(),
        )
        host = Host(
            name,
            await self.bus("worker"),
            address=f"{name}#{life}",
            fleet="test",
            clock=clock,
            lease_period_s=0.05,
            tracing=self.tracing,
        )
        capacity = Capacity(block_size, self.num_blocks, self.rows)
        source = None if self.source is None else self.source(host, forward, capacity)
        add_engine(host, engine, capacity, source)
        self.hosts[host.address] = host
        self.forwards[name] = forward
        self.engines[name] = engine
        await host.start()
        return host

    async def add_gateway(self) -> Gateway:
        name = f"g{next(self._gateway_numbers)}"
        outbox = Outbox(name, Incarnation(1)) if self.syncs else None
        clock = self.clock_of(name)
        router = Router(self.routing, clock=clock, outbox=outbox)
        transport = LocalTransport(name, self.hosts)
        bus, recorder = await self.bus("gateway"), self.make_recorder and self.make_recorder(name)
        spans = None if self.tracing is None else RequestSpans(self.tracing, "m")
        given: dict[str, Any] = {} if self.ids is None else {"ids": self.ids(name)}
        given |= {"recorder": recorder, "files": self.files, "spans": spans}
        given |= {"clock": clock, "wall_clock": self.wall_clock, "admission": self.admission}
        gateway = make_gateway(name, bus, transport, router, self.model, **given)
        await gateway.start_up()
        self.gateways.append(gateway)
        self.routers.append(router)
        return gateway

    async def ready(self, workers: int) -> None:
        """Return once every router knows the blocks of so many workers."""
        await until(
            lambda: all(
                sum(w.is_whole for w in router.workers()) == workers for router in self.routers
            )
        )

    def is_clean(self, most_kept: float = 1) -> bool:
        """Nothing runs, nothing is booked, and at most so many capsules are kept."""
        for gateway in self.gateways:
            gateway.check()
        kept = sum(engine.stats().capsules.kept for engine in self.engines.values())
        return (
            kept <= most_kept
            and all(engine.stats().jobs == 0 for engine in self.engines.values())
            and all(w.rows == 0 for router in self.routers for w in router.workers())
            and not any(gateway.shell.running for gateway in self.gateways)
        )

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.close()
        for host in self.hosts.values():
            await host.close()
        for bus in self.buses:
            await bus.close()


@asynccontextmanager
async def running(made: LiveFleet, workers: int, gateways: int = 1) -> AsyncIterator[LiveFleet]:
    """The fleet with its gateways and workers w0, w1, ..., all of which every gateway knows."""
    try:
        for _ in range(gateways):
            await made.add_gateway()
        for i in range(workers):
            await made.add_worker(f"w{i}")
        await made.ready(workers)
        await until(lambda: all(gateway.peers.knows_all for gateway in made.gateways))
        yield made
    finally:
        await made.close()


async def collect(stream: RunningRequest) -> dict[int, tuple[list[int], Delta]]:
    """Per branch: its tokens and its last delta; every branch ends once."""
    found: dict[int, tuple[list[int], Delta]] = {}
    async for delta in stream:
        tokens, last = found.get(delta.branch, ([], None))
        assert last is None or last.finish is None, "news after the end"
        found[delta.branch] = (tokens + list(delta.tokens), delta)
    assert all(last.finish is not None for _, last in found.values())
    return found


async def lose(f: LiveFleet, worker: str) -> Host:
    """Break a worker's links and end its leases, as if it had died."""
    host = f.hosts.pop(next(address for address in f.hosts if address.startswith(worker)))
    await host.tasks.close()
    for gateway in f.gateways:
        host._streams.end(gateway.context.gateway)
    await until(lambda: all(len(router.workers()) == len(f.hosts) for router in f.routers))
    del f.engines[worker]
    return host


def kill_gateway(f: LiveFleet, number: int) -> None:
    """Cut a gateway off from the bus and from all workers for good, as if it had died."""
    gateway, bus = f.gateways[number], f.gateways[number].context.bus
    assert isinstance(bus, LocalBus)
    bus.is_mute = True
    transport = gateway.shell.links._transport
    assert isinstance(transport, LocalTransport)
    transport._here = {}
    for host in f.hosts.values():
        host._streams.end(gateway.context.gateway)
