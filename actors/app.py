"""The Ray Serve application: a gateway, workers, and a broker if none is given.

    serve run mallee.actors.app:app model=smollm2 workers=2
    serve deploy serve.yaml

RAY_SERVE_ENABLE_HA_PROXY=1 must be set before `ray start` for requests to come by HAProxy.

RAY_AUTH_MODE must be set, to the same value, for the head and for these commands: a local `ray.init`
leaves a token behind that later commands would be refused for.
"""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray import serve
from ray.experimental import internal_kv
from ray.serve import Application, Deployment
from ray.serve.handle import DeploymentHandle

from mallee.actors.addresses import socket_path
from mallee.actors.build import (
    build_gateway,
    build_router,
    build_transport,
    build_worker,
    freeze_heap,
)
from mallee.actors.config import AppConfig
from mallee.actors.http.gate import Gate
from mallee.actors.proxy import choice, direct
from mallee.actors.tasks import Tasks
from mallee.actors.transport.greeting import Secret, new_secret, read_secret
from mallee.protocol.errors import InternalError
from mallee.protocol.ids import WorkerId
from mallee.protocol.model import ModelSpec

if TYPE_CHECKING:
    from mallee.actors.build import Gateway as BuiltGateway
    from mallee.actors.build import WorkerProcess

log = logging.getLogger(__name__)

# The gateway's own admission decides about waiting and refusals: Serve must not queue before it.
_GATEWAY_ONGOING = 100_000
_GATEWAY_STOP_S = 5.0  # after the drain
_SMALL_CPUS = 0.05
FIRST_LEASE_S = 3.0
NODES_PERIOD_S = 5.0


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
    """One engine, or many mocked ones, behind sockets of their own. Names follow from the replica's rank."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, config: AppConfig, broker: DeploymentHandle[Any] | None
    ) -> None:
        rank = serve.get_replica_context().rank.rank
        url, secret = await _broker_url(config, broker), await _secret(config)
        self._process = await _build_workers(config, rank, url, secret)
        await self._process.listen(path=socket_path(f"w{rank}"))
        self._tasks = Tasks(f"worker replica {rank}")
        if config.links.tcp == "always":
            await self._process.listen(tcp_host=_own_ip())
        elif config.nats_url is not None:  # with a broker of our own there is but one node
            self._tasks.spawn(_listen_between_nodes(self._process))
        await self._process.start()

    async def spec(self) -> bytes:
        """The `ModelSpec`, as msgpack."""
        return msgspec.msgpack.encode(self._process.model)

    async def check_health(self) -> None:
        if not self._process.host.healthy() or self._tasks.failure is not None:
            raise InternalError(f"no engine of {self._process.host.name} runs")

    async def __del__(self) -> None:
        # Without it the constructor failed, with an error of its own.
        if tasks := vars(self).get("_tasks"):
            await tasks.close()
        if process := vars(self).get("_process"):
            await process.close()


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
    config: AppConfig, rank: int, bus_url: str, secret: Secret
) -> "WorkerProcess":
    """The workers of the replica of this rank."""
    node = ray.get_runtime_context().get_node_id()
    if config.is_mocked:
        from mallee.actors.mock.fleet import build_mocked_workers

        return await build_mocked_workers(config, rank, bus_url=bus_url, secret=secret, node=node)
    worker = WorkerId(f"w{rank}")
    return await build_worker(config, worker, bus_url=bus_url, secret=secret, node=node)


async def _listen_between_nodes(process: "WorkerProcess") -> None:
    """Have the workers listen on TCP once the cluster has more than one node."""
    while sum(node["Alive"] for node in await asyncio.to_thread(ray.nodes)) < 2:  # noqa: ASYNC110
        await asyncio.sleep(NODES_PERIOD_S)
    await process.listen(tcp_host=_own_ip())


def _own_ip() -> str:
    """This node's address, which Ray's own servers listen on."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


async def _build_gateway(
    config: AppConfig, name: str, workers: DeploymentHandle[Any], bus_url: str
) -> "BuiltGateway":
    node = ray.get_runtime_context().get_node_id()
    return await build_gateway(
        config,
        name,
        bus_url=bus_url,
        transport=build_transport(config, name, await _secret(config), node),
        router=build_router(config, shared_as=name if config.experimental.sync_bookings else None),
        model=msgspec.msgpack.decode(await workers.spec.remote(), type=ModelSpec),
    )


async def _broker_url(config: AppConfig, broker: DeploymentHandle[Any] | None) -> str:
    if config.nats_url is not None:
        return config.nats_url
    assert broker is not None
    url: str = await broker.url.remote()
    return url


async def _secret(config: AppConfig) -> Secret:
    """The secret that gateways and workers share: of the file, or the app's own. Raises ConfigError."""
    if (file := config.links.secret_file) is not None:
        return read_secret(Path(file))
    return Secret(await asyncio.to_thread(_made_secret, serve.get_replica_context().app_name))


def _made_secret(app: str) -> bytes:
    """The app's secret in Ray's key-value store, put there by the first replica that asks.

    It outlives every replica and redeploy, and is no part of the app's arguments, which Serve shows
    and compares: one made for each deploy would restart every replica.
    """
    key = f"secret:{app}"
    internal_kv._internal_kv_put(key, new_secret(), overwrite=False, namespace="mallee")
    return bytes(internal_kv._internal_kv_get(key, namespace="mallee"))
