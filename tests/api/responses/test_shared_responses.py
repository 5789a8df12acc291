"""Responses and conversations of one gateway, used at another by OpenAI's client; and how they are stored."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.api.responses.conversations import Change, changed, pending, place
from mallee.api.responses.sharing import packed, unpacked
from mallee.api.responses.store import Left, Record, ResponseStore, Turn, UnknownResponse
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import Conversation, Function, Message, ToolCall
from mallee.api.text.families import FAMILIES
from mallee.protocol.errors import CodecError
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, CapsuleId, Scope
from mallee.router.dispatch.jobs import ForkJob
from mallee.runtime.config import ResponsesSettings
from mallee.testing.random_model import random_model
from support.live_fleet import LiveFleet, kill_gateway
from support.tiny_fleet import BLOCK, two_gateways
from support.waiting import until

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


async def test_a_background_stream_is_resumed_at_another_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """X24, part: event for event, while it runs and when it has ended, until its gateway dies."""
    monkeypatch.setattr("mallee.api.responses.room.MAX_BATCH", 64)
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
        with pytest.raises(openai.BadRequestError, match="went with the gateway"):
            await resumed(b, 1)


async def test_a_background_stream_breaks_off_when_its_gateway_dies() -> None:
    async with two_clients() as (a, b, fleet, _):
        begun = await a.responses.create(model="m", input="hi", stream=True, **LONG)
        name = (await anext(begun)).response.id
        elsewhere = await b.responses.retrieve(name, stream=True)
        assert (await anext(elsewhere)).type == "response.created"
        kill_gateway(fleet, 0)
        with pytest.raises(openai.APIConnectionError):
            async for _ in elsewhere:
                pass


def record() -> Record:
    call = ToolCall("c1", "look", '{"at": 1}')
    first = Turn(None, (Message("user", "hi"),))
    second = Turn(first, (Message("assistant", "", "hm", (call,)),))
    last = Turn(second, (Message("tool", "2", tool_call_id="c1", name="look"),))
    head = Conversation(
        (Message("system", "Be brief."),), (Function("look", "", {"a": [1]}),), {"date": "today"}
    )
    left = Left(CapsuleId("req_1.0"), 7, as_tokens([1, 2, 3]), (5, first))
    return Record("resp_1", Scope("one"), {"id": "resp_1"}, [{"type": "x"}], head, last, left, 99)


@given(st.binary(max_size=40) | st.integers(0, 400).map(lambda n: packed(record())[:n]))
def test_malformed_bytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(CodecError):
        unpacked(raw)


@pytest.mark.parametrize("turn", [-1, 3])
def test_a_turn_that_is_not_there_is_refused(turn: int) -> None:
    fields = msgspec.msgpack.decode(packed(record()))
    fields[8][4] = turn
    with pytest.raises(CodecError, match="of 3"):
        unpacked(msgspec.msgpack.encode(fields))


# The store: bounded in count, bytes and time, with turns that several share counted once


def stored(name: str, turn: Turn | None = None) -> Record:
    return Record(name, COMMON, {}, [], Conversation(()), turn)


def test_the_least_recently_used_is_forgotten_first() -> None:
    store = ResponseStore(ResponsesSettings(max_count=2), lambda: 0.0)
    for name in "ab":
        store.keep(stored(name))
    store.get("a", COMMON)
    store.keep(stored("c"))
    store.check()
    with pytest.raises(UnknownResponse):
        store.get("b", COMMON)
    assert store.get("a", COMMON).id == "a"


def test_bytes_are_bounded_and_shared_turns_count_once() -> None:
    store = ResponseStore(ResponsesSettings(max_mib=1), lambda: 0.0)
    first = Turn(None, (Message("user", "x" * 400_000),))
    store.keep(stored("a", first))
    for name in "bcd":
        store.keep(stored(name, Turn(first, (Message("user", name),))))
    store.check()
    assert len(store) == 4
    store.keep(stored("e", Turn(None, (Message("user", "y" * 700_000),))))
    store.check()
    assert store.nbytes <= 1 << 20
    assert len(store) == 1  # the long text was all of theirs


def test_an_unused_response_is_forgotten_in_time() -> None:
    now = 0.0
    store = ResponseStore(ResponsesSettings(ttl_s=10), lambda: now)
    store.keep(stored("a"))
    now = 9.0
    store.get("a", COMMON)
    now = 18.0
    store.get("a", COMMON)
    now = 29.0
    with pytest.raises(UnknownResponse):
        store.get("a", COMMON)
    store.check()
    assert store.nbytes == 0


def test_one_that_runs_stays_and_changes_its_turn() -> None:
    store = ResponseStore(ResponsesSettings(max_count=1), lambda: 0.0)
    running = stored("a")
    running.is_running = True
    store.keep(running)
    store.keep(stored("b"))
    running.turn = Turn(None, (Message("user", "hi"),))
    store.check()
    running.is_running = False
    store.keep(running)
    store.check()
    store.forget(running)
    store.check()
    assert store.nbytes == 0


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
    """F31, part: eight turns, at the gateway that keeps the conversation and at the other by turns."""
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
    assert "keeps conversation" in str(events[-1].response.error)
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


async def test_without_the_gateway_that_keeps_it_a_conversation_is_refused_in_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 where nobody says that it was changed, and while it may be known; 404 once it is gone."""
    a, b, fleet, _ = scene
    begun = await a.conversations.create()
    home = fleet.gateways[0].records

    async def never(name: str, scope: Any, given: bytes) -> bytes | None:
        await asyncio.Event().wait()
        return None

    home.share("conversation.change", never)
    monkeypatch.setattr("mallee.api.responses.conversations.END_S", 0.2)
    with pytest.raises(openai.InternalServerError, match="before you try again"):
        await b.conversations.update(begun.id, metadata={"a": "b"}, timeout=5)
    with pytest.raises(openai.InternalServerError, match="before you try again"):
        await ask(b, "x", conversation=begun.id, timeout=5)
    held = await ask(a, "x")
    home._bus.is_mute = True  # type: ignore[attr-defined]
    kept: Any = [(call, begun.id) for call in (b.conversations.retrieve, b.conversations.delete)]
    kept.append((b.responses.retrieve, held.id))
    for call, name in kept:
        with pytest.raises(openai.InternalServerError, match="have not answered") as refused:
            await call(name, timeout=5)
        assert refused.value.response.headers["retry-after"] == "1"
    await until(lambda: not fleet.gateways[1].records.has_others, timeout_s=10)
    for call, name in kept:
        with pytest.raises(openai.NotFoundError):
            await call(name, timeout=5)


