"""The Ray Serve application: a gateway, workers, and a broker if none is given.

    serve run mallee.actors.app:app model=smollm2 workers=2
    serve deploy serve.yaml

RAY_AUTH_MODE=token and RAY_SERVE_ENABLE_HA_PROXY=1 must be set for `ray start` and for these commands
(docs/deploy.md): the first keeps strangers out, by the second requests come by HAProxy.

The number of workers or gateways is `num_replicas` of a deployment in serve.yaml: a change of that restarts
nothing. Ray Serve restarts every deployment when anything in `args` changes, one replica after the
other, and no request is lost.
"""

import asyncio
import logging
import math
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, Deployment
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from mallee.actors import cluster
from mallee.actors.autoscaling import Report
from mallee.actors.build import (
    build_gateway,
    build_router,
    build_transport,
    build_worker,
    freeze_heap,
    open_access,
    threads_of,
)
from mallee.actors.checks import check_files
from mallee.actors.secret import take_secret
from mallee.api.entry.gate import Gate, refuse
from mallee.api.messages.errors import AnthropicErrors
from mallee.gateway.access.access import Access
from mallee.protocol.errors import ConfigError, InternalError, MalleeError, NoWorker
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import ModelSpec
from mallee.protocol.subjects import BusRole
from mallee.runtime.addresses import free_port, socket_path
from mallee.runtime.bus.access import BrokerAccess, FindBroker, operators_broker
from mallee.runtime.bus.accounts import Passwords
from mallee.runtime.bus.broker import check_broker, check_operators_broker
from mallee.runtime.bus.queues import QueueDepths, publish_depth
from mallee.runtime.config import AppConfig, TelemetrySettings, problems
from mallee.runtime.proxy import choice, direct
from mallee.runtime.telemetry import logs
from mallee.runtime.transport.greeting import Secret

if TYPE_CHECKING:
    from mallee.actors.build import GatewayProcess, WorkerProcess

log = logging.getLogger(__name__)

# The gateway's own admission decides about waiting and refusals: Serve must not queue before it.
_GATEWAY_ONGOING = 100_000
_STOP_S = 10.0  # after the drain
_SMALL_CPUS = 0.05
_GATEWAY_ACTOR: dict[str, Any] = {
    "num_cpus": _SMALL_CPUS,
    "runtime_env": {"env_vars": direct.ENVIRONMENT},
}
# Serve replaces a replica after three checks in a row that fail: here 2 s after a task has, and half a minute
# after its event loop has stopped.
_HEALTH: dict[str, Any] = {"health_check_period_s": 0.5, "health_check_timeout_s": 10.0}
_SURGE_PERCENT = 25  # workers that an update starts beside the old ones; at least one
_MEAN_S = 20.0  # over which the autoscaler takes the mean of the load
_LIVES_OF_PROCESS = 1 << 20  # of one mocked worker
FIRST_LEASE_S = 3.0
NODES_PERIOD_S = 5.0
SPEC_PERIOD_S = 0.5
SPEC_TIMEOUT_S = 1800.0  # for which workers may load their model


def app(settings: dict[str, Any] | AppConfig) -> Application:
    """The application of `args` in serve.yaml, once what can be checked before is found to serve.

    Raises RayServeException with one sentence, which `serve status` shows; the application that runs
    is kept then.
    """
    try:
        config = settings if isinstance(settings, AppConfig) else AppConfig.model_validate(settings)
        check_deployable(config)
    except ValidationError as error:
        raise RayServeException("; ".join(map("".join, problems(error, AppConfig)))) from error
    except MalleeError as error:
        raise RayServeException(str(error)) from error
    return build_application(config)


def check_deployable(config: AppConfig) -> None:
    """Raises MalleeError if the broker, the number of nodes, or the files don't serve `config`."""
    if config.nats_url is not None:
        check_operators_broker(config)
    if not ray.is_initialized():
        return
    cluster.check_one_node(config.nats_url)
    if cluster.is_only_node():  # else this one need not have the model, or the keys
        check_files(config)
        _check_listening(open_access(config))


