"""POST /v1/chat/completions over scripted answers: shapes, tools and their choice, reasoning."""

import random
from typing import Any

import pytest
from msgspec import structs

from mallee.runtime.config import ChatSettings, HttpSettings
from support.tool_answers import WRITERS, recorded

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "get_weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Åbo"}}\n</tool_call>'
ASKED = {"messages": MESSAGES, "tools": [tool()], "max_tokens": 200}


@pytest.fixture
def call_with(call_with: Any, service: Any) -> Any:
    service.model = structs.replace(service.model, max_model_len=4096)
    return call_with


@pytest.fixture
def call(call_with: Any) -> Any:
    return call_with(HttpSettings())


def assembled(events: list[Any]) -> dict[int, dict[str, Any]]:
    """The message of each choice as clients put it together from chunks, and its end."""
    found: dict[int, dict[str, Any]] = {}
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = dict(choice["delta"])
            made = found.setdefault(choice["index"], {"content": None, "tool_calls": []})
            assert ("role" in delta) == ("role" not in made)
            made |= {k: v for k, v in delta.items() if k == "role"}
            for name in ("content", "reasoning_content", "reasoning"):
                if delta.get(name) is not None:
                    made[name] = (made.get(name) or "") + delta[name]
            for part in delta.get("tool_calls", ()):
                calls = made["tool_calls"]
                if "id" in part:
                    assert part["index"] == len(calls)
                    calls.append({k: v for k, v in part.items() if k != "index"})
                else:
                    assert part["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            made["finish"] = choice["finish_reason"]
    return found


def test_a_chat_answer_has_openai_s_shape(call: Any) -> None:
    """I17: chat."""
    answer = call("POST", PATH, {"model": "tiny/bytes", "messages": MESSAGES})
    assert answer.status == 200
    assert answer.headers["x-mallee-worker"] == "w0"
    assert answer.body["object"] == "chat.completion"
    (choice,) = answer.body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello 0", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["mallee"]["capsule"] == "req_0.0"
    prompt = b"<user>hi|<assistant>"
    assert call.service.job.tokens.tolist() == list(prompt)
    assert answer.body["usage"]["prompt_tokens"] == len(prompt)


def test_without_a_limit_the_setting_s_counts_as_far_as_the_window_goes(call_with: Any) -> None:
    """I17: chat without `max_tokens` ends."""
    room = 4096 - len("<user>hi|<assistant>")
    for chats, wanted in (
        (ChatSettings(), room),
        (ChatSettings(max_tokens=40), 40),
        (ChatSettings(max_tokens=None), room),
    ):
        call = call_with(HttpSettings(), chats=chats)
        call("POST", PATH, {"messages": MESSAGES})
        assert call.service.job.limits.max_tokens == wanted


def test_both_names_of_the_token_limit_are_understood(call: Any) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        call("POST", PATH, {"messages": MESSAGES, field: 3})
        assert call.service.job.limits.max_tokens == 3
    messages = '[{"role": "user", "content": "hi"}]'
    for one, other in (("3", "4"), ("9" * 4300, "8" * 4300)):
        both = f'"max_tokens": {one}, "max_completion_tokens": {other}'
        answer = call.raw("POST", PATH, content=f'{{"messages": {messages}, {both}}}'.encode())
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "max_tokens")
        assert len(error["message"]) < 300


def test_an_answer_without_text_still_names_the_role(call: Any) -> None:
    call.service.reply = lambda _: ""
    (chunk, done) = call("POST", PATH, {"messages": MESSAGES, "stream": True}).events
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert done == "[DONE]"


def test_a_call_is_a_call_and_not_text(call: Any) -> None:
    """I17: tools in chat: the call's message, its id and its finish reason."""
    call.service.reply = lambda _: f"Let me see.\n{CALL}"
    answer = call("POST", PATH, ASKED)
    assert answer.status == 200, answer.body
    (choice,) = answer.body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["role"]) == ("Let me see.", "assistant")
    (made,) = message["tool_calls"]
    assert made["id"].startswith("call_")
    assert made["type"] == "function"
    assert made["function"] == {"name": "get_weather", "arguments": '{"city": "Åbo"}'}
    prompt = bytes(call.service.job.tokens.tolist()).decode()
    assert '<tool>{"type": "function", "function": {"name": "get_weather"' in prompt
    assert call.service.job.grammar is None  # free to call or not


