"""Refusals of requests and their messages."""

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mallee.gateway.access.access import Access
from mallee.gateway.access.keys import new_key
from mallee.protocol.api.capsules import CapsuleRequest
from mallee.protocol.api.generate import ChatRequest, CompletionRequest, ForkRequest
from mallee.protocol.api.shared import OTHERS_HARMLESS, OTHERS_NEUTRAL
from mallee.runtime.config import HttpSettings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def check_error(answer: Any, status: int, kind: str, param: str | None = None) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status == status, answer.body
    error = answer.body["error"]
    assert set(answer.body) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == kind
    assert isinstance(error["code"], str)
    assert error["param"] == param
    assert error["message"]
    return str(error["message"])


BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, True, "5", 1.5],
    "n": [0, 129, False],
    "temperature": [-0.1, 2.1, "hot", True],
    "top_p": [-0.1, 1.01],
    "top_k": [-2],
    "seed": [1 << 63, -(1 << 63) - 1, 10**400, "1"],
    "stop": ["", ["a"] * 17, 5],
    "ignore_eos": [1],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1, "much"],
    "logit_bias": [{"a": 1}, {"-1": 1}, {"300": 1}, {"5": 101}, [5]],
    "logprobs": [-1, 21, True],
    "min_tokens": [-1, 17],
    "include_stop_str_in_output": [1],
    "stream": ["yes"],
    "cache_salt": [5],
    "prompt_cache_key": [7],
    "model": [5],
    "stream_options": [True],
    "prompt": ["", [], 5, {"a": 1}, [1.5], [True], [1, "a"], ["a", [1]]],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in BAD for value in BAD[field]]
)
def test_a_bad_value_is_refused_with_its_field_named(call: Any, field: str, value: Any) -> None:
    """I17: unsupported values give a clear error."""
    answer = call("POST", COMPLETIONS, {"prompt": "abc", "max_tokens": 5, field: value})
    message = check_error(answer, 400, "invalid_request_error", field)
    assert field in message
    assert not call.service.streams


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 300]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [10**30]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [2, 300]]}, "prompt[1][1]"),
        ({"prompt": "a", "stop_token_ids": [0, 999]}, "stop_token_ids[1]"),
        ({"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids[0]"),
        ({"prompt": "a", "stop": ["x", 1]}, "stop[1]"),
        ({"prompt": "a", "stop": ["x", ""]}, "stop[1]"),
        ({"prompt": "a", "mallee": {"budget": {"tokens": 0}}}, "mallee.budget.tokens"),
        ({"prompt": "a", "mallee": {"stop_when": {"regex": ""}}}, "mallee.stop_when.regex"),
        ({"prompt": "a", "mallee": {"stop_when": {"regex": "a" * 600}}}, "mallee.stop_when.regex"),
        ({"prompt": "a", "mallee": {"stop_when": {"done": 0}}}, "mallee.stop_when.done"),
        (
            {"prompt": "a", "mallee": {"stop_when": {"logprob": {"below": 0.5}}}},
            "mallee.stop_when.logprob.below",
        ),
        (
            {"prompt": "a", "mallee": {"stop_when": {"logprob": {"below": -1, "tokens": 0}}}},
            "mallee.stop_when.logprob.tokens",
        ),
        ({}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_a_bad_element_is_refused_with_its_place_named(call: Any, body: Any, param: str) -> None:
    check_error(call("POST", COMPLETIONS, body), 400, "invalid_request_error", param)


@pytest.mark.slow
@pytest.mark.parametrize(
    "field", sorted(OTHERS_NEUTRAL.keys() - set(CompletionRequest.__struct_fields__))
)
def test_answer_changing_fields_pass_only_at_their_neutral_value(call: Any, field: str) -> None:
    """I17: an unsupported field gives a clear error, never a silently different answer."""
    answer = call("POST", COMPLETIONS, {"prompt": "a", field: ["something", "else"]})
    assert field in check_error(answer, 400, "invalid_request_error", field)
    for value in (None, *OTHERS_NEUTRAL[field]):
        assert call("POST", COMPLETIONS, {"prompt": "a", field: value}).status == 200
        if type(value) is int:  # 1 is no true
            answer = call("POST", COMPLETIONS, {"prompt": "a", field: True})
            check_error(answer, 400, "invalid_request_error", field)


@pytest.mark.parametrize("field", sorted(OTHERS_HARMLESS))
def test_harmless_fields_are_accepted(call: Any, field: str) -> None:
    assert call("POST", COMPLETIONS, {"prompt": "a", field: {"any": "thing"}}).status == 200


KINDS = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    "/v1/capsules": CapsuleRequest,
    "/v1/capsules/req_x.0/fork": ForkRequest,
}


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("temperature", 2.5, "give 0 to 2"),
        ("top_p", -0.1, "give 0 to 1"),
        ("repetition_penalty", 0, "give more than 0, up to 100"),
        ("max_tokens", 0, "give at least 1, or echo=true for the prompt alone"),
        ("max_tokens", -1, "give at least 0"),
        ("stop", ["a"] * 17, "give 1 or more characters, or 0 to 16 values"),
        ("stop_token_ids", [1] * 1025, "give 0 to 1024 values"),
        ("user", 5, "Expected `str`, got `int`"),
        ("logit_bias", {"5": 101}, "give -100 to 100"),
    ],
)
def test_a_refusal_says_the_range(call: Any, field: str, value: Any, remedy: str) -> None:
    """From the declaration of the field: its place, its value, and what may be given."""
    answer = call("POST", COMPLETIONS, {"prompt": "abc", field: value})
    message = check_error(answer, 400, "invalid_request_error", field)
    assert message.endswith(remedy)


