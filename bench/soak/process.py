"""A process of a plain service: a gateway with its HTTP API, or engines behind their host.

    python -m bench.soak.process

Its first line of input is its `Spec`; it answers with "ready". Each line after that is answered with its
`Report` as one line of JSON. It ends when its input does, or at SIGTERM.

The engines are ours over `testing.forward.MockForward`: each token is a digest of all that its branch can
read in the KV memory, so a wrong block, a lost one or an overwritten one changes the text.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from bench.doubles.forward import MockForward
from mallee.actors.build import (
    build_gateway,
    build_link_listener,
    build_router,
    build_scraped,
    engine_config,
    resolve,
    served_name,
)
from mallee.actors.hosting.engine import EngineThread, add_engine
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.worker import Capacity
from mallee.actors.mock.process import run
from mallee.protocol.errors import MalleeError
from mallee.protocol.events import Snapshot, unpack_hashes
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import ModelSpec
from mallee.router.index.index import PrefixIndex
from mallee.runtime.addresses import listener
from mallee.runtime.bus.access import BrokerAccess
from mallee.runtime.bus.nats import NatsBus
from mallee.runtime.config import AppConfig
from mallee.runtime.proxy.server import Server
from mallee.runtime.telemetry import logs
from mallee.runtime.transport.address import Way
from mallee.runtime.transport.greeting import Secret
from mallee.runtime.transport.link import Dial, Transport, dial
from mallee.runtime.transport.server import CommandServer
from mallee.worker.engine import Engine
from mallee.worker.forward import ForwardBatch, Logits
from mallee.worker.model.config import model_spec
from mallee.worker.model.loading.config_json import read_config
from mallee.worker.model.sampling.grammar import TokenGrammars

log = logging.getLogger(__name__)

STEP_S = 0.004  # of an engine


class Spec(msgspec.Struct, frozen=True, tag_field="role"):
    """The process `name` of a service with `config`, an `AppConfig` as JSON."""

    name: str
    config: str
    broker: BrokerAccess
    secret: bytes
    path: str  # of the engines' socket


class EnginesSpec(Spec, frozen=True, tag="engines"):
    """Engines `workers`, whose life is number `life`, behind a socket at `path`."""

    workers: tuple[str, ...]
    life: int


class GatewaySpec(Spec, frozen=True, tag="gateway"):
    """A gateway at `port`; it reaches the socket `path` at `path` with `way` after it."""

    port: int
    way: str


class Report(msgspec.Struct, frozen=True):
    """State of a process. `digests`: of each worker's blocks, as the process knows them."""

    broken: str  # the invariant that is
    num_running: int  # requests
    num_waiting: int
    num_booked: int  # requests, by a gateway, its own and others'
    digests: dict[str, int]
    capsules: dict[str, list[str]]
    kept: list[
        str
    ]  # capsules that are neither answers' nor gone, and the seconds that they have left
    tasks: dict[str, int]
    fds: dict[str, int]  # by kind
    num_objects: int


class PacedForward(MockForward):
    """Takes a while for each pass."""

    def forward(self, batch: ForwardBatch) -> list[Logits]:
        time.sleep(STEP_S)
        return list(super().forward(batch))


class ProxiedTransport(Transport):
    """Reaches the socket of a worker's process through one that something else listens at."""

    def __init__(self, gateway: str, secret: Secret, suffix: str) -> None:
        super().__init__(gateway, secret)
        self._suffix = suffix

    def _way_to(self, address: str) -> tuple[Way, Dial]:
        way, _ = super()._way_to(address)
        return way, partial(dial, f"{way}{self._suffix}", None)


def spec_of(config: AppConfig) -> ModelSpec:
    return model_spec(
        read_config(resolve(config.model)),
        name=served_name(config),
        weights_digest="mock",
        dtype="bfloat16",
        max_model_len=config.engine.max_model_len,
    )


@contextlib.asynccontextmanager
async def engines(spec: EnginesSpec) -> Any:
    """Reports of engines that serve."""
    config = AppConfig.model_validate_json(spec.config)
    model, num_blocks = spec_of(config), config.num_blocks
    assert num_blocks is not None
    bus = NatsBus(spec.broker, fleet=config.fleet, name=spec.name)
    host = Host(
        spec.name,
        bus,
        fleet=config.fleet,
        clock=time.monotonic,
        lease_period_s=config.lease_interval_s,
    )
    tokenizer = resolve(config.model) / "tokenizer.json"
    for name in spec.workers:
        engine = Engine(
            PacedForward(model, num_blocks=num_blocks, block_size=config.engine.block_size),
            config=engine_config(config),
            clock=time.monotonic,
            worker=WorkerId(name),
            incarnation=Incarnation(spec.life),
            structures=TokenGrammars(tokenizer, model.vocab_size, model.eos_token_ids),
        )
        rows = config.scheduler.max_rows
        add_engine(host, engine, Capacity(config.engine.block_size, num_blocks, rows))
    listener = build_link_listener(config, "", CommandServer(host, Secret(spec.secret)))
    await listener.listen_unix(spec.path)
    host.address = str(listener.address)
    scraped = build_scraped(config, host, "127.0.0.1")
    assert scraped is not None
    await bus.connect()
    await host.start(scraped.start_up())
    try:
        yield partial(_report_of_engines, host)
    finally:
        await host.close()
        await scraped.close()
        await listener.close()
        await bus.close()


