"""The parts of the service as a configuration describes them, and how they are put together.

The Ray application and the stacks without Ray are wired here alike. Knows neither Ray nor torch at import:
a broker's or a mocked engine's process must not pay for what it doesn't use.
"""

import asyncio
import gc
import logging
import os
import secrets
import sys
import time
import uuid
from collections import ChainMap
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mallee.actors.hosting.engine import add_engine, make_worker
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.memory import memory_use
from mallee.actors.hosting.orphans import HoldName, Orphans
from mallee.actors.hosting.worker import Capacity, Worker
from mallee.actors.kv_transfer.client import KvClient
from mallee.actors.kv_transfer.server import KvServer
from mallee.actors.secret import build_ids, check_kept
from mallee.gateway.access.scopes import Scopes
from mallee.protocol.errors import ConfigError, MalleeError, StorageError
from mallee.protocol.events import LendingUse, Load, MemoryUse
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import ModelSpec, WeightVersion
from mallee.runtime.addresses import socket_path
from mallee.runtime.bus.access import FindBroker
from mallee.runtime.bus.bus import Bus
from mallee.runtime.bus.nats import NatsBus
from mallee.runtime.config import AppConfig
from mallee.runtime.telemetry.tracing.provider import Tracing, open_tracing
from mallee.runtime.transport.greeting import Secret, read_secret
from mallee.runtime.transport.link import Transport
from mallee.runtime.transport.listener import Listener, Server
from mallee.runtime.transport.server import CommandServer
from mallee.runtime.transport.tls import TlsFiles, client_tls, expiry, server_tls
from mallee.worker.kv.watch import KVChecks
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from mallee.gateway.access.access import Access
    from mallee.gateway.capsules.capsules import CapsuleFiles
    from mallee.gateway.gateway import Gateway
    from mallee.gateway.metrics import GatewayMetrics
    from mallee.gateway.recording.recorder import Recorder
    from mallee.gateway.requests.spans import RequestSpans
    from mallee.router.config import CostModel
    from mallee.router.dispatch.queue import AdmissionConfig
    from mallee.router.router import Router
    from mallee.runtime.telemetry.listener import MetricsListener
    from mallee.worker.engine import Engine, MakeTiers
    from mallee.worker.kv.journal import Journal
    from mallee.worker.kv.watch import KVMemory
    from mallee.worker.memory.budget import Room
    from mallee.worker.model.runner import TorchForward
    from mallee.worker.storage.volume import Volume
    from mallee.worker.transfer.lower import LowerTiers

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
PROMPT_THREADS = (
    2  # that read large requests: they hold the interpreter's lock for most of the time
)
FILE_THREADS = 4  # that check and copy what is exported and imported
# New objects before the youngest are looked at; how often that before the next older ones are.
_GC_THRESHOLDS = (10_000, 10, 100)


def served_name(config: AppConfig) -> str:
    """The model's name for clients: as configured, else the model's own without folders."""
    if config.served_model_name is not None:
        return config.served_model_name
    path = Path(config.model).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else config.model


def resolve(model: str) -> Path:
    """The folder of the model's files."""
    from mallee.worker.model.loading.source import resolve_model

    return resolve_model(model)


def check_model(config: AppConfig) -> None:
    """Raises MalleeError if the model's files are not there or can't be read."""
    if config.is_foreign:  # it knows more models than we do
        if find_spec("vllm") is None:
            raise ConfigError(
                "engine.kind='vllm' needs vllm, which is not installed: run"
                " `pip install 'mallee[serve,vllm]'`"
            )
        resolve(config.model)
        return
    from mallee.worker.model.loading.config_json import read_config

    read_config(resolve(config.model))
    if (draft := config.engine.draft_model) is not None:
        from mallee.worker.model.loading.vocabulary import check_same_tokens

        check_same_tokens(resolve(config.model), resolve(draft))


def check_links(config: AppConfig) -> None:
    """Raises ConfigError if a file that the links need is not there or can't be read."""
    if config.links.secret_file is not None:
        read_secret(Path(config.links.secret_file))
    if (files := tls_files(config)) is not None:
        server_tls(files)
        client_tls(files)


