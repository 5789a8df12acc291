"""Answers of gpt-oss over its template's channels, in every API: reasoning, text, calls, forms, histories."""

import json
from typing import Any

import anthropic.types
import pytest
from msgspec import structs

from mallee.api.text.answers import thinking_of
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import Conversation, Function, Message, ToolCall
from mallee.api.text.tools.formats import format_of
from mallee.runtime.config import ChatSettings, HttpSettings

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# As gpt-oss' template: the reasoning of calls is read as `thinking`, that of other answers is left out, and a
# call has a reasoning or a text before it, not both.
TEMPLATE = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for tool in tools or [] %}
    {%- set tool = tool.function %}
    {{- '<|start|>developer<|message|>// ' + tool.description + ' ' + (tool | tojson) + '<|end|>' }}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' }}
    {%- elif message.role != 'assistant' %}
        {{- '<|start|>' + message.role + '<|message|>' }}
    {%- elif message.tool_calls %}
        {%- if message.content and message.thinking %}{{ raise_exception('not both') }}{% endif %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- (call.arguments | tojson) + '<|call|>' }}
    {%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' }}
    {%- endif %}
    {%- if not message.tool_calls %}{{ message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
THOUGHT = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"
PLAN = "<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "\u00c5bo"}<|call|>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}


@pytest.fixture
def call(call_with: Any, service: Any) -> Any:
    service.model = structs.replace(service.model, max_model_len=4096)
    return call_with(HttpSettings(), template=TEMPLATE)


def prompt_of(call: Any) -> str:
    return bytes(call.service.job.tokens.tolist()).decode()


def joined(events: list[Any]) -> dict[str, Any]:
    """The message of a stream of one choice, and its end."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in events[:-1]:
        (choice,) = event["choices"]
        delta, found["finish"] = choice["delta"], choice["finish_reason"]
        for name in ("content", "reasoning"):
            found[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                found["calls"].append([part["function"]["name"], ""])
            found["calls"][-1][1] += part["function"]["arguments"]
    return found


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_reasoning_and_text_are_told_apart(call: Any, tools: list[Any]) -> None:
    """I17, part: with tools and without, whole and streamed, a token a delta."""
    call.service.reply = lambda _: THOUGHT + FINAL + "4 < 5 \U0001f333"
    asked = ASKED | ({"tools": tools} if tools else {})
    (choice,) = call("POST", CHAT, asked).body["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("4 < 5 \U0001f333", "Look it up.")
    assert (choice["finish_reason"], "tool_calls" in message) == ("stop", False)
    made = joined(call("POST", CHAT, {**asked, "stream": True}).events)
    assert made == {
        **{"content": message["content"], "reasoning": "Look it up."},
        **{"calls": [], "finish": "stop"},
    }


@pytest.mark.parametrize("before", ["", THOUGHT, THOUGHT + PLAN, PLAN + THOUGHT])
def test_a_message_to_a_function_is_a_call(call: Any, before: str) -> None:
    """I17, part: after reasoning and a preamble or neither; its second turn is its own template's."""
    call.service.reply = lambda _: before + CALL
    asked = {**ASKED, "tools": [TOOL]}
    (choice,) = call("POST", CHAT, asked).body["choices"]
    message = choice["message"]
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "get_weather", "arguments": '{"city": "\u00c5bo"}'}
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == ("I'll look." if PLAN in before else None)
    assert message.get("reasoning") == ("Look it up." if THOUGHT in before else None)
    streamed = joined(call("POST", CHAT, {**asked, "stream": True}).events)
    assert streamed["calls"] == [["get_weather", '{"city": "\u00c5bo"}']]
    assert streamed["finish"] == "tool_calls"
    if THOUGHT not in before:
        return
    result = {"role": "tool", "tool_call_id": made["id"], "content": "7 degrees"}
    assert call("POST", CHAT, asked | {"messages": [*ASKED["messages"], message, result]})
    thought = "Look it up." + ("\n\nI'll look." if PLAN in before else "")
    assert prompt_of(call).endswith(
        f"<|start|>assistant<|channel|>analysis<|message|>{thought}<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "\u00c5bo"}<|call|>'
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>7 degrees<|end|>"
        "<|start|>assistant"
    )


def test_anthropics_and_openais_other_api_have_the_same_parts(call: Any) -> None:
    """I17, part: a thinking block and a tool's use; items of reasoning, text and a call, streamed too."""
    call.service.reply = lambda _: THOUGHT + PLAN + CALL
    tool = {"name": "get_weather", "input_schema": SCHEMA, "description": "Weather."}
    asked = {**ASKED, "tools": [tool], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    asked["max_tokens"] = 2000
    body = call("POST", MESSAGES, asked).body
    thinking, text, use = anthropic.types.Message.model_validate(body).content
    assert (thinking.type, text.type, use.type) == ("thinking", "text", "tool_use")
    assert (thinking.thinking, text.text, use.input) == (  # type: ignore[union-attr]
        *("Look it up.", "I'll look."),
        {"city": "\u00c5bo"},
    )
    assert body["stop_reason"] == "tool_use"
    asked = {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}
    output = call("POST", RESPONSES, asked).body["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert json.loads(output[-1]["arguments"]) == {"city": "\u00c5bo"}
    raw = call.raw("POST", RESPONSES, json={**asked, "stream": True}).text
    events = [json.loads(line[6:]) for line in raw.splitlines() if line[:5] == "data:"]
    assert [item["type"] for item in events[-1]["response"]["output"]] == [
        *("reasoning", "message", "function_call")
    ]


def test_calls_that_must_not_be_made_are_text(call: Any) -> None:
    """I17, part: as those of unknown functions, to the character."""
    call.service.reply = lambda _: CALL.replace("get_weather", "unknown")
    for more in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {}):
        (choice,) = call("POST", CHAT, ASKED | more).body["choices"]
        assert choice["message"]["content"] == CALL.replace("get_weather", "unknown")
        assert choice["finish_reason"] == "stop"


def test_forms_bind_the_final_channel_and_the_arguments(call: Any) -> None:
    """I16, part, I17, part: after the reasoning; a call that is required has no text beside it."""
    call.service.reply = lambda _: f'{THOUGHT}{FINAL}{{"a": 1}}'
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    (choice,) = call("POST", CHAT, {**ASKED, "response_format": form}).body["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (
        *('{"a": 1}', "Look it up."),
    )
    start, *_ = call.service.job.grammar.source.splitlines()
    assert start.startswith('start: ("<|channel|>analysis<|message|>" thoughts')
    assert start.endswith('("<|channel|>final<|message|>" form)')
    call.service.reply = lambda _: THOUGHT + CALL
    required = {**ASKED, "tools": [TOOL], "tool_choice": "required"}
    (choice,) = call("POST", CHAT, required).body["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    start, *_ = call.service.job.grammar.source.splitlines()
    assert start.endswith('("<|channel|>commentary" calls)')


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_the_channels_do_not_allow_is_refused_by_name(
    call: Any, more: dict[str, Any], param: str
) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "It is"}]
    answer = call("POST", CHAT, {**ASKED, "messages": messages, **more})
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    if param == "continue_final_message":
        assert call("POST", MESSAGES, {**ASKED, "messages": messages}).status == 400


@pytest.mark.parametrize("channel", ["analysis", "final"])
def test_a_prompt_may_end_inside_of_a_message(call_with: Any, service: Any, channel: str) -> None:
    """I17, part: of templates that are changed so; a final one leaves no room for reasoning."""
    service.model = structs.replace(service.model, max_model_len=4096)
    end = "{{ '<|start|>assistant' }}"
    begun = TEMPLATE.replace(end, f"{end[:-4]}<|channel|>{channel}<|message|>' }}}}")
    call = call_with(HttpSettings(), template=begun)
    is_final = channel == "final"
    answer = "4" if is_final else f"Look it up.<|end|><|start|>assistant{FINAL}4"
    call.service.reply = lambda _: answer
    for more in ({}, {"tools": [TOOL]}, {"response_format": {"type": "json_object"}}):
        (choice,) = call("POST", CHAT, ASKED | more).body["choices"]
        message = choice["message"]
        assert (message["content"], message.get("reasoning", "")) == (
            *("4", "" if is_final else "Look it up."),
        )
    assert (call.service.job.grammar.kind == "json_object") == is_final
    messages = [*ASKED["messages"], {"role": "assistant", "content": "It is "}]
    asked = {**ASKED, "messages": messages, "continue_final_message": True}
    assert call("POST", CHAT, asked).status == (200 if is_final else 400)


def test_the_channels_may_be_left_in_the_text(call_with: Any) -> None:
    call = call_with(HttpSettings(), template=TEMPLATE, chats=ChatSettings(reasoning_parser="none"))
    call.service.reply = lambda _: THOUGHT + FINAL + "4"
    (choice,) = call("POST", CHAT, {**ASKED, "max_tokens": 100}).body["choices"]
    assert choice["message"]["content"] == THOUGHT + FINAL + "4"


def test_the_template_names_its_form_and_gets_reasoning_by_its_name() -> None:
    """I17, part: Phi's ends of turns are others' too."""
    assert (format_of(TEMPLATE), thinking_of(TEMPLATE)) == ("harmony", "harmony")
    assert thinking_of("<|user|>{{ m.content }}<|end|><|assistant|>") is None
    template = ChatTemplate(TEMPLATE)
    made = Message("assistant", "Plan.", "Thought.", (ToolCall("c", "f", "{}"),))
    text = template.render(Conversation((Message("user", "x"), made), [Function("f")])).text
    assert '<|message|>//  {"name": "f", "description": "", ' in text
    assert "<|channel|>analysis<|message|>Thought.\n\nPlan.<|end|>" in text
