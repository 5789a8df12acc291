"""Responses over a real engine: other instructions, and responses in the background."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.families import FAMILIES
from mallee.testing.random_model import random_model
from support.live_fleet import LiveFleet
from support.tiny_fleet import tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=8192)
OPTIONS: Any = {"ignore_eos": True, "seed": 1}


@asynccontextmanager
async def scene() -> AsyncIterator[tuple[openai.AsyncOpenAI, LiveFleet]]:
    """OpenAI's client of one gateway over one worker."""
    settings = {"chat": ChatTemplate(None, family=FAMILIES[0])}
    async with (
        tiny_api(MODEL, 1, num_blocks=4096, settings=settings) as (http, fleet),
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client, fleet


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.responses.create(
        model="m", max_output_tokens=4, extra_body=OPTIONS, **fields
    )


async def test_other_instructions_render_the_whole_again() -> None:
    """Instructions are not carried over, as OpenAI says."""
    async with scene() as (client, _):
        first = await ask(client, input="hi", instructions="Be brief.")
        second = await ask(client, input="more", previous_response_id=first.id)
        assert second.mallee["turn"] == "whole"
        assert second.instructions is None


async def test_a_background_response_runs_and_can_be_cancelled() -> None:
    async with scene() as (client, fleet):
        queued = await client.responses.create(
            model="m", input="hi", background=True, max_output_tokens=8, extra_body=OPTIONS
        )
        assert queued.status == "queued"

        async def status() -> str | None:
            return (await client.responses.retrieve(queued.id)).status

        for _ in range(1000):
            if await status() not in ("queued", "in_progress"):
                break
        assert await status() == "incomplete"  # at its 8 tokens
        long = await client.responses.create(
            model="m", input="hi", background=True, max_output_tokens=6000, extra_body=OPTIONS
        )
        ended = await client.responses.cancel(long.id)
        assert ended.status == "cancelled"
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await ask(client, input="more", previous_response_id=long.id)


async def test_a_background_stream_is_read_again_from_any_event() -> None:
    async with scene() as (client, _):
        stream = await client.responses.create(
            model="m",
            input="hi",
            background=True,
            stream=True,
            max_output_tokens=8,
            extra_body=OPTIONS,
        )
        events = [event async for event in stream]
        name = events[0].response.id  # type: ignore[union-attr]
        again = await client.responses.retrieve(name, stream=True, starting_after=3)
        assert [e.sequence_number async for e in again] == list(range(4, len(events)))
        assert events[1].type == "response.queued"
        assert events[-1].type == "response.incomplete"
