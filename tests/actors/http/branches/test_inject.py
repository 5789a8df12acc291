"""Tokens into running branches over HTTP, on a tiny real model."""

import asyncio
from typing import Any

import httpx

from mallee.client import AsyncMallee
from mallee.testing.random_model import random_model
from support.live_fleet import lose
from support.tiny_fleet import chunks_of, post, tiny_api

MODEL = random_model("llama", 5, max_position_embeddings=2048)
PROMPT = "".join(chr(33 + 7 * i % 90) for i in range(50))
SAMPLED = {"ignore_eos": True, "seed": 3, "temperature": 1.0}
WORDS = "THE TOOL SAYS: 42."


async def _injected(client: httpx.AsyncClient, n: int, **more: Any) -> tuple[list[str], int, Any]:
    """The texts of n streamed branches, where `WORDS` came into the last, and how its stream told that."""
    asked = {"prompt": PROMPT, **SAMPLED, "max_tokens": 160, "n": n, "stream": True, **more}
    texts, place, told = [""] * n, -1, []
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        async for chunk in chunks_of(response):
            choice = chunk["choices"][0]
            texts[choice["index"]] += choice["text"]
            told += choice.get("mallee", {}).get("injected", [])
            if place < 0 and len(texts[n - 1]) > 20:
                path = f"/v1/requests/{chunk['id']}/branches/{n - 1}/inject"
                place = (await post(client, path, suffix=WORDS))["at"]
    return texts, place, told


async def test_the_answer_is_that_of_a_linear_run_with_these_tokens() -> None:
    """F22: the tool's words are in the stream where the answer says; what follows is a linear run's."""
    async with tiny_api(MODEL, 1) as (client, _):
        alone = await post(client, "/v1/completions", prompt=PROMPT, **SAMPLED, max_tokens=160, n=2)
        texts, place, told = await _injected(client, 2)
        assert told == [{"at": place, "tokens": len(WORDS)}]
        assert texts[0] == alone["choices"][0]["text"]  # the other branch is as it was
        before, after = texts[1][:place], texts[1][place + len(WORDS) :]
        assert before == alone["choices"][1]["text"][:place]
        assert texts[1][place:].startswith(WORDS)
        assert len(texts[1]) == 160  # which the limit counts
        one, at, _ = await _injected(client, 1, temperature=0.0)
        linear = await post(
            *(client, "/v1/completions"),
            **{**SAMPLED, "temperature": 0.0},
            prompt=PROMPT + one[0][:at] + WORDS,
            max_tokens=160 - at - len(WORDS),
        )
        assert linear["choices"][0]["text"] == one[0][at + len(WORDS) :]
        assert after


async def test_a_branch_that_lost_its_worker_keeps_what_was_injected() -> None:
    """F22, part: failover goes on after the injected tokens, token-exact."""
    async with tiny_api(MODEL, 2) as (client, fleet):
        asked = {"prompt": PROMPT, **SAMPLED, "temperature": 0.0, "max_tokens": 300, "stream": True}
        text, place, lost = "", -1, False
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            async for chunk in chunks_of(response):
                choice = chunk["choices"][0]
                text += choice["text"]
                if place < 0 and len(text) > 10:
                    path = f"/v1/requests/{chunk['id']}/branches/0/inject"
                    place = (await post(client, path, suffix=WORDS))["at"]
                elif place >= 0 and not lost and len(text) > place + len(WORDS) + 5:
                    lost = True
                    await lose(fleet, response.headers["x-mallee-worker"])
        assert lost
        linear = await post(
            *(client, "/v1/completions"),
            **{**SAMPLED, "temperature": 0.0},
            prompt=PROMPT + text[:place] + WORDS,
            max_tokens=300 - place - len(WORDS),
        )
        assert text[place:] == WORDS + linear["choices"][0]["text"]


async def test_what_cannot_be_injected_is_refused_by_name() -> None:
    """F22, part: a grammar, no such branch, no tokens, too many, and an unknown mode."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        body = {"prompt": PROMPT, **SAMPLED, "max_tokens": 1900, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            chunks = chunks_of(response)
            chunk = await anext(chunks)
            path = f"/v1/requests/{chunk['id']}/branches"
            for branch, asked, status, named in (
                (1, {"suffix": "x"}, 404, "branch"),
                ("x", {"suffix": "x"}, 404, "branch"),
                (0, {"suffix": ""}, 400, "suffix"),
                (0, {}, 400, "suffix"),
                (0, {"suffix": "x", "mode": "often"}, 400, "mode"),
                (0, {"suffix": "x" * 1900}, 400, "tokens"),
            ):
                answer = await client.post(f"{path}/{branch}/inject", json=asked)
                assert answer.status_code == status, answer.text
                assert named in answer.json()["error"]["message"]
        gone = await client.post(f"{path}/0/inject", json={"suffix": "x"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "branch_not_found")
        fleet.gateways[0].check()


async def test_the_sdk_injects_into_a_branch_of_a_stream() -> None:
    """F22, part: `Branch.inject`; the branch knows where."""
    async with tiny_api(MODEL, 1) as (client, _), AsyncMallee(str(client.base_url)) as sdk:
        stream = sdk.stream(PROMPT, max_tokens=200, ignore_eos=True, seed=3)
        at, asked = -1, None
        async with stream as branches:
            async for event in branches:
                if asked is None and event.text:
                    asked = asyncio.create_task(branches.branches[0].inject(WORDS))
            branch = branches.branches[0]
        assert asked is not None
        at = await asked
        assert branch.text[at : at + len(WORDS)] == WORDS
        assert branch.injected == [{"at": at, "tokens": len(WORDS)}]
