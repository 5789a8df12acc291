"""POST /v1/completions, whole and streamed; the ends of branches in every kind of stream."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mallee.gateway.requests.deltas import Delta
from mallee.protocol.errors import PoolExhausted, QueueFull, WorkerLost

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
FORK = "/v1/capsules/req_x.0/fork"
MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_completion_has_openai_s_shape_and_our_extras(call: Any) -> None:
    """I17: usage counters; worker, capsule and hit length are named."""
    answer = call("POST", PATH, {"model": "tiny/bytes", "prompt": "abcdefgh"})
    assert answer.status == 200
    assert answer.headers["x-mallee-worker"] == "w0"
    assert answer.body == {
        "id": "req_0",
        "object": "text_completion",
        "created": 1_760_000_005,
        "model": "tiny/bytes",
        "choices": [
            {
                "index": 0,
                "text": "hello 0",
                "logprobs": None,
                "finish_reason": "stop",
                "mallee": {
                    "worker": "w0",
                    "capsule": "req_0.0",
                    "boundary": 8,
                    "cached_tokens": 4,
                    "prefill_tokens": 5,
                    "completion_tokens": 8,
                    "weight_version": {"start": "base", "end": "base"},
                },
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 8,
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert call.service.streams[0].num_closes == 1


def test_a_failing_prompt_fails_the_list_and_cancels_the_rest(
    call: Any, failed: Callable[..., Delta]
) -> None:
    async def script(stream: Any) -> AsyncIterator[Delta]:
        if stream.request == "req_1":
            raise QueueFull(9, 9)
        async for delta in call.service.plain(stream):
            yield delta

    call.service.script = script
    call.service.holds_after = 2
    answer = call("POST", PATH, {"prompt": ["aa", "bb"]})
    assert answer.status == 429
    assert [s.num_closes for s in call.service.streams] == [1, 1]


def test_chunks_without_text_are_not_sent_but_the_last(call: Any) -> None:
    call.service.reply = lambda _: "aé€🌳"
    events = call("POST", PATH, {"prompt": "abc", "stream": True}).events[:-1]
    texts = [e["choices"][0]["text"] for e in events]
    assert texts == ["a", "é", "€", "🌳", ""]


def test_a_stop_string_in_the_last_delta_leaves_no_capsule_beyond_it(call: Any) -> None:
    """F28, part: no state that is ahead of the text the client saw."""
    call.service.reply = lambda _: "one STOP"
    answer = call("POST", PATH, {"prompt": "abc", "stop": "STOP", "max_tokens": 8})
    (choice,) = answer.body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    start = len(call.service.job.tokens)
    assert (choice["mallee"]["capsule"], choice["mallee"]["boundary"]) == ("req_0.0", start + 4)
    assert call.service.streams[0].cuts == {0: (start + 4, [])}


def test_an_unexpected_error_after_the_first_byte_tells_an_id_only(
    call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(_: Any) -> AsyncIterator[Delta]:
        yield Delta(0, (97,), None, 0, 3, None, 1, None)
        raise ZeroDivisionError("secret detail")

    call.service.script = script
    _, error = call("POST", PATH, {"prompt": "abc", "stream": True}).events
    assert error["error"]["type"] == "server_error"
    assert "err_1" in error["error"]["message"]
    assert "secret" not in str(error)
    assert "err_1" in caplog.text


# Each branch of a stream has exactly one end, however it ends.

ASKED: list[tuple[str, dict[str, Any]]] = [
    (PATH, {"prompt": "abc", "n": 3}),
    (PATH, {"prompt": ["abc", "de", "f"]}),
    (PATH, {"prompt": [[1, 2, 3], [4, 5], [6]]}),
    (CHAT, {"messages": MESSAGES, "n": 3}),
    (FORK, {"n": 3}),
]
OBJECTS = {PATH: "text_completion", CHAT: "chat.completion.chunk", FORK: "capsule.fork.chunk"}
every_stream = pytest.mark.parametrize(("path", "body"), ASKED)


def ends(events: list[Any]) -> dict[int, str]:
    """The reasons of all branches; no branch has two, and nothing of one comes after its end."""
    found: dict[int, str] = {}
    for event in events:
        if event == "[DONE]":
            continue
        if "error" in event:
            assert event is events[-1]
            for index in event["mallee"]["unfinished"]:
                assert index not in found
                found[index] = event["error"]["code"]
            continue
        for choice in event["choices"]:
            assert choice["index"] not in found
            if choice["finish_reason"] is not None:
                found[choice["index"]] = choice["finish_reason"]
                assert choice["mallee"].keys() >= {"capsule", "completion_tokens", "cached_tokens"}
            else:
                assert "mallee" not in choice
    return found


@every_stream
def test_branches_end_by_stop_and_by_length(call: Any, path: str, body: dict[str, Any]) -> None:
    """I17: with the capsule and the usage of each; exactly one terminal event."""
    for more, reason, num in [({}, "stop", 8), ({"max_tokens": 3}, "length", 3)]:
        answer = call("POST", path, {**body, "stream": True, **more})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-mallee-worker"] == "w0"
        events = answer.events
        assert ends(events) == dict.fromkeys(range(3), reason)
        assert (events[-1], events.count("[DONE]")) == ("[DONE]", 1)
        assert not any("usage" in event for event in events[:-1])
        assert all(stream.num_closes == 1 for stream in call.service.streams)
        assert {event["object"] for event in events[:-1]} == {OBJECTS[path]}
        told = [c["mallee"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
        assert [each["completion_tokens"] for each in told] == [num] * 3
        assert len({each["capsule"] for each in told}) == 3


def test_the_tokens_of_branches_add_up_to_the_usage(call: Any) -> None:
    call.service.reply = lambda branch: "x" * (branch + 1) + "STOP more"
    body = {"prompt": "abc", "n": 3, "stop": "STOP"}
    answer = call("POST", PATH, body).body
    tokens = [choice["mallee"]["completion_tokens"] for choice in answer["choices"]]
    assert tokens == [5, 6, 7]
    assert sum(tokens) == answer["usage"]["completion_tokens"]
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = call("POST", PATH, streamed).events
    assert ends(events) == dict.fromkeys(range(3), "stop")
    assert (events[-2]["choices"], events[-2]["usage"]["completion_tokens"]) == ([], sum(tokens))
    assert all(event["usage"] is None for event in events[:-2])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 6])
@pytest.mark.parametrize("lost", [(0,), (2,), (0, 1), (0, 1, 2)])
def test_branches_that_fail_end_each_once(
    call: Any, failed: Callable[..., Delta], lost: tuple[int, ...], after: int, stream: bool
) -> None:
    """I17: those of a worker that is lost for good, before their first token or in the middle; others go on.

    If all fail before the first byte it is an HTTP error, later one event and no [DONE].
    """

    async def script(source: Any) -> AsyncIterator[Delta]:
        num = 0
        async for delta in call.service.plain(source):
            if num == after:
                for branch in lost:
                    yield failed(branch, WorkerLost("w0", "test"))
            num += 1
            if num <= after or delta.branch not in lost:
                yield delta

    call.service.script = script
    answer = call("POST", PATH, {"prompt": "abc", "n": 3, "stream": stream})
    assert call.service.streams[0].num_closes == 1
    if len(lost) == 3 and not (stream and after):
        assert (answer.status, answer.body["error"]["code"]) == (503, "worker_lost")
        return
    assert answer.status == 200
    parts = answer.events if stream else [answer.body]
    choices = [c for each in parts if each != "[DONE]" for c in each.get("choices", ())]
    found = {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"]}
    errors = [c["mallee"]["error"]["code"] for c in choices if c["finish_reason"] == "error"]
    assert set(errors) <= {"worker_lost"}
    if stream:
        found = ends(answer.events)
        assert (answer.events[-1] == "[DONE]") == (len(lost) < 3)
        if len(lost) == 3:
            assert answer.events[-1]["error"]["type"] == "service_unavailable_error"
    assert found.keys() == {0, 1, 2}
    for index, reason in found.items():
        assert reason in (("error", "worker_lost") if index in lost else ("stop",))
        if index not in lost:
            text = "".join(c["text"] for c in choices if c["index"] == index)
            assert text == f"hello {index}"


def test_an_error_of_the_whole_stream_ends_the_branches_that_are_left(call: Any) -> None:
    async def script(stream: Any) -> AsyncIterator[Delta]:
        async for delta in call.service.plain(stream):
            if delta.branch == 1 and delta.boundary > 3:
                continue
            yield delta
        raise PoolExhausted(3, 1, 9)

    call.service.script = script
    call.service.reply = lambda branch: "hi" if branch == 2 else "hello"
    events = call("POST", PATH, {"prompt": "abc", "n": 3, "stream": True}).events
    assert ends(events) == {0: "stop", 1: "pool_exhausted", 2: "stop"}