def _check_listening(access: Access) -> None:
    """Raises ConfigError if Serve listens to other machines, and no key is set; blocks."""
    if (host := cluster.http_host()) is not None:
        access.check_listening(host)


def build_application(config: AppConfig) -> Application:
    """The application that `config` describes."""
    broker = None if config.nats_url is not None else Broker.bind(config)
    workers = Worker.options(
        **_number_of_workers(config),
        **_room_of_worker(config),
        # New workers start before old ones stop, but GPUs are seldom spare.
        max_surge_percent=0 if config.worker_gpus else _SURGE_PERCENT,
        graceful_shutdown_timeout_s=config.drain_s + _STOP_S,
    ).bind(config, broker)
    gateway: Application = Gateway.options(
        num_replicas=config.gateways,
        ray_actor_options={**_GATEWAY_ACTOR, "resources": dict(config.ray.gateway_resources)},
        graceful_shutdown_timeout_s=config.drain_s + _STOP_S,
    ).bind(config, workers, broker)
    return gateway


def _room_of_worker(config: AppConfig) -> dict[str, Any]:
    """The resources of a worker; vLLM's Ray executor takes the bundles of its placement group."""
    actor: dict[str, Any] = {
        "num_cpus": config.ray.worker_cpus,
        "num_gpus": config.worker_gpus,
        "resources": dict(config.ray.worker_resources),
    }
    if not (bundles := config.worker_bundles):
        return {"ray_actor_options": actor}
    actor["num_gpus"] = 0.0  # they are its engine's processes'
    return {
        "ray_actor_options": actor,
        "placement_group_bundles": bundles,
        "placement_group_strategy": "PACK",  # side by side, where they fit
    }


def _number_of_workers(config: AppConfig) -> dict[str, Any]:
    """Options of the deployment: a number, or Serve's autoscaler with a policy of ours."""
    scaling = config.autoscaling
    if scaling.max_workers is None:
        return {"num_replicas": config.workers}
    policy = {
        "policy_function": "mallee.actors.autoscaling:Policy",
        "policy_kwargs": scaling.model_dump(),
    }
    return {
        "autoscaling_config": {
            "min_replicas": scaling.min_workers,
            "initial_replicas": config.workers,
            "max_replicas": scaling.max_workers,
            # Replicas report every ten seconds; the policy waits by itself.
            "look_back_period_s": _MEAN_S,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": policy,
        }
    }