@pytest.mark.parametrize("number", range(12))
def test_a_stream_adds_up_to_the_whole_for_every_choice(call: Any, number: int) -> None:
    """I17: streaming deltas of text and calls, choices interleaved, one token a delta."""
    call.service.reply = lambda branch: recorded("hermes", number + branch).raw
    asked = {**ASKED, "tools": [tool("search"), tool("run-it"), tool()], "n": 3, "max_tokens": 2000}
    whole = call("POST", PATH, asked).body["choices"]
    stream = assembled(call("POST", PATH, {**asked, "stream": True}).events)
    for choice in whole:
        message, made = choice["message"], stream[choice["index"]]
        assert made["finish"] == choice["finish_reason"]
        assert (made["content"] or "") == (message["content"] or "")
        calls = message.get("tool_calls", [])
        assert [each["function"] for each in made["tool_calls"]] == [c["function"] for c in calls]
        assert [c["function"]["name"] for c in calls] == [
            c.name for c in recorded("hermes", number + choice["index"]).calls
        ]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


def test_ids_of_calls_are_all_different(call: Any) -> None:
    call.service.reply = lambda _: f"{CALL}\n{CALL}"
    ids = [
        made["id"]
        for _ in range(2)
        for choice in call("POST", PATH, {**ASKED, "n": 2}).body["choices"]
        for made in choice["message"]["tool_calls"]
    ]
    assert len(set(ids)) == len(ids) == 8


@pytest.mark.parametrize("more", [{"max_tokens": 59}, {"stop": ["Å"]}])
def test_what_breaks_off_in_its_arguments_is_a_call_as_far_as_it_came(call: Any, more: Any) -> None:
    """I17, part: as OpenAI's API, whole and streamed; sent back, it is read as a broken call's text."""
    call.service.reply = lambda _: CALL
    (choice,) = call("POST", PATH, ASKED | more).body["choices"]
    assert choice["finish_reason"] == ("length" if "max_tokens" in more else "tool_calls")
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "get_weather", "arguments": '{"city": "'}
    streamed = assembled(call("POST", PATH, {**ASKED, **more, "stream": True}).events)[0]
    assert [each["function"] for each in streamed["tool_calls"]] == [made["function"]]
    assert streamed["finish"] == choice["finish_reason"]
    result = {"role": "tool", "tool_call_id": made["id"], "content": "It broke off."}
    again = ASKED | {"messages": [*MESSAGES, choice["message"], result]}
    assert call("POST", PATH, again).status == 200
    assert (
        r'{"INVALID_JSON": "{\"city\": \""}'
        in call.service.job.tokens.astype("u1").tobytes().decode()
    )


def test_tools_that_must_not_be_called_leave_the_text_as_it_is(call: Any) -> None:
    call.service.reply = lambda _: CALL
    (choice,) = call("POST", PATH, {**ASKED, "tool_choice": "none"}).body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    unasked = call("POST", PATH, {"messages": MESSAGES, "max_tokens": 200}).body["choices"][0]
    assert unasked["message"]["content"] == CALL


