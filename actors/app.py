"""The Ray Serve application: a gateway, workers, and a broker if none is given.

    serve run mallee.actors.app:app model=smollm2 workers=2
    serve deploy serve.yaml

RAY_AUTH_MODE must be set, to the same value, for the head and for these commands: a local `ray.init`
leaves a token behind that later commands would be refused for.
"""

import asyncio
import gc
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from mallee.actors.build import (
    admission_config,
    build_api,
    build_router,
    load_forward,
    make_engine,
    resolve,
)
from mallee.actors.config import AppConfig
from mallee.protocol.errors import ConfigError, InternalError, WorkerLost
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import ModelSpec

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from mallee.actors.hosting.engine import WorkerHost
    from mallee.actors.hosting.host import Host
    from mallee.actors.mock.fleet import MockFleet

log = logging.getLogger(__name__)

# Streams of frames and batches count as requests: a handful per gateway, but never the default of 5.
_WORKER_ONGOING = 1000
# Who waits, and who is refused, is for our own admission to say: Serve must not queue before it.
_GATEWAY_ONGOING = 100_000
_SMALL_CPUS = 0.05
FIRST_LEASE_S = 3.0


def app(config: AppConfig) -> Application:
    """The application that `config` describes."""
    broker = None
    if config.nats_url is None:
        from mallee.actors.bus.broker import free_port

        # Chosen here, so that a broker replica that is restarted is found where the first one was.
        broker = Broker.bind(free_port())
    workers = Worker.options(
        num_replicas=config.workers,
        ray_actor_options={"num_cpus": config.ray.worker_cpus, "num_gpus": config.ray.worker_gpus},
    ).bind(config, broker)
    gateway: Application = Gateway.options(num_replicas=config.gateways).bind(
        config, workers, broker
    )
    return gateway


class BrokerReplica:
    """Owns the nats-server child. Its clients must run on the same node."""

    async def __init__(self, port: int) -> None:  # type: ignore[misc] # Serve awaits it
        from mallee.actors.bus.broker import Broker as NatsServer
        from mallee.actors.bus.broker import free_port

        self._server = NatsServer(port)
        try:
            await self._server.start()
        except ConfigError as error:
            # At the app's start clients will ask for the url; only after a restart it would be late.
            log.warning("the broker takes another port: %s", error)
            self._server = NatsServer(free_port())
            await self._server.start()

    async def url(self) -> str:
        return self._server.url

    async def pid(self) -> int | None:
        """Of the nats-server."""
        return self._server.pid

    async def check_health(self) -> None:
        if not self._server.is_running:
            raise InternalError("the broker's supervisor has ended")

    async def __del__(self) -> None:
        await self._server.stop()


