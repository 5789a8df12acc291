"""All below a capsule ends together: the lineage against a search of all, and over HTTP."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.actors.gateway.sessions.lineage import Lineage
from mallee.client import Mallee
from mallee.protocol.ids import CapsuleId, RequestId
from mallee.testing.random_model import random_model
from support.tiny_fleet import post, tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
SAMPLED = {"ignore_eos": True, "seed": 3, "temperature": 1.0}


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(0, 1)), max_size=30),
    st.integers(4, 40),
)
def test_all_below_a_capsule_is_found(forks: list[tuple[int, int, int]], kept: int) -> None:
    """D29, part: also of shards; of the newest requests, where more were made than are remembered."""
    lineage, origins = Lineage(max_kept=kept), {}
    for i, (of, branch, shard) in enumerate(forks, 1):
        name = f"r{of % i}-{shard}" if shard else f"r{of % i}"
        origins[f"r{i}"] = f"{name}.{branch}"
        lineage.add(RequestId(f"r{i}"), CapsuleId(origins[f"r{i}"]))
    known = dict(list(origins.items())[-kept:])
    for capsule in {*origins.values(), "r0.0"}:
        below = {request for request, origin in known.items() if origin == capsule}
        while more := {
            r
            for r, origin in known.items()
            if origin.partition(".")[0].partition("-")[0] in below and r not in below
        }:
            below |= more
        assert sorted(lineage.below([CapsuleId(capsule)])) == sorted(below)


@pytest.mark.slow
async def test_a_subtree_is_cancelled_and_its_capsules_are_gone() -> None:
    """F20, part, D29, part: through an answer that has ended; what stands beside it goes on undisturbed."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        root = (await post(client, "/v1/capsules", prompt="A tree", ttl_s=600))["id"]
        more = {**SAMPLED, "n": 2, "max_tokens": 5}
        first = await post(client, f"/v1/capsules/{root}/fork", **more)
        left, right = (choice["mallee"]["capsule"] for choice in first["choices"])
        back = (await post(client, f"/v1/capsules/{left}/rewind", to=7))["id"]
        alone = await post(client, f"/v1/capsules/{right}/fork", **SAMPLED, n=1, max_tokens=900)
        long = {**SAMPLED, "n": 2, "max_tokens": 1900}
        paths = [f"/v1/capsules/{left}/fork", f"/v1/capsules/{back}/fork"]
        below = [asyncio.create_task(post(client, path, **long)) for path in paths]
        beside = asyncio.create_task(
            post(client, f"/v1/capsules/{right}/fork", **SAMPLED, n=1, max_tokens=900)
        )
        engine: Any = next(iter(fleet.engines.values()))
        await until(lambda: len(engine.branches) == 5)
        pruned = await post(client, f"/v1/capsules/{left}/prune")
        assert len(pruned["requests"]) == 2
        assert (pruned["released"], pruned["left"]) == (1, 0)  # the rewound one
        for answer in await asyncio.gather(*below):
            assert {c["finish_reason"] for c in answer["choices"]} == {"cancelled"}
        undisturbed = await beside
        assert undisturbed["choices"][0]["text"] == alone["choices"][0]["text"]
        assert (await client.get(f"/v1/capsules/{back}")).status_code == 404
        assert (await client.get(f"/v1/capsules/{left}")).status_code == 200
        again = await post(client, f"/v1/capsules/{root}/prune")
        assert (again["requests"], again["left"]) == ([], 0)
        for gone in (left, right):
            assert (await client.get(f"/v1/capsules/{gone}")).status_code == 404
        await until(lambda: not engine.branches)
        assert (await client.get(f"/v1/capsules/{root}")).status_code == 200
        strange = await client.post("/v1/capsules/nobodys.0/prune", json={})
        assert (strange.status_code, strange.json()["error"]["code"]) == (404, "capsule_not_found")


async def test_the_sdk_prunes_below_a_capsule() -> None:
    """F20, part: `Capsule.prune`."""
    async with tiny_api(MODEL, 1) as (client, _):
        url = str(client.base_url)

        def ask() -> list[str]:
            with Mallee(url) as sdk:
                capsule = sdk.prefill("A tree")
                capsule.fork(2, max_tokens=3).wait()
                return capsule.prune()

        assert await asyncio.to_thread(ask) == []
