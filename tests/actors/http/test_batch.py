"""`POST /v1/batch`: many operations in one request, with a result for each."""

import asyncio
from typing import Any

import httpx
import pytest

from mallee.actors.access.access import Access
from mallee.actors.config import HttpSettings
from support.waiting import until

BATCH = "/v1/batch"
FORK = "/v1/capsules/req_x.0/fork"


def op(method: str, path: str, **more: Any) -> dict[str, Any]:
    return {"method": method, "path": path, **more}


def test_each_operation_has_the_answer_that_it_has_alone(call: Any) -> None:
    """In the order of the operations; some fail and the others don't."""
    operations = [
        op("POST", FORK, body={"n": 2, "seed": 1}),
        op("GET", "/v1/capsules/req_x.0"),
        op("GET", "/v1/capsules/never"),
        op("POST", FORK, body={"n": 0}),
        op("POST", "/v1/capsules", body={"prompt": "abc"}),
        op("GET", "/v1/requests/never"),
        op("POST", "/v1/capsules/req_x.0/nothing"),
    ]
    answer = call("POST", BATCH, {"operations": operations})
    assert answer.status == 200
    assert (answer.body["object"], answer.body["failed"]) == ("batch", 4)
    results = answer.body["data"]
    assert [each["status"] for each in results] == [200, 200, 404, 400, 200, 404, 404]
    forked = results[0]["body"]
    assert [choice["text"] for choice in forked["choices"]] == ["hello 0", "hello 1"]
    assert results[1]["body"] == call("GET", "/v1/capsules/req_x.0").body
    assert results[2]["body"] == call("GET", "/v1/capsules/never").body
    assert results[3]["body"]["error"]["param"] == "n"
    assert results[5]["body"]["error"]["code"] == "request_not_found"


def test_capsules_are_deleted_each(call: Any) -> None:
    made = [call("POST", "/v1/capsules", {"prompt": text}).body["id"] for text in ("a", "b", "c")]
    gone = [op("DELETE", f"/v1/capsules/{capsule}") for capsule in (*made, "never")]
    answer = call("POST", BATCH, {"operations": gone}).body
    assert answer["failed"] == 1
    assert [each["status"] for each in answer["data"]] == [200, 200, 200, 404]
    assert not set(made) & set(call.service.capsules)


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
        scopes.append(call.service.asked_scope)
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
    transport = httpx.ASGITransport(app=call.app)
    body = {"operations": [op("POST", FORK, body={"n": 2})] * 20}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        asked = asyncio.create_task(client.post(BATCH, json=body))
        await until(lambda: len(call.service.streams) == 16)
        asked.cancel()
        await asyncio.wait([asked])
    assert len(call.service.streams) == 16, "so many at once"
    assert all(stream.num_closes for stream in call.service.streams)
