"""Mocked engines by the hundred on one event loop, behind one host; they come, leave and die on command."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from msgspec import structs

from mallee.actors.build import (
    WorkerProcess,
    build_host,
    build_link_listener,
    build_scraped,
    engine_config,
    resolve,
    served_name,
)
from mallee.actors.hosting.engine import identity_of
from mallee.actors.hosting.worker import Capacity, Worker
from mallee.actors.mock.device import LiveDevice
from mallee.actors.mock.pacer import Pacer
from mallee.actors.mock.runner import MockRunner
from mallee.actors.mock.words import words_of
from mallee.api.text.tokenizer import Tokenizer
from mallee.mocker.device import DeviceConfig
from mallee.mocker.engine import MockedEngine
from mallee.mocker.tiers import TierConfig
from mallee.mocker.timing import Fixed, Timing, load_timing
from mallee.protocol.errors import ConfigError, NotFound
from mallee.protocol.events import Admin, Crash, Join
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import BASE_WEIGHTS, ModelSpec, WeightVersion
from mallee.protocol.subjects import check_token
from mallee.runtime.bus.access import FindBroker
from mallee.runtime.bus.bus import Bus
from mallee.runtime.bus.nats import NatsBus
from mallee.runtime.config import AppConfig
from mallee.runtime.telemetry.tracing.provider import Tracing, open_tracing
from mallee.runtime.transport.greeting import Secret
from mallee.runtime.transport.server import CommandServer
from mallee.worker.model.config import model_spec
from mallee.worker.model.loading.config_json import read_config

log = logging.getLogger(__name__)

NO_TIME = Timing(Fixed(0.0, 0.0))
NO_TIME_SPEEDUP = 1e12  # of moves


@dataclass(frozen=True, slots=True)
class MockPlan:
    """The model, timing and words of every mocked engine of a fleet."""

    config: AppConfig
    spec: ModelSpec
    timing: Timing
    words: Sequence[int]  # token ids that answers are drawn from
    tiers: TierConfig | None = None
    device: DeviceConfig | None = None  # that engines of a process share

    @classmethod
    def of(cls, config: AppConfig) -> "MockPlan":
        """Raises ConfigError and ModelError: no such timing, tokenizer or model."""
        folder = resolve(config.model)
        spec = model_spec(
            read_config(folder),
            name=served_name(config),
            weights_digest="mock",
            dtype="bfloat16",
            max_model_len=config.engine.max_model_len,
        )
        words: Sequence[int] = words_of(Tokenizer.load(folder))
        if not words:  # no such tokens: any, but none that would end an answer
            words = [t for t in range(spec.vocab_size) if t not in spec.eos_token_ids]
        return cls(
            config,
            spec,
            timing_of(config),
            words,
            tiers=tiers_of(config, spec),
            device=device_of(config),
        )

    @property
    def num_blocks(self) -> int:
        assert self.config.num_blocks is not None, "mocked engines have a default"
        return self.config.num_blocks

    @property
    def served(self) -> ModelSpec:
        """The model as clients can use it: no context that an engine's blocks couldn't hold."""
        return self.engine(WorkerId("w0"), Incarnation(0)).engine.spec

    def engine(
        self, worker: WorkerId, incarnation: Incarnation, weights: WeightVersion = BASE_WEIGHTS
    ) -> MockedEngine:
        """Its seed follows from its name: no two engines jitter alike, and a restart jitters as before."""
        return MockedEngine(
            timing=self.timing,
            num_blocks=self.num_blocks,
            block_size=self.config.engine.block_size,
            worker=worker,
            incarnation=incarnation,
            clock=time.monotonic,
            config=engine_config(self.config),
            spec=structs.replace(self.spec, weights=weights),
            vocabulary=self.words,
            seed=hash_seed(self.config.mock.seed, worker),
            tiers=self.tiers,
            max_multi_step=1 << 20 if self.device is None else 1,
        )


def timing_of(config: AppConfig) -> Timing:
    """The timing that the settings describe. Raises ConfigError.

    Its `request_s` is left out: the way of a request to the engine is real here.
    """
    mock = config.mock
    timing = load_timing(mock.timing, kv_tokens=(config.num_blocks or 0) * config.engine.block_size)
    startup_s = timing.startup_s if mock.startup_s is None else mock.startup_s
    if mock.speedup == 0.0:
        return replace(NO_TIME, startup_s=startup_s)
    return replace(
        timing,
        speedup=mock.speedup,
        jitter=timing.jitter if mock.jitter is None else mock.jitter,
        startup_s=startup_s,
        shares_reads=config.experimental.tree_attention,
    )


def tiers_of(config: AppConfig, spec: ModelSpec) -> TierConfig | None:
    """The tiers below each engine; None without any. Raises ConfigError."""
    mock = config.mock
    if not mock.host_kv_tokens and not mock.disk_kv_tokens:
        return None
    speedup = mock.speedup or NO_TIME_SPEEDUP
    tiers = TierConfig(
        mock.host_kv_tokens, mock.disk_kv_tokens, token_nbytes=spec.kv_bytes_per_token
    )
    return replace(
        tiers,
        host_bytes_s=tiers.host_bytes_s * speedup,
        disk_bytes_s=tiers.disk_bytes_s * speedup,
        host_latency_s=tiers.host_latency_s / speedup,
        disk_latency_s=tiers.disk_latency_s / speedup,
    ).validate()


def device_of(config: AppConfig) -> DeviceConfig | None:
    """The device that engines of a process share; None if each has its own, or nothing takes time."""
    mock = config.mock
    if mock.engines_per_device == 1 or not mock.speedup:
        return None
    device = DeviceConfig(mock.engines_per_device, mock.device_slice_ms * 1e-3)
    return replace(
        device, slice_s=device.slice_s / mock.speedup, switch_s=device.switch_s / mock.speedup
    )


def hash_seed(seed: int, worker: str) -> int:
    """A seed of 64 bits, the same in every process."""
    import xxhash

    return xxhash.xxh3_64_intdigest(worker.encode(), seed)


def counted_names(config: AppConfig, number: int) -> list[str]:
    """Names of the workers of the `number`-th process, where every process has as many."""
    first = number * config.mock.engines_per_worker
    return [f"w{i}" for i in range(first, first + config.mock.engines_per_worker)]


def replica_names(config: AppConfig, number: int) -> list[str]:
    """Names of the workers of replica `number`, beside which others may have more or fewer engines."""
    engines = config.mock.engines_per_worker
    return [f"w{number}"] if engines == 1 else [f"w{number}-{i}" for i in range(engines)]


async def build_mocked_workers(
    config: AppConfig,
    number: int,
    workers: Sequence[str],
    *,
    broker: FindBroker,
    secret: Secret,
    node: str = "",
    own_ip: str = "127.0.0.1",
    past: Incarnation | None = None,
) -> WorkerProcess:
    """The `number`-th process of mocked engines, with those names. Raises ConfigError and ModelError.

    Lives of its workers come after `past`; by default, after the time. `own_ip`: of the machine, for
    scrapers.
    """
    name = f"m{number}"
    plan = await asyncio.to_thread(MockPlan.of, config)
    bus = NatsBus(broker, fleet=config.fleet, name=f"mallee-{name}")
    tracing = open_tracing("worker", name)
    fleet = MockFleet(name, plan, bus, past=past, tracing=tracing)
    return WorkerProcess(
        host=fleet.host,
        model=plan.served,
        bus=bus,
        listener=build_link_listener(config, node, CommandServer(fleet.host, secret)),
        start_engines=partial(fleet.start, workers),
        close_engines=fleet.close,
        scraped=build_scraped(config, fleet.host, own_ip),
    )


class _Labels(NamedTuple):
    """The `WeightSource` of a mocked engine, whose weights are no more than a label."""

    fleet: "MockFleet"
    worker: WorkerId

    def load(self, weights: WeightVersion) -> Callable[[], Worker]:
        if weights.path:
            raise ConfigError("mocked engines have no weights to load; leave the path out")
        return lambda: self.fleet.make(self.worker, weights)


class MockFleet:
    """The mocked engines of one process. Belongs to one event loop."""

    def __init__(
        self,
        name: str,
        plan: MockPlan,
        bus: Bus,
        *,
        address: str = "",
        past: Incarnation | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        config = plan.config
        self.plan = plan
        self.host = build_host(config, name, bus, address=address, tracing=tracing)
        self.host.administer = self._administer
        self._pacer = Pacer(time.monotonic)
        self._devices: list[LiveDevice] = []
        self._past: dict[WorkerId, Incarnation] = {}
        self._first_past = Incarnation(time.time_ns()) if past is None else past
        self._starting: set[WorkerId] = set()

    async def start(self, workers: Sequence[str], metrics_at: str = "") -> None:
        """Start these workers; returns when they are registered.

        `metrics_at`: as for `Host.start`.
        """
        await asyncio.sleep(self.plan.timing.startup_s)
        for name in workers:
            self._add(WorkerId(name))
            await asyncio.sleep(0)  # thousands take seconds, and the broker wants an answer
        await self.host.start(metrics_at)

    async def close(self) -> None:
        """Remove every worker. Idempotent."""
        await self.host.close()
        self._pacer.close()

    # Joining and leaving

    def join(self, name: str) -> None:
        """Start a worker of that name; it joins after the start-up time.

        One of that name that is gone comes back with an empty cache, in another life. Raises ConfigError
        if there is one, or if that can be no name.
        """
        worker = WorkerId(check_token(name, "worker"))
        if worker in self.host.workers or worker in self._starting:
            raise ConfigError(f"worker {name} is there already: crash or drain it first")
        self._starting.add(worker)
        self.host.tasks.spawn(self._join(worker))

    async def _join(self, worker: WorkerId) -> None:
        try:
            await asyncio.sleep(self.plan.timing.startup_s)
            self._add(worker)
        finally:
            self._starting.discard(worker)

    async def crash(self, name: str) -> None:
        """End the worker at once, with all that it held. Raises NotFound."""
        if name not in self.host.workers:
            raise NotFound(f"no worker {name} in {self.host.name}", param="worker", worker=name)
        await self.host.crash(WorkerId(name), "it crashed")

    def _add(self, name: WorkerId) -> None:
        self.host.add(self.make(name, BASE_WEIGHTS), _Labels(self, name))

    def make(self, name: WorkerId, weights: WeightVersion) -> Worker:
        """The next life of a worker, not yet added."""
        incarnation = Incarnation(self._past.get(name, self._first_past) + 1)
        device = self._device_of(name)
        self._past[name] = incarnation
        mocked, config = self.plan.engine(name, incarnation, weights), self.plan.config
        max_rows = config.scheduler.max_rows
        capacity = Capacity(config.engine.block_size, self.plan.num_blocks, max_rows)
        make_runner = partial(MockRunner, mocked, self._pacer, clock=time.monotonic, device=device)
        spans = self.host.spans_of(name)
        return Worker(identity_of(mocked.engine), self.host, capacity, make_runner, spans=spans)

    def _device_of(self, name: WorkerId) -> LiveDevice | None:
        """The device of a worker, by the order in which names came; None if each has its own."""
        config = self.plan.device
        if config is None:
            return None
        names = [*self._past] if name in self._past else [*self._past, name]
        number = names.index(name) // config.engines
        if number == len(self._devices):
            self._devices.append(LiveDevice(config, self._pacer, time.monotonic))
        return self._devices[number]

    # Commands over the bus

    async def _administer(self, asked: Admin) -> bytes:
        """Do as asked; the fleet's state then. Raises ConfigError, NotFound."""
        match asked:
            case Join():
                self.join(asked.worker)
            case Crash():
                await self.crash(asked.worker)
        return json.dumps(self.describe()).encode()

    def describe(self) -> dict[str, object]:
        """The fleet's workers and counts; JSON-able."""
        workers = self.host.workers
        return {
            "host": self.host.name,
            "workers": {
                name: {
                    "incarnation": str(worker.incarnation),
                    "open": worker.num_open,
                    "next_seq": worker.runner.next_seq,
                    "is_draining": worker.is_draining,
                }
                for name, worker in workers.items()
            },
            "starting": sorted(self._starting),
            "host_stats": self.host.stats()._asdict(),
            "pacer": self._pacer.stats()._asdict(),
        }

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of the host, the timer or a runner."""
        self.host.check()
        self._pacer.check()
        for device in self._devices:
            device.check()