async def _report_of_engines(host: Host) -> Report:
    broken, digests, capsules, num_running = "", {}, {}, 0
    kept: list[str] = []
    for name, worker in host.workers.items():
        assert isinstance(worker.runner, EngineThread)
        engine = worker.runner.engine
        snapshot = await worker.runner.snapshot()
        digests[str(name)] = digest_of(snapshot)
        capsules[str(name)] = sorted(each.capsule for each in snapshot.capsules)
        stats = engine.stats()
        num_running += stats.jobs
        if not stats.jobs:  # else its thread changes what is looked at
            known = engine._capsules
            left_s = {key: at - time.monotonic() for key, at in known._expires.items()}
            names = [each.id for each in known if known.ttl_s(each) is not None]
            kept += [f"{name}: {left_s.get(name)}" for name in names]
            broken = broken or _broken(engine.check) or _broken(worker.check)
    open_requests = host.stats().open_requests
    return _report(
        broken, max(num_running, open_requests), digests=digests, capsules=capsules, kept=kept
    )


@contextlib.asynccontextmanager
async def gateway(spec: GatewaySpec) -> Any:
    """Reports of a gateway that serves."""
    config = AppConfig.model_validate_json(spec.config)
    router = build_router(config, shared_as=spec.name)
    made = await build_gateway(
        config,
        spec.name,
        broker=spec.broker,
        transport=ProxiedTransport(spec.name, Secret(spec.secret), spec.way),
        router=router,
        model=spec_of(config),
        secret=Secret(spec.secret),
        label=spec.way.lstrip("."),
    )
    await made.start()
    server = Server(made.api, log_level="error")
    serving = asyncio.create_task(server.serve(sockets=[listener("127.0.0.1", spec.port)]))
    while not server.started:  # noqa: ASYNC110 # before that it refuses connections
        await asyncio.sleep(0.01)

    async def report() -> Report:
        names = [each.worker for each in router.workers()]
        stats = router.stats()
        return _report(
            _broken(made.gateway.check) or _broken(router.check),
            len(made.gateway.shell.running),
            num_waiting=made.gateway.requests.num_waiting,
            num_booked=stats.booked_requests,
            digests={str(name): router.digest(name) or 0 for name in names},
            capsules={str(name): sorted(map(str, router.capsules_of(name))) for name in names},
        )

    try:
        yield report
    finally:
        server.should_exit = True
        await made.close()
        await asyncio.wait((serving,), timeout=2.0)
        server.force_exit = True
        await serving


def _report(broken: str, num_running: int, **fields: Any) -> Report:
    names = (task.get_coro() for task in asyncio.all_tasks())
    tasks = Counter(getattr(coro, "__qualname__", "") for coro in names)
    defaults: dict[str, Any] = {"num_waiting": 0, "num_booked": 0, "kept": []}
    return Report(
        broken,
        num_running,
        tasks=dict(tasks),
        fds=dict(Counter(_descriptors())),
        num_objects=len(gc.get_objects()),
        **(defaults | fields),
    )


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{number}").split(":[")[0]


def _broken(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as error:
        return f"{check.__qualname__}: {error}"
    return ""


def digest_of(snapshot: Snapshot) -> int:
    """`Router.digest` of a worker of which `snapshot` is known."""
    index = PrefixIndex(1)
    for tier, raw in enumerate(snapshot.by_tier):
        index.store(0, unpack_hashes(raw), tier)
    return index.digest(0)


async def serve(spec: EnginesSpec | GatewaySpec) -> None:
    """Serve and report until the input ends or a signal comes."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    asked: asyncio.Queue[None] = asyncio.Queue()

    def listen() -> None:
        said = os.read(sys.stdin.fileno(), 1 << 16)
        for _ in range(said.count(b"\n")):
            asked.put_nowait(None)
        if not said:
            stop.set()

    service = engines(spec) if isinstance(spec, EnginesSpec) else gateway(spec)
    async with service as report:
        loop.add_reader(sys.stdin.fileno(), listen)
        say("ready")
        answering = asyncio.create_task(_answer(asked, report))
        ending = asyncio.create_task(stop.wait())
        await asyncio.wait((answering, ending), return_when=asyncio.FIRST_COMPLETED)
        loop.remove_reader(sys.stdin.fileno())
        answering.cancel()


async def _answer(asked: "asyncio.Queue[None]", report: Callable[[], Awaitable[Report]]) -> None:
    while True:
        await asked.get()
        say(json.dumps(msgspec.to_builtins(await report())))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    line = sys.stdin.buffer.readline()
    spec: EnginesSpec | GatewaySpec = msgspec.json.decode(line, type=EnginesSpec | GatewaySpec)
    kind = "worker" if isinstance(spec, EnginesSpec) else "gateway"
    telemetry = AppConfig.model_validate_json(spec.config).telemetry
    logs.set_up(telemetry.log_level, telemetry.log_format, process=kind, name=spec.name)
    try:
        run(serve(spec))
    except MalleeError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
