"""Responses and conversations in the gateways' store, used at each gateway by OpenAI's client."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.bus import LocalBus, LocalHub
from bench.doubles.random_model import random_model
from mallee.api.entry.pages import Paging
from mallee.api.responses.conversations import Conversations, Talk
from mallee.api.responses.store import Left, Record, State
from mallee.api.responses.writing import opening
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import Conversation, Function, Message, ToolCall
from mallee.api.text.families import FAMILIES
from mallee.gateway.store.store import Store, StoreTerms
from mallee.protocol.api.responses import ResponseRequest
from mallee.protocol.codec import Decoder
from mallee.protocol.errors import CodecError, StoreFull
from mallee.protocol.ids import COMMON, CapsuleId, RequestId
from mallee.protocol.messages import pack_tokens
from mallee.router.dispatch.jobs import ForkJob
from mallee.runtime.config import ResponsesSettings
from support.live_fleet import LiveFleet, kill_gateway
from support.tiny_fleet import BLOCK, two_gateways
from support.waiting import elapse, until

MODEL = random_model("llama", 5, max_position_embeddings=8192)
OPTIONS: Any = {"ignore_eos": True, "seed": 1}


class Scene(NamedTuple):
    a: openai.AsyncOpenAI
    b: openai.AsyncOpenAI
    fleet: LiveFleet
    jobs: list[Any]


@asynccontextmanager
async def two_clients() -> AsyncIterator[Scene]:
    """OpenAI's clients of two gateways that know each other; all jobs that these start."""
    chat = ChatTemplate(None, family=FAMILIES[0])
    options: Any = {"api_key": "-", "max_retries": 0}
    async with (
        two_gateways(MODEL, num_blocks=4096, chat=chat) as two,
        openai.AsyncOpenAI(base_url=f"{two.a.base_url}/v1", **options) as a,
        openai.AsyncOpenAI(base_url=f"{two.b.base_url}/v1", **options) as b,
    ):
        jobs: list[Any] = []
        for gateway in two.fleet.gateways:

            async def spied(
                job: Any, *more: Any, start: Any = gateway.requests.start, **named: Any
            ) -> Any:
                jobs.append(job)
                return await start(job, *more, **named)

            gateway.requests.start = spied  # type: ignore[method-assign]
        yield Scene(a, b, two.fleet, jobs)


async def ask(client: openai.AsyncOpenAI, text: Any, **fields: Any) -> Any:
    return await client.responses.create(
        model="m", input=text, max_output_tokens=4, extra_body=OPTIONS, **fields
    )


LONG: Any = {"max_output_tokens": 6000, "extra_body": OPTIONS, "background": True}


async def test_a_turn_goes_on_at_another_gateway_and_computes_only_what_is_new() -> None:
    """X24, part, F31, part: ten turns, each at the gateway that didn't make the last one."""
    async with two_clients() as (a, b, _, jobs):
        alone = last = await ask(a, "Fix the bug. " * 20, instructions="Be brief.")
        for turn in range(10):
            text = f"{turn}: x = 1\n"
            shared = {"text": text, "instructions": "Be brief."}
            client = (b, a)[turn % 2]
            last = await ask(client, previous_response_id=last.id, **shared)
            assert isinstance(jobs[-1], ForkJob)
            computed = last.usage.input_tokens - last.usage.input_tokens_details.cached_tokens
            assert last.mallee["turn"] in ("capsule", "rewritten")
            assert last.mallee["new_tokens"] <= len(text) + 160
            assert computed <= last.mallee["new_tokens"] + BLOCK
            alone = await ask(a, previous_response_id=alone.id, **shared)
            assert alone.output_text == last.output_text
            assert alone.usage.input_tokens == last.usage.input_tokens
        # Instructions are not carried over, as OpenAI says.
        other = await ask(b, "more", previous_response_id=last.id)
        assert (other.mallee["turn"], other.instructions) == ("whole", None)


