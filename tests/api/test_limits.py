"""Limits of requests: each is checked before anything is computed, and its refusal has the numbers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from mallee.api import answers
from mallee.api.entry import middleware
from mallee.api.entry.decoding import LEAST_VALUES, MAX_DEPTH
from mallee.api.serve import LOGPROBS_COST, TURN_TOKENS
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.conversation import MAX_MESSAGES, Conversation, Message
from mallee.protocol.errors import MAX_SHOWN, InvalidParameter, shown
from mallee.runtime.config import AppConfig, HttpSettings
from support.waiting import elapse

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CAPSULES, FORK = "/v1/capsules", "/v1/capsules/req_x.0/fork"
ROUTES = (COMPLETIONS, CHAT, CAPSULES, FORK)


@pytest.fixture
def roomy(call_with: Callable[[HttpSettings], Any]) -> Any:
    """Bodies may have their default size."""
    return call_with(HttpSettings())


def refusal(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status == status, answer.body
    error: dict[str, Any] = answer.body["error"]
    return error


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("stop", ["x" * 2000] * 3, "4096"),
        ("stop", ["x"] * 17, "16"),
        ("stop_token_ids", [1] * 1025, "1024"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "1024"),
        ("cache_salt", "s" * 257, "256"),
        ("prompt_cache_key", "k" * 257, "256"),
        ("messages", [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1), str(MAX_MESSAGES)),
        ("guided_regex", "a" * (64 * 1024 + 1), "65536"),
        ("guided_choice", ["a" * 35_000, "b" * 35_000], "65536"),
        ("mallee", {"session": "s" * 129}, "128"),
    ],
)
def test_a_field_over_its_limit_is_refused_with_the_limit(
    roomy: Any, field: str, value: Any, limit: str
) -> None:
    """F30, part: stop strings, ids, biases, salts, cache keys, grammars, sessions and messages."""
    path, body = (CHAT, {}) if field == "messages" else (COMPLETIONS, {"prompt": "a"})
    error = refusal(roomy("POST", path, {**body, field: value}))
    assert limit in error["message"]
    assert len(error["message"]) < 300
    assert not roomy.service.streams


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "field",
    ["prompt", "messages", "suffixes", "tools", "guided_json", "response_format", "nvext", "zzz"],
)
@pytest.mark.parametrize("depth", [MAX_DEPTH - 3, MAX_DEPTH + 1, 400, 900, 100_000])
def test_nesting_is_bounded_wherever_it_stands(
    roomy: Any, route: str, field: str, depth: int
) -> None:
    """F30, part: deep JSON is the client's error, also where recursive code would read it."""
    inner = b"[" * depth + b"]" * depth
    if field == "guided_json":
        inner = b'{"a":' * depth + b"1" + b"}" * depth
    raw = b'{"prompt": "a", "' + field.encode() + b'": ' + inner + b"}"
    answer = roomy.raw("POST", route, content=raw)
    assert answer.status_code in (200, 400)
    if depth > MAX_DEPTH:
        assert str(MAX_DEPTH) in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [200, 900, 5_000, 100_000])
def test_nesting_is_bounded_inside_of_texts_that_are_read(roomy: Any, depth: int) -> None:
    """F30, part: the arguments of calls, and schemas."""
    text = '{"a":' * depth + "{}" + "}" * depth
    function = {"name": "f", "arguments": text}
    answered = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    messages: list[Any] = [{"role": "user", "content": "a"}]
    error = refusal(roomy("POST", CHAT, {"messages": [*messages, answered]}))
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": messages, "tools": tools, "guided_json": text}
    assert roomy("POST", CHAT, body).status in (200, 400)


UNKNOWN = (b'{"prompt": "a", "\\u0000": 1}', b'{"prompt": "a", "' + b"x" * 2000 + b'": 1}')


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "a",}',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"[1]",
        b'"x"',
        b"null",
        b'{"temperature": 1e999, "prompt": "a"}',
        b"[" * 3000,
        b'{"a":' * 800,
        b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}",
        b'{"prompt": [' + b"9" * 400 + b"]}",
        b'{"prompt": "a", "max_tokens": -' + b"9" * 400 + b"}",
        b'{"prompt": "a", "seed": 1e400}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'\xff\xfe{\x00"\x00',
        b'{"prompt": "\\udc80"}',
        *UNKNOWN,
        b'{"prompt": "a", "mallee": {"' + b"`y" * 1000 + b'": 1}}',
        b'{"prompt": "a", "model": "' + b"m" * 2000 + b'"}',
        b'{"prompt": {"a": "' + b"secret" * 500 + b'"}}',
        b'{"prompt": "a", "logit_bias": {"' + b"1" * 3000 + b'": 1}}',
    ],
)
def test_hostile_values_are_refused_and_hardly_echoed(roomy: Any, raw: bytes) -> None:
    """I17, F30, part: malformed JSON and bad UTF-8 are the client's error; little of a value is repeated."""
    path = "/v1/capsules" if raw in UNKNOWN else COMPLETIONS
    answer = roomy.raw("POST", path, content=raw)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert len(error["message"]) < 400
    assert len(error["param"] or "") <= MAX_SHOWN


