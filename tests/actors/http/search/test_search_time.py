"""Time to solution: each search that has its result is in /metrics, with the seconds since its request."""

import asyncio
import re
from typing import Any

import httpx

from mallee.testing.random_model import random_model
from support.tiny_fleet import post, tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
BEAM = {"type": "beam", "width": 2, "branch": 2, "depth": 3, "step_tokens": 4}
ASKED: dict[str, Any] = {"prompt": "Once upon a time", "policy": BEAM, "seed": 3}


async def counted(client: httpx.AsyncClient) -> dict[str, tuple[int, float]]:
    """By reason the number of searches, and their seconds in all; reasons without any are left out."""
    text = (await client.get("/metrics")).text
    found = dict(re.findall(r'mallee_search_duration_seconds_(\w+\{reason="\w+"\}) (\S+)', text))
    pairs = {
        reason: (int(float(found[f'count{{reason="{reason}"}}'])), float(value))
        for key, value in found.items()
        if key.startswith("sum") and (reason := key.split('"')[1])
    }
    return {reason: pair for reason, pair in pairs.items() if pair[0]}


async def test_metrics_have_the_time_to_solution_of_each_search() -> None:
    """D22: whole or streamed, by the reason of their end."""
    now = asyncio.get_running_loop().time
    async with tiny_api(MODEL, 1) as (client, _):
        assert await counted(client) == {}
        begun = now()
        assert (await post(client, "/v1/search", **ASKED))["reason"] == "done"
        async with client.stream("POST", "/v1/search", json={**ASKED, "stream": True}) as answer:
            await answer.aread()
        took = now() - begun
        cut = await post(client, "/v1/search", **ASKED, budget={"tokens": 10})
        assert cut["reason"] == "tokens"
        found = await counted(client)
        assert {reason: num for reason, (num, _) in found.items()} == {"done": 2, "tokens": 1}
        assert 0.5 * took < found["done"][1] <= took


async def test_a_search_that_its_client_leaves_has_no_time() -> None:
    """D22, part: there is no solution."""
    async with tiny_api(MODEL, 1, num_blocks=4096) as (client, fleet):
        (engine,) = fleet.engines.values()
        long = {**ASKED, "policy": {**BEAM, "depth": 200}, "stream": True}
        async with client.stream("POST", "/v1/search", json=long) as answer:
            await anext(answer.aiter_lines())
        await until(lambda: engine.stats().jobs == 0)
        assert await counted(client) == {}
