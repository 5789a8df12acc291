"""Running branches are cancelled together over HTTP."""

import pytest

from mallee.testing.random_model import random_model
from support.tiny_fleet import chunks_of, post, tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
ASKED = {"prompt": "A critic scores", "ignore_eos": True, "seed": 3, "temperature": 1.0, "n": 4}


@pytest.mark.slow
async def test_a_critic_prunes_some_branches_and_the_others_are_as_they_were() -> None:
    """F19, part, F20, part: the pruned end as cancelled, their KV is free; the others are undisturbed."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        alone = await post(client, "/v1/completions", **ASKED, max_tokens=400)
        engine = next(iter(fleet.engines.values()))
        texts, ends, pruned, left = [""] * 4, {}, None, []
        body = {**ASKED, "max_tokens": 400, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for chunk in chunks_of(response):
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
