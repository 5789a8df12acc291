"""Responses and conversations in a real broker's store, by the accounts that gateways and workers have."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from mallee.runtime.bus.broker import Broker
from mallee.runtime.bus.bus import Bus
from mallee.runtime.bus.nats import NatsBus
from support.live_api import served
from support.plain_ids import scopes_at
from support.tiny_fleet import tiny_fleet
from support.waiting import until, until_asked

pytestmark = [pytest.mark.process, pytest.mark.nats]

OPTIONS: Any = {"ignore_eos": True, "seed": 1}


async def ask(client: openai.AsyncOpenAI, text: str, **fields: Any) -> Any:
    given = {"max_output_tokens": 4, "extra_body": OPTIONS, **fields}
    return await client.responses.create(model="m", input=text, **given)


async def events(client: openai.AsyncOpenAI, name: str, **query: Any) -> list[Any]:
    return [event async for event in await client.responses.retrieve(name, stream=True, **query)]


async def sessions_are_one_at_both(a: openai.AsyncOpenAI, b: openai.AsyncOpenAI) -> None:
    """X24, part: made, forked, listed and closed at either, as soon as each call is answered."""
    for client, own in ((a, {"session": "é s"}), (b, {"session": "t", "parent_session": "é s"})):
        await ask(client, "hi", extra_body=OPTIONS | {"mallee": own | {"keep": True}})

    async def shown(client: openai.AsyncOpenAI, name: str) -> Any:
        return await client.get(f"/sessions/{name}", cast_to=object)

    async def are_there() -> bool:
        return bool((await shown(b, "é s"))["children"] and (await shown(a, "t"))["nodes"])

    await until_asked(are_there)
    await b.post("/sessions/é s/fork", body={"session": "u"}, cast_to=object)
    assert (await shown(a, "é s"))["children"] == ["t", "u"]
    closed: Any = await a.delete("/sessions/t", cast_to=object)
    assert closed["released"] == 1
    assert (await shown(b, "é s"))["children"] == ["u"]
    listed: Any = await b.get("/sessions", cast_to=object)
    assert [each["id"] for each in listed["data"]] == ["u", "é s"]
    for name in ("é s", "u"):
        await a.delete(f"/sessions/{name}", cast_to=object)
        with pytest.raises(openai.NotFoundError):
            await shown(b, name)


async def no_name_cuts_a_gateway_off(bus: Bus, client: openai.AsyncOpenAI) -> None:
    """X24, part: a broker leaves a client that sends a line of 4 KiB."""
    states: list[bool] = []
    bus.on_state(states.append)
    long = "x" * 8000
    for path in (f"/responses/resp_{long}", f"/conversations/conv_{long}", f"/sessions/{long}"):
        with pytest.raises(openai.NotFoundError):
            await client.get(path, cast_to=object)
    assert not states


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    made = Broker(fleet="test")
    await made.start()
    yield made
    await made.stop()


async def test_what_one_gateway_made_is_whole_at_the_other_until_that_dies_and_after(
    broker: Broker,
) -> None:
    """X24, part."""
    model = random_model("llama", 5, max_position_embeddings=8192)
    chat = ChatTemplate(None, family=FAMILIES[0])
    client: Any = {"api_key": "-", "max_retries": 0}
    fleet: Any = {"gateways": 2, "syncs": True, "ids": scopes_at}
    fleet["make_bus"] = lambda role: NatsBus(broker.access(role), fleet="test")
    async with (
        tiny_fleet(model, 1, num_blocks=4096, **fleet) as made,
        served(made.gateways[0], chat=chat) as (here, _),
        served(made.gateways[1], chat=chat) as (there, _),
        openai.AsyncOpenAI(base_url=f"{here}/v1", **client) as a,
        openai.AsyncOpenAI(base_url=f"{there}/v1", **client) as b,
    ):
        await until(lambda: all(len(each.peers.others) == 1 for each in made.gateways))
        first = await ask(a, "Fix the bug. " * 20)
        second = await ask(b, "more", previous_response_id=first.id)
        assert second.mallee["turn"] == "capsule"
        note = {"role": "user", "content": "hi", "note": "x" * 1_500_000}  # in parts at the broker
        talk = await a.conversations.create(items=[note], metadata={"a": "b"})  # type: ignore[list-item]
        answers = await asyncio.gather(*(ask(each, "hi", conversation=talk.id) for each in (a, b)))
        assert len((await b.conversations.items.list(talk.id)).data) == 5
        await sessions_are_one_at_both(a, b)
        await no_name_cuts_a_gateway_off(made.gateways[0].context.bus, a)
        begun = await ask(a, "hi", background=True, stream=True, max_output_tokens=200)
        head = await anext(begun)
        elsewhere = asyncio.create_task(events(b, head.response.id))
        whole = [head, *[event async for event in begun]]
        assert await elsewhere == whole == await events(b, head.response.id)
        long = {"background": True, "stream": True, "max_output_tokens": 6000}
        running = (await anext(await ask(a, "hi", **long))).response.id
        assert (await b.responses.cancel(running)).status == "cancelled"
        running = (await anext(await ask(a, "hi", **long))).response.id
        elsewhere = asyncio.create_task(events(b, running))
        await made.gateways[0].context.bus.close()
        async with asyncio.timeout(5.0):
            assert (await elsewhere)[-1].type == "response.failed"
        listed: Any = await b.get("/responses", cast_to=object)
        names = [each.id for each in (first, second, *answers)]
        assert {each["id"] for each in listed["data"]} >= {*names, head.response.id, running}
        await b.responses.delete(first.id)
        third = await ask(b, "and more", previous_response_id=second.id)
        assert third.mallee["turn"] == "capsule"
        await b.conversations.delete(talk.id)
        with pytest.raises(openai.NotFoundError):
            await b.conversations.items.list(talk.id)
