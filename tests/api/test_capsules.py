"""The capsule routes, and many operations on them in one request."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mallee.gateway.access.access import Access
from mallee.gateway.requests.deltas import Delta
from mallee.runtime.config import HttpSettings
from support.plain_ids import SCOPES
from support.waiting import until

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
    assert job.limits.max_tokens == 16
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


BATCH = "/v1/batch"


def op(method: str, path: str, **more: Any) -> dict[str, Any]:
    return {"method": method, "path": path, **more}


def test_each_operation_has_the_answer_that_it_has_alone(call: Any) -> None:
    """In the order of the operations; some fail and the others don't."""
    made = [call("POST", "/v1/capsules", {"prompt": text}).body["id"] for text in ("a", "b")]
    operations = [
        op("POST", FORK, body={"n": 2, "seed": 1}),
        op("GET", "/v1/capsules/req_x.0"),
        op("GET", "/v1/capsules/never"),
        op("POST", FORK, body={"n": 0}),
        op("POST", "/v1/capsules", body={"prompt": "abc"}),
        op("GET", "/v1/requests/never"),
        op("POST", "/v1/capsules/req_x.0/nothing"),
        *(op("DELETE", f"/v1/capsules/{capsule}") for capsule in (*made, "never")),
    ]
    answer = call("POST", BATCH, {"operations": operations})
    assert answer.status == 200
    assert (answer.body["object"], answer.body["failed"]) == ("batch", 5)
    results = answer.body["data"]
    statuses = [each["status"] for each in results]
    assert statuses == [200, 200, 404, 400, 200, 404, 404, 200, 200, 404]
    assert not set(made) & set(call.service.capsules)
    forked = results[0]["body"]
    assert [choice["text"] for choice in forked["choices"]] == ["hello 0", "hello 1"]
    assert results[1]["body"] == call("GET", "/v1/capsules/req_x.0").body
    assert results[2]["body"] == call("GET", "/v1/capsules/never").body
    assert results[3]["body"]["error"]["param"] == "n"
    assert results[5]["body"]["error"]["code"] == "request_not_found"


@pytest.mark.parametrize(
    ("operations", "param"),
    [
        ([], "operations"),
        ([op("GET", "/v1/models")], "operations[0].path"),
        ([op("POST", BATCH, body={"operations": []})], "operations[0].path"),
        ([op("GET", "/v1/capsules/a"), op("GET", "/v1/capsules/a/export")], "operations[1].path"),
        ([op("POST", "/v1/capsules/%69mport")], "operations[0].path"),
        ([op("GET", "/v1/capsules/a#b")], "operations[0].path"),
        ([op("GET", "/v1/capsules/" + "a" * 2000)], "operations[0].path"),
        ([op("POST", FORK, body={"n": 1, "stream": True})], "operations[0].body.stream"),
        ([op("DELETE", "/v1/capsules/a", body={})], "operations[0].body"),
        ([op("PUT", "/v1/capsules/a")], "operations"),
        ([op("GET", "/v1/capsules/a", other=1)], "operations"),
    ],
)
def test_a_wrong_operation_is_named_before_any_has_run(
    call: Any, operations: list[Any], param: str
) -> None:
    body = {"operations": [op("DELETE", "/v1/capsules/req_x.0"), *operations]}
    if param == "operations" and len(operations) != 1:
        body = {"operations": operations}
    elif "[" in param:
        number = int(param[11]) + 1
        param = f"operations[{number}]{param[13:]}"
    answer = call("POST", BATCH, body)
    assert answer.status == 400
    assert answer.body["error"]["param"].startswith(param)
    assert "req_x.0" in call.service.capsules


def test_the_number_of_operations_is_bounded(call_with: Any) -> None:
    many = [op("GET", "/v1/capsules/req_x.0")] * 257
    call = call_with(HttpSettings())
    assert call("POST", BATCH, {"operations": many}).body["error"]["param"] == "operations"
    assert call("POST", BATCH, {"operations": many[1:]}).body["failed"] == 0


def test_operations_belong_to_their_sender(call_with: Any) -> None:
    """Key, tenant and salt of the batch are those of each operation; each counts in the key's limits."""
    key = "k" * 16
    call = call_with(HttpSettings(), Access(None, {"MALLEE_API_KEY": key}))
    operations = [op("GET", "/v1/capsules/req_x.0")]
    assert call("POST", BATCH, {"operations": operations}).status == 401
    scopes = []
    for more in ({}, {"x-tenant-id": "t"}, {"x-cache-salt": "s"}):
        headers = {"authorization": f"Bearer {key}", **more}
        answer = call("POST", BATCH, {"operations": operations}, headers=headers)
        assert answer.body["data"][0]["status"] == 200
        scopes.append(call.service.capsules.asked_scope)
    assert len(set(scopes)) == 3


def test_keys_of_operations_run_them_once(call: Any) -> None:
    fork = op("POST", FORK, body={"n": 1}, idempotency_key="a")
    first = call("POST", BATCH, {"operations": [fork, fork]}).body
    assert first["data"][0] == first["data"][1]
    assert len(call.service.streams) == 1
    other = {**fork, "body": {"n": 2}}
    answer = call("POST", BATCH, {"operations": [fork, other]}).body
    assert [each["status"] for each in answer["data"]] == [200, 422]


async def test_a_client_that_leaves_cancels_what_runs(call: Any) -> None:
    call.service.holds_after = 2
    body = {"operations": [op("POST", FORK, body={"n": 2})] * 20}
    async with call.client() as client:
        asked = asyncio.create_task(client.post(BATCH, json=body))
        await until(lambda: len(call.service.streams) == 16)
        asked.cancel()
        await asyncio.wait([asked])
    assert len(call.service.streams) == 16, "so many at once"
    assert all(stream.num_closes for stream in call.service.streams)