def lease_s(config: AppConfig) -> float:
    """Seconds for which a gateway believes a lease."""
    return max(3.0, 3 * config.lease_interval_s)


def engine_config(config: AppConfig) -> EngineConfig:
    engine, switches = config.engine, config.experimental
    scheduler: dict[str, Any] = dict(config.scheduler)
    return EngineConfig(
        SchedulerConfig(**scheduler, gang=switches.gang, chunked=switches.chunked),
        engine.max_answer_capsules,
        max_kept_share=engine.max_kept_share,
        max_below_nbytes=engine.max_below_mb << 20,
        max_retained_share=engine.max_retained_share,
        prefix_cache=engine.prefix_cache,
        eviction=engine.eviction,
        overlap=switches.overlap,
        kv_checks=KVChecks(switches.kv_checks, switches.kv_faults),
        speculation=SpeculationConfig(engine.speculation, engine.num_speculative_tokens),
    )


def share_interpreter() -> None:
    """Have threads that compute give the interpreter's lock back soon.

    Each message of a stream takes the event loop several system calls, and after each one it waits for the
    lock; by default for up to 5 ms while a thread reads a large prompt or compiles a grammar.
    """
    sys.setswitchinterval(SWITCH_S)


def freeze_heap() -> None:
    """Exempt what was made so far from garbage collections, and have those of all the rest come seldom.

    Each stops the loop to look at every object: 100 ms in a gateway whose caches hold a million, and by
    default one comes whenever there are a quarter more. Requests leave few cycles, and the collections
    of young objects find those.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


# A gateway


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A gateway and its HTTP API, with their bus."""

    gateway: "Gateway"
    api: "Starlette"
    bus: Bus
    access: "Access"
    prompts: Executor  # reads large requests
    files: "FileDesk"
    tracing: Tracing | None = None
    listener: "MetricsListener | None" = None

    async def start(self) -> None:
        """Listen to the fleet; doesn't wait for it. Raises ConfigError."""
        metrics_at, tasks = "", self.gateway.tasks
        if self.listener is not None:
            metrics_at = self.listener.start_up()
            tasks.include(self.listener.tasks)
        tasks.include(self.access.tasks)
        tasks.watch_callbacks()
        tasks.include(self.files.listener.tasks)
        share_interpreter()
        self.access.start_up()
        await self.bus.connect()
        await self.gateway.start_up(metrics_at)

    async def close(self) -> None:
        """End every answer, and with them every stream of the API."""
        await self.gateway.close()
        await self.bus.close()
        if self.listener is not None:
            await self.listener.close()
        await self.access.close()
        self.prompts.shutdown(wait=False, cancel_futures=True)
        await self.files.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def build_listener(
    config: AppConfig,
    render: Callable[[str], Awaitable[bytes]],
    *,
    is_ready: Callable[[], bool],
    access: "Access",
    own_ip: str,
) -> "MetricsListener | None":
    """The listener of a process for the metrics that `render` gives, if the settings want one."""
    if config.telemetry.metrics_port is None:
        return None
    from mallee.runtime.telemetry.listener import MetricsListener  # a server: see above

    return MetricsListener(render, is_ready, access, settings=config.telemetry, own_ip=own_ip)


