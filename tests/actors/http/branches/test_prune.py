"""Running branches are cancelled together over HTTP."""

import json

from mallee.testing.random_model import random_model
from support.tiny_fleet import post, tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
ASKED = {"prompt": "A critic scores", "ignore_eos": True, "seed": 3, "temperature": 1.0, "n": 4}


async def test_a_critic_prunes_some_branches_and_the_others_are_as_they_were() -> None:
    """F19, part, F20, part: the pruned end as cancelled, their KV is free; the others are undisturbed."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        alone = await post(client, "/v1/completions", **ASKED, max_tokens=400)
        engine = next(iter(fleet.engines.values()))
        texts, ends, pruned, left = [""] * 4, {}, None, []
        body = {**ASKED, "max_tokens": 400, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                choice = chunk["choices"][0]
                texts[choice["index"]] += choice["text"]
                if choice["finish_reason"]:
                    ends[choice["index"]] = choice["finish_reason"]
                if pruned is None and len(texts[3]) > 5:
                    path = f"/v1/requests/{chunk['id']}/prune"
                    pruned = await post(client, path, branches=[0, 2, 9])
                    await until(lambda: len(engine.branches) <= 2)
                    left = [branch.index for branch in engine.branches]
        assert pruned is not None
        assert pruned["branches"] == [0, 2]
        assert left in ([1, 3], [3, 1])
        assert ends == {0: "cancelled", 1: "length", 2: "cancelled", 3: "length"}
        for index in (1, 3):
            assert texts[index] == alone["choices"][index]["text"]
        for index in (0, 2):
            assert alone["choices"][index]["text"].startswith(texts[index])
        await until(lambda: not engine.branches)
        again = await client.post(path, json={})
        assert (again.status_code, again.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_request_all_of_whose_branches_are_pruned_ends() -> None:
    """F20, part: its stream ends whole, with usage of what was drawn."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        body = {
            **ASKED,
            "max_tokens": 1900,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        ends, path, usage = [], "", None
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                ends += [c["finish_reason"] for c in chunk["choices"] if c["finish_reason"]]
                usage = chunk["usage"] or usage
                if not path:
                    path = f"/v1/requests/{chunk['id']}/prune"
                    assert (await post(client, path))["branches"] == [0, 1, 2, 3]
        assert ends == ["cancelled"] * 4
        assert usage is not None
        assert 0 < usage["completion_tokens"] < 4 * 1900
        engine = next(iter(fleet.engines.values()))
        await until(lambda: not engine.branches)
