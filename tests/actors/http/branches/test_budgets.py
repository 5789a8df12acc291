"""Budgets over HTTP, on a tiny real model; at one gateway and at two."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from mallee.actors.text.chat import ChatTemplate
from mallee.protocol.ids import account_of
from mallee.testing.random_model import random_model
from support.tiny_fleet import chunks_of, post, tiny_api, two_gateways
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
CHAT = ChatTemplate("{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}")
ASKED = {"prompt": "A tree of many trunks", "ignore_eos": True, "seed": 3, "temperature": 1.0}


def _ends(answer: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(c["finish_reason"], c["mallee"].get("ended_by")) for c in answer["choices"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_branches_end_at_their_budget_with_the_text_of_an_undisturbed_run(
    stream: bool,
) -> None:
    """X19, part: exactly as many tokens, each branch a prefix; KV is free, and forks share what is left."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        alone = await post(client, "/v1/completions", **ASKED, n=3, max_tokens=300)
        engine = next(iter(fleet.engines.values()))
        body = {**ASKED, "n": 3, "max_tokens": 300, "mallee": {"budget": {"tokens": 100}}}
        path = "/v1/completions"
        answer = await (streamed(client, path, body) if stream else post(client, path, **body))
        assert answer["usage"]["completion_tokens"] == 100
        assert _ends(answer) == [("budget", "tokens")] * 3
        for cut, whole in zip(answer["choices"], alone["choices"], strict=True):
            assert 0 < len(cut["text"]) < 300
            assert whole["text"].startswith(cut["text"])
        await until(lambda: not engine.branches)
        capsule = answer["choices"][0]["mallee"]["capsule"]
        spent = await client.post(f"/v1/capsules/{capsule}/fork", json={"n": 1})
        assert (spent.status_code, spent.json()["error"]["code"]) == (409, "budget_spent")


async def test_forks_of_its_capsules_spend_what_a_request_left() -> None:
    """X19, part: also of a fork's, and of a rewound one; the next branch is one too many."""
    async with tiny_api(MODEL, 1) as (client, _):
        budget = {"budget": {"tokens": 50, "branches": 4}}
        first = await post(client, "/v1/completions", **ASKED, max_tokens=10, mallee=budget)
        capsule = first["choices"][0]["mallee"]["capsule"]
        back = await post(client, f"/v1/capsules/{capsule}/rewind", to=12)
        more = {"ignore_eos": True, "max_tokens": 20}
        own = {"budget": {"tokens": 15}}
        second = await post(client, f"/v1/capsules/{back['id']}/fork", n=1, **more, mallee=own)
        assert second["usage"]["completion_tokens"] == 15
        assert _ends(second) == [("budget", "tokens")]
        leaf = second["choices"][0]["mallee"]["capsule"]
        whole = {"ignore_eos": True, "max_tokens": 200, "n": 2}
        third = await client.post(f"/v1/capsules/{capsule}/fork", json=whole)
        assert third.json()["usage"]["completion_tokens"] == 25
        for again in (leaf, capsule):
            answer = await client.post(f"/v1/capsules/{again}/fork", json={"n": 1})
            assert answer.json()["error"]["code"] == "budget_spent"


async def test_branches_end_when_their_time_is_over() -> None:
    """X19, part: `wall_s`, while tokens come and while none does."""
    async with tiny_api(MODEL, 1) as (client, _):
        body = {**ASKED, "n": 2, "max_tokens": 1900, "mallee": {"budget": {"wall_s": 0.2}}}
        answer = await asyncio.wait_for(post(client, "/v1/completions", **body), 20)
        assert _ends(answer) == [("budget", "wall_s")] * 2
        assert answer["usage"]["completion_tokens"] < 3800


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        ({}, "mallee.budget"),
        ({"tokens": 0}, "mallee.budget.tokens"),
        ({"branches": -1}, "mallee.budget.branches"),
        ({"wall_s": 0}, "mallee.budget.wall_s"),
        ({"wall_s": 1e9}, "mallee.budget.wall_s"),
        ({"token": 5}, "mallee.budget"),
        ({"branches": 1}, "budget"),
    ],
)
async def test_a_budget_that_cannot_be_is_refused_by_name(budget: Any, named: str) -> None:
    """X19, part: so is one of a request that draws nothing."""
    async with tiny_api(MODEL, 1) as (client, _):
        asked = {**ASKED, "n": 2, "mallee": {"budget": budget}}
        answer = await client.post("/v1/completions", json=asked)
        assert answer.status_code in (400, 409)
        assert named in answer.text
        prefill = {"prompt": "x", "mallee": {"budget": {"tokens": 5}}}
        none = await client.post("/v1/capsules", json=prefill)
        assert (none.status_code, none.json()["error"]["param"]) == (400, "mallee.budget")


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The chunks of an answer put together."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, dict[str, Any]] = {}
    usage: Any = None
    async with client.stream("POST", path, json=asked) as response:
        async for chunk in chunks_of(response):
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                index = choice["index"]
                before = choices.get(index, {"text": ""})["text"]
                choices[index] = {**choice, "text": before + choice["text"]}
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