@dataclass(frozen=True, slots=True)
class FileDesk:
    """Capsules that come and go as files, and both ends of the KV transfers for them."""

    files: "CapsuleFiles"
    kv_client: KvClient
    listener: Listener
    pool: Executor

    async def close(self) -> None:
        """End every KV transfer."""
        self.kv_client.close()
        await self.listener.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def build_files(
    config: AppConfig,
    name: str,
    secret: Secret,
    node: str,
    tcp_host: Callable[[], str | None],
) -> FileDesk:
    """The files of gateway `name` on machine `node`. Raises ConfigError."""
    from mallee.gateway.capsules.capsules import CapsuleFiles
    from mallee.gateway.capsules.files.exports import Exports
    from mallee.gateway.capsules.files.imports import Imports, SpoolLender
    from mallee.gateway.capsules.files.spool import Spools

    settings = config.imports
    folder = None if settings.folder is None else Path(settings.folder).expanduser()
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"imports.folder={str(folder)!r} is no folder that can be written to")
    pool = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix=f"files of {name}")
    kv_client = build_kv_client(config, name, secret, node)
    lender = SpoolLender(lambda: secrets.token_hex(16))
    listener, lock = build_link_listener(config, node, KvServer(lender, secret)), asyncio.Lock()

    async def address() -> str:
        """Listen once something is imported, as few gateways ever do."""
        async with lock:
            if listener.address.path is None:
                await listener.listen_unix(socket_path("gl"))
            if listener.address.tcp is None and (host := await asyncio.to_thread(tcp_host)):
                await listener.listen_tcp(host)
        return str(listener.address)

    imports = Imports(
        name,
        Spools(folder, int(settings.spool_gib * 2**30)),
        pool,
        max_nbytes=int(settings.max_gib * 2**30),
        lender=lender,
        address=address,
    )
    return FileDesk(CapsuleFiles(Exports(kv_client, pool), imports), kv_client, listener, pool)


async def build_gateway(
    config: AppConfig,
    name: str,
    *,
    broker: FindBroker,
    transport: Transport,
    router: "Router",
    model: ModelSpec,
    secret: Secret,
    node: str = "",
    label: str = "",
    own_ip: str = "127.0.0.1",
    tcp_host: Callable[[], str | None] = lambda: None,
) -> GatewayProcess:
    """A gateway called `name` on machine `node`, not yet started. Raises MalleeError if files don't serve.

    Gateways with one `secret` know each other's capsules. `label`: its name in metrics, if another.
    `own_ip`: of the machine, for scrapers.
    `tcp_host()`: where workers of other machines read what was imported, if there are any.
    """
    # Lazily: numba and a tokenizer library, which workers don't need.
    from mallee.gateway.gateway import Gateway
    from mallee.gateway.metrics import GatewayMetrics
    from mallee.gateway.sessions.copies import SessionLimits
    from mallee.gateway.shell import GatewayContext
    from mallee.gateway.store.store import StoreTerms

    access, scopes = open_access(config), build_ids(secret, name)
    metrics, tracing = GatewayMetrics(label or name), open_tracing("gateway", name)
    metrics.show_access(access)
    if (tls := tls_files(config)) is not None:
        access.certificate_expiry = expiry(tls)
    recorder = None
    if config.recording.folder is not None:
        recorder = build_recorder(config, config.recording.folder, name, model, metrics)
    bus = NatsBus(broker, fleet=config.fleet, name=f"mallee-{name}")
    files = build_files(config, name, secret, node, tcp_host)
    process = GatewayContext(
        gateway=name,
        fleet=config.fleet,
        model=model,
        bus=bus,
        router=router,
        metrics=metrics,
        ids=scopes,
        clock=time.monotonic,
        wall_clock=time.time,
    )
    gateway = Gateway(
        process,
        transport,
        expected_workers=config.num_workers,
        admission=admission_config(config, access),
        sessions=SessionLimits(config.sessions.max_nodes, config.sessions.ttl_s),
        store=StoreTerms(
            name=config.store.name or config.fleet,
            max_nbytes=config.store.max_mib << 20,
            is_in_memory=config.store.storage == "memory",
            num_replicas=config.store.replicas,
        ),
        token_memory_nbytes=config.routing.token_memory_mb << 20,
        recorder=recorder,
        files=files.files,
        spans=None if tracing is None else build_spans(tracing, config),
    )
    gateway.operator.key_fault = lambda: access.fault
    prompts = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix=f"prompts of {name}")
    api = await asyncio.to_thread(build_api, config, gateway, access, scopes, prompts)
    if tracing is not None:
        from mallee.runtime.telemetry.tracing.http import HttpSpans  # OpenTelemetry

        api.add_middleware(HttpSpans, tracing=tracing)

    async def render(accept: str) -> bytes:
        return gateway.operator.metrics(accept)

    listener = build_listener(
        config,
        render,
        is_ready=lambda: gateway.operator.is_serving,
        access=access,
        own_ip=own_ip,
    )
    return GatewayProcess(
        gateway=gateway,
        api=api,
        bus=bus,
        access=access,
        prompts=prompts,
        files=files,
        tracing=tracing,
        listener=listener,
    )


