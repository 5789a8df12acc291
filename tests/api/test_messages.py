"""Anthropic's POST /v1/messages and its count of tokens, asked by the real client where that matters."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from msgspec import structs

from mallee.api.messages.reading import read_dialogue
from mallee.api.sse import IDLE_S
from mallee.gateway.access.access import Access
from mallee.protocol.errors import (
    InternalError,
    MalleeError,
    TenantQueueFull,
    Unavailable,
)
from mallee.runtime.config import ChatSettings, HttpSettings
from support.any_gateway import one_gateway
from support.waiting import elapse

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Weather of a city.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Åbo"}}\n</tool_call>'


def said(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


ASKED: dict[str, Any] = {"max_tokens": 200, **said("hi")}


@pytest.fixture
def call(call_with: Any, service: Any) -> Any:
    service.model = structs.replace(service.model, max_model_len=4096)
    return call_with(HttpSettings())


@pytest.fixture
async def client(call: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = httpx2.ASGITransport(app=call.app)
    async with anthropic.AsyncAnthropic(
        api_key="none",
        base_url="http://test",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport, base_url="http://test"),
    ) as made:
        yield made


def prompt_of(call: Any) -> str:
    return bytes(call.service.job.tokens.tolist()).decode()


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    return found


async def test_a_message_has_anthropics_shape(call: Any, client: anthropic.AsyncAnthropic) -> None:
    """Anthropic's client reads text, usage in its parts, the reason of the end and our extras."""
    call.service.reply = lambda _: "hello"
    got = await client.messages.create(
        model="tiny/bytes",
        max_tokens=64,
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        metadata={"user_id": "user_1"},
    )
    (block,) = got.content
    assert block.type == "text"
    assert (block.text, got.role, got.stop_reason, got.stop_sequence) == (
        *("hello", "assistant", "end_turn"),
        None,
    )
    assert prompt_of(call) == "<system>Be kind.|<user>hi|<assistant>"
    assert call.service.job.terms.tenant == "user_1"
    usage = got.usage
    assert usage.cache_read_input_tokens == 4
    assert usage.cache_creation is not None
    length = len(call.service.job.tokens)
    assert usage.cache_creation.ephemeral_5m_input_tokens == length - 4
    assert (usage.input_tokens, usage.output_tokens) == (0, 6)
    (span,) = call.service.job.retain
    assert span.duration_s == 300
    assert got.model_extra is not None
    assert got.model_extra["mallee"]["capsule"] == f"{got.id}.0"


async def test_the_streams_helper_puts_the_same_message_together(
    call: Any, client: anthropic.AsyncAnthropic
) -> None:
    """text_stream and get_final_message, with text, calls and their parsed input."""
    call.service.reply = lambda _: f"Let me see.\n{CALL}"
    asked: Any = {**ASKED, "model": "tiny/bytes", "tools": [TOOL]}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Let me see."
    assert (whole.stop_reason, final.stop_reason) == ("tool_use", "tool_use")
    first, second = final.content
    assert (first.type, second.type) == ("text", "tool_use")
    assert second.input == {"city": "Åbo"}
    assert final.usage == whole.usage
    kinds = [each.model_dump(include={"type", "text", "name", "input"}) for each in final.content]
    assert kinds == [
        each.model_dump(include={"type", "text", "name", "input"}) for each in whole.content
    ]


def test_events_come_in_anthropics_order(call: Any) -> None:
    call.service.reply = lambda _: f"So{CALL}"
    answer = call.raw("POST", PATH, json={**ASKED, "tools": [TOOL], "stream": True})
    events = events_of(answer.text)
    names = [each["type"] for each in events]
    shown = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert shown == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert [e["index"] for e in events if e["type"] == "content_block_start"] == [0, 1]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert answer.headers["request-id"].startswith("req_")