class BrokerReplica:
    """Owns the nats-server child. Its clients must run on the same node."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc] # Serve awaits it
        from mallee.runtime.bus.broker import start_broker

        _set_up_logs(config.telemetry, "broker", config.fleet)
        store, key = cluster.RayStore(), f"broker:{_app_name()}"
        # Port and passwords of the one before, if that port is free: its clients just reconnect.
        kept = await asyncio.to_thread(store.get, key)
        port, passwords = (
            msgspec.json.decode(kept, type=tuple[int, Passwords])
            if kept
            else (free_port(), Passwords.new())
        )
        self._server = await start_broker(
            port,
            fleet=config.fleet,
            passwords=passwords,
            folder=config.store_folder,
            store=config.store.name,
        )
        now = msgspec.json.encode((self._server.port, passwords)).decode()
        await asyncio.to_thread(store.put, key, now)

    async def place(self, role: BusRole) -> tuple[BrokerAccess, str]:
        """Access for that role, and the node."""
        return self._server.access(role), cluster.own_node()

    async def check_health(self) -> None:
        if not self._server.is_running:
            raise InternalError("the broker's supervisor has ended")

    async def __del__(self) -> None:
        if server := vars(self).get("_server"):
            await server.stop()


class WorkerReplica:
    """One engine, or many mocked ones, behind sockets of their own."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, config: AppConfig, broker: DeploymentHandle[Any] | None
    ) -> None:
        self._config = config
        secret = await _secret(config, has_disk=True)
        found = await _find_broker(config, broker, "worker")
        self._names = cluster.Names.of(_app_name())
        claim = await asyncio.to_thread(self._names.claim)
        _set_up_logs(config.telemetry, "worker", f"w{claim.number}")
        self._claim = claim
        self._process = await _build_workers(config, self._names, claim, found, secret)
        await self._process.listen(path=socket_path(f"w{claim.number}"))
        if config.links.tcp == "always":
            await self._process.listen(tcp_host=_own_ip())
        elif config.nats_url is not None:  # with a broker of our own there is but one node
            self._process.host.tasks.spawn(_listen_between_nodes(self._process))
        await self._process.start()
        self._queues = QueueDepths(self._process.host.clock)
        if config.autoscaling.max_workers is not None:
            await self._queues.start_up(self._process.bus, config.fleet)

    async def spec(self, version: str) -> bytes | None:
        """The `ModelSpec`, as msgpack; None if this is a worker of another version of the settings."""
        if version != _version(self._config):
            return None
        return msgspec.msgpack.encode(self._process.model)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The load as `autoscaling.Policy` reads it; Serve asks while it scales."""
        demand = self._process.host.demand()
        share = min(1.0, self._config.admission.busy_rows_ratio)
        report = Report(
            rows=demand.rows,
            waiting=demand.waiting,
            max_rows=demand.max_rows * share,
            needed_blocks=demand.needed_blocks,
            num_blocks=demand.num_blocks,
            queued=self._queues.total(),
        )
        return report._asdict()

    async def check_health(self) -> None:
        if not self._process.host.healthy():
            raise InternalError(
                f"no engine of {self._process.host.name} runs, or a task of it failed"
            )

    async def __del__(self) -> None:
        # Without it the constructor failed, with an error of its own.
        if process := vars(self).get("_process"):
            await process.drain(self._config.drain_s)
            await process.close()
            # What it leaves on disk can be adopted at once, before the next replica takes the name.
            await asyncio.to_thread(self._names.give_back, self._claim)


@serve.ingress()
class GatewayReplica:
    """HTTP API, tokenizer and router in one process. Ready when a worker has named the model."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self,
        config: AppConfig,
        workers: DeploymentHandle[Any],
        broker: DeploymentHandle[Any] | None,
    ) -> None:
        self._drain_s = config.drain_s
        self._names = cluster.Names.of(f"gateways of {_app_name()}")
        self._claim = await asyncio.to_thread(self._names.claim)
        # Metrics have the number alone, which comes again: an update makes no new series.
        label = f"g{self._claim.number}"
        name = f"{label}-{serve.get_replica_context().replica_id.unique_id}"
        _set_up_logs(config.telemetry, "gateway", name)
        if (advice := choice.advice()) is not None:
            log.warning(advice)
        if (exposure := await asyncio.to_thread(cluster.exposure)) is not None:
            log.warning(exposure)
        found = await _find_broker(config, broker, "gateway")
        self._gateway = await _build_gateway(config, name, label, workers, found)
        await asyncio.to_thread(_check_listening, self._gateway.access)
        await self._gateway.start()
        gateway, bus = self._gateway.gateway, self._gateway.bus
        gateway.tasks.spawn(_follow_target(config, self._gateway))
        if config.autoscaling.max_workers is not None:
            requests = gateway.requests
            gateway.tasks.spawn(
                publish_depth(bus, config.fleet, name, lambda: requests.num_waiting)
            )
        # Serve sends requests as soon as this returns. Without a broker there is no lease to wait for.
        await gateway.wait_for_worker(FIRST_LEASE_S)
        freeze_heap()
        refusal = AnthropicErrors(refuse, new_id=lambda: uuid.uuid4().hex)
        self._gate = Gate(self._gateway.api, refusal)
        direct.serve_here(self._gate)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for those that run, and end those with an error that are not in time."""
        if late := await self._gate.drain(timeout_s):
            log.warning("%d requests were not answered within %.0f s", late, timeout_s)
            await self._gateway.close()

    async def check_health(self) -> None:
        if (failure := self._gateway.gateway.operator.failure) is not None:
            raise InternalError(f"a task of the gateway failed: {failure!r}")

    def __serve_build_asgi_app__(self) -> Gate:
        return self._gate

    async def __del__(self) -> None:
        """Serve has waited for the requests, and not for what they left to go on."""
        if (gate := vars(self).get("_gate")) and not gate.is_closed:
            await gate.drain(self._drain_s)
        if gateway := vars(self).get("_gateway"):
            await gateway.close()
        if claim := vars(self).get("_claim"):
            await asyncio.to_thread(self._names.give_back, claim)


Broker: Deployment = serve.deployment(
    name="Broker",
    ray_actor_options={"num_cpus": _SMALL_CPUS},
    **_HEALTH,
    graceful_shutdown_timeout_s=5.0,
    max_surge_percent=0,  # one broker at a time has the folder of the store
)(BrokerReplica)

Worker: Deployment = serve.deployment(
    name="Worker",
    **_HEALTH,
    graceful_shutdown_wait_loop_s=0.2,
)(WorkerReplica)

Gateway: Deployment = serve.deployment(
    name="Gateway",
    max_ongoing_requests=_GATEWAY_ONGOING,
    max_surge_percent=100,
    **_HEALTH,
    ray_actor_options=_GATEWAY_ACTOR,
)(GatewayReplica)


def _set_up_logs(telemetry: TelemetrySettings, process: str, name: str) -> None:
    """Have this replica log as the settings say, beside Serve's own records."""
    logs.set_up_replica(telemetry.log_level, telemetry.log_format, process=process, name=name)


