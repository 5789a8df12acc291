"""Anthropic's threads: an answer is gone on from by its id, as often as one likes, by the real client too."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from anthropic import beta_async_tool
from msgspec import structs

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from mallee.runtime.config import HttpSettings
from support.live_api import keyed
from support.plain_ids import scopes_at
from support.tiny_fleet import tiny_api

PATH = "/v1/messages"
MODEL = random_model("llama", 5, max_position_embeddings=8192)
(QWEN,) = (family for family in FAMILIES if family.name == "qwen3")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bergen"}}\n</tool_call>'
OPTIONS: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
SYSTEM = "You say what you see. " * 12


def asked(*texts: str, **more: Any) -> dict[str, Any]:
    return {**OPTIONS, "messages": [*map(said, texts)], **more}


def said(text: str) -> Any:
    return {"role": "user", "content": text}


def after(name: str) -> dict[str, Any]:
    return {"thread": {"type": "continue", "previous_message_id": name}}


async def sent(client: httpx.AsyncClient, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json=body, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(message: dict[str, Any]) -> str:
    return "".join(block.get("text", block.get("thinking", "")) for block in message["content"])


async def test_turns_of_a_thread_are_forks_of_the_answer_before() -> None:
    """F31, part: two go on from one answer, and say what whole conversations say; what is new is computed.

    Streamed or not; the capsule may have gone.
    """
    settings = {"chat": ChatTemplate(None, family=QWEN)}
    async with tiny_api(MODEL, 2, num_blocks=4096, ids=scopes_at, settings=settings) as (client, _):
        begin = asked("a wood of many trunks", system=SYSTEM)
        first = await sent(client, {**begin, "thread": {"type": "create"}})
        answer = {"role": "assistant", "content": first["content"]}
        for question in ("Why?", "And then?"):
            turn = await sent(client, asked(question, **after(first["id"])))
            history = [*begin["messages"], answer, *asked(question)["messages"]]
            salted = {**begin, "messages": history, "cache_salt": question}
            whole = await sent(client, salted)
            assert text_of(turn) == text_of(whole)
            usage, own = turn["usage"], whole["usage"]
            total = usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert total == own["input_tokens"] + own["cache_read_input_tokens"]
            assert usage["input_tokens"] < 120 < 300 < own["input_tokens"]
        body = asked("Why?", stream=True, **after(first["id"]))
        async with client.stream("POST", PATH, json=body) as stream:
            events = [
                json.loads(line[6:]) async for line in stream.aiter_lines() if line[:5] == "data:"
            ]
        assert events[-1]["type"] == "message_stop"
        third = await sent(client, asked("Go on.", **after(events[0]["message"]["id"])))
        assert third["usage"]["input_tokens"] < 120
        gone = (await client.delete(f"/v1/capsules/{first['mallee']['capsule']}")).status_code
        assert gone in (200, 404)
        again = await sent(client, asked("And then?", **after(first["id"])))
        assert text_of(again) == text_of(turn)


async def test_a_turn_whose_capsule_went_meanwhile_is_one_request_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole conversation takes the place of the fork: a key of one branch at once has room for it."""
    access, headers = keyed(tmp_path, max_branches=1)
    settings = {"chat": ChatTemplate(None, family=QWEN), "access": access}
    async with tiny_api(MODEL, 1, num_blocks=4096, ids=scopes_at, settings=settings) as (client, _):
        client.headers.update(headers)
        first = await sent(client, {**asked("a wood"), "thread": {"type": "create"}})
        turn = await sent(client, asked("Why?", **after(first["id"])))
        deleted = await client.delete(f"/v1/capsules/{first['mallee']['capsule']}")
        assert deleted.status_code == 200

        async def was_there(*_: Any) -> bool:
            return True

        monkeypatch.setattr("mallee.api.messages.handlers.has_capsule_after", was_there)
        for _ in range(2):
            again = await sent(client, asked("Why?", **after(first["id"])))
            assert text_of(again) == text_of(turn)


@pytest.fixture
def call(call_with: Any, service: Any) -> Any:
    service.model = structs.replace(service.model, max_model_len=4096)
    return call_with(HttpSettings())


@pytest.fixture
def bodies() -> list[dict[str, Any]]:
    """Bodies that the real client sends."""
    return []