async def test_a_loop_of_tools_goes_back_as_it_came(
    call: Any, client: anthropic.AsyncAnthropic
) -> None:
    """F31, part: calls and results of a history, rendered as the model's own."""
    call.service.reply = lambda _: f"Let me see.\n{CALL}"
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    got = await client.messages.create(
        model="tiny/bytes", max_tokens=200, tools=[TOOL], messages=messages
    )
    (use,) = [each for each in got.content if each.type == "tool_use"]
    messages.append({"role": "assistant", "content": [each.to_dict() for each in got.content]})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "no station"}
    extra = {"type": "text", "text": "Go on."}
    messages.append({"role": "user", "content": [{**result, "is_error": True}, extra]})
    await client.messages.create(model="tiny/bytes", max_tokens=20, tools=[TOOL], messages=messages)
    said = prompt_of(call).partition("<user>")[2]
    assert said.startswith("Weather?|<assistant>Let me see.<tool_call>")
    assert said.endswith("</tool_call>|<tool>Error: no station|<user>Go on.|<assistant>")


@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_reasoning_comes_back_unharmed(
    call: Any, client: anthropic.AsyncAnthropic, display: Any
) -> None:
    """Thinking blocks with signatures; the next prompt has the reasoning even if it was not shown."""
    call.service.reply = lambda _: "It is cold.</think>\n\nCold."
    thinking: Any = {"type": "enabled", "budget_tokens": 1024, "display": display}
    asked: Any = {"model": "tiny/bytes", "max_tokens": 2000, "thinking": thinking}
    got = await client.messages.create(**asked, messages=ASKED["messages"])
    thought, text = got.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert thought.thinking == ("It is cold." if display == "summarized" else "")
    async with client.messages.stream(**asked, messages=ASKED["messages"]) as stream:
        final = await stream.get_final_message()
    assert [each.to_dict() for each in final.content] == [each.to_dict() for each in got.content]
    back = {"role": "assistant", "content": [each.to_dict() for each in got.content]}
    messages = [*ASKED["messages"], back, {"role": "user", "content": "Why?"}]
    await client.messages.create(**asked, messages=messages)
    assert "<assistant><think>It is cold.</think>Cold.|<user>Why?" in prompt_of(call)


def test_without_thinking_there_is_none(call: Any) -> None:
    for thinking in (None, {"type": "disabled"}):
        call("POST", PATH, {**ASKED, "thinking": thinking})
        assert prompt_of(call).endswith("<assistant>")


def test_a_begun_answer_goes_on(call: Any) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "The answer is ("}]
    assert call("POST", PATH, {**ASKED, "messages": messages}).status == 200
    assert prompt_of(call) == "<user>hi|<assistant>The answer is ("


def test_stop_sequences_are_named(call: Any) -> None:
    call.service.reply = lambda _: "one two three"
    asked = {**ASKED, "stop_sequences": ["three", "two"]}
    body = call("POST", PATH, asked).body
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "two")
    assert body["content"] == [{"type": "text", "text": "one "}]
    events = events_of(call.raw("POST", PATH, json={**asked, "stream": True}).text)
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "two"}


async def test_silence_is_told_by_pings(call: Any, client: anthropic.AsyncAnthropic) -> None:
    async def late(stream: Any) -> AsyncIterator[Any]:
        async for delta in call.service.plain(stream):
            yield delta
            await elapse(IDLE_S + 1)

    call.service.reply, call.service.script = lambda _: "abc", late
    async with client.messages.stream(model="tiny/bytes", **ASKED) as stream:
        assert (await stream.get_final_message()).stop_reason == "end_turn"
    asked = {"model": "tiny/bytes", "stream": True, **ASKED}
    async with call.client() as plain:
        events = events_of((await plain.post(PATH, json=asked, timeout=None)).text)
    assert sum(event == {"type": "ping"} for event in events) >= 3  # one at the beginning