def _app_name() -> str:
    return serve.get_replica_context().app_name


async def _build_workers(
    config: AppConfig,
    names: cluster.Names,
    claim: cluster.Claim,
    broker: FindBroker,
    secret: Secret,
) -> "WorkerProcess":
    """The workers of a replica."""
    node = cluster.own_node()
    if config.is_mocked:
        from mallee.actors.mock.fleet import build_mocked_workers, replica_names

        return await build_mocked_workers(
            config,
            claim.number,
            replica_names(config, claim.number),
            broker=broker,
            secret=secret,
            node=node,
            own_ip=_own_ip(),
            past=Incarnation(claim.life * _LIVES_OF_PROCESS),
        )
    if config.is_foreign:
        from mallee.actors.foreign.build import build_foreign_worker  # an extra

        return await build_foreign_worker(
            config,
            WorkerId(f"w{claim.number}"),
            Incarnation(claim.life),
            broker=broker,
            secret=secret,
            node=node,
            own_ip=_own_ip(),
            device=", ".join(f"GPU {gpu}" for gpu in cluster.own_gpus()),
        )
    return await build_worker(
        config,
        WorkerId(f"w{claim.number}"),
        Incarnation(claim.life),
        broker=broker,
        secret=secret,
        node=node,
        own_ip=_own_ip(),
        gpus=cluster.own_gpus(),
        hold_name=partial(names.hold_departed, partial(_target_workers, config, _app_name())),
        threads=threads_of(config, await asyncio.to_thread(_workers_here, config, _app_name())),
    )


def _target_workers(config: AppConfig, app: str) -> int:
    """The replicas that Serve aims at, or those of the settings while it has no target."""
    return cluster.target_replicas(app, "Worker") or config.workers


def _workers_here(config: AppConfig, app: str) -> int:
    """Workers that this node gets when Serve has spread them."""
    workers = config.most_workers
    if config.autoscaling.max_workers is None:
        workers = _target_workers(config, app)
    return math.ceil(workers / max(1, cluster.num_nodes()))