def build_spans(tracing: Tracing, config: AppConfig) -> "RequestSpans":
    from mallee.gateway.requests.spans import RequestSpans  # OpenTelemetry

    return RequestSpans(tracing, served_name(config))


def build_recorder(
    config: AppConfig, folder: str, name: str, model: ModelSpec, metrics: "GatewayMetrics"
) -> "Recorder":
    """The recorder of gateway `name`."""
    from mallee.gateway.recording.files import RecordFolder
    from mallee.gateway.recording.recorder import Recorder

    recording = config.recording
    return Recorder(
        RecordFolder(
            Path(folder).expanduser(),
            most=recording.max_sessions,
            most_each=recording.max_tenant_sessions,
        ),
        gateway=name,
        model=model,
        max_nbytes=recording.max_session_mb << 20,
        clock=time.monotonic,
        wall_clock=time.time,
        count_stopped=metrics.record_stopped,
        count_nbytes=metrics.recorded_bytes.inc,
    )


def open_access(config: AppConfig) -> "Access":
    """The callers of a gateway. Raises ConfigError."""
    from mallee.gateway.access.access import Access

    file = config.http.keys_file
    return Access(None if file is None else Path(file), os.environ)


def build_router(
    config: AppConfig,
    *,
    shared_as: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> "Router":
    """A router. With `shared_as`, a gateway's name, its bookings are broadcast to other gateways."""
    from mallee.router.config import RouterConfig  # numba: see above
    from mallee.router.router import Router
    from mallee.router.sync.outbox import Outbox

    routing = config.routing
    return Router(
        RouterConfig(
            block_size=config.engine.block_size,
            lease_s=lease_s(config),
            busy_ratio=config.admission.busy_rows_ratio,
            cost=cost_model(config),
            max_workers=config.worker_room,
            policy=routing.policy,
            temperature=routing.temperature,
            max_index_nbytes=routing.max_index_mb << 20,
            kv_events=routing.kv_events,
        ),
        clock=clock,
        outbox=None if shared_as is None else Outbox(shared_as, Incarnation(time.time_ns())),
    )


def cost_model(config: AppConfig) -> "CostModel":
    """A router's prices: of `routing.timing` or of mocked engines' own, but for those of `routing.cost`.

    Raises ConfigError: no such timing.
    """
    from mallee.router.config import CostModel

    routing, block_size = config.routing, config.engine.block_size
    figures: dict[str, Any] = {str(name): value for name, value in routing.cost.items()}
    cost, speedup, name = CostModel(), 1.0, routing.timing
    if name is None and config.is_mocked:
        name, speedup = config.mock.timing, config.mock.speedup or 1.0
    if name is not None:
        from mallee.mocker import prices  # others need no timing models
        from mallee.mocker.timing import load_timing

        timing = load_timing(name, kv_tokens=(config.num_blocks or 1) * block_size)
        cost = prices.cost_model(replace(timing, speedup=speedup), block_size)
    return replace(cost, **figures, expected_output_tokens=routing.expected_output_tokens)


def admission_config(config: AppConfig, access: "Access") -> "AdmissionConfig":
    from mallee.router.dispatch.queue import AdmissionConfig

    return AdmissionConfig(
        max_waiting=config.admission.max_queued,
        max_waiting_per_tenant=config.admission.max_queued_per_tenant,
        max_wait_s=config.admission.max_queue_wait_s,
        weights=ChainMap(config.admission.tenant_weights, access.weights),
    )


def build_api(
    config: AppConfig,
    gateway: "Gateway",
    access: "Access",
    scopes: Scopes,
    pool: Executor,
) -> "Starlette":
    """The HTTP API in front of `gateway`, with the model's tokenizer and chat template."""
    from mallee.api import api
    from mallee.api.text.chat import ChatTemplate
    from mallee.api.text.tokenizer import Tokenizer

    path, chats = resolve(config.model), config.chat
    tokenizer = Tokenizer.load(path)
    template = ChatTemplate.load(
        path,
        file=None if chats.template is None else Path(chats.template).expanduser(),
        special_tokens=tokenizer.special_tokens,
        added_tokens=tokenizer.added_tokens,
        protects=not chats.special_tokens,
    )
    return api.build_api(
        gateway,
        api.ServedModel(
            served_name(config),
            tokenizer,
            template,
            created=int(time.time()),
            aliases=config.served_names,
        ),
        api.Entry(access, scopes, pool),
        api.ApiSettings(config.http, chats, config.responses),
        api.Draws(lambda: uuid.uuid4().hex, lambda: secrets.randbits(64)),
    )


# A process of workers


@dataclass(frozen=True, slots=True)
class Scraped:
    """The metrics of a process of workers, and the keys of those that may read them."""

    listener: "MetricsListener"
    access: "Access"

    def start_up(self) -> str:
        """Listen; the address for scrapers. Raises ConfigError."""
        self.access.start_up()
        return self.listener.start_up()

    async def close(self) -> None:
        """Stop listening."""
        await self.listener.close()
        await self.access.close()


def build_scraped(config: AppConfig, host: Host, own_ip: str) -> Scraped | None:
    """The metrics of the workers of `host`, if the settings want a listener. Raises ConfigError."""
    if config.telemetry.metrics_port is None:
        return None
    from mallee.actors.hosting.meters import HostMetrics  # Prometheus: see above

    access = open_access(config)
    render = HostMetrics(host).render
    listener = build_listener(config, render, is_ready=host.healthy, access=access, own_ip=own_ip)
    assert listener is not None, "there is a port"
    return Scraped(listener, access)


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """The workers of one process behind their host, with their bus, listener and way to others' KV.

    `start_engines` registers them, `close_engines` makes them leave.
    """

    host: Host
    model: ModelSpec
    bus: Bus
    listener: Listener
    start_engines: Callable[[str], Awaitable[None]]  # given where their metrics are read
    close_engines: Callable[[], Awaitable[None]]
    kv_client: KvClient | None = None
    scraped: "Scraped | None" = None
    orphans: Orphans | None = None

    async def listen(self, *, path: str | None = None, tcp_host: str | None = None) -> None:
        """Listen there too; leases from now on say so."""
        if path is not None:
            await self.listener.listen_unix(path)
        if tcp_host is not None:
            await self.listener.listen_tcp(tcp_host)
        self.host.address = str(self.listener.address)

    async def start(self) -> None:
        """Register the workers; `listen` comes first. Raises ConfigError."""
        self.host.tasks.watch_callbacks()
        metrics_at = ""
        if self.scraped is not None:
            metrics_at = self.scraped.start_up()
            self.host.tasks.include(self.scraped.listener.tasks)
            self.host.tasks.include(self.scraped.access.tasks)
        share_interpreter()
        self.host.tasks.include(self.listener.tasks)
        await self.bus.connect()
        await self.start_engines(metrics_at)
        if self.orphans is not None:
            self.host.tasks.spawn(
                self.orphans.watch(self.host), name="capsules of departed workers"
            )
        freeze_heap()

    async def drain(self, drain_s: float) -> None:
        """Have gateways send nothing new; returns when they need these workers no more."""
        await self.host.drain_all(drain_s)

    async def close(self) -> None:
        """End the workers; gateways get their last frames."""
        if self.kv_client is not None:
            self.kv_client.close()  # the engine's end waits for what it reads
        await self.close_engines()
        if self.scraped is not None:
            await self.scraped.close()
        await self.listener.close()
        await self.bus.close()
        if self.host.tracing is not None:
            await asyncio.to_thread(self.host.tracing.close)


def build_host(
    config: AppConfig,
    name: str,
    bus: Bus,
    *,
    address: str = "",
    tracing: Tracing | None = None,
    device: str = "",
    measure_memory: Callable[[Load | None], MemoryUse | None] = lambda load: None,
) -> Host:
    """The host of a process's workers, with the settings that are the same for every kind of engine."""
    return Host(
        name,
        bus,
        address=address,
        fleet=config.fleet,
        clock=time.monotonic,
        lease_period_s=config.lease_interval_s,
        max_step_s=config.engine.max_step_s,
        drain_s=config.drain_s,
        tracing=tracing,
        device=device,
        measure_memory=measure_memory,
    )


def build_link_listener(config: AppConfig, node: str, *servers: Server) -> Listener:
    """The listener of a process on machine `node`, at no address yet. Raises ConfigError."""
    files = tls_files(config)
    return Listener(*servers, node=node, tls=files and server_tls(files))


def build_kv_client(config: AppConfig, name: str, secret: Secret, node: str) -> KvClient:
    """The way of `name`, on machine `node`, to the KV of other processes. Raises ConfigError."""
    files = tls_files(config)
    return KvClient(name, secret, node=node, tls=files and client_tls(files))


def build_transport(config: AppConfig, gateway: str, secret: Secret, node: str = "") -> Transport:
    """The links of `gateway` on machine `node`. Raises ConfigError."""
    files = tls_files(config)
    return Transport(gateway, secret, node=node, tls=files and client_tls(files))


def tls_files(config: AppConfig) -> TlsFiles | None:
    """The files of the links' TLS, if they have it."""
    links = config.links
    if links.tls_cert is None or links.tls_key is None:
        return None
    return TlsFiles(links.tls_cert, links.tls_key, links.tls_ca or links.tls_cert)


async def build_worker(
    config: AppConfig,
    worker: WorkerId,
    incarnation: Incarnation,
    *,
    broker: FindBroker,
    secret: Secret,
    node: str,
    threads: int,
    own_ip: str = "127.0.0.1",
    gpus: Sequence[str] = (),
    hold_name: HoldName | None = None,
) -> WorkerProcess:
    """The one worker of a process: loads the model. Raises MalleeError.

    `own_ip`: of the machine, for scrapers. `gpus`: of the process, by Ray's names. Without `hold_name` it
    adopts no capsules of workers that are gone, as on object stores, which have no locks.
    """
    place = await asyncio.to_thread(place_worker, config, gpus)
    threads = min(threads, place.cpus or threads)
    forward = await asyncio.to_thread(load_forward, config, threads)
    kv_client = build_kv_client(config, worker, secret, node) if config.links.lends else None
    orphans = None
    if hold_name is not None and "://" not in (config.engine.disk_path or "://"):
        orphans = Orphans(Path(config.disk_place("")), worker, hold_name)
    around = Surroundings(kv_client, build_ids(secret), orphans)
    engine = await asyncio.to_thread(make_engine, config, forward, worker, incarnation, around)
    num_blocks = engine.stats().pool.total  # less than the forward's, if some are guards
    bus = NatsBus(broker, fleet=config.fleet, name=f"mallee-{worker}")
    host = build_host(
        config,
        worker,
        bus,
        tracing=open_tracing("worker", worker),
        device=place.device,
        measure_memory=lambda load: memory_use(forward.memory_stats(), load),
    )
    capacity = Capacity(forward.block_size, num_blocks, config.scheduler.max_rows)
    source = ModelSource(config, host, forward, engine.incarnation, capacity, around)
    add_engine(host, engine, capacity, source)
    servers: list[Server] = [CommandServer(host, secret)]
    if kv_client is not None:
        kv_server, read = KvServer(host, secret), kv_client.counts
        servers.append(kv_server)
        host.serves_kv = True
        host.kv_use = lambda: LendingUse(read.use, kv_server.counts.use)
    return WorkerProcess(
        host=host,
        model=engine.spec,
        bus=bus,
        listener=build_link_listener(config, node, *servers),
        start_engines=host.start,
        close_engines=host.close,
        kv_client=kv_client,
        scraped=build_scraped(config, host, own_ip),
        orphans=orphans,
    )


class Placement(NamedTuple):
    """The name of a worker's device, and the number of CPUs that its process is pinned to, if it is."""

    device: str
    cpus: int | None = None


def place_worker(config: AppConfig, gpus: Sequence[str], sysfs: Path = Path("/sys")) -> Placement:
    """Pin this process to the CPUs beside its device. Raises ConfigError if there is no such device."""
    names = [f"GPU {name}" for name in gpus]
    if not config.has_cuda:
        return Placement(", ".join(names))
    from mallee.actors.hosting.numa import pin
    from mallee.worker.memory.device import identify
    from mallee.worker.model.backend import check_device

    check_device(config.engine.device)
    found = identify(config.engine.device)
    near = pin(found.pci, root=sysfs) if config.engine.pin_cpus else None
    parts = [found.name, *names, *filter(None, [found.pci])]
    if near is not None:
        parts.append(f"NUMA node {near.node}")
    place = Placement(", ".join(parts), None if near is None else len(near.cpus))
    log.info("this worker computes on %s, pinned to %s CPUs", place.device, place.cpus or "no")
    return place


@dataclass(slots=True)
class ModelSource:
    """The `WeightSource` of the one worker of a process."""

    config: AppConfig
    host: Host
    forward: "TorchForward"
    incarnation: Incarnation  # of the worker's last life
    capacity: Capacity
    around: "Surroundings"

    def load(self, weights: WeightVersion) -> Callable[[], Worker]:
        forward = self.forward
        own = forward.spec.weights
        if (weights.path, weights.digest) == (own.path, own.digest):
            take = partial(forward.rename, weights)
        else:
            folder = resolve(weights.path or self.config.model)
            take = partial(forward.update, forward.prepare_update(folder, weights))

        def make() -> Worker:
            take()
            self.incarnation = Incarnation(self.incarnation + 1)
            name = WorkerId(self.host.name)
            engine = make_engine(self.config, self.forward, name, self.incarnation, self.around)
            return make_worker(self.host, engine, self.capacity)

        return make


def threads_of(config: AppConfig, workers_here: int) -> int:
    """CPU threads of a worker, of which so many share this machine."""
    if (threads := config.engine.threads or int(config.ray.worker_cpus)) >= 1:
        return threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // max(1, workers_here))


def load_forward(config: AppConfig, threads: int) -> "TorchForward":
    from mallee.worker.model.runner import load

    engine = config.engine
    return load(
        resolve(config.model),
        num_blocks=config.num_blocks,
        kv_budget_bytes=config.kv_nbytes,
        block_size=engine.block_size,
        dtype=engine.dtype,
        kv_dtype=engine.kv_dtype,
        device=engine.device,
        deterministic=engine.deterministic,
        uses_kernels=engine.attention != "torch",
        threads=threads,
        name=served_name(config),
        max_model_len=engine.max_model_len,
        room=room_on_device(config) if config.has_cuda else None,
        draft=None if engine.draft_model is None else resolve(engine.draft_model),
    )


def room_on_device(config: AppConfig) -> "Room":
    """A worker's part of its CUDA device."""
    from mallee.worker.memory.budget import GRAPHS, Room
    from mallee.worker.memory.device import probe

    engine, scheduler = config.engine, config.scheduler
    return Room(
        probe,
        engine.device_share,
        config.worker_gpus or 1.0,
        max_rows=scheduler.max_rows,
        max_step_tokens=scheduler.max_step_tokens,
        kept_rows=engine.max_answer_capsules,
        host_tier=int(engine.host_gib * 2**30),
        graphs=GRAPHS if engine.cuda_graphs == "auto" else 0,
    )


class Surroundings(NamedTuple):
    """Surroundings of an engine: peers that lend it KV, ids as gateways draw them, parts of a disk."""

    peers: KvClient | None = None
    ids: Scopes | None = None
    orphans: Orphans | None = None


ALONE: Final = Surroundings()


def make_engine(
    config: AppConfig,
    forward: "TorchForward",
    worker: WorkerId,
    incarnation: Incarnation,
    around: Surroundings = ALONE,
) -> "Engine":
    """The engine of `worker`."""
    from mallee.worker.engine import Engine
    from mallee.worker.model.sampling.grammar import TokenGrammars
    from mallee.worker.speculation.draft_model import DraftModel
    from mallee.worker.updates import switch_on

    switch_on(config.experimental.debug_logs)
    forward.shares_reads = config.experimental.tree_attention
    return Engine(
        forward,
        device=forward if forward.is_beside_host else None,
        config=engine_config(config),
        clock=time.monotonic,
        worker=worker,
        incarnation=incarnation,
        structures=TokenGrammars(
            resolve(config.model) / "tokenizer.json",
            forward.spec.vocab_size,
            forward.spec.eos_token_ids,
        ),
        report_fault=lambda error: log.error("%s: %s", worker, error),
        below=tiers_below(config, forward, worker, around),
        gaps=forward.gaps,
        draft_model=None
        if forward.draft is None
        else DraftModel(forward.draft, clock=time.monotonic),
    )


def tiers_below(
    config: AppConfig,
    forward: "TorchForward",
    worker: WorkerId,
    around: Surroundings = ALONE,
) -> "MakeTiers | None":
    """The tiers below the device of `worker`, of which its peers count as one, if it is to have any.

    A disk that can't be opened is left out, and the log says why: requests don't need it. Where the host's
    memory is the device's there is no tier of it: its bytes are KV already.
    """
    engine, (peers, ids, orphans) = config.engine, around
    host_nbytes = 0 if forward.is_unified else int(engine.host_gib * 2**30)
    if engine.host_gib and forward.is_unified:
        log.info("%s: engine.host_gib is KV, since the host's memory is the device's", worker)
    if not host_nbytes and engine.disk_path is None and peers is None:
        return None

    def make(journal: "Journal", memory: "KVMemory") -> "LowerTiers":
        from mallee.worker.transfer.lower import LowerTiers
        from mallee.worker.transfer.movers import Carrier, Pace, ThreadedMover
        from mallee.worker.transfer.prices import MeasuredPrices

        nbytes = memory.block_nbytes
        arena = memory.new_rows(host_nbytes // nbytes)
        disk = None
        if engine.disk_path is not None:
            try:
                if ids is not None:
                    check_kept(config)
                disk = open_disk(config, forward, worker, nbytes)
                if orphans is not None:
                    orphans.adopt_into(disk)
            except StorageError as error:
                log.error("%s serves without its disk: %s", worker, error)
        pace = Pace(engine.tier_gib_s * 2**30, time.monotonic, time.sleep)
        carrier = Carrier(memory, arena, disk, time.monotonic, pace.spent, peers)
        return LowerTiers(
            journal,
            carrier,
            prices=MeasuredPrices(nbytes),
            mover=ThreadedMover(carrier, worker),
            report=lambda error: log.warning("%s: a move of KV failed: %s", worker, error),
            report_unreadable=partial(_report_unreadable, worker),
            is_ours=(lambda capsule, owner: True) if ids is None else ids.belongs,
        )

    return make


def _report_unreadable(worker: WorkerId, errors: Sequence[MalleeError]) -> None:
    """Log a line for each kind of reason: a restart can bring a thousand at once."""
    kinds: dict[object, list[MalleeError]] = {}
    for error in errors:
        fields = [field for field, *_ in error.fields.get("differences", ())]
        kinds.setdefault((error.code, *fields), []).append(error)
    for found in kinds.values():
        text = "%s: %d capsules on its disk can't be used, the first because: %s"
        log.error(text, worker, len(found), found[0])


def open_disk(
    config: AppConfig, forward: "TorchForward", worker: WorkerId, block_nbytes: int
) -> "Volume":
    """The part of `engine.disk_path` that is this worker's. Raises StorageError."""
    from mallee.worker.model.identity import kv_identity
    from mallee.worker.storage.files import Directory
    from mallee.worker.storage.objects import ObjectStore
    from mallee.worker.storage.volume import Volume, VolumeConfig

    engine, place = config.engine, config.disk_place(worker)
    path = resolve(forward.spec.weights.path or config.model)
    return Volume.open(
        ObjectStore.at(place) if "://" in place else Directory(Path(place)),
        kv_identity(
            path,
            forward.decoder.config,
            forward.spec,
            engine.kv_dtype,
            is_scaled=forward.decoder.weights.has_kv_scales,
        ),
        block_nbytes,
        VolumeConfig(
            int(engine.disk_gib * 2**30),
            owner_nbytes=int(engine.disk_tenant_gib * 2**30),
        ),
    )