async def listed(client: openai.AsyncOpenAI, path: str, **query: Any) -> Any:
    return await client.get(path, cast_to=object, options={"params": query})


async def test_lists_have_the_things_of_all_gateways_a_page_at_a_time(scene: Scene) -> None:
    """By id, each once though two gateways have it; what is deleted is in none, others' things neither."""
    a, b, fleet, _ = scene
    talks = [await (a, b)[i % 2].conversations.create(metadata={"i": str(i)}) for i in range(5)]
    made = [await ask((a, b)[i % 2], "x", metadata={"i": str(i)}) for i in range(3)]
    await b.responses.retrieve(made[0].id)  # a copy
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
    fleet.gateways[0].records._bus.is_mute = True  # type: ignore[attr-defined]
    with pytest.raises(openai.InternalServerError, match="not all have answered"):
        await listed(b, "/responses")


def conversation(num_items: int) -> Record:
    items = [{"id": f"i{n}", "type": "message"} for n in range(num_items)]
    made = Record("conv_1", COMMON, {"metadata": {}}, items, Conversation(()))
    made.measure()
    return made


@given(st.lists(st.tuples(st.sampled_from("+-ro"), st.integers(0, 6)), max_size=12))
def test_the_state_of_an_answer_covers_exactly_the_items_before_it(steps: list[Any]) -> None:
    """Against a list of items: each answer's state is used while all that it has seen is still there."""
    found, model = conversation(2), ["i0", "i1"]
    seen: list[str] | None = None  # by the answer whose state is there
    bases = [(place(found), list(model))]
    made = 2
    for kind, n in steps:
        if kind == "+":
            found = changed(found, Change(items=[{"id": f"i{made}"}]), None)
            model, made = [*model, f"i{made}"], made + 1
        elif kind == "-" and model:
            name = model[n % len(model)]
            found = changed(found, Change(without=name), None)
            model.remove(name)
            seen = None
        elif kind == "r":
            bases.append((place(found), list(model)))  # a response begins
        elif kind == "o":  # and ends
            at, base = bases[n % len(bases)]
            answer = Record("resp", COMMON, {}, [], Conversation(()))
            answer.turn = Turn(None, (Message("user", "x"),))
            fits = base == model
            found = changed(found, Change(items=[{"id": f"i{made}"}], at=at), answer)
            model, made = [*model, f"i{made}"], made + 1
            seen = list(model) if fits else seen
        assert [item["id"] for item in found.items] == model
        exact = replace(found)
        exact.measure()
        assert abs(found.num_chars - exact.num_chars) <= 2 * len(steps)  # brackets and commas
        assert (found.turn is not None) == (seen is not None)
        assert [item["id"] for item in pending(found)] == model[len(seen or []) :]
        assert unpacked(packed(found)).num_covered == found.num_covered
