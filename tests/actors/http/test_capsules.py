"""The capsule routes."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mallee.actors.gateway.service import Delta
from mallee.protocol.errors import PoolExhausted
from support.plain_ids import SCOPES

FORK = "/v1/capsules/req_x.0/fork"
MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_capsule_is_made_of_a_prompt(call: Any) -> None:
    body = {"model": "tiny/bytes", "prompt": "abcdefg", "ttl_s": 5, "cache_salt": "t"}
    answer = call("POST", "/v1/capsules", body)
    assert answer.status == 200
    assert answer.headers["x-mallee-worker"] == "w0"
    assert answer.body == {
        "id": f"{call.service.streams[0].request}.0",
        "object": "capsule",
        "created": 1_760_000_005,
        "model": "tiny/bytes",
        "worker": "w0",
        "tokens": 8,
        "status": "ready",
        "prefill_tokens": 4,
        "cached_tokens": 4,
        "ttl_s": 5.0,
        "usage": {
            "prompt_tokens": 8,
            "completion_tokens": 0,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert (call.service.job.ttl_s, call.service.job.scope) == (5.0, SCOPES.scope("", "t"))
    assert call.service.streams[0].num_closes == 1


def test_a_capsule_of_messages_leaves_the_answer_open_unless_asked(call: Any) -> None:
    call("POST", "/v1/capsules", {"messages": MESSAGES})
    assert bytes(call.service.job.tokens.tolist()) == b"<user>hi|"
    assert call.service.job.ttl_s == 3600.0
    call("POST", "/v1/capsules", {"messages": MESSAGES, "add_generation_prompt": True})
    assert bytes(call.service.job.tokens.tolist()) == b"<user>hi|<assistant>"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "ttl_s": -1}, "ttl_s"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": [1] * 257}, "prompt"),
    ],
)
def test_a_bad_capsule_request_names_its_field(call: Any, body: Any, param: str) -> None:
    answer = call("POST", "/v1/capsules", body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


def test_a_prefill_that_fails_is_an_http_error(call: Any, failed: Callable[..., Delta]) -> None:
    async def script(_: Any) -> AsyncIterator[Delta]:
        yield failed(0, PoolExhausted(3, 1, 9))

    call.service.script = script
    answer = call("POST", "/v1/capsules", {"prompt": "a"})
    assert (answer.status, answer.body["error"]["code"]) == (503, "pool_exhausted")


def test_a_prefill_that_keeps_no_capsule_is_not_called_one(call: Any) -> None:
    async def script(_: Any) -> AsyncIterator[Delta]:
        yield Delta(0, (), "stop", 0, 1, None, 1, None)

    call.service.script = script
    answer = call("POST", "/v1/capsules", {"prompt": "a"})
    assert answer.status == 503
    assert answer.headers["x-should-retry"] == "false"  # it would be computed again


def test_a_capsule_can_be_looked_at_and_forgotten(call: Any) -> None:
    """A deleted capsule is unknown afterwards."""
    path = "/v1/capsules/req_x.0"
    assert call("GET", path).body == {
        "id": "req_x.0",
        "object": "capsule",
        "created": 7,
        "model": "tiny/bytes",
        "worker": "w0",
        "tokens": 32,
        "status": "ready",
    }
    deleted = {"id": "req_x.0", "object": "capsule.deleted", "deleted": True}
    assert call("DELETE", path).body == deleted
    for method, where in (("GET", path), ("DELETE", path), ("POST", FORK)):
        answer = call(method, where, {"n": 1} if method == "POST" else None)
        assert (answer.status, answer.body["error"]["code"]) == (404, "capsule_not_found")
        assert answer.body["error"]["type"] == "not_found_error"


def test_a_fork_takes_strings_ids_and_messages(call: Any) -> None:
    answer = call("POST", FORK, {"suffixes": ["ab", [1, 2, 3], {"messages": MESSAGES}, ""]})
    assert answer.status == 200
    assert answer.body["object"] == "capsule.fork"
    assert [c["text"] for c in answer.body["choices"]] == [f"hello {b}" for b in range(4)]
    job = call.service.job
    assert [s.tolist() for s in job.suffixes] == [
        [97, 98],
        [1, 2, 3],
        list(b"<user>hi|<assistant>"),
        [],
    ]
    assert job.limits.max_tokens == 16
    assert answer.body["usage"]["prompt_tokens"] == 32 + 2 + 3 + 20
    assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert [c["mallee"]["prefill_tokens"] for c in answer.body["choices"]] == [2, 3, 20, 0]


def test_a_fork_of_n_samples_the_capsule_s_own_next_token(call: Any) -> None:
    answer = call("POST", FORK, {"n": 4, "seed": 3, "max_tokens": 2})
    assert [len(s) for s in call.service.job.suffixes] == [0] * 4
    assert call.service.job.sampling.seed == 3
    assert [c["text"] for c in answer.body["choices"]] == ["he"] * 4


def test_a_fork_may_continue_the_beginning_of_a_capsule(call: Any) -> None:
    """F5, part: `at` names the boundary; the prompt is as long as that and the suffix."""
    answer = call("POST", FORK, {"suffixes": ["ab"], "at": 10})
    assert answer.status == 200
    assert call.service.job.at == 10
    assert answer.body["usage"]["prompt_tokens"] == 10 + 2


def test_a_forked_stream_is_multiplexed_by_index(call: Any) -> None:
    body = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    answer = call("POST", FORK, body)
    chunks = answer.events[:-2]
    assert [c["choices"][0]["index"] for c in chunks[:4]] == [0, 1, 0, 1]
    assert {c["object"] for c in answer.events[:-1]} == {"capsule.fork.chunk"}
    assert answer.events[-2]["choices"] == []
    assert answer.events[-1] == "[DONE]"
    last = chunks[-1]["choices"][0]
    assert last == {
        "index": 1,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "mallee": {
            "worker": "w0",
            "capsule": "req_0.1",
            "boundary": 8,
            "cached_tokens": 32,
            "prefill_tokens": 0,
            "completion_tokens": 8,
            "weight_version": {"start": "base", "end": "base"},
        },
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "suffixes"),
        ({"n": 2, "suffixes": ["a"]}, "suffixes"),
        ({"suffixes": []}, "suffixes"),
        ({"suffixes": "ab"}, "suffixes"),
        ({"suffixes": ["a"] * 129}, "suffixes"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"suffixes": [1, 2]}, "suffixes[0]"),
        ({"suffixes": ["a", None]}, "suffixes[1]"),
        ({"suffixes": ["a", [300]]}, "suffixes[1][0]"),
        ({"suffixes": [{"messages": MESSAGES, "x": 1}]}, "suffixes[0]"),
        ({"suffixes": [{"messages": []}]}, "suffixes[0].messages"),
        ({"suffixes": ["a", "b" * 300]}, "prompt"),
        ({"n": 1, "max_tokens": 225}, "prompt"),
        ({"n": 1, "at": 0}, "at"),
        ({"n": 1, "at": 33}, "at"),
        ({"n": 1, "at": "end"}, "at"),
    ],
)
def test_a_bad_fork_names_its_field(call: Any, body: Any, param: str) -> None:
    answer = call("POST", FORK, body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    assert not call.service.streams