@pytest.mark.parametrize(
    ("path", "body", "param", "remedy"),
    [
        (
            "/v1/responses",
            {"input": "hi", "metadata": {"k" * 65: "v"}},
            "metadata",
            "give 0 to 64 characters in each name",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call", "call_id": "", "name": "f"}]},
            "input[0].call_id",
            "'': give 1 or more characters",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}], "max_tokens": 4},
            "messages[0].content[0].type",
            "give text, or tool_result",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "a", "na`me": "b"}], "max_tokens": 4},
            "messages[0].na`me",
            "leave it out",
        ),
    ],
)
def test_a_refusal_is_of_the_kind_of_part_that_was_given(
    call: Any, path: str, body: Any, param: str, remedy: str
) -> None:
    """Not of others that could stand there."""
    answer = call("POST", path, body)
    assert answer.status == 400
    assert answer.body["error"]["param"] == param
    assert answer.body["error"]["message"].endswith(remedy)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 2), ("logprobs", True), ("stop", ["a"]), ("response_format", {"type": "json_object"})],
)
def test_fields_of_other_paths_that_would_change_an_answer_are_refused(
    call: Any, path: str, body: Any, field: str, value: Any
) -> None:
    """I17: as others' that aren't served."""
    answer = call("POST", path, {**body, field: value})
    assert answer.status == 400
    assert answer.body["error"]["param"] == field
    assert call("POST", path, {**body, field: OTHERS_NEUTRAL[field][0]}).status == 200


@pytest.mark.parametrize("path", KINDS)
def test_unknown_fields_are_refused_by_name_where_they_are_ours(call_with: Any, path: str) -> None:
    """Of Mallee's own paths and objects; of others' paths too, if the setting says so."""
    asked: list[tuple[dict[str, Any], str, str]] = [
        ({"max_token": 5}, "max_token", "max_token"),
        ({"mallee": {"prio": 1}}, "mallee.prio", "the nearest is `priority`"),
        ({"keep": True}, "keep", "it is `mallee.keep`"),
    ]
    if path != "/v1/capsules":  # which has no stream
        option = "stream_options.include_all"
        asked.append(({"stream_options": {"include_all": 1}}, option, "include_all"))
    for setting in ("ours", "all"):
        call = call_with(HttpSettings(strict=setting))
        for fields, param, name in asked:
            is_ours = path.startswith("/v1/capsules") or param == "mallee.prio"
            if setting == "ours" and not is_ours:
                continue
            answer = call("POST", path, fields)
            assert name in check_error(answer, 400, "invalid_request_error", param)


