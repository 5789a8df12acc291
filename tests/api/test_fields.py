"""Fields that standard clients always send: running usage, names of the model, answers that are begun."""

from typing import Any

import pytest

from mallee.runtime.config import HttpSettings

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
FORK, RESPONSES = "/v1/capsules/req_x.0/fork", "/v1/responses"
HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": HELLO},
    FORK: {"n": 1},
}


@pytest.mark.parametrize("path", BODIES)
def test_each_chunk_may_have_the_usage_so_far(call: Any, path: str) -> None:
    """I5, part: as vLLM, and as load generators ask for it; only where usage is asked for at all."""
    for asked in (
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": True, "continuous_usage_stats": False},
        {"continuous_usage_stats": True},
    ):
        body = {**BODIES[path], "max_tokens": 5, "stream": True, "stream_options": asked}
        *chunks, done = call("POST", path, body).events
        assert done == "[DONE]"
        if "include_usage" not in asked:
            assert not any("usage" in chunk for chunk in chunks)
            continue
        *parts, last = [chunk["usage"] for chunk in chunks]
        assert last["completion_tokens"] == 5
        if asked["continuous_usage_stats"]:
            assert [usage["completion_tokens"] for usage in parts] == [1, 2, 3, 4, 5]
            assert parts[-1] == last
        else:
            assert parts == [None] * 5


@pytest.mark.parametrize("path", [*BODIES, MESSAGES, RESPONSES])
def test_no_share_at_all_is_the_likeliest_token(call: Any, path: str) -> None:
    """I5, part: `top_p: 0`, which some harnesses send for greedy answers."""
    more: dict[str, Any] = {MESSAGES: {"messages": HELLO}, RESPONSES: {"input": "hi"}}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = {**BODIES.get(path, more.get(path, {})), limit: 3, "top_p": 0, "temperature": 0.7}
    if path == MESSAGES:
        body["model"] = "tiny/bytes"
    assert call("POST", path, body).status == 200
    sampling = call.service.job.sampling
    assert (sampling.top_k, sampling.top_p) == (1, 1.0)


def test_browsers_may_call_from_origins_that_are_set(call: Any, call_with: Any) -> None:
    """I5, part: a preflight, the answer, and refusals have the headers; by default none has."""
    ask = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    ask["access-control-request-headers"] = "content-type,authorization"
    assert "access-control-allow-origin" not in call("OPTIONS", CHAT, headers=ask).headers
    ours = call_with(HttpSettings(cors_origins=("http://localhost:3000",)))
    body = {**BODIES[CHAT], "max_tokens": 1}
    wrong = {**body, "max_tokens": 0}
    from_page = {"origin": "http://localhost:3000"}
    for answer, status in (
        (ours("OPTIONS", CHAT, headers=ask), 200),
        (ours("OPTIONS", MESSAGES, headers=ask), 200),
        (ours("POST", CHAT, body, headers=from_page), 200),
        (ours("POST", CHAT, wrong, headers=from_page), 400),
        (ours("POST", MESSAGES, {}, headers=from_page), 400),
    ):
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    other = ours("POST", CHAT, body, headers={"origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in other.headers
    every = call_with(HttpSettings(cors_origins=("*",)))
    assert (
        every("POST", CHAT, body, headers=from_page).headers["access-control-allow-origin"] == "*"
    )


def test_a_model_may_have_several_names(call_with: Any) -> None:
    """I5, part: all are listed, and each answer has the one that was asked for."""
    call = call_with(HttpSettings(), aliases=("gpt-4o", "claude-haiku-4-5"))
    names = [model["id"] for model in call("GET", "/v1/models").body["data"]]
    assert names == ["tiny/bytes", "gpt-4o", "claude-haiku-4-5"]
    assert call("GET", "/v1/models/gpt-4o").body["id"] == "gpt-4o"
    for name in names:
        for path, body in BODIES.items():
            answer = call("POST", path, {**body, "model": name, "max_tokens": 2}).body
            assert answer["model"] == name
            stream = {**body, "model": name, "max_tokens": 2, "stream": True}
            assert {e["model"] for e in call("POST", path, stream).events[:-1]} == {name}
        asked = {"model": name, "messages": HELLO, "max_tokens": 2}
        assert call("POST", MESSAGES, asked).body["model"] == name
        asked = {"model": name, "input": "hi", "max_output_tokens": 2, "store": False}
        assert call("POST", RESPONSES, asked).body["model"] == name
    assert call("POST", CHAT, BODIES[CHAT]).body["model"] == "tiny/bytes"
    unknown = call("POST", CHAT, {**BODIES[CHAT], "model": "gpt-5"})
    assert unknown.status == 404
    assert "claude-haiku-4-5" in unknown.body["error"]["message"]


def test_an_answer_may_be_begun_for_the_model(call: Any) -> None:
    """I5, part: vLLM's continue_final_message; the answer has what follows alone."""

    def prompt(**more: Any) -> str:
        answer = call("POST", CHAT, {"max_tokens": 3, **more})
        assert answer.status == 200, answer.body
        return bytes(call.service.job.tokens.tolist()).decode()

    begun = [*HELLO, {"role": "assistant", "content": "Sure, the"}]
    for more in ({}, {"add_generation_prompt": False}):
        text = prompt(messages=begun, continue_final_message=True, **more)
        assert text == "<user>hi|<assistant>Sure, the"
    assert prompt(messages=HELLO, add_generation_prompt=False) == "<user>hi|"
    assert prompt(messages=HELLO, add_generation_prompt=True) == "<user>hi|<assistant>"
    plain = prompt(messages=begun, continue_final_message=False)
    assert plain == "<user>hi|<assistant>Sure, the|<assistant>"
    for field, body in (
        ("add_generation_prompt", {"messages": begun, "add_generation_prompt": True}),
        ("continue_final_message", {"messages": HELLO}),
        (
            "continue_final_message",
            {"messages": begun, "chat_template_kwargs": {"enable_thinking": True}},
        ),
    ):
        answer = call("POST", CHAT, {**body, "continue_final_message": True, "max_tokens": 3})
        assert (answer.status, answer.body["error"]["param"]) == (400, field)


def test_reasoning_may_be_left_out(call: Any) -> None:
    """I5, part: vLLM's include_reasoning; `request_id` is accepted."""
    call.service.reply = lambda _: "<think>first</think>So be it."
    body = {**BODIES[CHAT], "max_tokens": 99, "request_id": "mine"}
    (shown,) = call("POST", CHAT, body).body["choices"]
    assert shown["message"]["reasoning"] == "first"
    (hidden,) = call("POST", CHAT, {**body, "include_reasoning": False}).body["choices"]
    assert "reasoning" not in hidden["message"]
    assert hidden["message"]["content"] == "So be it."
    chunks = call("POST", CHAT, {**body, "include_reasoning": False, "stream": True}).events[:-1]
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks)
