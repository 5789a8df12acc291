"""The normal form of conversations, read from OpenAI's messages; lines at their head that change."""

import json
from typing import Any

import msgspec
import pytest

from mallee.api.text.conversation import (
    MAX_LEVELS,
    Function,
    Message,
    read_functions,
    read_messages,
    sound_arguments,
)
from mallee.api.text.heads import MAX_CLIENTS, Head, Heads
from mallee.protocol.errors import InvalidParameter

HI: list[Any] = [{"role": "user", "content": "hi"}]


def call(**function: Any) -> list[Any]:
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
    ]


def tool(**function: Any) -> list[Any]:
    return [{"type": "function", "function": function}]


def test_an_answer_of_ours_is_a_message_of_the_next_turn() -> None:
    """I17, part: clients send the answer's message back as it came, with fields that mean nothing."""
    sent = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]}
    answer, found = read_messages([sent, result])
    assert answer == Message("assistant", "", "hm", answer.tool_calls)
    assert answer.tool_calls[0] == ("c1", "f", '{"a":1}')
    assert found == Message("tool", "4", tool_call_id="c1", name="f")
    # LiteLLM's fields, Anthropic's marks of the cache, and assistants that said nothing.
    added = {
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
        "audio": None,
        "function_call": None,
        "cache_control": {"type": "ephemeral"},
    }
    assert read_messages([{"role": "assistant", "content": "a", **added}])[0].text == "a"
    assert read_messages([{"role": "assistant", "content": None}]) == (Message("assistant"),)
    (refused,) = read_messages([{"role": "assistant", "content": None, "refusal": "no"}])
    assert refused == Message("assistant", "no")
    parts = [{"type": "refusal", "refusal": "no"}]
    assert read_messages([{"role": "assistant", "content": parts}]) == (refused,)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    assert read_messages([{"role": "user", "content": parts}])[0].text == "a\nb"


@pytest.mark.parametrize("arguments", ["", "{}", None, {}])
def test_no_arguments_may_be_written_in_several_ways(arguments: Any) -> None:
    (message,) = read_messages(call(name="f", arguments=arguments))
    assert message.tool_calls[0].arguments == "{}"


@pytest.mark.parametrize("depth", [MAX_LEVELS, 900, 100_000])
def test_arguments_of_too_many_levels_are_refused_by_name(depth: int) -> None:
    """F30, part: they are walked recursively, also where they come as a text."""
    text = '{"a":' * depth + "{}" + "}" * depth
    with pytest.raises(InvalidParameter, match=rf"arguments.*{MAX_LEVELS} levels"):
        read_messages(call(name="f", arguments=text))
    fits = '{"a":' * (MAX_LEVELS - 1) + "[]" + "}" * (MAX_LEVELS - 1)
    assert read_messages(call(name="f", arguments=fits))[0].tool_calls[0].arguments == fits


def test_halves_of_surrogate_pairs_in_arguments_are_replaced() -> None:
    """I17, part: answers may have them, as escapes, and no tokenizer takes them."""
    text = r"""{"a": "\ud83d", "\ude00": ["\ud83d\ude00", "\ud83dx\ude00"]}"""
    (message,) = read_messages(call(name="f", arguments=text))
    arguments = message.tool_calls[0].arguments
    assert json.loads(arguments.encode()) == {
        "a": "\ufffd",
        "\ufffd": ["\U0001f600", "\ufffdx\ufffd"],
    }
    kept = r"""{"a":  "\ud83d\ude00"}"""
    assert read_messages(call(name="f", arguments=kept))[0].tool_calls[0].arguments == kept


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages="),
        ("hi", "messages="),
        ([*HI, 3], r"messages\[1\]="),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": "x", "refusal": "no"}], r"messages\[0\]\.refusal"),
        ([{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "user", "content": "x", "images": [1]}], r"messages\[0\]\.images"),
        ([{"role": "user", "content": "x", "function_call": {"name": "f"}}], "function_call"),
        ([{"role": "user", "content": "x", "name": 3}], r"messages\[0\]\.name=3: give a string"),
        (
            [*HI, *call(name="f", arguments=[1])],
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments",
        ),
        (call(name="f", arguments=True), r"arguments=True: give the text of a JSON object"),
        (call(name="f", arguments=3), r"tool_calls\[0\]\.function\.arguments=3"),
        (call(name="", arguments="{}"), r"tool_calls\[0\]\.function\.name"),
        ([{"role": "assistant", "tool_calls": [{"id": 1}]}], r"tool_calls\[0\]\.function="),
        ([{"role": "assistant", "tool_calls": {}}], r"tool_calls=\{\}: give a list"),
        (
            [{"role": "user", "content": "", "tool_calls": call(name="f")[0]["tool_calls"]}],
            "assistant",
        ),
        ([{"role": "user", "content": "", "tool_call_id": "c"}], r"role of results is tool"),
    ],
)
def test_bad_messages_are_refused_by_place(messages: object, named: str) -> None:
    with pytest.raises(InvalidParameter, match=named):
        read_messages(messages)


