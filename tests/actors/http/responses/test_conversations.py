"""Conversations by OpenAI's own client: over one gateway, and from another than the one that keeps them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.actors.http.responses.conversations import Change, changed, pending, place
from mallee.actors.http.responses.sharing import packed, unpacked
from mallee.actors.http.responses.store import Record, Turn
from mallee.actors.text.conversation import Conversation, Message
from mallee.protocol.ids import COMMON
from mallee.router.dispatch.jobs import ForkJob
from support.openai_clients import OPTIONS, Scene, ask, two_clients
from support.tiny_fleet import BLOCK


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
    """404 where nobody tells of it, 503 where nobody says that it was changed."""
    a, b, fleet, _ = scene
    begun = await a.conversations.create()
    home = fleet.gateways[0].records

    async def never(name: str, scope: Any, given: bytes) -> bytes | None:
        await asyncio.Event().wait()
        return None

    home.share("conversation.change", never)
    monkeypatch.setattr("mallee.actors.http.responses.conversations.END_S", 0.2)
    with pytest.raises(openai.InternalServerError, match="before you try again"):
        await b.conversations.update(begun.id, metadata={"a": "b"}, timeout=5)
    with pytest.raises(openai.InternalServerError, match="before you try again"):
        await ask(b, "x", conversation=begun.id, timeout=5)
    home._bus.is_mute = True  # type: ignore[attr-defined]
    for call in (b.conversations.retrieve, b.conversations.delete):
        with pytest.raises(openai.NotFoundError):
            await call(begun.id, timeout=5)


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
