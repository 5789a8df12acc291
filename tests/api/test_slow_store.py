"""A store whose every answer is late: what needs it waits or is 503, the rest goes on, nothing is wrong."""

import asyncio
from typing import Any

import httpx

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from support.tiny_fleet import post, two_gateways
from support.waiting import elapse

MODEL = random_model("llama", 5, max_position_embeddings=8192)
CHAT = ChatTemplate(None, family=FAMILIES[0])
DRAW: dict[str, Any] = {"ignore_eos": True, "seed": 1}
LATE_S, TOO_LATE_S = 1.0, 3.0
KEY = {"Idempotency-Key": "k"}
SOON_S = 0.5  # an answer that needs no store, in virtual time


async def complete(client: httpx.AsyncClient, prompt: str, **more: Any) -> tuple[str, float]:
    """The text, and the (virtual) seconds that it took."""
    begun = asyncio.get_running_loop().time()
    found = await post(client, "/v1/completions", prompt=prompt, max_tokens=4, **DRAW, **more)
    return found["choices"][0]["text"], asyncio.get_running_loop().time() - begun


async def test_late_answers_of_the_store_are_waited_for_and_right() -> None:
    """X8, part: two gateways that share what is stored."""
    async with two_gateways(MODEL, chat=CHAT, num_blocks=4096) as both:
        a, b, fleet = both
        want, _ = await complete(a, "one")
        budget = {"budget": {"tokens": 9}}
        assert (await a.put("/v1/sessions/s", json=budget)).status_code == 200
        fleet.hub.kept.late_s = LATE_S
        for client in (a, b):
            text, took = await complete(client, "one")
            assert (text, took < SOON_S) == (want, True)
        body = {"max_output_tokens": 4, **DRAW}
        first = await post(a, "/v1/responses", input="x", **body)
        second = await post(b, "/v1/responses", input="y", previous_response_id=first["id"], **body)
        shown = await b.get(f"/v1/responses/{first['id']}")
        assert (shown.status_code, shown.json()["output"]) == (200, first["output"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        asked = {"model": "m", "prompt": "once", "max_tokens": 4, **DRAW}
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=asked, headers=KEY) for client in (a, b, a))
        )
        assert len({each.content for each in answers}) == 1
        of_session = {"mallee": {"session": "s"}}
        for client in (a, b):
            await complete(client, "of s", **of_session)
        assert (await b.post("/v1/completions", json={**asked, **of_session})).status_code == 200
        spent = await a.post("/v1/completions", json={**asked, **of_session})
        assert (spent.status_code, spent.json()["error"]["code"]) == (409, "budget_spent")
        nodes = [len((await each.get("/v1/sessions/s")).json()["nodes"]) for each in (a, b)]
        assert nodes[0] == nodes[1]


async def test_a_store_whose_answers_come_too_late_is_away_and_nothing_is_lost() -> None:
    """X8, part: 503 with `Retry-After`, never 404."""
    async with two_gateways(MODEL, chat=CHAT, num_blocks=4096) as both:
        a, b, fleet = both
        want, _ = await complete(a, "one")
        body = {"model": "m", "input": "x", "max_output_tokens": 4, **DRAW}
        first = await post(a, "/v1/responses", **body)
        capsule = (await post(a, "/v1/capsules", prompt="A long text. " * 4))["id"]
        fleet.hub.kept.late_s = TOO_LATE_S
        for client in (a, b):
            text, took = await complete(client, "one")
            assert (text, took < SOON_S) == (want, True)
            fork = {"n": 1, "max_tokens": 4, **DRAW}
            assert (await client.post(f"/v1/capsules/{capsule}/fork", json=fork)).status_code == 200
        await complete(a, "of s", mallee={"session": "s"})
        refused = [
            await b.get(f"/v1/responses/{first['id']}"),
            await b.get("/v1/responses/resp_unknown"),
            await b.post("/v1/responses", json={**body, "previous_response_id": first["id"]}),
            await b.post("/v1/completions", json={"model": "m", "prompt": "x"}, headers=KEY),
            await b.get("/v1/sessions/s"),
        ]
        for each in refused:
            assert (each.status_code, each.json()["error"]["code"]) == (503, "store_away"), (
                each.text
            )
            assert int(each.headers["retry-after"]) >= 1
        lost = await post(a, "/v1/responses", **body)
        assert (lost["store"], "no answer came" in lost["mallee"]["not_stored"]) == (False, True)
        fleet.hub.kept.late_s = 0.0
        await elapse(5.0)
        nodes = (await b.get("/v1/sessions/s")).json()["nodes"]
        assert len(nodes) == 1
        assert (await b.get(f"/v1/responses/{first['id']}")).json()["output"] == first["output"]
        assert (await b.get("/v1/responses/resp_unknown")).status_code == 404
        assert (await post(b, "/v1/responses", **body))["output"][0]["content"] == (
            first["output"][0]["content"]
        )