@pytest.fixture
async def client(call: Any, bodies: list[Any]) -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = httpx2.ASGITransport(app=call.app)

    async def seen(request: httpx2.Request) -> None:
        bodies.append(json.loads(request.content))

    hooks: Any = {"request": [seen]}
    async with anthropic.AsyncAnthropic(
        api_key="none",
        base_url="http://test",
        max_retries=0,
        http_client=httpx2.AsyncClient(
            transport=transport, base_url="http://test", event_hooks=hooks
        ),
    ) as made:
        yield made


def prompt_of(call: Any) -> str:
    return bytes(call.service.job.tokens.tolist()).decode()


@beta_async_tool
async def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


async def test_anthropics_tool_runner_runs_in_a_thread(
    call: Any, client: anthropic.AsyncAnthropic, bodies: list[Any]
) -> None:
    """I17, part: its second request has the result alone; the prompt has all of it."""
    call.service.reply = lambda _: "It rains." if "rain in" in prompt_of(call) else CALL
    runner = client.beta.messages.tool_runner(
        max_tokens=200,
        model="tiny/bytes",
        messages=[{"role": "user", "content": "hi there"}],
        system="Be short.",
        tools=[get_weather],
    )
    last = await runner.until_done()
    assert [block.text for block in last.content if block.type == "text"] == ["It rains."]
    assert [body["thread"]["type"] for body in bodies] == ["create", "continue"]
    assert "tools" not in bodies[1]
    prompt = prompt_of(call)
    assert prompt.count("hi there") == prompt.count("Be short.") == 1
    assert prompt.index("hi there") < prompt.index("Bergen") < prompt.index("rain in Bergen")


async def test_anthropics_threads_go_on_fork_and_find_their_way_back(
    call: Any, client: anthropic.AsyncAnthropic
) -> None:
    """`send`, `stream`, `fork`; a thread that was forgotten is begun again by the client itself."""
    thread = client.beta.messages.thread(max_tokens=50, model="tiny/bytes", system="Be short.")
    call.service.reply = lambda _: "one"
    first = await thread.send(said("hi"))
    assert thread.previous_message_id == first.id
    other = thread.fork()
    call.service.reply = lambda _: "two"
    async with thread.stream(said("more")) as stream:
        assert (await stream.get_final_message()).content[0].text == "two"
    assert prompt_of(call).count("Be short.") == 1
    assert prompt_of(call).index("one") < prompt_of(call).index("more")
    await other.send(said("other"))
    assert "more" not in prompt_of(call)
    assert "other" in prompt_of(call)
    thread._state._thread.previous_message_id = "req_gone"
    await thread.send(said("last"))
    assert prompt_of(call).index("more") < prompt_of(call).index("last")


def test_what_a_thread_can_t_do_is_told_by_its_code(call: Any) -> None:
    begin = {"max_tokens": 20, "messages": [{"role": "user", "content": "hi"}], "system": "A"}
    first = call("POST", PATH, {**begin, "thread": {"type": "create"}}).body["id"]
    more = {"max_tokens": 20, "messages": [{"role": "user", "content": "go on"}]}
    lost = call("POST", PATH, {**more, **after("req_x")})
    assert (lost.status, lost.body["error"]["type"]) == (404, "not_found_error")
    assert lost.body["error"]["details"] == {"error_code": "thread_not_found"}
    salted = call("POST", PATH, {**more, **after(first), "cache_salt": "other"})
    assert salted.status == 404
    changed = call("POST", PATH, {**more, **after(first), "system": "B"})
    assert changed.status == 400
    assert changed.body["error"]["details"] == {"error_code": "thread_fingerprint_mismatch"}
    assert call("POST", PATH, {**more, **after(first), "system": "A"}).status == 200
    noted = [{"role": "system", "content": "Note."}, *more["messages"]]
    assert call("POST", PATH, {**more, **after(first), "messages": noted}).status == 200
    begun = {**begin, "messages": [*begin["messages"], {"role": "assistant", "content": "So"}]}
    refused = call("POST", PATH, {**begun, "thread": {"type": "create"}})
    assert (refused.status, refused.body["error"]["param"]) == (400, "messages")


def test_fields_of_betas_that_change_no_answer_are_taken(call: Any) -> None:
    """A request without them gets the same answer."""
    tool = {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True, "new_hint": 1}
    more: dict[str, Any] = {
        "tools": [tool],
        "billing_policy": {"type": "billing_policy", "bill_to": "self"},
        "fallbacks": "default",
        "output_config": {"effort": "low", "task_budget": {"total": 9}},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "user_profile_id": "u",
    }
    answer = call("POST", PATH, {"max_tokens": 9, **asked("hi"), **more})
    assert answer.status == 200, answer.body