async def test_a_response_is_read_and_deleted_at_another_gateway_by_its_scope_alone() -> None:
    async with two_clients() as (a, b, _, _):
        first = await ask(a, "hi")
        for headers in ({"x-cache-salt": "eve"}, None):
            if headers is not None:
                for call in (b.responses.retrieve, b.responses.delete):
                    with pytest.raises(openai.NotFoundError):
                        await call(first.id, extra_headers=headers)
                continue
            assert (await b.responses.retrieve(first.id)).to_dict() == first.to_dict()
        items = await b.responses.input_items.list(first.id)
        assert items.data[0].content[0].text == "hi"  # type: ignore[union-attr]
        second = await ask(a, "more", previous_response_id=first.id)
        await b.responses.delete(second.id)
        await b.responses.delete(first.id)
        for client in (a, b, a):
            for name in (first.id, second.id):
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(name)
                with pytest.raises(openai.NotFoundError):
                    await ask(client, "x", previous_response_id=name)


async def test_a_background_response_is_seen_cancelled_and_deleted_from_another_gateway() -> None:
    async with two_clients() as (a, b, fleet, _):
        queued = await a.responses.create(model="m", input="hi", **LONG)
        assert queued.status == "queued"
        await until(lambda: fleet.engines["w0"].stats().jobs == 1)
        seen = await b.responses.retrieve(queued.id)
        assert seen.status in ("queued", "in_progress")
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await ask(b, "more", previous_response_id=queued.id)
        with pytest.raises(openai.BadRequestError, match="can be streamed again"):
            await b.responses.retrieve(queued.id, stream=True)
        assert (await b.responses.cancel(queued.id)).status == "cancelled"
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)
        for client in (a, b):
            assert (await client.responses.retrieve(queued.id)).status == "cancelled"
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await ask(client, "more", previous_response_id=queued.id)
        other = await a.responses.create(model="m", input="hi", **LONG)
        await until(lambda: fleet.engines["w0"].stats().jobs == 1)
        await b.responses.delete(other.id)
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)
        with pytest.raises(openai.NotFoundError):
            await a.responses.retrieve(other.id)


async def test_a_background_stream_is_resumed_at_another_gateway() -> None:
    """X24, part: event for event, while it runs, when it has ended, and when its gateway is gone."""
    asked = {**LONG, "max_output_tokens": 300}
    async with two_clients() as (a, b, fleet, _):
        stream = await a.responses.create(model="m", input="hi", stream=True, **asked)
        first = [await anext(stream) for _ in range(4)]
        name = first[0].response.id

        async def resumed(client: openai.AsyncOpenAI, after: int) -> list[Any]:
            more = await client.responses.retrieve(name, stream=True, starting_after=after)
            return [event async for event in more]

        running = asyncio.create_task(resumed(b, 1))
        rest = [event async for event in stream]
        whole = [*first, *rest]
        assert whole[-1].type == "response.incomplete"  # of as many tokens as it may have
        assert await running == await resumed(b, 1) == await resumed(a, 1) == whole[2:]
        kill_gateway(fleet, 0)
        assert await resumed(b, 1) == whole[2:]


async def test_what_was_made_at_a_gateway_that_is_gone_is_read_gone_on_from_and_deleted() -> None:
    """X24, part: a chain, whose first link is deleted without harm to the others."""
    async with two_clients() as (a, b, fleet, jobs):
        first = await ask(a, "Fix the bug. " * 20)
        second = await ask(a, "more", previous_response_id=first.id)
        kill_gateway(fleet, 0)
        assert (await b.responses.retrieve(second.id)).to_dict() == second.to_dict()
        await b.responses.delete(first.id)
        third = await ask(b, "and more", previous_response_id=second.id)
        assert isinstance(jobs[-1], ForkJob)
        assert computed(third) <= third.mallee["new_tokens"] + BLOCK
        listed = (await b.get("/responses", cast_to=object))["data"]  # type: ignore[index]
        assert [each["id"] for each in listed] == sorted([second.id, third.id])


