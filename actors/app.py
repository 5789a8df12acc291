"""The Ray Serve application: a gateway, workers, and a broker if none is given.

    serve run mallee.actors.app:app model=smollm2 workers=2
    serve deploy serve.yaml

RAY_SERVE_ENABLE_HA_PROXY=1 must be set before `ray start` for requests to come by HAProxy.

RAY_AUTH_MODE must be set, to the same value, for the head and for these commands: a local `ray.init`
leaves a token behind that later commands would be refused for.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from mallee.actors.build import build_gateway, build_router, build_worker, freeze_heap
from mallee.actors.config import AppConfig
from mallee.actors.http.gate import Gate
from mallee.actors.proxy import choice, direct
from mallee.protocol.errors import InternalError, WorkerLost
from mallee.protocol.ids import WorkerId
from mallee.protocol.model import ModelSpec

if TYPE_CHECKING:
    from mallee.actors.build import Gateway as BuiltGateway
    from mallee.actors.build import WorkerProcess

log = logging.getLogger(__name__)

# Streams of frames and batches count as requests: a handful per gateway, but never the default of 5.
_WORKER_ONGOING = 1000
# The gateway's own admission decides about waiting and refusals: Serve must not queue before it.
_GATEWAY_ONGOING = 100_000
_GATEWAY_STOP_S = 5.0  # after the drain
_SMALL_CPUS = 0.05
FIRST_LEASE_S = 3.0


def app(config: AppConfig) -> Application:
    """The application that `config` describes."""
    broker = None
    if config.nats_url is None:
        from mallee.actors.addresses import free_port

        # Chosen here, so that a broker replica that is restarted is found where the first one was.
        broker = Broker.bind(free_port())
    workers = Worker.options(
        num_replicas=config.workers,
        ray_actor_options={"num_cpus": config.ray.worker_cpus, "num_gpus": config.ray.worker_gpus},
    ).bind(config, broker)
    gateway: Application = Gateway.options(
        num_replicas=config.gateways,
        graceful_shutdown_timeout_s=config.drain_s + _GATEWAY_STOP_S,
    ).bind(config, workers, broker)
    return gateway


class BrokerReplica:
    """Owns the nats-server child. Its clients must run on the same node."""

    async def __init__(self, port: int) -> None:  # type: ignore[misc] # Serve awaits it
        from mallee.actors.bus.broker import start_broker

        self._server = await start_broker(port)

    async def url(self) -> str:
        return self._server.url

    async def check_health(self) -> None:
        if not self._server.is_running:
            raise InternalError("the broker's supervisor has ended")

    async def __del__(self) -> None:
        if server := vars(self).get("_server"):
            await server.stop()


class WorkerReplica:
    """One engine, or many mocked ones. Names follow from the replica's rank, the address is its id."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, config: AppConfig, broker: DeploymentHandle[Any] | None
    ) -> None:
        context = serve.get_replica_context()
        self._address = context.replica_id.unique_id
        url = await _broker_url(config, broker)
        self._process = await _build_workers(config, context.rank.rank, url, self._address)
        await self._process.start()

    async def spec(self) -> bytes:
        """The `ModelSpec`, as msgpack."""
        return msgspec.msgpack.encode(self._process.model)

    async def submit(self, gateway: str, address: str, raw: bytes) -> None:
        """See `Host.submit`. Raises WorkerLost if another replica was meant."""
        self._check_address(address)
        await self._process.host.submit(gateway, raw)

    async def frames(self, gateway: str, address: str) -> AsyncGenerator[bytes, None]:
        """See `Host.frames`. Raises WorkerLost if another replica was meant."""
        self._check_address(address)
        async with aclosing(self._process.host.frames(gateway)) as frames:
            async for raw in frames:
                yield raw

    async def check_health(self) -> None:
        if not self._process.host.healthy():
            raise InternalError(f"no engine of {self._process.host.name} runs")

    async def __del__(self) -> None:
        # Without it the constructor failed, with an error of its own.
        if process := vars(self).get("_process"):
            await process.close()

    def _check_address(self, address: str) -> None:
        if address != self._address:
            name = self._process.host.name
            raise WorkerLost(name, f"replica {address} was meant, not {self._address}")


@serve.ingress()
class GatewayReplica:
    """HTTP API, tokenizer and router in one process. Ready when a worker has named the model."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self,
        config: AppConfig,
        workers: DeploymentHandle[Any],
        broker: DeploymentHandle[Any] | None,
    ) -> None:
        name = f"g-{serve.get_replica_context().replica_id.unique_id}"
        if (advice := choice.advice()) is not None:
            log.warning(advice)
        url = await _broker_url(config, broker)
        self._gateway = await _build_gateway(config, name, workers, url)
        await self._gateway.start()
        # Serve sends requests as soon as this returns. Without a broker there is no lease to wait for.
        await self._gateway.service.wait_for_worker(FIRST_LEASE_S)
        freeze_heap()
        self._gate = Gate(self._gateway.api)
        direct.serve_here(self._gate)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for those that run, and end those with an error that are not in time."""
        if late := await self._gate.drain(timeout_s):
            log.warning("%d requests were not answered within %.0f s", late, timeout_s)
            await self._gateway.close()

    async def check_health(self) -> None:
        if (failure := self._gateway.service.failure) is not None:
            raise InternalError(f"a task of the gateway failed: {failure!r}")

    def __serve_build_asgi_app__(self) -> Gate:
        return self._gate

    async def __del__(self) -> None:
        if gateway := vars(self).get("_gateway"):
            await gateway.close()


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
        request_router_class="mallee.actors.transport.ray:PinnedRouter"  # type: ignore[arg-type] # imported by Ray
    ),
    health_check_period_s=1.0,
    health_check_timeout_s=30.0,
    graceful_shutdown_wait_loop_s=0.2,
    graceful_shutdown_timeout_s=3.0,
)(WorkerReplica)

Gateway: Deployment = serve.deployment(
    name="Gateway",
    max_ongoing_requests=_GATEWAY_ONGOING,
    ray_actor_options={
        "num_cpus": _SMALL_CPUS,
        "runtime_env": {"env_vars": direct.ENVIRONMENT},
    },
)(GatewayReplica)


async def _build_workers(
    config: AppConfig, rank: int, bus_url: str, address: str
) -> "WorkerProcess":
    """The workers of the replica of this rank."""
    if config.is_mocked:
        from mallee.actors.mock.fleet import build_mocked_workers

        return await build_mocked_workers(config, rank, bus_url=bus_url, address=address)
    return await build_worker(config, WorkerId(f"w{rank}"), bus_url=bus_url, address=address)


async def _build_gateway(
    config: AppConfig, name: str, workers: DeploymentHandle[Any], bus_url: str
) -> "BuiltGateway":
    from mallee.actors.transport.ray import ray_transport

    return await build_gateway(
        config,
        name,
        bus_url=bus_url,
        transport=ray_transport(name, workers),
        router=build_router(config, shared_as=name if config.experimental.sync_bookings else None),
        model=msgspec.msgpack.decode(await workers.spec.remote(), type=ModelSpec),
    )


async def _broker_url(config: AppConfig, broker: DeploymentHandle[Any] | None) -> str:
    if config.nats_url is not None:
        return config.nats_url
    assert broker is not None
    url: str = await broker.url.remote()
    return url