LARGE = 3 << 20


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("value", [b"1", b"[]", b"{}", b'"a"', b'"\\""', b"null", b'{"a":1}'])
def test_a_body_of_too_many_values_is_413(roomy: Any, route: str, value: bytes) -> None:
    """F30, part: to decode them would stop every other request, also in another thread."""
    num = LEAST_VALUES + 1
    for field in (b"prompt", b"nvext"):
        raw = b'{"' + field + b'": [' + b",".join([value] * num) + b"]}"
        answer = roomy.raw("POST", route, content=raw)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert str(LEAST_VALUES) in answer.json()["error"]["message"]
    half = b'{"zzz": [' + b",".join([value] * (num // 5)) + b"]}"
    assert roomy.raw("POST", route, content=half).status_code == 400


@pytest.mark.parametrize("route", ROUTES)
def test_a_body_of_too_many_names_is_413(roomy: Any, route: str) -> None:
    names = json.dumps({"metadata": {str(i): 1 for i in range(LEAST_VALUES // 2)}})
    assert roomy.raw("POST", route, content=names.encode()).status_code == 413


@pytest.mark.parametrize("text", ["a, b [c] {d}: ", '\\", [{" ', "\\\\", '"', "7", ',"\\'])
def test_a_text_is_one_value_whatever_it_says(roomy: Any, text: str) -> None:
    body = {"prompt": "[{" * 20, "metadata": [text * (LARGE // len(text)), "b"]}
    assert roomy.raw("POST", COMPLETIONS, content=json.dumps(body).encode()).status_code == 200


def test_long_numbers_of_a_large_body_are_refused(roomy: Any) -> None:
    """F30, part: reading one takes the square of its length."""
    raw = b'{"prompt": "a", "nvext": [' + (b"9" * 4300 + b",") * 100 + b"1]}"
    answer = roomy.raw("POST", COMPLETIONS, content=raw)
    assert answer.status_code == 400
    assert "256 digits" in answer.json()["error"]["message"]


def test_a_prompt_of_the_window_is_read_whatever_the_limit(call_with: Any, service: Any) -> None:
    """The limit of values grows with the model's window."""
    service.model = msgspec.structs.replace(service.model, max_model_len=2 * LEAST_VALUES)
    call = call_with(HttpSettings())
    ids = [7] * (2 * LEAST_VALUES - 1)
    assert call("POST", COMPLETIONS, {"prompt": ids, "max_tokens": 1}).status == 200
    too_many = call("POST", COMPLETIONS, {"prompt": [7, 7, *ids], "max_tokens": 1})
    assert refusal(too_many)["code"] == "context_length_exceeded"


COUNTS = ("max_tokens", "min_tokens", "n", "seed", "top_k")
NUMBERS = {
    COMPLETIONS: (
        *(*COUNTS, "logprobs", "temperature", "top_p", "min_p", "repetition_penalty", "best_of"),
        *("presence_penalty", "frequency_penalty", "prompt", "stop_token_ids", "logit_bias"),
        *("nvext", "mallee", "prompt_logprobs"),
    ),
    CHAT: (*COUNTS, "max_completion_tokens", "top_logprobs"),
    CAPSULES: ("prompt", "ttl_s", "mallee"),
    FORK: (*COUNTS, "at", "logprobs", "suffixes"),
}
SHAPES = {
    "prompt": "[%s]",
    "stop_token_ids": "[%s]",
    "suffixes": "[[%s]]",
    "logit_bias": '{"1": %s}',
    "nvext": '{"agent_hints": {"priority": %s}}',
}


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("digits", [19, 20, 400, 4299, 4300, 5000])
@pytest.mark.parametrize("sign", ["", "-"])
def test_numbers_of_any_length_are_the_clients_fault(
    roomy: Any, route: str, digits: int, sign: str
) -> None:
    """F30, part: also beyond those that Python writes out, also where they are added up."""
    number = sign + "9" * digits
    base = {CHAT: '"messages": [{"role": "user", "content": "a"}], "logprobs": true'}
    base |= {FORK: '"n": 1', COMPLETIONS: '"prompt": "a"', CAPSULES: '"prompt": "a"'}
    for field in NUMBERS[route]:
        inners = ("priority", "deadline_s", "weight") if field == "mallee" else ("",)
        for inner in inners:
            value = SHAPES.get(field, "%s") % number
            value = f'{{"{inner}": {value}}}' if inner else value
            head = "" if field in base[route] else base[route] + ", "
            raw = f'{{{head}"{field}": {value}}}'
            answer = roomy.raw("POST", route, content=raw.encode())
            assert answer.status_code in (200, 400), (field, inner, answer.text)
            if answer.status_code == 400:
                assert len(answer.json()["error"]["message"]) < 500
            if field in ("max_tokens", "max_completion_tokens", "min_tokens", "n", "at"):
                assert answer.status_code == 400, field


def test_names_in_paths_are_hardly_echoed(call: Any) -> None:
    for path in ("/v1/capsules/" + "c" * 5000, "/v9/" + "p" * 5000, "/v1/models/" + "m" * 5000):
        answer = call("GET", path)
        assert len(refusal(answer, 404)["message"]) < 300


def test_values_are_shown_in_short_time_however_long_they_are() -> None:
    for value in (10**100_000, nested(200), "x" * 10**6, [[1] * 1000] * 1000, {"k": "v" * 10**6}):
        assert len(shown(value)) <= MAX_SHOWN
    assert shown({"a": [1, "b", True, None]}) == "{'a': [1, 'b', True, None]}"


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "x" * 500])
def test_a_compressed_body_is_415(call: Any, encoding: str) -> None:
    """F30, part: not unpacked, so it is no bomb."""
    answer = call("POST", COMPLETIONS, {"prompt": "a"}, headers={"content-encoding": encoding})
    error = refusal(answer, 415)
    assert error["code"] == "unsupported_content_encoding"
    assert len(error["message"]) < 200
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "a" * 300])
def test_the_content_type_is_not_looked_at(call: Any, kind: str) -> None:
    """`curl -d` says that a body is a form. The last of two equal keys counts."""
    headers = {"content-type": kind}
    raw = b'{"prompt": "a", "n": 999, "n": 1}'
    answer = call.raw("POST", COMPLETIONS, content=raw, headers=headers)
    assert answer.status_code == 200


def test_a_slow_body_that_keeps_its_rate_is_read(roomy: Any) -> None:
    """All of it takes longer than a body that brings nothing may."""

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(2 * int(middleware.BODY_S)):
            yield b" " * middleware.MIN_BODY_RATE
            await elapse(1)
        yield b'{"prompt":"abcd"}'

    assert roomy.raw("POST", COMPLETIONS, content=slow()).status_code == 200


def test_an_answer_of_too_many_logprobs_has_to_be_streamed(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F30, part."""
    monkeypatch.setattr(answers, "MAX_CHANCES", 40)
    body = {"prompt": "a", "n": 3, "logprobs": 2}
    error = refusal(call("POST", COMPLETIONS, body))
    assert (error["code"], error["param"]) == ("answer_too_large", "logprobs")
    assert call.service.streams[-1].num_closes == 1
    assert call("POST", COMPLETIONS, {**body, "stream": True}).status == 200
    assert call("POST", COMPLETIONS, {**body, "n": 1}).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_large_answer_leaves_turns_to_other_requests(
    roomy: Any, path: str, *, stream: bool, logprobs: bool
) -> None:
    """F30, part: however many tokens wait, with log-probabilities fewer at once."""
    roomy.service.reply = lambda branch: "x" * 1000
    body: dict[str, Any] = {"max_tokens": 200, "n": 128, "stream": stream}
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": "a"}], "logprobs": logprobs}
    else:
        body |= {"prompt": "a", "logprobs": 2 if logprobs else None}
    num_turns = 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def both() -> Any:
        turning = asyncio.create_task(turn())
        answer = await roomy._send("POST", path, json=body)
        turning.cancel()
        return answer

    assert asyncio.run(both()).status_code == 200
    cost = LOGPROBS_COST if logprobs else 1
    assert num_turns > 128 * 200 * cost // TURN_TOKENS


@pytest.mark.parametrize("ttl_s", [0, 86_401, 1e30])
def test_no_capsule_is_kept_for_ever_unless_the_operator_says_so(
    call_with: Callable[[HttpSettings], Any], ttl_s: float
) -> None:
    """F30, part: a time to live is bounded, and has a default."""
    call = call_with(HttpSettings())
    error = refusal(call("POST", CAPSULES, {"prompt": "a", "ttl_s": ttl_s}))
    assert error["param"] == "ttl_s"
    assert "86400" in error["message"]
    call = call_with(HttpSettings(max_ttl_s=None, default_ttl_s=7))
    assert call("POST", CAPSULES, {"prompt": "a"}).body["ttl_s"] == 7
    answer = call("POST", CAPSULES, {"prompt": "a", "ttl_s": 0})
    assert answer.body["ttl_s"] is None
    assert call.service.job.ttl_s == 0


def test_the_default_time_to_live_is_not_above_the_longest() -> None:
    with pytest.raises(ValueError, match=r"default_ttl_s=3600 > max_ttl_s=60"):
        AppConfig.model_validate({"model": "m", "http": {"max_ttl_s": 60}})


def test_a_chat_template_repeats_little_of_a_message() -> None:
    """Templates refuse with texts of their own, in which a role may stand."""
    template = ChatTemplate("{{ raise_exception('Unexpected role ' + messages[0].role) }}")
    with pytest.raises(InvalidParameter) as refused:
        template.render(Conversation([Message("r" * 10_000, "a")]))
    assert "Unexpected role" in refused.value.message
    assert len(refused.value.message) < 300
