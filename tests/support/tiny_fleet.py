"""A live fleet whose engines compute a tiny model, and its API behind a real server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from mallee.router.config import RouterConfig
from mallee.testing.random_model import RandomModel
from support.live_api import served
from support.live_fleet import LiveFleet, running
from support.torch_threads import one_torch_thread

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
    with one_torch_thread():
        async with running(made, workers, gateways) as fleet:
            yield fleet


@asynccontextmanager
async def tiny_api(
    model: RandomModel, workers: int, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, LiveFleet]]:
    """A client of the first gateway; at the end engines and gateway are whole. As `tiny_fleet`."""
    async with (
        tiny_fleet(model, workers, **options) as fleet,
        served(fleet.gateways[0]) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        yield client, fleet
        for engine in fleet.engines.values():
            engine.check()
        fleet.gateways[0].check()


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """The answer, which is no error."""
    response = await client.post(path, json=body)
    answer: dict[str, Any] = response.json()
    assert response.status_code == 200, answer
    return answer
