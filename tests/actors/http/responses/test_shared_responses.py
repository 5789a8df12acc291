"""Responses of one gateway, read, gone on from, ended and deleted at another; and where they are stored."""

from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.actors.config import ResponsesSettings
from mallee.actors.http.responses.sharing import packed, unpacked
from mallee.actors.http.responses.store import Left, Record, ResponseStore, Turn, UnknownResponse
from mallee.actors.text.conversation import Conversation, Function, Message, ToolCall
from mallee.protocol.errors import CodecError
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import COMMON, CapsuleId, Scope
from mallee.router.dispatch.jobs import ForkJob
from support.openai_clients import OPTIONS, ask, two_clients
from support.tiny_fleet import BLOCK
from support.waiting import until

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
        with pytest.raises(openai.BadRequestError, match="has its events"):
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


async def test_without_its_gateway_an_unknown_response_is_404_in_time() -> None:
    async with two_clients() as (a, b, fleet, _):
        first = await ask(a, "hi")
        known = await ask(a, "hello")
        await b.responses.retrieve(known.id)
        fleet.gateways[0].records._bus.is_mute = True  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError):
            await b.responses.retrieve(first.id, timeout=5)
        again = await ask(b, "more", previous_response_id=known.id)
        assert again.mallee["turn"] in ("capsule", "rewritten")


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
