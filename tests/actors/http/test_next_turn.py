"""The turn after one that broke off: the KV that it left never shows in the text that follows.

A client that lost its stream sends the text that it saw and more. The answer is that of a service that
never saw the first turn, though the workers hold what they computed beyond the client's text.
"""

import itertools
import json
from typing import Any

import httpx
import pytest

from mallee.actors.gateway.service import Delta
from mallee.protocol.errors import UnknownCapsule
from mallee.protocol.hashing import as_tokens, block_hashes
from mallee.protocol.ids import Scope
from mallee.protocol.messages import Limits, Sampling
from mallee.router.dispatch.jobs import ForkJob, GenerateJob
from mallee.testing.random_model import random_model
from support.tiny_fleet import BLOCK, tiny_api, tiny_fleet
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=2048)
PROMPT = "".join(chr(33 + 7 * i % 90) for i in range(50))
MORE = "what was that? "
SALTED = Scope("another")
salts = itertools.count()


def body(prompt: str, **options: Any) -> dict[str, Any]:
    return {"prompt": prompt, "ignore_eos": True, "seed": 3, "temperature": 0, **options}


async def texts_of(response: httpx.Response, at_least: int, num: int = 1) -> dict[int, str]:
    """The text that a client sees until it has `at_least` characters of each of `num` choices."""
    seen: dict[int, str] = {}
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                seen[choice["index"]] = seen.get(choice["index"], "") + choice["text"]
        if len(seen) >= num and all(len(text) >= at_least for text in seen.values()):
            break
    return seen


async def whole(client: httpx.AsyncClient, prompt: str, **options: Any) -> dict[str, Any]:
    asked = body(prompt, max_tokens=24, **options)
    answer = (await client.post("/v1/completions", json=asked)).json()
    choice: dict[str, Any] = answer["choices"][0]
    return choice


async def check_next_turn(client: httpx.AsyncClient, prompt: str, seen: str) -> int:
    """The tokens that the turn after `seen` found; its text is a cold service's."""
    warm = await whole(client, prompt + seen + MORE)
    cold = await whole(client, prompt + seen + MORE, cache_salt=f"cold-{next(salts)}")
    assert cold["mallee"]["cached_tokens"] == 0
    assert warm["text"] == cold["text"]
    found: int = warm["mallee"]["cached_tokens"]
    assert found <= len(prompt + seen + MORE)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
async def test_the_turn_after_a_disconnect_is_a_cold_ones(temperature: float) -> None:
    """F28, I26, part: cut in mid-stream, three branches; the prefix is found all the same."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        options = {"stream": True, "max_tokens": 900, "n": 3, "temperature": temperature}
        asked = body(PROMPT, **options)
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            seen = await texts_of(response, 10, 3)
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)
        for text in seen.values():
            assert await check_next_turn(client, PROMPT, text) >= len(PROMPT) // BLOCK * BLOCK
            await check_next_turn(client, PROMPT, text[:-3] + "~")


async def test_the_turn_after_a_cancelled_prefill_or_fork_is_a_cold_ones() -> None:
    """F28, part: forks of a capsule cut in mid-stream; the capsule and its forks go on as if new."""
    async with tiny_api(MODEL, 1) as (client, fleet):
        made = (await client.post("/v1/capsules", json={"prompt": PROMPT})).json()
        path = f"/v1/capsules/{made['id']}/fork"
        options = {"ignore_eos": True, "temperature": 0, "suffixes": ["ab", "cd"]}
        asked = {**options, "stream": True, "max_tokens": 900}
        async with client.stream("POST", path, json=asked) as response:
            seen = await texts_of(response, 6, 2)
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)
        again = (await client.post(path, json={**options, "max_tokens": 24})).json()
        for choice, suffix in zip(again["choices"], options["suffixes"], strict=True):  # type: ignore[call-overload]
            assert choice["text"].startswith(seen.get(choice["index"], "")[:24])
            cold = await whole(client, PROMPT + suffix, cache_salt=f"cold-{next(salts)}")
            assert choice["text"] == cold["text"]
            await check_next_turn(client, PROMPT + suffix, seen[choice["index"]])


async def test_what_an_engine_keeps_is_what_its_client_saw() -> None:
    """F20: after a cancel in mid-stream: capsules end where their clients' texts do, blocks hold those."""
    async with tiny_fleet(MODEL, 1) as fleet:
        gateway, engine = fleet.gateways[0], fleet.engines["w0"]
        prompt = [*PROMPT.encode()]
        hot = Sampling(temperature=1.0, seed=4)
        stream = await gateway.start(GenerateJob(as_tokens(prompt), Limits(40, (), True), hot, n=3))
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        last: dict[int, Delta] = {}
        async for delta in stream:
            seen[delta.branch] += delta.tokens
            if delta.branch == 1 and len(seen[1]) >= 9:
                stream.cancel(1)
            if delta.finish is not None:
                last[delta.branch] = delta
        assert sorted(last) == [0, 2]
        await until(lambda: engine.stats().jobs == 0)
        for branch, delta in last.items():
            assert delta.boundary == len(prompt) + len(seen[branch]) == len(prompt) + 40
            assert delta.capsule is not None
            fork = await gateway.start(
                ForkJob(delta.capsule, [as_tokens([7])], Limits(12, (), True), Sampling(0.0))
            )
            found = [token async for part in fork for token in part.tokens]
            text = [*prompt, *seen[branch], 7]
            cold = await gateway.start(
                GenerateJob(as_tokens(text), Limits(12, (), True), Sampling(0.0), scope=SALTED)
            )
            assert found == [token async for part in cold for token in part.tokens]
        with pytest.raises(UnknownCapsule):
            await gateway.capsule(f"{stream.request}.1", SALTED)  # type: ignore[arg-type]
        # The cancelled branch's blocks are those of its text, as far as that was sent, and no others.
        whole_text = await gateway.start(
            GenerateJob(as_tokens(prompt), Limits(40, (), True), hot, n=3, scope=SALTED)
        )
        true: dict[int, list[int]] = {0: [], 1: [], 2: []}
        async for delta in whole_text:
            true[delta.branch] += delta.tokens
        assert true[1][: len(seen[1])] == seen[1]
        assert (true[0], true[2]) == (seen[0], seen[2])
        held = {int(each) for each in engine._tree.held_hashes()}
        beyond = block_hashes(as_tokens(prompt + true[1]), BLOCK)
        num_held = sum(int(each) in held for each in beyond)
        assert num_held * BLOCK <= len(prompt) + len(seen[1]) + 3 * BLOCK
        engine.check()
