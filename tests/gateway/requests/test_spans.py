"""Spans of requests, in memory: their tree, times, attributes, context in and out."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import StatusCode
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families as text_families

from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import ConfigError
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import CapsuleId
from mallee.protocol.messages import Limits
from mallee.router.config import RouterConfig
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, PrefillJob
from mallee.runtime.telemetry.tracing import genai
from mallee.runtime.telemetry.tracing.http import HttpSpans
from mallee.runtime.telemetry.tracing.provider import check_exporters, exporter_names, open_tracing
from support.live_api import api_over
from support.live_fleet import LiveFleet, lose, running
from support.span_tree import Spans
from support.waiting import elapse, until

SPEC = mock_spec(vocab_size=128, max_model_len=4096)
PROMPT = as_tokens(range(1, 40))
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@asynccontextmanager
async def traced_fleet(spans: Spans, workers: int = 1) -> AsyncIterator[LiveFleet]:
    fleet = LiveFleet(SPEC, RouterConfig(block_size=16), tracing=spans.tracing)
    async with running(fleet, workers) as made:
        yield made


async def drain(stream: Any) -> None:
    async for _ in stream:
        pass


@asynccontextmanager
async def client_of(fleet: LiveFleet, spans: Spans) -> AsyncIterator[httpx.AsyncClient]:
    app = api_over(fleet.gateways[0])
    app.add_middleware(HttpSpans, tracing=spans.tracing)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_a_request_is_one_tree_from_http_to_the_engine() -> None:
    spans = Spans()
    body = {"model": "m", "prompt": "a secret of tree", "max_tokens": 5, "n": 2, "temperature": 0.5}
    body |= {"stop": ["secret stop"], "user": "secret user", "mallee": {"session": "secret"}}

    async def parts() -> AsyncIterator[bytes]:
        await elapse(0.25)
        yield json.dumps(body).encode()

    async with traced_fleet(spans) as fleet, client_of(fleet, spans) as client:
        answer = await client.post("/v1/completions", content=parts())
        assert answer.status_code == 200, answer.text
    assert spans.tree == [
        "POST /v1/completions",
        "  prepare",
        "  text_completion m",
        "    queue",
        "    shard",
        "      engine",
        *(["    branch", "      prefill", "      decode"] * 2),
    ]
    http, request = spans.one("POST /v1/completions"), spans.one("text_completion m")
    assert http.attributes == {
        genai.METHOD: "POST",
        genai.STATUS: 200,
        genai.ROUTE: "/v1/completions",
    }
    found = dict(request.attributes or {})
    assert found.pop(genai.FIRST_CHUNK_S) > 0
    assert found == {
        genai.OPERATION: "text_completion",
        genai.PROVIDER: "mallee",
        genai.REQUEST_MODEL: "m",
        genai.RESPONSE_MODEL: "m",
        genai.CHOICES: 2,
        genai.MAX_TOKENS: 5,
        genai.TEMPERATURE: 0.5,
        genai.TOP_P: 1.0,
        genai.FREQUENCY_PENALTY: 0.0,
        genai.PRESENCE_PENALTY: 0.0,
        genai.RESPONSE_ID: answer.json()["id"],
        genai.INPUT_TOKENS: 16,
        genai.CACHED_TOKENS: 0,
        genai.OUTPUT_TOKENS: 10,
        genai.FINISH_REASONS: ("length", "length"),
    }
    engine = spans.one("engine")
    assert engine.attributes is not None
    assert engine.attributes[genai.WORKER] == "w0"
    assert engine.attributes[genai.COMMAND] == "generate"
    assert engine.attributes[genai.OUTPUT_TOKENS] == 10
    assert engine.attributes[genai.STEPS] >= 5
    assert [event.name for event in engine.events] == ["first token"]
    assert "secret" not in "".join(span.to_json() for span in spans.ended)


async def test_times_of_spans_are_those_of_the_life() -> None:
    spans = Spans()
    async with traced_fleet(spans) as fleet:
        stream = await fleet.gateways[0].requests.start(GenerateJob(PROMPT, Limits(4)), 0.25)
        await drain(stream)
        life = fleet.gateways[0].operator.decisions(stream.request, 1, 1)["life"]["branches"][0]
    begun = spans.one("text_completion m").start_time
    for name, begin, end in (
        ("queue", 0.0, life["placed_s"]),
        ("shard", life["placed_s"], life["end_s"]),
        ("branch", life["placed_s"], life["end_s"]),
        ("prefill", life["placed_s"], life["first_token_s"]),
        ("decode", life["first_token_s"], life["end_s"]),
    ):
        span = spans.one(name)
        assert (span.start_time - begun) / 1e9 == pytest.approx(begin, abs=1e-6), name
        assert (span.end_time - begun) / 1e9 == pytest.approx(end, abs=1e-6), name
    assert not spans.named("prepare"), "no span of HTTP to be a part of"


async def test_w3c_context_comes_in_and_goes_out() -> None:
    """Health, metrics and requests with an unsampled parent have no span."""
    spans = Spans()
    body = {"prompt": "a tree", "max_tokens": 2}
    async with traced_fleet(spans) as fleet, client_of(fleet, spans) as client:
        for path in ("/health", "/metrics"):
            assert (await client.get(path)).status_code == 200
        headers = {"traceparent": PARENT[:-2] + "00"}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert "traceresponse" not in answer.headers
        assert spans.ended == ()
        answer = await client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
    http = spans.one("POST /v1/completions")
    assert http.parent is not None
    assert f"{http.parent.span_id:016x}" == "b7ad6b7169203331"
    assert {f"{span.context.trace_id:032x}" for span in spans.ended} == {TRACE}
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{http.context.span_id:016x}-01"


async def test_a_fork_links_to_the_request_that_made_its_capsule() -> None:
    spans = Spans()
    async with traced_fleet(spans) as fleet:
        gateway = fleet.gateways[0]
        made = await gateway.requests.start(PrefillJob(PROMPT))
        await drain(made)
        capsule = CapsuleId(f"{made.request}.0")
        fork = ForkJob(capsule, [as_tokens(()), as_tokens((3,))], Limits(3))
        await drain(await gateway.requests.start(fork))
    prefill, forked = spans.one("prefill m"), spans.one("fork m")
    (link,) = forked.links
    assert link.context.span_id == prefill.context.span_id
    assert forked.attributes is not None
    assert forked.attributes[genai.CAPSULE] == capsule
    assert [line.strip() for line in spans.tree].count("branch") == 3
    commands = [dict(span.attributes or {})[genai.COMMAND] for span in spans.named("engine")]
    assert commands == ["prefill", "fork"]


async def test_a_branch_that_moves_has_a_shard_on_each_worker() -> None:
    spans = Spans()
    async with traced_fleet(spans, workers=2) as fleet:
        stream = await fleet.gateways[0].requests.start(GenerateJob(PROMPT, Limits(400)))
        await anext(aiter(stream))
        await lose(fleet, stream.worker)
        await drain(stream)
    first, second = spans.named("shard")
    workers = [dict(shard.attributes or {})[genai.WORKER] for shard in (first, second)]
    assert sorted(map(str, workers)) == ["w0", "w1"]
    assert [event.name for event in first.events] == ["moved"]
    assert first.end_time == second.start_time
    branch = spans.one("branch")
    assert branch.attributes is not None
    assert branch.attributes[genai.MOVES] == 1
    assert branch.attributes[genai.WORKER] == workers[1]
    joined = [span.parent.span_id for span in spans.named("engine") if span.parent is not None]
    assert second.context.span_id in joined


async def test_a_client_that_hangs_up_ends_all_its_spans() -> None:
    spans = Spans()
    async with traced_fleet(spans) as fleet:
        stream = await fleet.gateways[0].requests.start(GenerateJob(PROMPT, Limits(3000), n=2))
        await anext(aiter(stream))
        await stream.aclose()
        await until(lambda: bool(spans.named("text_completion m")) and bool(spans.named("engine")))
    for branch in spans.named("branch"):
        assert dict(branch.attributes or {})[genai.FINISH_REASONS] == ("cancelled",)
    assert len(spans.named("shard")) == 1


async def test_refused_requests_have_the_codes_of_their_errors_and_no_text_of_a_client() -> None:
    spans = Spans()
    async with traced_fleet(spans, 0) as made, client_of(made, spans) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        refused = {"prompt": "john", "user": "john", "model": "john"}
        assert (await client.post("/v1/completions", json=refused)).status_code == 404
        assert (await client.get("/v1/sessions/john@example.com/record")).status_code == 400
    assert spans.named("POST /v1/completions")[0].status.status_code is StatusCode.ERROR
    span = spans.one("text_completion m")
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description is None, "it may quote a client"
    assert dict(span.attributes or {})[genai.ERROR] == "no_worker"
    assert "john" not in str([span.to_json() for span in spans.ended])


def test_our_names_are_those_of_the_semantic_conventions() -> None:
    theirs = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    ours = {v for v in vars(genai).values() if isinstance(v, str) and v.startswith("gen_ai.")}
    assert len(ours) > 15
    assert ours <= theirs


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        ({"OTEL_SERVICE_NAME": "x"}, []),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, []),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ["otlp_proto_http", "console"]),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            ["otlp_proto_grpc"],
        ),
    ],
)
def test_the_standard_variables_name_the_exporters(
    environ: dict[str, str], names: list[str]
) -> None:
    assert exporter_names(environ) == names


def test_what_is_not_installed_or_known_is_told_with_its_remedy() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'mallee\[traces\]'"):
        check_exporters({"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL='http/json': give http"):
        check_exporters(
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
        )


def test_names_in_the_process_win_over_defaults_and_the_environment_over_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"OTEL_TRACES_EXPORTER": "console"}
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-mallee")
    tracing = open_tracing("worker", "w3", environ)
    assert tracing is not None
    span = tracing.tracer.start_span("x")
    attributes = span.resource.attributes
    assert attributes["service.name"] == "my-mallee"
    assert attributes["service.instance.id"] == "w3"
    tracing.close()


async def test_a_bucket_of_first_tokens_names_a_trace_where_openmetrics_is_asked_for() -> None:
    spans = Spans()
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    async with traced_fleet(spans) as fleet, client_of(fleet, spans) as client:
        await drain(await fleet.gateways[0].requests.start(GenerateJob(PROMPT, Limits(4))))
        opened = await client.get("/metrics", headers=accept)
        plain = await client.get("/metrics")
    assert opened.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(openmetrics_families(opened.text))
    assert opened.text.endswith("# EOF\n")
    (named,) = [
        sample for family in families for sample in family.samples if sample.exemplar is not None
    ]
    assert named.name == "mallee_time_to_first_token_seconds_bucket"
    request = spans.one("text_completion m")
    assert named.exemplar.labels == {
        "trace_id": f"{request.context.trace_id:032x}",
        "span_id": f"{request.context.span_id:016x}",
    }
    assert "trace_id" not in plain.text
    async with running(LiveFleet(SPEC, RouterConfig(block_size=16)), 1) as untraced:
        await drain(await untraced.gateways[0].requests.start(GenerateJob(PROMPT, Limits(4))))
        assert b"trace_id" not in untraced.gateways[0].operator.metrics(
            "application/openmetrics-text"
        )
    counted = {family.name for family in families}
    assert counted == {family.name.removesuffix("_total") for family in text_families(plain.text)}
