"""A live fleet whose engines compute a tiny model, and its API behind a real server."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import httpx
from starlette.applications import Starlette

from bench.doubles.bus import LocalBus
from bench.doubles.random_model import RandomModel
from mallee.gateway.gateway import Gateway
from mallee.router.config import RouterConfig
from support.any_gateway import IS_ON, OPTIONS, any_gateway
from support.live_api import api_over, served, serving
from support.live_fleet import LiveFleet, running
from support.plain_ids import scopes_at
from support.torch_threads import torch_threads
from support.waiting import until

BLOCK = 4


@asynccontextmanager
async def tiny_fleet(
    model: RandomModel,
    workers: int,
    *,
    gateways: int = 1,
    num_blocks: int = 512,
    **options: Any,
) -> AsyncIterator[LiveFleet]:
    """Workers of `model` with blocks of 4 tokens. `options` are LiveFleet's."""

    def forward(_: Any, *, num_blocks: int, block_size: int) -> Any:
        return model.forward(num_blocks=num_blocks, block_size=block_size)

    made = LiveFleet(
        model.forward(num_blocks=2).spec,
        RouterConfig(block_size=BLOCK),
        forward=forward,  # type: ignore[arg-type]
        num_blocks=num_blocks,
        **options,
    )
    with torch_threads():
        async with running(made, workers, gateways) as fleet:
            yield fleet


@asynccontextmanager
async def tiny_api(
    model: RandomModel, workers: int, *, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, LiveFleet]]:
    """A client of the first gateway; at the end engines and gateway are whole. As `tiny_fleet`.

    Or of any gateway (`any_gateway.IS_ON`). `settings` are of `api_over`.
    """
    if IS_ON:
        options |= OPTIONS

    def make_app(gateway: Gateway) -> Starlette:
        return api_over(gateway, **settings or {})

    async with tiny_fleet(model, workers, **options) as fleet, AsyncExitStack() as stack:
        app: Any = None
        if IS_ON:
            await until(lambda: all(len(each.peers.others) == 2 for each in fleet.gateways))
            app = await stack.enter_async_context(any_gateway(fleet, make_app))
        else:
            app = make_app(fleet.gateways[0])
        url, _ = await stack.enter_async_context(serving(app))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30)), fleet
        for engine in fleet.engines.values():
            engine.check()
        fleet.gateways[0].check()


class TwoGateways(NamedTuple):
    """A client of each."""

    a: httpx.AsyncClient
    b: httpx.AsyncClient
    fleet: LiveFleet

    def bus_of(self, gateway: int) -> LocalBus:
        """Of the first or the second."""
        bus = self.fleet.gateways[gateway].context.bus
        assert isinstance(bus, LocalBus)
        return bus


@asynccontextmanager
async def two_gateways(
    model: RandomModel, *, num_blocks: int = 512, **settings: Any
) -> AsyncIterator[TwoGateways]:
    """Two gateways that know each other, over one worker; at the end they are whole.

    `settings` are of `served`.
    """
    options: Any = {"gateways": 2, "syncs": True, "ids": scopes_at}
    async with tiny_fleet(model, 1, num_blocks=num_blocks, **options) as fleet:
        await until(lambda: all(len(each.peers.others) == 1 for each in fleet.gateways))
        async with (
            served(fleet.gateways[0], **settings) as (here, _),
            served(fleet.gateways[1], **settings) as (there, _),
            httpx.AsyncClient(base_url=here, timeout=30) as a,
            httpx.AsyncClient(base_url=there, timeout=30) as b,
        ):
            yield TwoGateways(a, b, fleet)
        for gateway in fleet.gateways:
            gateway.check()
            assert gateway.operator.failure is None


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """The answer, which is no error."""
    response = await client.post(path, json=body)
    answer: dict[str, Any] = response.json()
    assert response.status_code == 200, answer
    return answer


async def chunks_of(response: httpx.Response) -> AsyncIterator[Any]:
    """The events of a stream that are JSON, as they come."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


async def has_capsules(client: httpx.AsyncClient, num: int) -> bool:
    """Whether so many capsules of the scope are there."""
    return bool((await client.get("/v1/capsules/count")).json()["count"] == num)
