"""Usage tells the tokens that were drafted for an answer: drawn or not, of each branch and of all."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from bench.doubles.random_model import random_model
from mallee.client import AsyncMallee
from mallee.worker.records import EngineConfig
from mallee.worker.speculation.speculator import SpeculationConfig
from support.live_fleet import LiveFleet
from support.speculating import Free, draft_model
from support.tiny_fleet import BLOCK, post, tiny_api

MODEL, OTHER = random_model("llama", 5), random_model("llama", 6)
PATH = "/v1/completions"
ASKED = {"prompt": "tell me of the sea", "max_tokens": 24, "ignore_eos": True, "seed": 3}
ACCEPTED, REJECTED = "accepted_prediction_tokens", "rejected_prediction_tokens"


@asynccontextmanager
async def api(*, drafts_by: Any) -> AsyncIterator[tuple[httpx.AsyncClient, LiveFleet]]:
    """A fleet with that draft model, or with none."""
    config = EngineConfig(speculation=SpeculationConfig("model" if drafts_by else "off", 3))

    def make() -> Any:
        if drafts_by is None:
            return None
        return draft_model(drafts_by.forward(num_blocks=200, block_size=BLOCK))

    async with tiny_api(MODEL, 1, config=config, draft_by=make) as (client, fleet):
        if (speculator := fleet.engines["w0"]._speculator) is not None:
            speculator._costs = Free()
        yield client, fleet


async def test_rejected_tokens_are_those_that_were_not_drawn() -> None:
    """I15, part: by a model that knows nothing of the answers."""
    async with api(drafts_by=OTHER) as (client, fleet):
        usage = (await post(client, PATH, **ASKED, temperature=1))["usage"]
        drafted, accepted = fleet.engines["w0"].stats().speculation
        details = usage["completion_tokens_details"]
        assert details == {ACCEPTED: accepted, REJECTED: drafted - accepted}
        assert details[REJECTED] > details[ACCEPTED]
        assert usage["completion_tokens"] == 24


async def test_a_choice_tells_its_own_and_usage_tells_all() -> None:
    """I15, part: by a draft model that is right every time; streams tell the same at their end.

    The SDK has it by branch and by request; a fork too. An answer that is cut at a stop string tells what was
    drafted before.
    """
    async with api(drafts_by=MODEL) as (http, fleet), AsyncMallee(str(http.base_url)) as client:
        whole = await post(http, PATH, **ASKED, n=2, cache_salt="a")
        own = [choice["mallee"] for choice in whole["choices"]]
        stats = fleet.engines["w0"].stats().speculation
        assert whole["usage"]["completion_tokens_details"] == {
            ACCEPTED: stats.num_accepted,
            REJECTED: 0,
        }
        assert all(12 <= each[ACCEPTED] < 24 and each[REJECTED] == 0 for each in own)
        assert sum(each[ACCEPTED] for each in own) == stats.num_accepted
        text = whole["choices"][0]["text"]
        cut = await post(http, PATH, **ASKED, stop=[text[12:15]])
        assert cut["choices"][0]["text"] == text[: text.index(text[12:15])]
        accepted = cut["usage"]["completion_tokens_details"][ACCEPTED]
        assert 0 < accepted <= 24
        assert cut["choices"][0]["mallee"][ACCEPTED] == accepted
        branches = await client.complete(**ASKED, n=2, cache_salt="b")  # type: ignore[arg-type]
        details = whole["usage"]["completion_tokens_details"]
        for branch, choice in zip(branches, whole["choices"], strict=True):
            assert branch.text == choice["text"]
            assert branch.accepted_prediction_tokens == choice["mallee"][ACCEPTED]
            assert branch.rejected_prediction_tokens == choice["mallee"][REJECTED]
            assert branch.usage is not None
            assert branch.usage.accepted_prediction_tokens == details[ACCEPTED]
            assert branch.usage.rejected_prediction_tokens == details[REJECTED]
        fork = await branches[0].fork(1, max_tokens=12, ignore_eos=True).wait()
        assert (fork[0].accepted_prediction_tokens or 0) > 4


@pytest.mark.parametrize("stream", [False, True])
async def test_without_speculation_usage_has_no_such_field(stream: bool) -> None:
    async with api(drafts_by=None) as (client, _):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        asked = {**ASKED, "stream": stream, **options}
        raw = (await client.post(PATH, json=asked)).text
        assert "prompt_tokens" in raw
        assert "prediction_tokens" not in raw
        assert "completion_tokens_details" not in raw
        if not stream:
            assert json.loads(raw)["usage"]["completion_tokens"] == 24
