"""The capsule routes."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from mallee.gateway.requests.deltas import Delta
from support.plain_ids import SCOPES

CAPSULES = "/v1/capsules"
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
    assert job.limits.max_tokens == 256 - (32 + 20), (
        "with messages as a chat: what the window has left"
    )
    assert call("POST", FORK, {"suffixes": ["ab", ""]}).status == 200
    assert call.service.job.limits.max_tokens == 16, "without any as a completion"
    assert answer.body["usage"]["prompt_tokens"] == 32 + 2 + 3 + 20
    assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert [c["mallee"]["prefill_tokens"] for c in answer.body["choices"]] == [2, 3, 20, 0]


def test_a_fork_of_n_may_continue_the_beginning_of_a_capsule(call: Any) -> None:
    """F5, part: `at` names the boundary; the prompt is as long as that."""
    answer = call("POST", FORK, {"n": 4, "seed": 3, "max_tokens": 2, "at": 10})
    assert answer.status == 200
    assert [len(s) for s in call.service.job.suffixes] == [0] * 4
    assert (call.service.job.sampling.seed, call.service.job.at) == (3, 10)
    assert [c["text"] for c in answer.body["choices"]] == ["he"] * 4
    assert answer.body["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CAPSULES, {}, "prompt"),
        (CAPSULES, {"prompt": "a", "messages": MESSAGES}, "prompt"),
        (CAPSULES, {"prompt": ""}, "prompt"),
        (CAPSULES, {"prompt": ["a"]}, "prompt"),
        (CAPSULES, {"prompt": "a", "ttl_s": -1}, "ttl_s"),
        (CAPSULES, {"prompt": "a", "n": 2}, "n"),
        (CAPSULES, {"prompt": [1] * 257}, "prompt"),
        (FORK, {}, "suffixes"),
        (FORK, {"n": 2, "suffixes": ["a"]}, "suffixes"),
        (FORK, {"suffixes": []}, "suffixes"),
        (FORK, {"suffixes": "ab"}, "suffixes"),
        (FORK, {"suffixes": ["a"] * 129}, "suffixes"),
        (FORK, {"n": 0}, "n"),
        (FORK, {"n": 129}, "n"),
        (FORK, {"n": True}, "n"),
        (FORK, {"suffixes": [1, 2]}, "suffixes[0]"),
        (FORK, {"suffixes": ["a", None]}, "suffixes[1]"),
        (FORK, {"suffixes": ["a", [300]]}, "suffixes[1][0]"),
        (FORK, {"suffixes": [{"messages": MESSAGES, "x": 1}]}, "suffixes[0]"),
        (FORK, {"suffixes": [{"messages": []}]}, "suffixes[0].messages"),
        (FORK, {"suffixes": ["a", "b" * 300]}, "prompt"),
        (FORK, {"n": 1, "max_tokens": 225}, "prompt"),
        (FORK, {"n": 1, "at": 0}, "at"),
        (FORK, {"n": 1, "at": 33}, "at"),
        (FORK, {"n": 1, "at": "end"}, "at"),
    ],
)
def test_a_bad_request_names_its_field(call: Any, path: str, body: Any, param: str) -> None:
    answer = call("POST", path, body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    assert not call.service.streams
