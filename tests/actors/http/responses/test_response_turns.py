"""Turns of responses over a real engine: what is new is computed, and the text is that of the whole."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import openai
import pytest

from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.families import FAMILIES, Family
from mallee.router.dispatch.jobs import ForkJob
from mallee.testing.random_model import random_model
from support.live_api import served
from support.live_fleet import LiveFleet
from support.tiny_fleet import tiny_fleet
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=8192)
OPTIONS: Any = {"ignore_eos": True, "seed": 1}


class Scene(NamedTuple):
    client: openai.AsyncOpenAI
    fleet: LiveFleet
    jobs: list[Any]


@asynccontextmanager
async def scene(family: Family) -> AsyncIterator[Scene]:
    """A client of one gateway over one worker, and the jobs that the gateway was given."""
    async with (
        tiny_fleet(MODEL, 1, num_blocks=4096) as fleet,
        served(fleet.gateways[0], chat=ChatTemplate(None, family=family)) as (url, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        jobs: list[Any] = []
        start = fleet.gateways[0].start

        async def spied(job: Any, *args: Any, **options: Any) -> Any:
            jobs.append(job)
            return await start(job, *args, **options)

        fleet.gateways[0].start = spied  # type: ignore[method-assign]
        yield Scene(client, fleet, jobs)
        for engine in fleet.engines.values():
            engine.check()
        fleet.gateways[0].check()


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.responses.create(
        model="m", max_output_tokens=4, extra_body=OPTIONS, **fields
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
async def test_a_turns_tokens_are_those_of_the_whole_conversation(family: Family) -> None:
    async with scene(family) as (client, fleet, jobs):
        first = await ask(client, input="What is a mallee?", instructions="Be brief.")
        second = await ask(
            client, input="And then?", instructions="Be brief.", previous_response_id=first.id
        )
        fork = jobs[-1]
        assert isinstance(fork, ForkJob)
        text = fleet.gateways[0]._memory.get(fork.capsule)
        assert text is not None
        forked = [*text.path.tokens()[: fork.at], *fork.suffixes[0]]
        items: Any = [
            {"role": "user", "content": "What is a mallee?"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And then?"},
        ]
        whole = await ask(client, input=items, instructions="Be brief.")
        assert forked == [*jobs[-1].tokens]
        assert whole.output_text == second.output_text


async def test_other_instructions_render_the_whole_again() -> None:
    """Instructions are not carried over, as OpenAI says."""
    async with scene(FAMILIES[0]) as (client, _, __):
        first = await ask(client, input="hi", instructions="Be brief.")
        second = await ask(client, input="more", previous_response_id=first.id)
        assert second.mallee["turn"] == "whole"
        assert second.instructions is None


async def test_a_background_response_runs_and_can_be_cancelled() -> None:
    async with scene(FAMILIES[0]) as (client, fleet, _):
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
    async with scene(FAMILIES[0]) as (client, _, __):
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
