"""POST /v1/chat/completions."""

from typing import Any

from mallee.actors.config import ChatSettings, HttpSettings

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


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
    room = 256 - len("<user>hi|<assistant>")
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
    both = {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}
    answer = call("POST", PATH, both)
    assert (answer.status, answer.body["error"]["param"]) == (400, "max_tokens")


def test_the_first_chunk_of_each_choice_names_the_role(call: Any) -> None:
    answer = call("POST", PATH, {"messages": MESSAGES, "n": 2, "stream": True})
    assert answer.events[-1] == "[DONE]"
    chunks = answer.events[:-1]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert {c["id"] for c in chunks} == {"req_0"}
    for index in (0, 1):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": "h"}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["delta"] == {}
        assert choices[-1]["mallee"]["worker"] == "w0"
        assert "".join(c["delta"].get("content", "") for c in choices) == f"hello {index}"


def test_an_answer_without_text_still_names_the_role(call: Any) -> None:
    call.service.reply = lambda _: ""
    (chunk, done) = call("POST", PATH, {"messages": MESSAGES, "stream": True}).events
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert done == "[DONE]"


def test_bad_messages_are_refused_by_the_template(call: Any) -> None:
    bad = [{"role": "x"}]
    for messages, param in ((None, "messages"), ([], "messages"), (bad, "messages[0].content")):
        answer = call("POST", PATH, {"messages": messages})
        assert (answer.status, answer.body["error"]["param"]) == (400, param)