@pytest.mark.parametrize("family", WRITERS)
def test_a_call_under_way_shows_signs_of_life_with_its_chances(call_with: Any, family: str) -> None:
    """I17, part: its chunks are empty, and each has the chances of the tokens that came with it."""
    call = call_with(HttpSettings(), chats=ChatSettings(tool_parser=family))
    raw = WRITERS[family](random.Random(4), [("search", {"city": "x" * 300})])
    call.service.reply = lambda _: raw
    asked = {**ASKED, "tools": [tool("search")], "max_tokens": 1000, "logprobs": True}
    choices = [e["choices"][0] for e in call("POST", PATH, {**asked, "stream": True}).events[:-1]]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert choices[0]["delta"]["content"] is None
    assert len(choices) > 300
    assert sum(len(choice["logprobs"]["content"]) for choice in choices) == len(raw.encode()) + 1
    assert max(len(choice["logprobs"]["content"]) for choice in choices) < 40
    whole = call("POST", PATH, asked).body["choices"][0]
    assert whole["message"]["content"] is None, "a call alone has none"
    streamed = [each for choice in choices for each in choice["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]


def test_reasoning_has_a_field_of_its_own(call: Any) -> None:
    """I17: reasoning apart from the answer, whole and streamed, under both names."""
    call.service.reply = lambda _: f"<think>\nfirst\n\nthen\n</think>\n\nSo be it. {CALL}"
    (choice,) = call("POST", PATH, ASKED).body["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "first\n\nthen"
    assert message["content"] == "So be it."
    assert choice["finish_reason"] == "tool_calls"
    made = assembled(call("POST", PATH, {**ASKED, "stream": True}).events)[0]
    assert made["reasoning_content"] == made["reasoning"] == "first\n\nthen"
    assert made["content"] == "So be it."
    assert len(made["tool_calls"]) == 1


def test_a_template_that_opens_the_reasoning_is_told_from_its_prompt(call: Any) -> None:
    call.service.reply = lambda _: "hm\n</think>\nyes"
    asked = {"messages": MESSAGES, "max_tokens": 50}
    closed = call("POST", PATH, asked).body["choices"][0]["message"]
    assert (closed["content"], "reasoning" in closed) == ("hm\n</think>\nyes", False)
    for more in ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "low"}):
        message = call("POST", PATH, asked | more).body["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("yes", "hm")
    off = call("POST", PATH, asked | {"reasoning_effort": "none"})
    assert not call.service.job.tokens.tobytes().endswith(b"<think>")
    assert off.status == 200


def test_reasoning_may_be_left_in_the_text(call_with: Any) -> None:
    call = call_with(HttpSettings(), chats=ChatSettings(reasoning_parser="none"))
    call.service.reply = lambda _: "<think>a</think>b"
    message = call("POST", PATH, {"messages": MESSAGES}).body["choices"][0]["message"]
    assert message["content"] == "<think>a</think>b"


def test_a_form_is_that_of_what_follows_the_reasoning(call: Any) -> None:
    """I16, part, I17, part: reasoning in its field, streamed too, then the JSON; also of Anthropic's."""
    call.service.reply = lambda _: 'I say "{".\n</think>\n\n{"a": 1}'
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    asked = {"messages": MESSAGES, "max_tokens": 50, "response_format": form}
    message = call("POST", PATH, asked | on).body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ('I say "{".', '{"a": 1}')
    made = assembled(call("POST", PATH, {**asked, **on, "stream": True}).events)[0]
    assert (made["reasoning_content"], made["content"]) == ('I say "{".', '{"a": 1}')
    assert call.service.job.grammar.kind == "lark"
    assert call.service.job.grammar.source.startswith("start: thoughts gap (form)")
    call.service.reply = lambda _: '{"a": 1}'
    closed = call("POST", PATH, asked).body["choices"][0]["message"]
    assert (closed["content"], "reasoning" in closed) == ('{"a": 1}', False)


def test_a_named_function_is_called_once_and_ends_as_openai_s(call: Any) -> None:
    """I17, part: one call, whatever `parallel_tool_calls` says; its reason is "stop", of "required" not."""
    call.service.reply = lambda _: CALL
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, reason in ((named, "stop"), ("required", "tool_calls")):
        asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": True}
        (whole,) = call("POST", PATH, asked).body["choices"]
        made = assembled(call("POST", PATH, {**asked, "stream": True}).events)[0]
        assert whole["finish_reason"] == made["finish"] == reason
        assert len(whole["message"]["tool_calls"]) == len(made["tool_calls"]) == 1
        several = '("\\n"' in call.service.job.grammar.source or "call)*" in (
            call.service.job.grammar.source
        )
        assert several == (choice == "required")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"chat_template_kwargs": {"enable_thought": 1}}, "chat_template_kwargs.enable_thought"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ],
)
def test_what_can_t_be_is_refused_by_name(call: Any, more: Any, param: str) -> None:
    answer = call("POST", PATH, ASKED | more)
    assert answer.status == 400, answer.body
    assert answer.body["error"]["param"] == param


def test_a_capsule_of_a_conversation_with_tools_is_the_chat_s_prefix(call: Any) -> None:
    """F31, part: what was prefilled is the beginning of the chat's prompt."""
    asked = {k: ASKED[k] for k in ("messages", "tools")}
    call("POST", "/v1/capsules", asked)
    prefix = call.service.job.tokens.tolist()
    call("POST", PATH, ASKED)
    assert call.service.job.tokens.tolist()[: len(prefix)] == prefix


def test_ids_of_the_model_s_own_are_kept_once(call_with: Any) -> None:
    """Kimi's template writes them again; a second call with the same one has a new id."""
    call = call_with(HttpSettings(), chats=ChatSettings(tool_parser="kimi_k2"))
    argued = '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
    call.service.reply = lambda _: f"<|tool_call_begin|>functions.get_weather:0{argued}" * 2
    (whole,) = call("POST", PATH, ASKED).body["choices"]
    first, second = (each["id"] for each in whole["message"]["tool_calls"])
    assert first == "functions.get_weather:0"
    assert second.startswith("call_")