def test_an_answer_that_was_pruned_is_no_whole_turn(call: Any) -> None:
    async def pruned(stream: Any) -> AsyncIterator[Any]:
        deltas = [delta async for delta in call.service.plain(stream)]
        for delta in deltas[:2]:
            yield delta
        yield deltas[-1]._replace(finish="cancelled", tokens=(), capsule=None)

    call.service.reply, call.service.script = lambda _: "abc", pruned
    body = call("POST", PATH, ASKED).body
    assert (body["stop_reason"], body["content"]) == (
        "pause_turn",
        [{"type": "text", "text": "ab"}],
    )


def test_the_end_by_a_limit_is_told_apart_from_the_windows(call: Any) -> None:
    """Clients ask for more tokens than small windows have; that is no error."""
    call.service.reply = lambda _: "x" * 5000
    assert call("POST", PATH, {**ASKED, "max_tokens": 5}).body["stop_reason"] == "max_tokens"
    body = call("POST", PATH, {**ASKED, "max_tokens": 32_000}).body
    assert body["stop_reason"] == "model_context_window_exceeded"
    call.tokenizer.longest_token = 8
    for num in (5000, 400_000):
        long = {**ASKED, **said("x" * num)}
        refused = call("POST", PATH, long)
        assert refused.status == 400
        assert refused.body["error"]["message"].startswith("prompt is too long: ")


