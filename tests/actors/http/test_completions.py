"""POST /v1/completions, whole and streamed."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mallee.actors.gateway.service import Delta
from mallee.protocol.errors import PoolExhausted, QueueFull, WorkerLost
from support.plain_ids import SCOPES

PATH = "/v1/completions"


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


def test_n_is_one_job_whose_prompt_counts_once(call: Any) -> None:
    answer = call("POST", PATH, {"prompt": "abcdefgh", "n": 3, "max_tokens": 4})
    assert [c["text"] for c in answer.body["choices"]] == ["hell"] * 3
    assert [c["index"] for c in answer.body["choices"]] == [0, 1, 2]
    assert [c["finish_reason"] for c in answer.body["choices"]] == ["length"] * 3
    assert answer.body["usage"]["prompt_tokens"] == 9
    assert answer.body["usage"]["completion_tokens"] == 12
    assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert len(call.service.streams) == 1
    assert call.service.job.n == 3


@pytest.mark.parametrize("prompt", [["aa", "bb"], [[1, 2, 3], [4, 5, 6]]])
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_a_list_are_jobs_and_choices_are_numbered_through(
    call: Any, prompt: list[Any], stream: bool
) -> None:
    answer = call("POST", PATH, {"prompt": prompt, "n": 2, "stream": stream})
    assert len(call.service.streams) == 2
    texts = ["hello 0", "hello 1", "hello 0", "hello 1"]
    if stream:
        assert _texts(answer.events, 4) == texts
        assert answer.events[-1] == "[DONE]"
    else:
        assert [c["text"] for c in answer.body["choices"]] == texts
        assert answer.body["usage"]["prompt_tokens"] == 6
    assert [s.num_closes for s in call.service.streams] == [1, 1]


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


def test_token_ids_go_to_the_service_as_they_are(call: Any) -> None:
    call("POST", PATH, {"prompt": [1, 2, 299]})
    assert call.service.job.tokens.tolist() == [1, 2, 299]


def test_sampling_and_limits_reach_the_job(call: Any) -> None:
    body = {
        "prompt": "x",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": -1,
        "max_tokens": 3,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "cache_salt": "tenant",
    }
    assert call("POST", PATH, body).status == 200
    job = call.service.job
    assert (job.sampling.temperature, job.sampling.top_p, job.sampling.top_k) == (0.5, 0.9, 7)
    assert job.sampling.seed == (1 << 64) - 1
    assert job.limits.max_tokens == 3
    assert job.limits.stop_token_ids == (5,)
    assert job.limits.ignore_eos
    assert job.scope == SCOPES.scope("", "tenant")


def test_defaults_are_openai_s_and_a_seed_is_drawn(call: Any) -> None:
    call("POST", PATH, {"prompt": "x", "seed": None, "logprobs": None})
    job = call.service.job
    assert (job.sampling.temperature, job.limits.max_tokens, job.n) == (1.0, 16, 1)
    assert job.sampling.seed == 1000
    call("POST", PATH, {"prompt": "x"})
    assert call.service.job.sampling.seed == 1001


def test_a_stream_ends_with_one_terminal_event(call: Any) -> None:
    """I17: exactly one terminal event; each choice has exactly one last chunk."""
    body = {"prompt": "abcdefgh", "n": 2, "stream": True}
    answer = call("POST", PATH, body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-mallee-worker"] == "w0"
    assert answer.events.count("[DONE]") == 1
    assert answer.events[-1] == "[DONE]"
    chunks = answer.events[:-1]
    assert all(c["object"] == "text_completion" and "usage" not in c for c in chunks)
    assert _texts(answer.events, 2) == ["hello 0", "hello 1"]
    last = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
    assert [c["mallee"]["capsule"] for c in last] == ["req_0.0", "req_0.1"]
    assert [c["mallee"]["prefill_tokens"] for c in last] == [5, 0]
    assert all("mallee" not in c["choices"][0] for c in chunks if c["choices"][0] not in last)


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(call: Any) -> None:
    body = {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}}
    events = call("POST", PATH, body).events
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 8
    assert all(e["usage"] is None for e in events[:-2])


def test_chunks_without_text_are_not_sent_but_the_last(call: Any) -> None:
    call.service.reply = lambda _: "aé€🌳"
    events = call("POST", PATH, {"prompt": "abc", "stream": True}).events[:-1]
    texts = [e["choices"][0]["text"] for e in events]
    assert texts == ["a", "é", "€", "🌳", ""]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_its_capsule(call: Any, stream: bool) -> None:
    """F28, part: the branch ends, and its capsule is of the text that the client saw."""
    call.service.reply = lambda branch: ("one STOP two", "one two")[branch]
    body = {"prompt": "abc", "n": 2, "stop": ["STOP", "never"], "stream": stream}
    answer = call("POST", PATH, body)
    if stream:
        assert _texts(answer.events, 2) == ["one ", "one two"]
        ends = [e["choices"][0] for e in answer.events[:-1] if e["choices"][0]["finish_reason"]]
    else:
        assert [c["text"] for c in answer.body["choices"]] == ["one ", "one two"]
        ends = answer.body["choices"]
    assert {c["index"]: c["finish_reason"] for c in ends} == {0: "stop", 1: "stop"}
    assert {c["index"]: c["mallee"]["capsule"] for c in ends} == {0: "req_0.0", 1: "req_0.1"}
    start = len(call.service.job.tokens)
    assert {c["index"]: c["mallee"]["boundary"] for c in ends} == {0: start + 4, 1: 8}
    assert call.service.streams[0].cuts == {0: (start + 4, [])}


def test_a_stop_string_in_the_last_delta_leaves_no_capsule_beyond_it(call: Any) -> None:
    """F28, part: no state that is ahead of the text the client saw."""
    call.service.reply = lambda _: "one STOP"
    answer = call("POST", PATH, {"prompt": "abc", "stop": "STOP", "max_tokens": 8})
    (choice,) = answer.body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    start = len(call.service.job.tokens)
    assert (choice["mallee"]["capsule"], choice["mallee"]["boundary"]) == ("req_0.0", start + 4)
    assert call.service.streams[0].cuts == {0: (start + 4, [])}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_failing_as_a_whole_before_the_first_byte_is_an_http_error(
    call: Any, failed: Callable[..., Delta], stream: bool, n: int
) -> None:
    async def script(_: Any) -> AsyncIterator[Delta]:
        for branch in range(n):
            yield failed(branch, WorkerLost("w0", "it died"))

    call.service.script = script
    answer = call("POST", PATH, {"prompt": "abc", "n": n, "stream": stream})
    assert (answer.status, answer.body["error"]["code"]) == (503, "worker_lost")
    assert call.service.streams[0].num_closes == 1


def test_an_error_after_the_first_byte_is_one_event_and_no_done(
    call: Any, failed: Callable[..., Delta]
) -> None:
    """I17: error event mid-stream."""

    async def script(_: Any) -> AsyncIterator[Delta]:
        yield Delta(0, (97,), None, 0, 3, None, 1, None)
        yield failed(0, WorkerLost("w0", "it died"))

    call.service.script = script
    answer = call("POST", PATH, {"prompt": "abc", "stream": True})
    assert answer.status == 200
    first, error = answer.events
    assert first["choices"][0]["text"] == "a"
    assert error["error"]["code"] == "worker_lost"
    assert error["error"]["type"] == "service_unavailable_error"


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_branch_that_fails_alone_leaves_the_others_going(
    call: Any, failed: Callable[..., Delta], stream: bool
) -> None:
    async def script(s: Any) -> AsyncIterator[Delta]:
        yield failed(1, PoolExhausted(3, 1, 9))
        async for delta in call.service.plain(s):
            if delta.branch != 1:
                yield delta

    call.service.script = script
    answer = call("POST", PATH, {"prompt": "abc", "n": 3, "stream": stream})
    assert answer.status == 200
    if stream:
        assert answer.events[-1] == "[DONE]"
        ends = [e["choices"][0] for e in answer.events[:-1] if e["choices"][0]["finish_reason"]]
        assert _texts(answer.events, 3) == ["hello 0", "", "hello 2"]
    else:
        ends = answer.body["choices"]
    reasons = {c["index"]: c["finish_reason"] for c in ends}
    assert reasons == {0: "stop", 1: "error", 2: "stop"}
    error = next(c for c in ends if c["index"] == 1)["mallee"]["error"]
    assert error["code"] == "pool_exhausted"


def test_a_stream_that_ends_too_early_is_an_error_not_a_short_answer(call: Any) -> None:
    async def script(_: Any) -> AsyncIterator[Delta]:
        yield Delta(0, (97,), None, 0, 3, None, 1, None)

    call.service.script = script
    assert call("POST", PATH, {"prompt": "abc"}).status == 500


def _texts(events: list[Any], n: int) -> list[str]:
    texts = [""] * n
    for event in events:
        if event != "[DONE]" and event["choices"]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    return texts