async def test_responses_have_budgets_and_conditions() -> None:
    """X19, part, F19, part: a response, the turns that fork it, and a stream, with the text of a free run."""
    async with tiny_api(MODEL, 1, settings={"chat": CHAT}) as (client, fleet):
        asked = {"input": "A tree", "ignore_eos": True, "seed": 3, "max_output_tokens": 60}
        free = await post(client, "/v1/responses", **asked)
        text = free["output"][0]["content"][0]["text"]
        bounded = {**asked, "mallee": {"budget": {"tokens": 25}}, "stream": True}
        async with client.stream("POST", "/v1/responses", json=bounded) as response:
            lines = [line async for line in response.aiter_lines()]
        last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
        first = last["response"]
        assert last["type"] == "response.incomplete"
        assert first["output"][0]["content"][0]["text"] == text[:25]
        assert first["mallee"]["ended_by"] == "tokens"
        again = {**asked, "previous_response_id": first["id"]}
        spent = await client.post("/v1/responses", json=again)
        assert (spent.status_code, spent.json()["error"]["code"]) == (409, "budget_spent")
        met = {"stop_when": {"regex": re.escape(text[10:13])}}
        ended = await post(client, "/v1/responses", **asked, mallee=met)
        assert ended["status"] == "completed"
        assert ended["mallee"]["ended_by"] == "regex"
        said = ended["output"][0]["content"][0]["text"]
        assert said == text[: text.index(text[10:13]) + 3]
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)


FORK = {"ignore_eos": True, "seed": 3, "temperature": 1.0}


@pytest.mark.slow
async def test_a_tree_s_budget_holds_at_every_gateway() -> None:
    """X19, part: forks at both at once draw no more than is left, and all of that; then both refuse."""
    async with two_gateways(MODEL) as s:
        first = await post(
            s.a, "/v1/completions", **ASKED, max_tokens=20, mallee={"budget": {"tokens": 500}}
        )
        capsule = first["choices"][0]["mallee"]["capsule"]
        assert account_of(capsule)
        await until(lambda: s.fleet.gateways[1].is_kept(capsule))
        alone = await post(s.a, "/v1/completions", **ASKED, n=1, max_tokens=1500)
        path = f"/v1/capsules/{capsule}/fork"
        more = {**FORK, "n": 2, "max_tokens": 1500}
        answers = await asyncio.gather(
            post(s.a, path, **more), streamed(s.b, path, more), post(s.b, path, **more)
        )
        drawn = [answer["usage"]["completion_tokens"] for answer in answers]
        assert all(drawn)
        assert 420 <= sum(drawn) <= 480
        for answer in answers:
            assert _ends(answer) == [("budget", "tokens")] * 2
            text = answer["choices"][0]["text"]
            assert (first["choices"][0]["text"] + text)[:20] == alone["choices"][0]["text"][:20]
        last = [choice["mallee"]["capsule"] for answer in answers for choice in answer["choices"]]
        # What a gateway had taken ahead is back now, and is the rest.
        rest = 480 - sum(drawn)
        final = await s.b.post(path, json={**more, "n": 1})
        if rest:
            assert final.json()["usage"]["completion_tokens"] == rest
            final = await s.b.post(path, json={**more, "n": 1})
        assert (final.status_code, final.json()["error"]["code"]) == (409, "budget_spent")
        for client in (s.a, s.b):
            for each in (capsule, last[0]):
                await until(lambda each=each: all(g.is_kept(each) for g in s.fleet.gateways))  # type: ignore[misc]
                spent = await client.post(f"/v1/capsules/{each}/fork", json={"n": 1})
                assert (spent.status_code, spent.json()["error"]["code"]) == (409, "budget_spent")


async def test_a_response_is_below_the_one_that_it_names_wherever_it_is_sent() -> None:
    """X19, part: by its name alone, also where its capsule is gone."""
    async with two_gateways(MODEL, chat=CHAT) as s:
        asked = {"input": "A tree", "ignore_eos": True, "seed": 3, "max_output_tokens": 20}
        first = await post(s.a, "/v1/responses", **asked, mallee={"budget": {"tokens": 30}})
        capsule = first["mallee"]["capsule"]
        await s.a.delete(f"/v1/capsules/{capsule}")
        again = {**asked, "previous_response_id": first["id"]}
        second = await post(s.b, "/v1/responses", **again)
        assert second["mallee"]["ended_by"] == "tokens"
        assert second["usage"]["output_tokens"] == 10
        third = await s.a.post(
            "/v1/responses", json={**asked, "previous_response_id": second["id"]}
        )
        assert (third.status_code, third.json()["error"]["code"]) == (409, "budget_spent")
