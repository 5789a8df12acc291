"""A whole Mallee with mocked engines in the event loop of a test: as `mallee.actors.mock.stack` wires it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.doubles.bus import LocalBus, LocalHub
from mallee.actors.build import GatewayProcess, build_gateway, build_router
from mallee.actors.hosting.host import Host
from mallee.actors.mock.fleet import MockPlan, build_mocked_workers, counted_names
from mallee.runtime.config import AppConfig
from support.live_api import serving
from support.local_transport import SECRET, LocalTransport
from support.waiting import until


class Stack(NamedTuple):
    """A running service at `base_url`."""

    base_url: str
    gateway: GatewayProcess


async def _no_broker(*_: Any) -> Any:
    raise AssertionError("its bus is in memory")


@asynccontextmanager
async def mock_stack(config: AppConfig) -> AsyncIterator[Stack]:
    """`config.workers` hosts of mocked engines and one gateway, over a bus in memory; all are registered."""
    hub, hosts = LocalHub(), dict[str, Host]()
    router = build_router(config)
    in_memory: Any = lambda *_, **__: LocalBus(hub)  # noqa: E731
    async with AsyncExitStack() as stack:
        stack.enter_context(patch("mallee.actors.build.NatsBus", in_memory))
        stack.enter_context(patch("mallee.actors.mock.fleet.NatsBus", in_memory))
        for number in range(config.workers):
            names = counted_names(config, number)
            workers = await build_mocked_workers(
                config, number, names, broker=_no_broker, secret=SECRET
            )
            workers.host.address = workers.host.name
            hosts[workers.host.name] = workers.host
            stack.push_async_callback(workers.close)
            await workers.bus.connect()
            await workers.start_engines()
        gateway = await build_gateway(
            config,
            "g0",
            broker=_no_broker,
            transport=LocalTransport("g0", hosts),
            router=router,
            model=MockPlan.of(config).served,
            secret=SECRET,
        )
        stack.push_async_callback(gateway.close)
        await gateway.start()
        await until(lambda: len(router.workers()) == config.num_workers)
        url, _ = await stack.enter_async_context(serving(gateway.api))
        yield Stack(url, gateway)
        gateway.gateway.check()
        assert gateway.gateway.operator.failure is None