def test_functions_are_read() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = tool(name="f", description="d", parameters=schema, strict=True) + tool(name="g")
    assert read_functions(tools) == (Function("f", "d", schema, True), Function("g"))
    assert read_functions(None) == read_functions([]) == ()


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        ({}, "tools="),
        ([3], r"tools\[0\]=3"),
        ([{"type": "web_search"}], r"tools\[0\]="),
        ([{"type": "function"}], r"tools\[0\]\.function="),
        (tool(name="a b"), r"tools\[0\]\.function\.name='a b': give 1 to 128 letters"),
        (tool(name="f", parameters="{}"), r"tools\[0\]\.function\.parameters"),
        (tool(name="f", strict="yes"), r"tools\[0\]\.function\.strict"),
        (tool(name="f") * 2, r"tools\[1\]\.function\.name='f': give each function once"),
        (tool(name="f") * 600, "tools=600: give at most 512"),
    ],
)
def test_bad_tools_are_refused_by_place(tools: object, named: str) -> None:
    with pytest.raises(InvalidParameter, match=named):
        read_functions(tools)


def test_half_of_a_pair_in_a_model_s_own_call_breaks_no_answer() -> None:
    """It comes back as U+FFFD, in answers as objects and in the prompts of what follows."""
    for text in (r'{"a\ud83d": "\udfffx \ud83d\ude00"}', r'{"a": "\ud83d'):
        sound = sound_arguments(text)
        assert msgspec.json.decode(msgspec.json.encode(json.loads(sound))) == json.loads(sound)
    assert sound_arguments(r'{"a\ud83d": 1}') == '{"a\ufffd": 1}'
    whole = r'{"a": "\ud83d\ude00 \\ud83d"}'
    assert sound_arguments(whole) == whole


REST = "You are an agent that repairs code.\nAnswer in few words, and run the tests before you do."


def asked(head: str, *, rest: str = REST) -> tuple[Message, ...]:
    return Message("system", f"{head}\n{rest}"), Message("user", "Fix it.")


def test_a_line_that_changes_is_found_by_comparing() -> None:
    heads = Heads(moves=False)
    assert heads.settle(asked("Date: Monday"), "a") == Head(asked("Date: Monday"))
    assert heads.settle(asked("Date: Monday"), "a").changed == ""
    assert heads.settle(asked("Date: Friday"), "b").changed == ""  # of another client
    found = heads.settle(asked("Date: Tuesday"), "a")
    assert found == Head(asked("Date: Tuesday"), "Date: Tuesday")
    assert heads.settle(asked("Date: Tuesday"), "a").changed == ""


@pytest.mark.parametrize("text", ["other", "Date: x\nshort", f"Date: x\n{REST}\nmore"])
def test_another_prompt_is_no_change_of_a_line(text: str) -> None:
    heads = Heads(moves=True)
    heads.settle(asked("Date: Monday"), "a")
    given = (Message("system", text), Message("user", "hi"))
    assert heads.settle(given, "a") == Head(given)


def test_a_line_that_has_changed_once_moves_from_then_on() -> None:
    heads = Heads(moves=True)
    heads.settle(asked("Date: Monday"), "a")
    for _ in range(2):
        found = heads.settle(asked("Date: Tuesday"), "a")
        assert found == Head((Message("system", REST), Message("user", "Fix it.\n\nDate: Tuesday")))


def test_a_count_is_no_turn() -> None:
    heads = Heads(moves=False)
    heads.settle(asked("Date: Monday"), "a")
    for _ in range(2):
        assert heads.settle(asked("Date: Tuesday"), "a", remembers=False).changed
    assert heads.settle(asked("Date: Tuesday"), "a").changed


def test_clients_are_bounded() -> None:
    heads = Heads(moves=False)
    heads.settle(asked("Date: Monday"), "first")
    for i in range(MAX_CLIENTS):
        heads.settle(asked("Date: Monday"), f"{i}")
    assert heads.settle(asked("Date: Tuesday"), "first").changed == ""