class WorkerReplica:
    """One engine, or many mocked ones. Names follow from the replica's rank, the address is its id."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, config: AppConfig, broker: DeploymentHandle[Any] | None
    ) -> None:
        from mallee.actors.bus.nats import NatsBus

        context = serve.get_replica_context()
        self._address = context.replica_id.unique_id
        rank = context.rank.rank
        name = f"{'m' if config.is_mocked else 'w'}{rank}"
        self._bus = NatsBus(await _broker_url(config, broker), name=f"mallee-{name}")
        self._fleet: MockFleet | None = None
        if config.is_mocked:
            self._fleet = await self._mocked_engines(config, name)
        host = None if self._fleet is None else self._fleet.host
        self._host: Host = host or await self._one_engine(config, WorkerId(name))
        await self._bus.connect()
        if self._fleet is None:
            await self._host.start()
            return
        each = config.mock.engines_per_worker
        await self._fleet.start([f"w{i}" for i in range(rank * each, (rank + 1) * each)])
        gc.collect()
        gc.freeze()  # a full collection would look at every engine, and stop the loop meanwhile

    async def _mocked_engines(self, config: AppConfig, name: str) -> "MockFleet":
        from mallee.actors.mock.fleet import MockFleet, MockPlan

        plan = await asyncio.to_thread(MockPlan.of, config)
        self._spec = plan.served
        return MockFleet(name, plan, self._bus, address=self._address)

    async def _one_engine(self, config: AppConfig, worker: WorkerId) -> "WorkerHost":
        # Heavy (torch): only a replica that computes pays for it.
        from mallee.actors.hosting.engine import WorkerHost
        from mallee.actors.hosting.worker import Capacity

        incarnation = Incarnation(time.time_ns())
        forward = await asyncio.to_thread(load_forward, config)
        engine = make_engine(config, forward, worker, incarnation)
        self._spec = engine.spec
        num_blocks = engine.stats().pool.total  # less than the forward's, if some are guards
        return WorkerHost(
            engine,
            self._bus,
            worker=worker,
            incarnation=incarnation,
            address=self._address,
            model=engine.spec,
            capacity=Capacity(forward.block_size, num_blocks, config.scheduler.max_rows),
            fleet=config.fleet,
            clock=time.monotonic,
            lease_period_s=config.lease_interval_s,
            max_step_s=config.engine.max_step_s,
        )

    async def spec(self) -> bytes:
        """The `ModelSpec`, as msgpack."""
        return msgspec.msgpack.encode(self._spec)

    async def submit(self, gateway: str, address: str, raw: bytes) -> None:
        """See `Host.submit`. Raises WorkerLost if another replica was meant."""
        self._check_address(address)
        await self._host.submit(gateway, raw)

    async def frames(self, gateway: str, address: str) -> AsyncGenerator[bytes, None]:
        """See `Host.frames`. Raises WorkerLost if another replica was meant."""
        self._check_address(address)
        async with aclosing(self._host.frames(gateway)) as frames:
            async for raw in frames:
                yield raw

    async def check_health(self) -> None:
        if not self._host.healthy():
            raise InternalError(f"no engine of {self._host.name} runs")

    async def __del__(self) -> None:
        await (self._host if self._fleet is None else self._fleet).close()
        await self._bus.close()

    def _check_address(self, address: str) -> None:
        if address != self._address:
            raise WorkerLost(self._host.name, f"replica {address} was meant, not {self._address}")


@serve.ingress()
class GatewayReplica:
    """HTTP API, tokenizer and router in one process. Ready when a worker has told the model."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self,
        config: AppConfig,
        workers: DeploymentHandle[Any],
        broker: DeploymentHandle[Any] | None,
    ) -> None:
        from mallee.actors.bus.nats import NatsBus
        from mallee.actors.gateway.gateway import GatewayService
        from mallee.actors.telemetry.metrics import GatewayMetrics
        from mallee.actors.transport.ray import RayTransport
        from mallee.router.sync.outbox import Outbox

        gateway = f"g-{serve.get_replica_context().replica_id.unique_id}"
        outbox = (
            Outbox(gateway, Incarnation(time.time_ns()))
            if config.experimental.sync_bookings
            else None
        )
        path = await asyncio.to_thread(resolve, config.model)
        model = msgspec.msgpack.decode(await workers.spec.remote(), type=ModelSpec)
        metrics = GatewayMetrics()
        self._bus = NatsBus(await _broker_url(config, broker), name=f"mallee-{gateway}")
        self._service = GatewayService(
            gateway,
            bus=self._bus,
            transport=RayTransport(gateway, workers),
            router=build_router(config, outbox),
            model=model,
            fleet=config.fleet,
            metrics=metrics,
            new_request_id=lambda: f"req_{uuid.uuid4().hex}",
            expected_workers=config.num_workers,
            token_memory_nbytes=config.routing.token_memory_mb << 20,
            admission=admission_config(config),
        )
        self._api = await asyncio.to_thread(build_api, config, path, self._service, metrics)
        await self._bus.connect()
        await self._service.start_up()
        # Serve sends requests as soon as this returns. Without a broker there is no lease to wait for.
        await self._service.wait_for_worker(FIRST_LEASE_S)
        gc.collect()
        gc.freeze()  # a full collection would look at all of this again, and stop the loop meanwhile

    def __serve_build_asgi_app__(self) -> "Starlette":
        return self._api

    async def __del__(self) -> None:
        await self._service.close()
        await self._bus.close()


Broker: Deployment = serve.deployment(
    name="Broker",
    ray_actor_options={"num_cpus": _SMALL_CPUS},
    health_check_period_s=2.0,
    graceful_shutdown_timeout_s=5.0,
)(BrokerReplica)

Worker: Deployment = serve.deployment(
    name="Worker",
    max_ongoing_requests=_WORKER_ONGOING,
    request_router_config=RequestRouterConfig(
        request_router_class="mallee.actors.transport.ray:PinnedRouter"  # type: ignore[arg-type]
    ),
    health_check_period_s=1.0,
    health_check_timeout_s=30.0,
    graceful_shutdown_wait_loop_s=0.2,
    graceful_shutdown_timeout_s=3.0,
)(WorkerReplica)

Gateway: Deployment = serve.deployment(
    name="Gateway",
    max_ongoing_requests=_GATEWAY_ONGOING,
    ray_actor_options={"num_cpus": _SMALL_CPUS},
    graceful_shutdown_timeout_s=5.0,
)(GatewayReplica)


async def _broker_url(config: AppConfig, broker: DeploymentHandle[Any] | None) -> str:
    if config.nats_url is not None:
        return config.nats_url
    assert broker is not None
    url: str = await broker.url.remote()
    return url
