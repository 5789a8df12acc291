"""Priorities, tenants and deadlines of requests, and the refusals when they can't be served."""

import asyncio
from typing import Any

import openai
import pytest

from mallee.protocol.errors import (
    DeadlineExceeded,
    MalleeError,
    Overloaded,
    PoolExhausted,
    QueueFull,
    Saturated,
    TenantQueueFull,
    from_wire,
)
from mallee.router.dispatch.jobs import QueueTerms
from support.plain_ids import SCOPES

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
FORK = "/v1/capsules/req_x.0/fork"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "abc"}),
        (CHAT, {"messages": MESSAGES}),
        ("/v1/capsules", {"prompt": "abc"}),
        (FORK, {"n": 2}),
    ],
)
def test_whose_work_it_is_and_how_urgent_reaches_the_job(
    call: Any, path: str, body: dict[str, Any]
) -> None:
    """S13, part: whose work it is on its worker."""
    ours = {"priority": 7, "deadline_s": 2.5, "session": "tree 1", "weight": 2.5}
    assert call("POST", path, {**body, "user": "ann", "mallee": ours}).status == 200
    assert call.service.job.terms == QueueTerms("ann", 7, 2.5, session="tree 1", weight=2.5)
    assert call("POST", path, body).status == 200
    assert call.service.job.terms == QueueTerms()


@pytest.mark.parametrize(
    ("headers", "fields", "tenant"),
    [
        ({}, {}, ""),
        ({}, {"user": "u"}, "u"),
        ({}, {"user": "u", "safety_identifier": "s"}, "s"),
        ({}, {"user": "u", "safety_identifier": "s", "cache_salt": "c"}, "c"),
        ({"x-tenant-id": "t"}, {"user": "u", "cache_salt": "c"}, "t"),
        ({"x-tenant-id": ""}, {"user": "u"}, "u"),
        ({"authorization": "Bearer sk-1"}, {}, ""),
        ({}, {"user": "x" * 1000}, "x" * 128),
    ],
)
def test_the_tenant_is_who_the_proxy_then_who_the_client_says(
    call: Any, headers: dict[str, str], fields: dict[str, str], tenant: str
) -> None:
    assert call("POST", PATH, {"prompt": "a", **fields}, headers=headers).status == 200
    assert call.service.job.terms.tenant == tenant
    scope = SCOPES.scope(headers.get("x-tenant-id", ""), fields.get("cache_salt", ""))
    assert call.service.job.scope == scope


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({"nvext": {"agent_hints": {"priority": 3, "osl": 9}}}, 3),
        ({"nvext": {"agent_hints": {"priority": 3}}, "mallee": {"priority": -4}}, -4),
        ({"nvext": {"agent_hints": {"priority": 3}}, "mallee": {"priority": 0}}, 0),
        ({"nvext": {"agent_hints": {}}}, 0),
        ({"nvext": {"agent_hints": None}}, 0),
        ({"nvext": {"annotations": ["x"]}}, 0),
        ({"nvext": 5}, 0),
        ({"mallee": None}, 0),
        ({"mallee": {"priority": None, "deadline_s": None}}, 0),
    ],
)
def test_dynamos_priority_hint_counts_unless_ours_is_given(
    call: Any, fields: dict[str, Any], priority: int
) -> None:
    assert call("POST", PATH, {"prompt": "a", **fields}).status == 200
    assert call.service.job.terms.priority == priority


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mallee": {"priority": 1001}}, "mallee.priority"),
        ({"mallee": {"priority": 0.5}}, "mallee.priority"),
        ({"mallee": {"priority": True}}, "mallee.priority"),
        ({"nvext": {"agent_hints": {"priority": "high"}}}, "nvext.agent_hints.priority"),
        ({"nvext": {"agent_hints": {"priority": True}}}, "nvext.agent_hints.priority"),
        ({"mallee": {"deadline_s": -1}}, "mallee.deadline_s"),
        ({"mallee": {"deadline_s": 1e9}}, "mallee.deadline_s"),
        ({"mallee": {"deadline_s": "soon"}}, "mallee.deadline_s"),
        ({"mallee": {"weight": 0}}, "mallee.weight"),
        ({"mallee": {"weight": 1e9}}, "mallee.weight"),
        ({"mallee": {"session": "x" * 129}}, "mallee.session"),
        ({"mallee": []}, "mallee"),
        ({"user": 5}, "user"),
    ],
)
def test_terms_that_make_no_sense_are_refused_by_name(
    call: Any, fields: dict[str, Any], param: str
) -> None:
    answer = call("POST", PATH, {"prompt": "a", **fields})
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
    assert not call.service.streams


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "kind", "retry_after"),
    [
        (TenantQueueFull(4, 4, 7.2), 429, "tenant_queue_full", "rate_limit_error", "8"),
        (Overloaded(9, 9, 60.0), 503, "overloaded", "service_unavailable_error", "60"),
        (QueueFull(9, 9), 429, "queue_full", "rate_limit_error", "1"),
        (PoolExhausted(3, 1, 9), 503, "pool_exhausted", "service_unavailable_error", "1"),
        (Saturated(2, 2), 503, "saturated", "service_unavailable_error", "1"),
        (
            DeadlineExceeded(3.0, 2.0, is_own=True),
            503,
            "deadline_exceeded",
            "service_unavailable_error",
            "2",
        ),
    ],
    ids=lambda value: getattr(value, "code", None),
)
def test_refusals_have_openais_shape_and_say_when_to_come_back(
    call: Any,
    error: MalleeError,
    status: int,
    code: str,
    kind: str,
    retry_after: str,
    stream: bool,
) -> None:
    """F30, part: limits as HTTP."""
    call.service.refuses = from_wire(error.to_wire())
    answer = call("POST", PATH, {"prompt": "abc", "stream": stream})
    assert answer.status == status
    assert (answer.body["error"]["code"], answer.body["error"]["type"]) == (code, kind)
    assert answer.body["error"]["message"] == error.message
    assert answer.headers["retry-after"] == retry_after
    assert answer.headers.get("x-should-retry") == (
        "false" if code == "deadline_exceeded" else None
    )


@pytest.mark.parametrize(
    ("refusal", "kind", "naps_s"),
    [
        (TenantQueueFull(4, 4, 7.0), openai.RateLimitError, 14.0),
        (Overloaded(4, 4, 12.0), openai.InternalServerError, 24.0),
        (DeadlineExceeded(60.0, 8.0, is_own=False), openai.InternalServerError, 16.0),
        (DeadlineExceeded(3.0, 8.0, is_own=True), openai.InternalServerError, 0.0),
    ],
    ids=["429", "503", "waited too long", "own deadline"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_client_has_its_own_error_and_retries_when_it_is_told_to(
    live: Any,
    official: openai.AsyncOpenAI,
    refusal: MalleeError,
    kind: type[openai.APIStatusError],
    naps_s: float,
    stream: bool,
) -> None:
    """I17: it waits twice as long as Retry-After says; not at all if its own deadline is over."""
    live.service.refuses = refusal
    now = asyncio.get_running_loop().time
    began = now()
    client: Any = official.with_options(max_retries=2)
    with pytest.raises(kind) as refused:
        await client.chat.completions.create(model="tiny/bytes", messages=MESSAGES, stream=stream)
    assert refused.value.code == refusal.code
    assert now() - began == pytest.approx(naps_s, abs=0.1)