def test_the_choice_of_tools_and_the_form_of_answers_reach_the_grammar(call: Any) -> None:
    asked = {**ASKED, "tools": [TOOL]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        assert call("POST", PATH, {**asked, "tool_choice": choice}).status == 200
        assert call.service.job.grammar.kind == "lark"
    call("POST", PATH, {**asked, "tool_choice": {"type": "none"}})
    assert call.service.job.grammar is None
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_format": form}, {"output_config": {"format": form}}):
        assert call("POST", PATH, {**ASKED, **fields}).status == 200
        # Reasoning may come before it, as the model's template has it.
        assert call.service.job.grammar.source.startswith('start: ("<think>" thoughts gap)? (form)')


async def test_a_count_of_tokens_is_the_usages(call: Any, client: anthropic.AsyncAnthropic) -> None:
    shared: Any = {
        "model": "tiny/bytes",
        "messages": [*ASKED["messages"], {"role": "assistant", "content": "So"}],
        "system": "Be kind.",
        "tools": [TOOL],
        "thinking": {"type": "disabled"},
    }
    counted = await client.messages.count_tokens(**shared)
    usage = (await client.messages.create(max_tokens=10, **shared)).usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_creation_input_tokens == 0
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (said(1), "messages[0].content"),
    (said([{"type": "image", "source": {}}]), "messages[0].content[0].type"),
    (said([{"type": "document", "source": {}}]), "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    (
        {"messages": [*ASKED["messages"], {"role": "assistant", "content": "x "}]},
        "messages[1].content",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "much"}}, "thinking"),
    ({"temperature": 1.5}, "temperature"),
    ({"cache_control": {"type": "ephemeral", "ttl": "7d"}}, "cache_control.ttl"),
    ({"tools": [{**TOOL, "cache_control": "long"}]}, "cache_control"),
    ({"compaction": {"type": "x"}}, "compaction"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"thread": {"type": "fork"}}, "thread"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"system": 5}, "system"),
    ({"messages": [{"role": "user", "content": "a", "b": 1}]}, "messages[0].b"),
    (
        {"messages": [{"role": "user", "content": "a", "b` - at `$.c.d": 1}]},
        "messages[0].b` - at `$.c.d",
    ),
    ({"messages": [{"role": "image", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"metadata": {"user_id": 1}}, "metadata"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(each)[:50] for each, _ in REFUSED])
def test_a_field_that_cant_be_served_is_named(
    call: Any, fields: dict[str, Any], param: str
) -> None:
    answer = call("POST", PATH, {**ASKED, **fields})
    assert answer.status == 400
    assert answer.body["type"] == "error"
    assert answer.body["error"]["type"] == "invalid_request_error"
    assert answer.body["error"]["param"] == param
    assert answer.body["request_id"] == answer.headers["request-id"]
    assert param in answer.body["error"]["message"]


ERRORS: list[tuple[MalleeError, type[anthropic.APIStatusError], str]] = [
    (TenantQueueFull.with_message("too many"), anthropic.RateLimitError, "rate_limit_error"),
    (Unavailable("no room"), anthropic.InternalServerError, "overloaded_error"),
    (InternalError("broken"), anthropic.InternalServerError, "api_error"),
]


@pytest.mark.parametrize(("error", "kind", "name"), ERRORS, ids=[each[2] for each in ERRORS])
async def test_failures_are_typed_for_the_client(
    call: Any,
    client: anthropic.AsyncAnthropic,
    error: MalleeError,
    kind: type[anthropic.APIStatusError],
    name: str,
) -> None:
    call.service.refuses = error
    with pytest.raises(kind) as found:
        await client.messages.create(**{**ASKED, "model": "tiny/bytes"})
    assert found.value.body["error"]["type"] == name  # type: ignore[index]
    assert found.value.status_code == (529 if error.status == 503 else error.status)
    assert found.value.request_id is not None


async def test_refusals_are_typed_for_the_client(client: anthropic.AsyncAnthropic) -> None:
    asked: Any = {**ASKED, "model": "tiny/bytes"}
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**asked, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await client.messages.create(**asked, extra_body={"temperature": 7.0})
    with pytest.raises(anthropic.NotFoundError, match="batches"):
        await client.messages.batches.list()


async def test_the_example_of_the_docs_runs(live: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/api/messages.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"URL": live.url, "MODEL": "tiny/bytes"}
    await asyncio.to_thread(exec, code, names)
    assert names["text"] == "hello 0"


async def test_a_failure_in_the_middle_is_an_error_event(
    call: Any, client: anthropic.AsyncAnthropic, failed: Callable[..., Any]
) -> None:
    plain = call.service.plain

    async def script(stream: Any) -> AsyncIterator[Any]:
        async for delta in plain(stream):
            yield delta
            break
        yield failed(0, Unavailable("the worker left"))

    call.service.script = script
    asked = {**ASKED, "model": "tiny/bytes"}
    answer = await client.post(PATH, body={**asked, "stream": True}, cast_to=httpx2.Response)
    last = events_of(answer.text)[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(**asked) as stream:
            await stream.get_final_message()


def test_a_key_may_come_in_anthropics_header(call_with: Any) -> None:
    call = call_with(HttpSettings(), Access(None, {"MALLEE_API_KEY": "secret-key-1234567890"}))
    assert call("POST", PATH, ASKED, headers={"x-api-key": "secret-key-1234567890"}).status == 200
    for headers in ({"x-api-key": "wrong"}, {}):
        refused = call("POST", PATH, ASKED, headers=headers)
        assert refused.status == 401
        assert refused.body["error"]["type"] == "authentication_error"


def test_a_system_message_may_stand_among_the_others(call: Any) -> None:
    """Claude Code sends some; messages of one role in a row are one."""
    messages = [
        {"role": "system", "content": "A."},
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
        {"role": "system", "content": [{"type": "text", "text": "B."}]},
    ]
    assert call("POST", PATH, {**ASKED, "system": "S.", "messages": messages}).status == 200
    assert prompt_of(call) == "<system>S.\nA.|<user>one\ntwo|<system>B.|<assistant>"


def test_the_longest_mark_counts_and_that_of_a_tool_alone(call: Any) -> None:
    def text(ttl: str) -> dict[str, Any]:
        mark = {"type": "ephemeral", "ttl": ttl}
        return {"type": "text", "text": "x", "cache_control": mark}

    messages = [{"role": "user", "content": [text("5m"), text("1h")]}]
    tool = {**TOOL, "cache_control": text("1h")["cache_control"]}
    for more in ({"messages": messages}, {"tools": [tool]}):
        usage = call("POST", PATH, {**ASKED, **more}).body["usage"]
        (span,) = call.service.job.retain
        assert span.duration_s == 3600
        made = usage["cache_creation"]["ephemeral_1h_input_tokens"]
        assert made == usage["cache_creation_input_tokens"]


def test_many_blocks_of_one_message_take_no_more_than_their_length() -> None:
    blocks = [{"type": "text", "text": "x" * 300} for _ in range(20_000)]
    begin = time.process_time()
    found = read_dialogue(None, [{"role": "user", "content": blocks}])
    assert time.process_time() - begin < 3
    assert len(found.messages[0].text) == 301 * 20_000 - 1


def _claude_code(turn: int) -> Iterator[dict[str, Any]]:
    mark = {"type": "ephemeral"}
    yield {
        "type": "text",
        "text": f"x-anthropic-billing-header: cc_version=2.1.3; cc_entrypoint=cli; cch={turn:05x};",
    }
    yield {"type": "text", "text": "You are Claude Code.", "cache_control": mark}
    yield {"type": "text", "text": "Instructions. " * 20, "cache_control": mark}


def claude_code(messages: list[Any], turn: int) -> dict[str, Any]:
    """A request in the shape that Claude Code sends."""
    return {
        "model": "tiny/bytes",
        "max_tokens": 32_000,
        "system": list(_claude_code(turn)),
        "messages": messages,
        "tools": [{**TOOL, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def test_claude_codes_requests_are_answered_over_several_turns(call: Any) -> None:
    call.service.reply = lambda _: f"Hm.</think>\n\nLooking.\n{CALL}"
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Fix it."}]}]
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-api-key": "none",
    }
    for turn in range(4):
        body = claude_code(messages, turn)
        answer = call.raw("POST", f"{PATH}?beta=true", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        events = events_of(answer.text)
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        (use,) = [
            e["content_block"]
            for e in events
            if e["type"] == "content_block_start" and e["content_block"]["type"] == "tool_use"
        ]
        text = {"type": "text", "text": "Looking."}
        messages.append(
            {"role": "assistant", "content": [text, {**use, "input": {"city": "Oslo"}}]}
        )
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "cold"}
        mark = {"cache_control": {"type": "ephemeral"}}
        messages.append({"role": "user", "content": [{**result, **mark}]})
    assert prompt_of(call).count("<tool_call>") == 3


@one_gateway
@pytest.mark.parametrize("moves", [False, True])
def test_a_changing_bill_is_moved_if_the_operator_allows(
    call_with: Any, service: Any, moves: bool
) -> None:
    """By default a prompt is rendered as it came; the count of its tokens is the same either way."""
    service.model = structs.replace(service.model, max_model_len=4096)
    call = call_with(HttpSettings(), chats=ChatSettings(move_changing_lines=moves))
    prompts = []
    for turn in range(2):
        body = claude_code([{"role": "user", "content": "Fix it."}], turn)
        assert call.raw("POST", PATH, json=body).status_code == 200
        prompts.append(prompt_of(call))
        del body["max_tokens"], body["stream"]
        counted = call("POST", f"{PATH}/count_tokens", body).body["input_tokens"]
        assert counted == len(prompts[-1].encode())
    same = next(i for i, pair in enumerate(zip(*prompts, strict=True)) if pair[0] != pair[1])
    assert (same > prompts[0].index("Fix it.")) == moves
    bill = "x-anthropic-billing-header: cc_version=2.1.3; cc_entrypoint=cli; cch=00001;"
    assert prompts[1].count(bill) == 1
    assert (f"Fix it.\n\n{bill}" in prompts[1]) == moves
    assert service.job.messages.changed == ("" if moves else bill)