async def _follow_target(config: AppConfig, gateway: "GatewayProcess") -> None:
    """Keep the gateway's number of expected workers at Serve's target, which changes without a restart."""
    app = _app_name()
    while True:
        try:
            found = await asyncio.to_thread(cluster.target_replicas, app, "Worker")
        except RayError as error:  # the controller is being replaced
            log.info("the number of workers is not known: %r", error)
            found = None
        if found is not None:
            gateway.gateway.operator.expect(found * config.mock.engines_per_worker)
        await asyncio.sleep(NODES_PERIOD_S)


async def _listen_between_nodes(process: "WorkerProcess") -> None:
    """Have the workers listen on TCP once the cluster has more than one node."""
    while await asyncio.to_thread(cluster.num_nodes) < 2:  # noqa: ASYNC110
        await asyncio.sleep(NODES_PERIOD_S)
    await process.listen(tcp_host=_own_ip())


def _own_ip() -> str:
    """This node's address, which Ray's own servers listen on."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


async def _build_gateway(
    config: AppConfig,
    name: str,
    label: str,
    workers: DeploymentHandle[Any],
    broker: FindBroker,
) -> "GatewayProcess":
    model = await _model(config, workers)
    secret = await _secret(config, has_disk=False)
    return await build_gateway(
        config,
        name,
        broker=broker,
        transport=build_transport(config, name, secret, cluster.own_node()),
        router=build_router(config, shared_as=name if config.experimental.sync_bookings else None),
        model=model,
        secret=secret,
        node=cluster.own_node(),
        label=label,
        own_ip=_own_ip(),
        tcp_host=lambda: _kv_host(config),
    )


def _kv_host(config: AppConfig) -> str | None:
    """The host at which workers of other machines read what a gateway imports; None while there are none."""
    if config.links.tcp == "always":
        return _own_ip()
    # With a broker of our own there is but one node.
    return _own_ip() if config.nats_url is not None and cluster.num_nodes() > 1 else None


async def _model(config: AppConfig, workers: DeploymentHandle[Any]) -> ModelSpec:
    """The model as a worker of this version of the settings serves it; old ones are being replaced."""
    try:
        async with asyncio.timeout(SPEC_TIMEOUT_S):
            while (raw := await workers.spec.remote(_version(config))) is None:  # noqa: ASYNC110
                await asyncio.sleep(SPEC_PERIOD_S)
    except TimeoutError as error:
        raise NoWorker(f"no worker of these settings came in {SPEC_TIMEOUT_S:.0f} s") from error
    return msgspec.msgpack.decode(raw, type=ModelSpec)


def _version(config: AppConfig) -> str:
    """The settings that decide how a worker serves its model."""
    kept = {"model", "served_model_name", "engine", "mock"}
    return config.model_dump_json(include=kept)


async def _find_broker(
    config: AppConfig, broker: DeploymentHandle[Any] | None, role: BusRole
) -> FindBroker:
    """A call that finds the broker, now and later. Raises ConfigError if it can't be used here."""
    if broker is None:

        async def read() -> BrokerAccess:
            return await asyncio.to_thread(operators_broker, config, role)

        await asyncio.to_thread(check_broker, await read())
        return read

    async def find() -> BrokerAccess:
        try:
            access, node = await broker.place.remote(role)
        except (RayError, RayServeException) as error:
            raise ConnectionError(f"the broker's replica does not answer: {error}") from error
        if node != cluster.own_node():
            raise ConnectionError("the broker is on another node")
        assert isinstance(access, BrokerAccess)
        return access

    try:
        await find()
    except ConnectionError as error:
        raise ConfigError(
            f"{error}, and listens on loopback there: start a nats-server and give its nats_url"
        ) from error
    return find


async def _secret(config: AppConfig, *, has_disk: bool) -> Secret:
    return await asyncio.to_thread(
        take_secret,
        config,
        cluster.RayStore(),
        _app_name(),
        has_disk=has_disk,
        is_one_node=lambda: cluster.num_nodes() == 1,
    )