async def test_what_runs_in_the_background_fails_within_5_s_when_its_gateway_dies() -> None:
    """X24, part: for whoever reads it, follows its events, or goes on from it; the same ever after."""
    async with two_clients() as (a, b, fleet, _):
        begun = await a.responses.create(model="m", input="hi", stream=True, **LONG)
        name = (await anext(begun)).response.id
        elsewhere = await b.responses.retrieve(name, stream=True)
        events = [await anext(elsewhere)]
        assert events[0].type == "response.created"
        assert (await b.responses.retrieve(name)).status in ("queued", "in_progress")
        kill_gateway(fleet, 0)
        async with asyncio.timeout(5.0):
            events += [event async for event in elsewhere]
        assert events[-1].type == "response.failed"
        assert "gateway that ran this response is gone" in events[-1].response.error.message
        assert [event.sequence_number for event in events] == list(range(len(events)))
        found = await b.responses.retrieve(name)
        assert (found.status, found.to_dict()) == ("failed", events[-1].response.to_dict())
        again = await b.responses.retrieve(name, stream=True, starting_after=1)
        assert [event async for event in again] == events[2:]
        with pytest.raises(openai.BadRequestError, match="it is failed"):
            await ask(b, "more", previous_response_id=name)
        assert (await b.responses.cancel(name)).status == "failed"


