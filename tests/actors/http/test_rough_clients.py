"""Clients that are slow, come back too soon or send much: what they get, and what it costs."""

import asyncio
import json
import time
from typing import Any
from unittest.mock import create_autospec

import httpx
import msgspec
import pytest

from mallee.actors.access.quotas import UNLIMITED
from mallee.actors.config import HttpSettings
from mallee.actors.http.messages.reading import read_dialogue
from mallee.actors.http.responses.running import Background, Run
from mallee.actors.http.responses.store import Record, ResponseStore
from mallee.actors.text.conversation import Conversation
from mallee.protocol.errors import InternalError
from mallee.protocol.ids import COMMON
from support.waiting import elapse, until

PATH = "/v1/completions"
RESPONSES = "/v1/responses"


@pytest.fixture
def roomy(call_with: Any, service: Any) -> Any:
    service.model = msgspec.structs.replace(service.model, max_model_len=4096)
    return call_with(HttpSettings(max_body_bytes=8 << 20))


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(part.split("\ndata: ")[1]) for part in text.split("\n\n")[:-1]]


async def test_a_reader_that_is_slow_at_the_end_gets_the_end() -> None:
    record = Record("resp_a", COMMON, {}, [], Conversation(()))
    run = create_autospec(Run, instance=True)  # it never begins
    background = Background(run, record, UNLIMITED, tenant="", streams=True)
    record.events.append(b"first")
    reading = background.follow(-1)
    assert await anext(reading) == b"first"
    record.events.append(b"last")  # while the first is written
    background.finish()
    assert [each async for each in reading] == [b"last"]


async def test_a_key_sent_again_at_once_after_hanging_up_runs_again(call: Any) -> None:
    """The run that is given up may take its time; its refusal is for nobody."""
    service, going = call.service, asyncio.Event()

    async def held(stream: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            await going.wait()
        yield

    service.script = held
    transport = httpx.ASGITransport(app=call.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        head = {"Idempotency-Key": "again"}
        body = json.dumps({"prompt": "abc"}).encode()
        gone = asyncio.Event()
        sent: list[Any] = []
        bodies = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "headers": [(b"idempotency-key", b"again"), (b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "http_version": "1.1",
            "root_path": "",
        }
        first = asyncio.create_task(call.app(scope, receive, send))
        await until(service.started.is_set)
        gone.set()
        await elapse(1)
        service.script = service.plain
        second = asyncio.create_task(client.post(PATH, content=body, headers=head))
        await elapse(1)
        going.set()
        answer = await second
        await first
        assert (answer.status_code, len(service.streams)) == (200, 2)
        third = await client.post(PATH, content=body, headers=head)
        assert third.content == answer.content
        assert len(service.streams) == 2


@pytest.mark.parametrize("given", [{}, {"instructions": "Be brief."}])
def test_a_system_message_beside_instructions_stays_in_later_turns(
    roomy: Any, service: Any, given: dict[str, str]
) -> None:
    system = {"role": "system", "content": "Answer in Finnish."}
    first = {"input": [system, {"role": "user", "content": "hi"}], "instructions": "Be kind."}
    made = roomy("POST", RESPONSES, first).body
    prompts = [bytes(service.job.tokens.tolist()).decode()]
    service.capsules.clear()
    then = {"input": "go on", "previous_response_id": made["id"], **given}
    assert roomy("POST", RESPONSES, then).status == 200
    prompts.append(bytes(service.job.tokens.tolist()).decode())
    assert prompts[0].startswith("<system>Be kind.\n\nAnswer in Finnish.|<user>hi|")
    assert "Answer in Finnish." in prompts[1]
    assert prompts[1].count("<system>") == 1


def test_a_response_that_fails_has_all_its_events_in_order(
    roomy: Any, service: Any, failed: Any
) -> None:
    async def broken(stream: Any) -> Any:
        async for delta in service.plain(stream):
            yield delta._replace(finish=None, capsule=None)
            break
        yield failed(0, InternalError("lost"))

    service.script = broken
    raw = roomy.raw("POST", RESPONSES, json={"input": "hi", "stream": True})
    found = events_of(raw.text)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert found[-1]["type"] == "response.failed"
    kinds = [each["type"] for each in found]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")


def test_stored_items_count_with_all_their_fields(roomy: Any) -> None:
    item = {"role": "user", "content": "hi", "note": "x" * 1_000_000}
    made = roomy("POST", RESPONSES, {"input": [item]}).body
    store = _store(roomy)
    store.check()
    assert store.nbytes > 1_000_000
    assert roomy("DELETE", f"{RESPONSES}/{made['id']}").status == 200
    assert store.nbytes == 0


def _store(call: Any) -> ResponseStore:
    route = next(r for r in call.app.routes if r.path == RESPONSES)
    store: ResponseStore = route.endpoint._handler.__self__.store
    return store


def test_items_without_an_id_are_shown_with_one(roomy: Any) -> None:
    item = {"id": None, "status": None, "role": "user", "content": "hi"}
    made = roomy("POST", RESPONSES, {"input": [item]}).body
    (shown,) = roomy("GET", f"{RESPONSES}/{made['id']}/input_items").body["data"]
    assert shown["id"].startswith("msg_")
    assert shown["status"] == "completed"


def test_many_blocks_of_one_message_take_no_more_than_their_length() -> None:
    blocks = [{"type": "text", "text": "x" * 300} for _ in range(20_000)]
    begin = time.process_time()
    found = read_dialogue(None, [{"role": "user", "content": blocks}])
    assert time.process_time() - begin < 3
    assert len(found.messages[0].text) == 301 * 20_000 - 1


@pytest.mark.parametrize("num", [5000, 400_000])
def test_a_prompt_far_too_long_is_refused_in_anthropics_words(roomy: Any, num: int) -> None:
    roomy.tokenizer.longest_token = 8
    asked = {"max_tokens": 8, "messages": [{"role": "user", "content": "x" * num}]}
    found = roomy("POST", "/v1/messages", asked)
    assert found.status == 400
    assert found.body["error"]["message"].startswith("prompt is too long: ")


def test_a_mark_on_a_tool_alone_retains_the_prompt(roomy: Any, service: Any) -> None:
    tool: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
    asked: dict[str, Any] = {"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    marked = {**tool, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert roomy("POST", "/v1/messages", {**asked, "tools": [marked]}).status == 200
    (span,) = service.job.retain
    assert span.duration_s == 3600
    wrong = {**tool, "cache_control": "long"}
    refused = roomy("POST", "/v1/messages", {**asked, "tools": [wrong]})
    assert (refused.status, refused.body["error"]["param"]) == (400, "cache_control")


@pytest.mark.parametrize("summary", ["long", 1, [], {}])
def test_a_summary_of_no_known_kind_is_refused(roomy: Any, summary: Any) -> None:
    refused = roomy("POST", RESPONSES, {"input": "hi", "reasoning": {"summary": summary}})
    assert (refused.status, refused.body["error"]["param"]) == (400, "reasoning.summary")
    known = roomy("POST", RESPONSES, {"input": "hi", "reasoning": {"summary": "auto"}})
    assert known.body["reasoning"]["summary"] == "auto"
