"""A process with one worker whose engine is not ours, put together."""

import asyncio
from typing import get_args

from mallee.actors.build import (
    WorkerProcess,
    build_host,
    build_link_listener,
    build_scraped,
)
from mallee.actors.foreign.runner import AsyncEngine, ForeignRunner
from mallee.actors.foreign.texts import TextLimits
from mallee.actors.foreign.vllm import start_engine
from mallee.actors.front.pods.kv_events import PodContents
from mallee.actors.front.pods.subscriber import Subscriber
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.worker import Capacity, Identity, Results, Worker
from mallee.protocol.capabilities import Capability
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.model import ModelSpec
from mallee.runtime.bus.access import FindBroker
from mallee.runtime.bus.nats import NatsBus
from mallee.runtime.config import AppConfig
from mallee.runtime.telemetry.tracing.provider import open_tracing
from mallee.runtime.transport.greeting import Secret
from mallee.runtime.transport.server import CommandServer


def add_foreign(
    host: Host,
    engine: AsyncEngine,
    model: ModelSpec,
    capacity: Capacity,
    *,
    worker: WorkerId,
    incarnation: Incarnation,
    limits: TextLimits,
) -> ForeignRunner:
    """Have `host` serve `engine`; its runner, which is to be told of the engine's steps and events."""
    lacks: tuple[Capability, ...] = get_args(Capability)
    identity = Identity(worker, incarnation, model, is_prefix_closed=False, lacks=lacks)
    contents = PodContents(
        capacity.block_size,
        max_blocks=2 * capacity.num_blocks,
        salt_of=lambda adapter, cache_salt: cache_salt,  # that which the runner gives
    )

    def make_runner(results: Results) -> ForeignRunner:
        return ForeignRunner(
            engine,
            identity,
            capacity,
            results,
            contents=contents,
            limits=limits,
            clock=host.clock,
        )

    made = Worker(identity, host, capacity, make_runner, spans=host.spans_of(worker))
    host.add(made)
    runner = made.runner
    assert isinstance(runner, ForeignRunner)
    host.tasks.include(runner.tasks)
    return runner


async def build_foreign_worker(
    config: AppConfig,
    worker: WorkerId,
    incarnation: Incarnation,
    *,
    broker: FindBroker,
    secret: Secret,
    node: str,
    own_ip: str = "127.0.0.1",
    device: str = "",
) -> WorkerProcess:
    """The one worker of a process, on vLLM's engine: loads the model. Raises MalleeError."""
    import zmq.asyncio  # an extra, which vLLM needs, too

    engine = await asyncio.to_thread(start_engine, config)
    bus = NatsBus(broker, fleet=config.fleet, name=f"mallee-{worker}")
    tracing = open_tracing("worker", worker)
    host = build_host(config, worker, bus, tracing=tracing, device=device)
    runner = add_foreign(
        host,
        engine,
        engine.model,
        Capacity(config.engine.block_size, engine.num_blocks, engine.max_rows),
        worker=worker,
        incarnation=incarnation,
        limits=TextLimits(config.engine.max_answer_capsules, config.engine.max_below_mb << 20),
    )
    await engine.warm_up()
    engine.meter.progressed = runner.progressed
    context = zmq.asyncio.Context()
    order, take = runner.contents.follow(0, can_replay=True), runner.take_events
    runner.follow(Subscriber(context, engine.places, order, take).run)
    return WorkerProcess(
        host=host,
        model=engine.model,
        bus=bus,
        listener=build_link_listener(config, node, CommandServer(host, secret)),
        start_engines=host.start,
        close_engines=host.close,
        scraped=build_scraped(config, host, own_ip),
    )