def test_unknown_fields_of_others_paths_are_ignored_and_named(call: Any) -> None:
    """The answer is that without them, whole or streamed; its header `warnings` names them."""
    unknown = {"max_token": 5, "foo\r\nbar": None, "über": {"a": 1}, "stream_options": {"more": 1}}
    body = {"prompt": "abc", "max_tokens": 5, "seed": 1, "stream": True}
    plain = call.raw("POST", COMPLETIONS, json=body)
    assert "warnings" not in plain.headers
    answer = call.raw("POST", COMPLETIONS, json={**body, **unknown})
    assert answer.status_code == 200
    told = answer.headers["warnings"]
    assert told == (
        "fields that this server does not know were ignored: 'max_token' (the nearest is `max_tokens`),"
        " '\\xfcber', 'stream_options.more'"
    )
    for kind, asked in (
        (CHAT, {"messages": MESSAGES}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/conversations", {"metadata": {"a": "b"}}),
        ("/tokenize", {"prompt": "a"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ):
        answer = call.raw("POST", kind, json={**asked, "a\nb": 1})
        assert answer.status_code == 200, answer.text
        assert "'a\\nb'" in answer.headers["warnings"]


def test_many_unknown_fields_are_named_in_part(call: Any) -> None:
    many = {f"field{i:03}{'x' * 60}": i for i in range(40)}
    answer = call.raw("POST", COMPLETIONS, json={"prompt": "a", **many})
    assert answer.status_code == 200
    told = answer.headers["warnings"]
    assert told.endswith(", and 24 more")
    assert len(told) < 4000


def test_what_does_not_fit_the_window_is_refused_with_all_numbers(call: Any) -> None:
    answer = call("POST", COMPLETIONS, {"prompt": [1] * 200, "max_tokens": 57})
    message = check_error(answer, 400, "invalid_request_error", "prompt")
    assert answer.body["error"]["code"] == "context_length_exceeded"
    assert "200" in message
    assert "57" in message
    assert "257 > 256" in message
    assert call("POST", COMPLETIONS, {"prompt": [1] * 200, "max_tokens": 56}).status == 200
    for path, body in (
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1 << 70}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 400}]}),
    ):
        check_error(call("POST", path, body), 400, "invalid_request_error", "prompt")


def test_another_model_is_not_found(call: Any) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = call("POST", path, {**body, "model": "gpt-9"})
        check_error(answer, 404, "not_found_error", "model")
        assert answer.body["error"]["code"] == "model_not_found"


def test_unknown_paths_and_methods_have_the_shape_too(call: Any) -> None:
    check_error(call("GET", "/v2/nothing"), 404, "not_found_error")
    check_error(call("POST", "/v1/completions/", {"prompt": "a"}), 404, "not_found_error")
    for name in ("{model:path}", "a/b", "{model}"):
        check_error(call("GET", f"/v1/models/{name}"), 404, "not_found_error", "model")
    check_error(call("GET", "/v1/responses/{response}"), 404, "not_found_error")
    answer = call("GET", COMPLETIONS)
    check_error(answer, 405, "invalid_request_error")
    assert answer.headers["allow"] == "POST"


def test_a_bug_is_500_with_an_id_and_no_detail(call: Any, caplog: pytest.LogCaptureFixture) -> None:
    call.service.refuses = ZeroDivisionError("secret detail")
    for stream in (False, True):
        answer = call("POST", COMPLETIONS, {"prompt": "a", "stream": stream})
        message = check_error(answer, 500, "server_error")
        assert "err_1" in message
        assert "secret" not in message
    assert "request err_1 failed" in caplog.text


