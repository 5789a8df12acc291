"""Work of real engines over HTTP: cold siblings compute their prefix once, a turn after a tool the rest."""

import asyncio
from typing import Any

import httpx
import pytest

from bench.doubles.random_model import random_model
from mallee.worker.records import EngineConfig
from support.tiny_fleet import BLOCK, post, tiny_api
from support.volumes import volume_tiers

MODEL = random_model("llama", 5, max_position_embeddings=4096)
PROMPT = "".join(chr(33 + 7 * i % 90) for i in range(400))
RESULT = " and what the tool found"
GREEDY = {"ignore_eos": True, "temperature": 0, "max_tokens": 4}
RETAIN = {"action_type": "kv.retain", "payload": {"directives": [{"priority": 90, "duration": 60}]}}


async def call_tool(client: httpx.AsyncClient) -> None:
    """Others' prompts take all memory that is to be had meanwhile."""
    for i in range(4):
        other = "".join(chr(33 + (11 * j + i) % 90) for j in range(440))
        await post(client, "/v1/completions", prompt=f"{i}{other}", **GREEDY)


async def resumed(way: str) -> tuple[str, int]:
    """The text of the turn after the tool, and the prompt tokens that were computed for it."""
    config = EngineConfig(max_answer_capsules=0, max_retained_share=0.9)
    api = tiny_api(
        MODEL,
        1,
        num_blocks=240,
        config=config,
        below=lambda worker: volume_tiers(None, host_blocks=256) if way == "promoted" else None,
    )
    async with api as (client, fleet):
        path = ""
        if way == "promoted":
            kept = await post(client, "/v1/capsules", prompt=PROMPT, ttl_s=60)
            path = f"/v1/capsules/{kept['id']}"
            await post(client, f"{path}/demote", tier="host")
        else:
            more: dict[str, Any] = {}
            if way == "retained":
                more = {"kv_hints": {"protocol_version": "0.1", "actions": [RETAIN]}}
            await post(client, "/v1/completions", prompt=PROMPT, **GREEDY, **more)
        if way != "resident":
            await call_tool(client)
        if way == "promoted":
            await post(client, f"{path}/promote")
        (engine,) = fleet.engines.values()
        before = engine.stats().num_prefill_tokens
        answer = await post(client, "/v1/completions", prompt=PROMPT + RESULT, **GREEDY)
        return answer["choices"][0]["text"], engine.stats().num_prefill_tokens - before


async def test_a_turn_after_a_tool_call_is_the_work_of_one_at_once() -> None:
    """X17: retained or promoted, the same tokens are computed, so its first one is as early."""
    at_once = await resumed("resident")
    assert at_once[1] == len(RESULT)
    assert await resumed("retained") == at_once
    assert await resumed("promoted") == at_once
    assert (await resumed("lost"))[1] > 10 * len(RESULT)


PREFIX = "the quick brown fox jumps over the lazy dog. " * 80
PREFIX = PREFIX[: len(PREFIX) // BLOCK * BLOCK]  # dearer to compute again than to queue behind 64


@pytest.mark.parametrize("num", [2, 32, 64])
async def test_cold_siblings_compute_their_prefix_once(num: int) -> None:
    """X2: prefill tokens = prefix + suffixes, of two real engines, for requests that came at once."""
    suffixes = [f" {i:02}?"[: 2 + i % 3] for i in range(num)]
    async with tiny_api(MODEL, 2, num_blocks=2048) as (client, fleet):
        answers = await asyncio.gather(
            *(
                post(client, "/v1/completions", prompt=PREFIX + suffix, max_tokens=2, temperature=0)
                for suffix in suffixes
            )
        )
        computed = sum(engine.stats().num_prefill_tokens for engine in fleet.engines.values())
        assert computed == len(PREFIX) + sum(map(len, suffixes))
        details = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
        assert sorted(details) == [0] + [len(PREFIX)] * (num - 1)
