"""Priorities, tenants and deadlines of requests, and the refusals when they can't be served."""

import asyncio
from collections.abc import AsyncIterator, Callable
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


@pytest.fixture
async def client(live: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{live.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "abc"}),
        (CHAT, {"messages": MESSAGES}),
        ("/v1/capsules", {"prompt": "abc"}),
        (FORK, {"n": 2}),
    ],
)
def test_priority_deadline_and_tenant_reach_the_job(
    call: Any, path: str, body: dict[str, Any]
) -> None:
    extras = {"user": "ann", "mallee": {"priority": 7, "deadline_s": 2.5}}
    assert call("POST", path, {**body, **extras}).status == 200
    assert call.service.job.terms == QueueTerms("ann", 7, 2.5)
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


def test_an_unknown_extra_is_refused(call: Any) -> None:
    answer = call("POST", PATH, {"prompt": "a", "mallee": {"prio": 1}})
    assert answer.status == 400
    assert "prio" in answer.body["error"]["message"]


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


async def test_the_official_client_reads_a_full_tenant_queue_as_its_rate_limit(
    live: Any, client: openai.AsyncOpenAI
) -> None:
    """I17: 429 is RateLimitError, 503 is InternalServerError, both with our code."""
    live.service.refuses = TenantQueueFull(4, 4, 7.0)
    with pytest.raises(openai.RateLimitError) as limited:
        await client.completions.create(model="tiny/bytes", prompt="abc")
    assert limited.value.code == "tenant_queue_full"
    live.service.refuses = Overloaded(4, 4, 7.0)
    with pytest.raises(openai.InternalServerError) as refused:
        await client.chat.completions.create(model="tiny/bytes", messages=MESSAGES, stream=True)
    assert (refused.value.status_code, refused.value.code) == (503, "overloaded")


@pytest.mark.parametrize(
    ("refusal", "naps_s"),
    [
        (lambda: TenantQueueFull(4, 4, 7.0), 14.0),
        (lambda: Overloaded(4, 4, 12.0), 24.0),
        (lambda: DeadlineExceeded(60.0, 8.0, is_own=False), 16.0),
        (lambda: DeadlineExceeded(3.0, 8.0, is_own=True), 0.0),
    ],
    ids=["429", "503", "waited too long", "own deadline"],
)
async def test_the_official_client_retries_when_it_is_told_to(
    live: Any, client: openai.AsyncOpenAI, refusal: Callable[[], MalleeError], naps_s: float
) -> None:
    """I17: it waits twice as long as Retry-After says; not at all if its own deadline is over."""
    live.service.refuses = refusal()
    now = asyncio.get_running_loop().time
    began = now()
    with pytest.raises(openai.APIStatusError):
        await client.with_options(max_retries=2).completions.create(
            model="tiny/bytes", prompt="abc"
        )
    assert now() - began == pytest.approx(naps_s, abs=0.1)