def test_at_debug_each_request_has_a_line_with_its_status_and_the_id_of_a_proxy(
    call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "mallee.api")
    asked: list[tuple[str, str, str]] = [
        ("POST", COMPLETIONS, "4f1c:a.b_c-D"),
        ("GET", "/v1/models/zzz", ""),
        ("GET", "/v2/its-secret", 'a "quoted" one'),
        ("PUT", COMPLETIONS, "x" * 129),
    ]
    for method, path, name in asked:
        body = {"prompt": "a", "stream": True} if method == "POST" else None
        call(method, path, body, headers={"x-request-id": name} if name else {})
    lines = [re.sub(r"in [\d.]+ s", "in T", each) for each in caplog.messages if " in 0." in each]
    assert lines == [
        "POST /v1/completions 200 in T, x-request-id 4f1c:a.b_c-D",
        "GET /v1/models/{model:path} 404 in T",
        "GET other 404 in T",
        "PUT /v1/completions 405 in T",
    ]


def test_without_the_key_everything_but_health_is_401(
    call_with: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    key = "s3cret-key-of-24-letters"
    call = call_with(HttpSettings(), Access(None, {"MALLEE_API_KEY": key}))
    bad: list[dict[str, str]] = [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer s3cret-key-of-24-letterz"},
        {"authorization": f"Basic {key}"},
        {"authorization": key},
    ]
    for headers in bad:
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", CHAT)):
            answer = call(method, path, headers=headers)
            assert "s3cret" not in check_error(answer, 401, "invalid_request_error")
            assert answer.headers["www-authenticate"] == "Bearer"
    assert call("GET", "/health").body == {"status": "ok"}
    for path in ("/health/live", "/health/ready"):
        for headers in bad:  # a probe that sends a wrong key is answered too
            assert call("GET", path, headers=headers).status == 200
    good = {"authorization": f"Bearer {key}"}
    assert set(call("GET", "/health", headers=good).body) > {"status"}
    assert call("GET", "/v1/models", headers=good).status == 200
    assert call("POST", COMPLETIONS, {"prompt": "a"}, headers=good).status == 200
    assert "s3cret" not in caplog.text


def test_more_than_a_key_may_ever_have_is_refused_for_good(
    call_with: Callable[..., Any], tmp_path: Path
) -> None:
    """No later moment is a better one, and the answer doesn't say that it is; what fits may owe the rest."""
    key, file = new_key("alice", "client", None), tmp_path / "keys.yaml"
    limits = {"max_branches": 4, "max_capsule_tokens": 3, "tokens_per_minute": 5}
    file.write_text(yaml.safe_dump({"keys": [{**key.entry, **limits}]}))
    call = call_with(HttpSettings(), Access(file, {}))
    headers = {"authorization": f"Bearer {key.token}"}
    for path, body, needed in (
        (COMPLETIONS, {"prompt": "a", "n": 8}, "8 branches at once"),
        ("/v1/capsules", {"prompt": "abcd"}, "5 tokens in capsules"),
    ):
        answer = call("POST", path, body, headers=headers)
        assert answer.body["error"]["code"] == "quota_too_small"
        assert needed in check_error(answer, 400, "invalid_request_error")
        assert "retry-after" not in answer.headers
    answer = call("POST", COMPLETIONS, {"prompt": "a" * 20, "n": 4}, headers=headers)
    assert answer.status == 200  # of more tokens than a minute's: they are owed
    again = call("POST", COMPLETIONS, {"prompt": "a"}, headers=headers)
    assert (again.status, again.body["error"]["code"]) == (429, "quota_exceeded")
    assert int(again.headers["retry-after"]) >= 1


async def test_long_prompts_are_tokenized_beside_the_event_loop(
    call_with: Callable[[HttpSettings], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health answers while a long prompt is being tokenized."""
    monkeypatch.setattr("mallee.api.entry.asking.INLINE_BODY_BYTES", 10)
    call = call_with(HttpSettings())
    begun, may_end = threading.Event(), threading.Event()

    def encode(*_: Any, **__: Any) -> list[int]:
        begun.set()
        assert may_end.wait(5)
        return [1]

    monkeypatch.setattr(call.tokenizer, "encode", encode)

    async with call.client() as client:
        long = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "abcdefgh"}))
        assert await asyncio.to_thread(begun.wait, 5)
        health = await client.get("/health")
        may_end.set()
        assert (health.status_code, (await long).status_code) == (200, 200)