@pytest.mark.parametrize("is_dead", [False, True])
async def test_what_a_silent_gateway_runs_is_not_said_to_be_ended_until_it_is(
    monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    """503 while it lives; once it is gone the response has failed."""
    async with two_clients() as (a, b, fleet, _):
        queued = await a.responses.create(model="m", input="hi", **LONG)

        async def never(name: str, scope: Any, given: bytes) -> bytes | None:
            await asyncio.Event().wait()
            return None

        if is_dead:
            kill_gateway(fleet, 0)
            assert (await b.responses.cancel(queued.id)).status == "failed"
            await b.responses.delete(queued.id)
        else:
            monkeypatch.setattr("mallee.api.responses.room.END_S", 0.1)
            fleet.gateways[0].peers.share("response.end", never)
            for call in (b.responses.cancel, b.responses.delete):
                with pytest.raises(openai.InternalServerError, match="did not end it"):
                    await call(queued.id)
            assert (await a.responses.cancel(queued.id)).status == "cancelled"


async def test_a_gateway_that_closes_says_that_its_background_responses_failed() -> None:
    async with two_clients() as (a, b, fleet, _):
        queued = await a.responses.create(model="m", input="hi", **LONG)
        await until(lambda: fleet.engines["w0"].stats().jobs == 1)
        await fleet.gateways[0].close()
        found = await b.responses.retrieve(queued.id)
        assert found.status == "failed"


# With the store away, full, or of another layout


async def test_without_the_store_nothing_is_begun_that_would_be_lost_and_known_things_are_read() -> (
    None
):
    async with two_clients() as (a, b, fleet, jobs):
        first = await ask(a, "hi")
        talk = await a.conversations.create(items=[{"role": "user", "content": "x"}])
        num_jobs = len(jobs)
        fleet.hub.set_up(False)
        assert (await a.responses.retrieve(first.id)).to_dict() == first.to_dict()
        assert (await a.conversations.retrieve(talk.id)).id == talk.id
        assert texts((await a.conversations.items.list(talk.id)).data) == ["x"]
        calls: list[Any] = [
            lambda: ask(a, "hi"),
            lambda: ask(a, "hi", background=True),
            lambda: ask(a, "hi", store=False, conversation=talk.id),
            lambda: a.responses.delete(first.id),
            lambda: a.responses.retrieve(first.id[:-4] + "0000"),
            lambda: b.responses.retrieve(first.id),
            lambda: b.conversations.retrieve(talk.id),
            lambda: a.conversations.update(talk.id, metadata={}),
            lambda: a.get("/responses", cast_to=object),
        ]
        for call in calls:
            with pytest.raises(openai.InternalServerError, match="store can't be reached") as no:
                await call()
            assert no.value.status_code == 503
            assert no.value.response.headers["retry-after"] == "1"
        assert len(jobs) == num_jobs
        plain = await ask(a, "hi", store=False)
        assert plain.status == "incomplete"  # at its 4 tokens
        fleet.hub.set_up(True)
        assert (await b.responses.retrieve(first.id)).to_dict() == first.to_dict()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("error", [StoreFull("no room"), TimeoutError()])
async def test_an_answer_that_could_not_be_stored_says_so(
    monkeypatch: pytest.MonkeyPatch, error: Exception, streams: bool
) -> None:
    async with two_clients() as (a, b, fleet, _):

        async def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(fleet.gateways[0].context.bus.buckets, "put", fail)
        if streams:
            events = [event async for event in await ask(a, "hi", stream=True)]
            answer = events[-1].response
        else:
            answer = await ask(a, "hi")
        assert (answer.status, answer.store) == ("incomplete", False)
        assert answer.output_text
        assert answer.mallee["not_stored"]
        with pytest.raises(openai.NotFoundError):
            await b.responses.retrieve(answer.id)


async def test_a_background_response_is_stored_once_the_store_is_back() -> None:
    asked = {**LONG, "max_output_tokens": 300}
    async with two_clients() as (a, b, fleet, _):
        stream = await a.responses.create(model="m", input="hi", stream=True, **asked)
        events = [await anext(stream)]
        fleet.hub.set_up(False)
        await until(lambda: fleet.engines["w0"].stats().jobs == 0)
        fleet.hub.set_up(True)
        events += [event async for event in stream]
        name = events[0].response.id
        again = await b.responses.retrieve(name, stream=True)
        assert [event async for event in again] == events
        assert events[-1].type == "response.incomplete"  # at its 300 tokens
        assert (await b.responses.retrieve(name)).status == "incomplete"


async def test_a_record_of_another_version_is_refused_by_name() -> None:
    async with two_clients() as (a, _, fleet, _):
        first = await ask(a, "hi")
        (key,) = [k for k in fleet.hub.kept.buckets["mallee_test_responses"] if k.count(".") == 1]
        values = fleet.hub.kept.buckets["mallee_test_responses"]
        old = values[key]
        raw = old.value[:1] + b"\x09" + old.value[2:]
        values[key] = old._replace(value=raw, revision=old.revision + 1)
        with pytest.raises(openai.InternalServerError, match="layout 9") as refused:
            await a.responses.retrieve(first.id)
        assert refused.value.status_code == 503


def record() -> Record:
    call = ToolCall("c1", "look", '{"at": 1}')
    turns = (
        (Message("user", "hi"),),
        (Message("assistant", "", "hm", (call,)),),
        (Message("tool", "2", tool_call_id="c1", name="look"),),
    )
    head = Conversation(
        (Message("system", "Be brief."),), (Function("look", "", {"a": [1]}),), {"date": "today"}
    )
    left = Left(CapsuleId("req_1.0"), 7, pack_tokens([1, 2, 3]), 5, 0)
    body = opening(ResponseRequest(input="hi"), "resp_1", 1, "m", tools=[], conversation=None)
    return Record(body, [{"type": "x"}], "g0", None, State.of(head, turns, left))


decode = Decoder(Record, "a response", is_json=True)


def test_a_record_is_the_same_once_it_was_stored() -> None:
    assert decode(msgspec.json.encode(record())) == record()
    state = decode(msgspec.json.encode(record())).state
    assert state is not None
    assert state.head == Conversation(state.system, state.functions, {"date": "today"})


@given(
    st.binary(max_size=40) | st.integers(0, 300).map(lambda n: msgspec.json.encode(record())[:n])
)
def test_malformed_bytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(CodecError):
        decode(raw)


@pytest.mark.parametrize("turn", [-1, 2])
def test_a_turn_that_is_not_there_is_refused(turn: int) -> None:
    fields = msgspec.json.decode(msgspec.json.encode(record()))
    fields[4][4][4] = turn
    with pytest.raises(CodecError, match="of 2"):
        decode(msgspec.json.encode(fields))


# Conversations


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with two_clients() as made:
        yield made


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def computed(answer: Any) -> int:
    found: int = answer.usage.input_tokens - answer.usage.input_tokens_details.cached_tokens
    return found


async def test_a_conversation_grows_by_each_response_which_computes_only_what_is_new(
    scene: Scene,
) -> None:
    """F31, part: eight turns, at two gateways by turns."""
    a, b, _, jobs = scene
    begun = await a.conversations.create(
        items=[{"type": "message", "role": "user", "content": "I grow mallees. " * 20}],
        metadata={"topic": "trees"},
    )
    said, last = ["I grow mallees. " * 20], None
    for turn in range(8):
        text = f"{turn}: x = 1\n"
        given: Any = ({"id": begun.id}, begun.id)[turn % 2]
        answer = await ask((a, b)[turn // 2 % 2], text, conversation=given)
        said += [text, answer.output_text]
        assert answer.conversation.id == begun.id
        assert answer.mallee["turn"] in (("whole",) if last is None else ("capsule", "rewritten"))
        if last is not None:
            assert isinstance(jobs[-1], ForkJob)
            assert answer.mallee["new_tokens"] <= len(text) + 160
            assert computed(answer) <= answer.mallee["new_tokens"] + BLOCK
        last = answer
    for client in (a, b):
        items = [item async for item in client.conversations.items.list(begun.id, order="asc")]
        assert texts(items) == said
        assert len({item.id for item in items}) == len(items)
    # The same conversation, given at once, is answered alike.
    whole = await b.conversations.create()
    roles = ["user", *("user", "assistant") * 7]
    history: Any = [{"role": r, "content": t} for r, t in zip(roles, said, strict=False)]
    alone = await ask(b, [*history, {"role": "user", "content": said[-2]}], conversation=whole.id)
    assert last is not None
    assert alone.output_text == last.output_text
    assert alone.usage.input_tokens == last.usage.input_tokens


async def test_metadata_of_a_conversation_are_changed_by_one_put_of_its_head(scene: Scene) -> None:
    a, b, fleet, _ = scene
    begun = await a.conversations.create(metadata={"a": "b"})
    before = fleet.hub.kept.revision
    changed = await b.conversations.update(begun.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"}
    assert fleet.hub.kept.revision == before + 2, "its items live on, too"
    assert (await a.conversations.retrieve(begun.id)).metadata == {"c": "d"}


async def test_items_that_were_added_are_forked_to_and_one_less_computes_the_whole(
    scene: Scene,
) -> None:
    a, b, _, jobs = scene
    begun = await a.conversations.create(metadata={"a": "b"})
    assert (await b.conversations.items.list(begun.id)).data == []
    first = await ask(a, "one " * 30, conversation=begun.id)
    added = await b.conversations.items.create(
        begun.id, items=[{"role": "user", "content": "two"}, {"role": "developer", "content": "x"}]
    )
    assert [item.type for item in added.data] == ["message", "message"]
    second = await ask(a, "three", conversation=begun.id)
    assert isinstance(jobs[-1], ForkJob)
    listed = await a.conversations.items.list(begun.id, order="asc", limit=2)
    assert texts(listed.data) == ["one " * 30, first.output_text]
    assert listed.has_more
    rest = await listed.get_next_page()
    assert texts(rest.data) == ["two", "x"]
    gone = rest.data[0].id
    assert gone is not None
    item = await b.conversations.items.retrieve(gone, conversation_id=begun.id)
    assert texts([item]) == ["two"]
    after = await b.conversations.items.delete(gone, conversation_id=begun.id)
    assert (after.id, after.metadata) == (begun.id, {"a": "b"})
    third = await ask(a, "four", conversation=begun.id)
    assert third.mallee["turn"] == "whole"
    assert not isinstance(jobs[-1], ForkJob)
    fourth = await ask(b, "five", conversation=begun.id)
    assert isinstance(jobs[-1], ForkJob)
    items = await a.conversations.items.list(begun.id, order="asc")
    outputs = [each.output_text for each in (first, second, third, fourth)]
    expected = ["one " * 30, outputs[0], "x", "three", outputs[1], "four"]
    assert texts(items.data) == [*expected, outputs[2], "five", outputs[3]]
    with pytest.raises(openai.NotFoundError, match="not in conversation"):
        await a.conversations.items.delete(gone, conversation_id=begun.id)


async def test_a_conversation_is_changed_and_deleted_at_every_gateway_by_its_scope_alone(
    scene: Scene,
) -> None:
    a, b, _, _ = scene
    begun = await a.conversations.create(metadata={"a": "b"})
    assert (await b.conversations.update(begun.id, metadata={"c": "d"})).metadata == {"c": "d"}
    for client in (a, b):
        found = await client.conversations.retrieve(begun.id)
        assert (found.metadata, found.object) == ({"c": "d"}, "conversation")
        invented = begun.id[:-4] + "0000"
        for name, headers in ((begun.id, {"x-cache-salt": "eve"}), (invented, {})):
            for call in (client.conversations.retrieve, client.conversations.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(name, extra_headers=headers)
            with pytest.raises(openai.NotFoundError):
                await ask(client, "x", conversation=name, extra_headers=headers)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)
    answer = await ask(b, "x", conversation=begun.id)
    assert (await b.conversations.delete(begun.id)).deleted
    for client in (a, b):
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(begun.id)
    assert (await a.responses.retrieve(answer.id)).conversation is not None
    with pytest.raises(openai.BadRequestError, match="not both"):
        await ask(a, "x", conversation=begun.id, previous_response_id=answer.id)
    with pytest.raises(openai.BadRequestError, match="at most 20"):
        await a.conversations.create(items=[{"role": "user", "content": "x"}] * 21)


@pytest.mark.slow
async def test_streams_and_background_grow_it_and_a_lost_one_fails_the_answer(scene: Scene) -> None:
    a, b, _, _ = scene
    begun = await a.conversations.create()
    stream = await ask(b, "one", conversation=begun.id, stream=True)
    kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.incomplete"
    run = await ask(a, "two", conversation=begun.id, background=True)

    async def is_over() -> bool:
        return (await a.responses.retrieve(run.id)).status not in ("queued", "in_progress")

    while not await is_over():
        pass
    items = await a.conversations.items.list(begun.id, order="asc")
    assert [texts(items.data)[i] for i in (0, 2)] == ["one", "two"]
    stream = await b.responses.create(
        model="m",
        input="three",
        conversation=begun.id,
        stream=True,
        max_output_tokens=1000,
        extra_body=OPTIONS,
    )
    events = [await anext(aiter(stream))]
    await a.conversations.delete(begun.id)
    events += [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert "is not stored here" in str(events[-1].response.error)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")


async def test_answers_side_by_side_are_both_added_and_the_next_one_sees_both(scene: Scene) -> None:
    """Two gateways, one conversation: the answer that ends last is added as items alone."""
    a, b, _, jobs = scene
    begun = await b.conversations.create()
    await ask(a, "zero", conversation=begun.id)
    both = await asyncio.gather(
        *(ask(g, t, conversation=begun.id) for g, t in ((a, "x"), (b, "y")))
    )
    items = await a.conversations.items.list(begun.id, order="asc")
    pairs = {(t, each.output_text) for t, each in zip("xy", both, strict=True)}
    found = texts(items.data)
    assert {(found[2], found[3]), (found[4], found[5])} == pairs
    history: Any = [item.to_dict(exclude_unset=True) for item in items.data]
    forked = await ask(a, "last", conversation=begun.id)
    alone = await ask(a, [*history, {"role": "user", "content": "last"}])
    assert isinstance(jobs[-2], ForkJob)
    assert forked.output_text == alone.output_text
    assert forked.usage.input_tokens == alone.usage.input_tokens


async def test_changes_side_by_side_are_all_made_and_a_deleted_one_stays_so(scene: Scene) -> None:
    a, b, _, _ = scene
    begun = await a.conversations.create()

    async def add(text: str) -> None:
        client = (a, b)[int(text) % 2]
        items: Any = [{"role": "user", "content": text}]
        await client.conversations.items.create(begun.id, items=items)

    await asyncio.gather(*map(add, map(str, range(6))))
    items = await b.conversations.items.list(begun.id)
    assert sorted(texts(items.data)) == [*map(str, range(6))]
    await asyncio.gather(
        add("6"), add("7"), a.conversations.delete(begun.id), return_exceptions=True
    )
    for client in (a, b):
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.list(begun.id)
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(begun.id)


async def test_a_conversation_lives_on_with_its_items_when_its_metadata_change() -> None:
    bus = LocalBus(LocalHub())
    await bus.connect()
    store = Store(bus, StoreTerms("test"))
    settings = ResponsesSettings(ttl_s=60.0)
    names = (RequestId(f"req_{i}") for i in itertools.count())
    talks = Conversations(store, settings, new_name=lambda scope: next(names), clock=float)
    item = {"type": "message", "role": "user", "content": "x"}
    made = await talks.create(COMMON, [item], {})
    await elapse(50.0)
    assert (await talks.set_metadata(made.id, COMMON, {"a": "b"})).metadata == {"a": "b"}
    await elapse(50.0)
    assert (await talks.head(made.id, COMMON)).metadata == {"a": "b"}
    assert len((await talks.talk(made.id, COMMON)).items) == 1
    await bus.close()


async def listed(client: openai.AsyncOpenAI, path: str, **query: Any) -> Any:
    return await client.get(path, cast_to=object, options={"params": query})


async def test_a_page_is_full_though_some_things_went_while_it_was_read() -> None:
    """Else it would say that there are no more."""
    paging, names = Paging("a", 2), list("abcdef")

    async def read(name: str) -> str | None:
        return None if name in "bd" else name

    assert await paging.read(names, read) == ["c", "e", "f"]
    assert await paging.read(names[:5], read) == ["c", "e"]


async def test_lists_have_the_things_of_all_gateways_a_page_at_a_time(scene: Scene) -> None:
    """By id; what is deleted is in none, others' things neither."""
    a, b, _, _ = scene
    talks = [await (a, b)[i % 2].conversations.create(metadata={"i": str(i)}) for i in range(5)]
    made = [await ask((a, b)[i % 2], "x", metadata={"i": str(i)}) for i in range(3)]
    for path, things in (("/conversations", talks), ("/responses", made)):
        names = sorted(each.id for each in things)
        for client in (a, b):
            assert [each["id"] for each in (await listed(client, path))["data"]] == names
            page = await listed(client, path, limit=2)
            assert [each["id"] for each in page.pop("data")] == names[:2]
            ends = {"first_id": names[0], "last_id": names[1], "has_more": True}
            assert page == {"object": "list", **ends}
            rest = await listed(client, path, after=names[1])
            assert [each["id"] for each in rest["data"]] == names[2:]
            assert not rest["has_more"]
            none = await listed(client, path, after="z")
            assert (none["data"], none["first_id"], none["last_id"]) == ([], None, None)
            eve = client.with_options(default_headers={"x-cache-salt": "eve"})
            assert (await listed(eve, path))["data"] == []
    shown = {each["id"]: each for each in (await listed(b, "/responses"))["data"]}
    for response in made:
        found = shown[response.id]
        assert (found["status"], found["metadata"]) == (response.status, response.metadata)
        assert found["usage"] == response.usage.to_dict()
        assert "output" not in found
    with pytest.raises(openai.BadRequestError, match="limit"):
        await listed(a, "/responses", limit=101)
    await b.responses.delete(made[0].id)
    await b.conversations.delete(talks[0].id)
    for client in (a, b):
        left = [each["id"] for each in (await listed(client, "/responses"))["data"]]
        assert left == sorted(each.id for each in made[1:])
        left = [each["id"] for each in (await listed(client, "/conversations"))["data"]]
        assert left == sorted(each.id for each in talks[1:])


def state() -> State:
    turns = ((Message("user", "x"),), (Message("assistant", "y"),))
    return State.of(Conversation(()), turns, None)


@given(st.lists(st.tuples(st.sampled_from("+-ro"), st.integers(0, 6)), max_size=12))
def test_the_state_of_an_answer_covers_exactly_the_items_before_it(steps: list[Any]) -> None:
    """Against a list of items: each answer's state is used while all that it has seen is still there."""
    found, model = Talk([{"id": "i0"}, {"id": "i1"}]), ["i0", "i1"]
    seen: list[str] | None = None  # by the answer whose state is there
    bases = [(found, list(model))]
    made = 2
    for kind, n in steps:
        if kind == "+":
            found = found.with_items([{"id": f"i{made}"}])
            model, made = [*model, f"i{made}"], made + 1
        elif kind == "-" and model:
            name = model[n % len(model)]
            found = found.without(name)
            model.remove(name)
            seen = None
        elif kind == "r":
            bases.append((found, list(model)))  # a response begins
        elif kind == "o":  # and ends
            after, base = bases[n % len(bases)]
            fits = base == model
            found = found.with_answer([{"id": f"i{made}"}], state(), after)
            model, made = [*model, f"i{made}"], made + 1
            seen = list(model) if fits else seen
        assert [item["id"] for item in found.items] == model
        assert (found.state is not None) == (seen is not None)
        assert [item["id"] for item in found.pending] == model[len(seen or []) :]
