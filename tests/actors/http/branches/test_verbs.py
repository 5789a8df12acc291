"""Verbs of branches, asked of a gateway that doesn't run the request."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from mallee.actors.http.branches import verbs
from mallee.testing.random_model import random_model
from support.tiny_fleet import post, two_gateways
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
ASKED: dict[str, Any] = {
    "prompt": "A critic scores",
    "ignore_eos": True,
    "seed": 3,
    "temperature": 1.0,
    "n": 3,
    "max_tokens": 1200,
}


class Run:
    """A streamed request, read to its end."""

    def __init__(self) -> None:
        self.name = ""
        self.texts = [""] * ASKED["n"]
        self.ends: dict[int, str] = {}
        self.injected: dict[int, Any] = {}


@asynccontextmanager
async def streamed(client: httpx.AsyncClient) -> AsyncIterator[tuple[Run, Any]]:
    run = Run()

    async def read(stop_at: int | None = None) -> None:
        """Until branch 0 has `stop_at` characters, or to the end."""
        async for line in lines:
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                run.name = chunk["id"]
                for choice in chunk["choices"]:
                    run.texts[choice["index"]] += choice["text"]
                    if choice["finish_reason"]:
                        run.ends[choice["index"]] = choice["finish_reason"]
                    if "injected" in choice.get("mallee", {}):
                        run.injected[choice["index"]] = choice["mallee"]["injected"]
            if stop_at is not None and len(run.texts[0]) >= stop_at:
                return

    async with client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as response:
        lines = response.aiter_lines()
        yield run, read


async def test_another_gateway_passes_them_on() -> None:
    """F19, part, F20, part, F22, part, F29, part: as if the gateway that runs the request had been asked."""
    async with two_gateways(MODEL) as s, streamed(s.a) as (run, read):
        await read(3)
        path = f"/v1/requests/{run.name}"
        done = await post(s.b, f"{path}/branches/1/inject", suffix="LOOK")
        assert (done["branch"], done["tokens"]) == (1, 4)
        changed = await post(s.b, f"{path}/prioritize", priority=2, branches=[0, 1])
        assert (changed["branches"], changed["priority"]) == ([0, 1], 2)
        assert (await post(s.b, f"{path}/prune", branches=[0, 2, 9]))["branches"] == [0, 2]
        gone = await s.b.post(f"{path}/branches/0/inject", json={"suffix": "x"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "branch_not_found")
        full = {"suffix": "x" * 1999}
        refused = await s.b.post(f"{path}/branches/1/inject", json=full)
        same = await s.a.post(f"{path}/branches/1/inject", json=full)
        assert refused.status_code == 400
        told, there = (each.json()["error"] for each in (refused, same))
        assert told["message"].startswith("tokens=1999: give 1 to ")
        assert told | {"message": ""} == there | {"message": ""}
        assert (await post(s.b, f"{path}/prune"))["branches"] == [1]
        await read()
        lives = [(await each.get(path)).json() for each in (s.a, s.b)]
        for life in lives:
            assert [branch["states"][-1]["state"] for branch in life["branches"]] == [
                "cancelled"
            ] * 3
        assert run.ends == dict.fromkeys(range(3), "cancelled")
        at = done["at"]
        assert run.texts[1][at : at + 4] == "LOOK"
        over = await s.b.post(f"{path}/prune", json={})
        assert over.status_code == 404


async def test_another_scope_learns_nothing_anywhere() -> None:
    """F7, part: at both gateways its answer is that for an id that never was."""
    async with two_gateways(MODEL) as s, streamed(s.a) as (run, read):
        await read(3)
        told = []
        for client in (s.a, s.b):
            for name in (run.name, f"{run.name[:-4]}0000"):
                body = {"cache_salt": "another"}
                answer = await client.post(f"/v1/requests/{name}/prune", json=body)
                told.append((answer.status_code, answer.text.replace(name, "ID")))
        for client in (s.a, s.b):
            headers = {"x-cache-salt": "another"}
            assert (
                await client.get(f"/v1/requests/{run.name}", headers=headers)
            ).status_code == 404
        assert len(set(told)) == 1
        assert told[0][0] == 404
        assert not run.ends


async def test_a_gateway_that_takes_too_long_is_told_apart_from_an_unknown_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verbs, "WAIT_S", 0.1)
    async with two_gateways(MODEL) as s, streamed(s.a) as (run, read):
        await read(3)
        records = s.fleet.gateways[0].records
        tell = records._tell.pop(verbs._VERB)

        async def never(key: str, scope: Any, given: bytes) -> bytes | None:
            await until(lambda: False, timeout_s=0.5)
            return None

        records._tell[verbs._VERB] = never
        answer = await s.b.post(f"/v1/requests/{run.name}/prune", json={})
        assert answer.status_code == 503
        assert run.name in answer.json()["error"]["message"]
        records._tell[verbs._VERB] = tell
        await post(s.b, f"/v1/requests/{run.name}/prune")
        await read()


async def test_a_subtree_ends_at_every_gateway() -> None:
    """F20, part: its requests came to two gateways by turns; either is asked, and the other's end too."""
    for asked in range(2):
        async with two_gateways(MODEL) as s:
            root = (await post(s.a, "/v1/capsules", prompt="A tree", ttl_s=600))["id"]
            short = {"n": 1, "max_tokens": 3, "ignore_eos": True}
            names, capsule = [], root
            for client in (s.a, s.b, s.a, s.b):
                made = await post(client, f"/v1/capsules/{capsule}/fork", **short)
                capsule = made["choices"][0]["mallee"]["capsule"]
                names.append(capsule)
            long = short | {"max_tokens": 1900}
            running = [
                asyncio.create_task(post(client, f"/v1/capsules/{of}/fork", **long))
                for client, of in ((s.a, capsule), (s.b, capsule), (s.b, names[0]))
            ]
            engine: Any = next(iter(s.fleet.engines.values()))
            await until(lambda engine=engine: len(engine.branches) == 3)
            pruned = await post((s.a, s.b)[asked], f"/v1/capsules/{root}/prune")
            assert len(pruned["requests"]) == 3
            assert (pruned["released"], pruned["left"]) == (4, 0)
            for answer in await asyncio.gather(*running):
                assert answer["choices"][0]["finish_reason"] == "cancelled"
            await until(lambda engine=engine: not engine.branches)
            for client in (s.a, s.b):
                for gone in names:
                    assert (await client.get(f"/v1/capsules/{gone}")).status_code == 404
                assert (await client.get(f"/v1/capsules/{root}")).status_code == 200
