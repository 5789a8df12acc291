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
from support.tiny_fleet import BLOCK, tiny_fleet
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=8192)
TOOLS: Any = [
    {
        "type": "function",
        "name": "read_file",
        "description": "Reads a file. " * 4,
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        "strict": False,
    }
]
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
async def test_twenty_turns_with_tools_compute_only_what_is_new(family: Family) -> None:
    """F31, part: a call and its output are sent, with the last response's id."""
    shared: Any = {"instructions": "You are an agent.", "tools": TOOLS, "tool_choice": "none"}
    async with scene(family) as (client, _, jobs):
        last = await ask(client, input="Fix the bug.", **shared)
        for turn in range(20):
            result, arguments = f"{turn}: x = 1\n" * 3, f'{{"path": "src/{turn}.py"}}'
            call = {"type": "function_call", "call_id": f"c{turn}", "name": "read_file"}
            items: Any = [
                {**call, "arguments": arguments},
                {"type": "function_call_output", "call_id": f"c{turn}", "output": result},
            ]
            last = await ask(client, input=items, previous_response_id=last.id, **shared)
            assert last.usage is not None
            computed = last.usage.input_tokens - last.usage.input_tokens_details.cached_tokens
            assert isinstance(jobs[-1], ForkJob)
            assert last.mallee["turn"] in ("capsule", "rewritten")
            assert computed <= last.mallee["new_tokens"] + BLOCK, turn
            assert last.mallee["new_tokens"] <= len(result) + 320, turn  # a call, marks of messages


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


async def test_a_response_is_forked_any_number_of_times() -> None:
    async with scene(FAMILIES[0]) as (client, _, jobs):
        first = await ask(client, input="Once upon a time")
        for more in ("a", "b", "c"):
            await ask(client, input=more, previous_response_id=first.id)
        forks = jobs[1:]
        assert {fork.capsule for fork in forks} == {first.mallee["capsule"]}
        texts = [bytes(fork.suffixes[0].tolist()).decode() for fork in forks]
        for text, more in zip(texts, "abc", strict=True):
            assert f"\n{more}<|" in text


async def test_other_instructions_render_the_whole_again() -> None:
    """Instructions are not carried over, as OpenAI says."""
    async with scene(FAMILIES[0]) as (client, _, __):
        first = await ask(client, input="hi", instructions="Be brief.")
        second = await ask(client, input="more", previous_response_id=first.id)
        assert second.mallee["turn"] == "whole"
        assert second.instructions is None


async def test_the_text_of_a_lost_capsule_is_rendered_again() -> None:
    async with scene(FAMILIES[0]) as (client, fleet, _):
        first = await ask(client, input="hi")
        capsule = first.mallee["capsule"]
        await fleet.gateways[0].release_capsule(capsule, "")  # type: ignore[arg-type]
        second = await ask(client, input="more", previous_response_id=first.id)
        assert second.mallee["turn"] == "whole"


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


async def test_a_cancelled_stream_ends_with_its_status() -> None:
    """A reader of a background response is told of the end that another one made."""
    async with scene(FAMILIES[0]) as (client, fleet, _):
        stream = await client.responses.create(
            model="m",
            input="hi",
            background=True,
            stream=True,
            max_output_tokens=6000,
            extra_body=OPTIONS,
        )
        events: list[Any] = []
        async for event in stream:
            events.append(event)
            if len(events) == 5:
                await client.responses.cancel(events[0].response.id)
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.status == "cancelled"
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)


async def test_another_salt_knows_nothing_of_a_response() -> None:
    async with scene(FAMILIES[0]) as (client, _, __):
        first = await ask(client, input="hi")
        headers = {"x-cache-salt": "another"}
        messages = []
        for name in (first.id, "resp_never"):
            with pytest.raises(openai.NotFoundError) as found:
                await client.responses.retrieve(name, extra_headers=headers)
            messages.append(str(found.value).replace(name, "ID"))
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(name, extra_headers=headers)
            extra = {**OPTIONS, "cache_salt": "another"}
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(
                    model="m", input="x", previous_response_id=name, extra_body=extra
                )
        assert messages[0] == messages[1]
        items = await client.responses.input_items.list(first.id)
        assert items.data[0].content[0].text == "hi"  # type: ignore[union-attr]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
