"""The priority of running branches is changed over HTTP."""

import asyncio
from typing import Any

import pytest

from mallee.client import AsyncMallee
from mallee.testing.random_model import random_model
from support.live_fleet import LiveFleet, lose
from support.tiny_fleet import chunks_of, post, tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
ASKED = {"prompt": "An agent values", "ignore_eos": True, "seed": 3, "temperature": 1.0, "n": 3}


def _priorities(fleet: LiveFleet) -> list[float]:
    """Of all branches that run, lowest first."""
    engines: Any = fleet.engines.values()
    return sorted(branch.priority for engine in engines for branch in engine.branches)


@pytest.mark.slow
async def test_branches_have_their_new_priority_also_after_their_worker_was_lost() -> None:
    """D15, part: at the worker's next step, and on the next worker; the texts are as they were."""
    async with tiny_api(MODEL, 2) as (client, fleet):
        alone = await post(client, "/v1/completions", **ASKED, max_tokens=600)
        texts, done = [""] * 3, False
        body = {**ASKED, "max_tokens": 600, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for chunk in chunks_of(response):
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
                if not done and all(texts):
                    done = True
                    path = f"/v1/requests/{chunk['id']}/prioritize"
                    some = await post(client, path, priority=5, branches=[2, 1, 7])
                    assert (some["branches"], some["priority"]) == ([1, 2], 5)
                    await until(lambda: _priorities(fleet) == [0, 5, 5])
                    one = await post(client, path, priority=-7, branches=[1])
                    assert one["branches"] == [1]
                    await until(lambda: _priorities(fleet) == [-7, 0, 5])
                    await lose(fleet, response.headers["x-mallee-worker"])
                    await until(lambda: _priorities(fleet) == [-7, 0, 5])
        assert texts == [choice["text"] for choice in alone["choices"]]
        gone = await client.post(path, json={"priority": 1})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_priority_that_cannot_be_is_refused_by_name() -> None:
    """F30, part: none, too high, no number."""
    async with tiny_api(MODEL, 1) as (client, _):
        for body in ({}, {"priority": 1001}, {"priority": "high"}):
            answer = await client.post("/v1/requests/cmpl-1/prioritize", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


async def test_the_sdk_changes_the_priority_of_a_branch() -> None:
    """D15, part: `Branch.prioritize`."""
    async with tiny_api(MODEL, 1) as (client, fleet), AsyncMallee(str(client.base_url)) as sdk:
        asked = None
        async with sdk.stream("x", max_tokens=300, ignore_eos=True, n=2) as branches:
            async for event in branches:
                if asked is None and event.text:
                    asked = asyncio.create_task(branches.branches[event.index].prioritize(9))
                    assert await asked
                    await until(lambda: _priorities(fleet)[-1] == 9)
                    break
