"""Models, health, metrics, and the metrics themselves."""

from typing import Any

import numpy as np
import pytest

from mallee.gateway.metrics import GatewayMetrics
from mallee.protocol.events import EventBatch, FetchPrices, Lease, Load, Stored, pack_hashes
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import RequestId, WorkerId
from mallee.router.router import Router

HASHES = np.arange(1, 11, dtype=np.uint64)


def test_the_one_model_is_listed_under_its_name(call: Any) -> None:
    model = {
        "id": "tiny/bytes",
        "object": "model",
        "created": 1_760_000_000,
        "owned_by": "mallee",
        "max_model_len": 256,
    }
    assert call("GET", "/v1/models").body == {"object": "list", "data": [model]}
    assert call("GET", "/v1/models/tiny/bytes").body == model
    answer = call("GET", "/v1/models/other")
    assert (answer.status, answer.body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("status", "ready"), [("ok", 200), ("degraded", 200), ("unavailable", 503)]
)
def test_a_gateway_is_live_whether_or_not_it_is_ready(call: Any, status: str, ready: int) -> None:
    call.service.status = status
    answer = call("GET", "/health")
    assert (answer.status, answer.body["status"]) == (ready, status)
    assert ("retry-after" in answer.headers) == (ready == 503)
    answer = call("GET", "/health/ready")
    assert answer.status == ready
    assert answer.body == {"status": "ready" if ready == 200 else "unavailable"}
    assert ("retry-after" in answer.headers) == (ready == 503)
    for path in ("/v1/models", "/v1/models/tiny/bytes"):  # which clients wait for before they ask
        answer = call("GET", path)
        assert answer.status == ready
        assert ("retry-after" in answer.headers) == (ready == 503)
        assert ready == 200 or answer.body["error"]["code"] == "no_worker"
    answer = call("GET", "/health/live")
    assert (answer.status, answer.body) == (200, {"status": "live"})


def test_answers_are_counted_by_route_and_status(call: Any) -> None:
    call("POST", "/v1/completions", {"prompt": "a"})
    call("POST", "/v1/completions", {"prompt": ""})
    call("GET", "/v1/capsules/req_x.0")
    call("GET", "/v9/whatever")
    answer = call("GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    for line in (
        'mallee_http_answers_total{endpoint="/v1/completions",status="200"} 1.0',
        'mallee_http_answers_total{endpoint="/v1/completions",status="400"} 1.0',
        'mallee_http_answers_total{endpoint="/v1/capsules/{capsule}",status="200"} 1.0',
        'mallee_http_answers_total{endpoint="other",status="404"} 1.0',
    ):
        assert line in answer.body


def test_gateway_metrics_show_latency_tokens_and_ends() -> None:
    """Tokens, TTFT, ITL, durations, ends and routes are in the Prometheus text."""
    metrics = GatewayMetrics()
    metrics.in_flight.set(1)
    metrics.first_token_s.observe(0.015)
    metrics.token_gap_s.observe(0.003)
    metrics.output_tokens.inc(2)
    metrics.branch_ended("stop", cached_tokens=96, prefill_tokens=32)
    metrics.times(None, None, 0.5)
    metrics.branch_ended("cancelled", cached_tokens=0, prefill_tokens=0)
    metrics.routed(WorkerId("w1"), 6, 8)
    metrics.resyncs.inc()
    text = metrics.render().decode()
    for line in (
        "mallee_branches_in_flight 1.0",
        'mallee_time_to_first_token_seconds_bucket{le="0.02"} 1.0',
        'mallee_time_to_first_token_seconds_bucket{le="0.01"} 0.0',
        "mallee_inter_token_latency_seconds_sum 0.003",
        "mallee_branch_duration_seconds_count 1.0",
        "mallee_output_tokens_total 2.0",
        "mallee_cached_tokens_total 96.0",
        "mallee_prefill_tokens_total 32.0",
        "mallee_prompt_tokens_total 128.0",
        'mallee_branches_ended_total{reason="stop"} 1.0',
        'mallee_branches_ended_total{reason="cancelled"} 1.0',
        'mallee_route_decisions_total{worker="w1"} 1.0',
        "mallee_route_overlap_blocks_total 6.0",
        "mallee_route_best_overlap_blocks_total 8.0",
        "mallee_resyncs_total 1.0",
    ):
        assert line in text.splitlines()
    assert "mallee_output_tokens_total 0.0" in GatewayMetrics().render().decode(), "of its own"


def test_the_router_explains_its_decisions(call: Any) -> None:
    """X11: every candidate's terms, the same numbers as the decision log."""
    router: Router = call.service.router
    for worker in ("w0", "w1"):
        router.on_lease(Lease(worker, 1, "a", "m", "f", 16, 1000, 8, 4096, 0))
    router.on_events(EventBatch("w1", 1, 0, (Stored(pack_hashes(HASHES)),)))
    router.route(RequestId("req_1"), HASHES, prompt_tokens=160, max_tokens=8)
    (logged,) = router.decisions(1, of=RequestId("req_1"))
    (shown,) = call("GET", "/v1/router/explain?request=req_1").body["data"]
    assert (shown["request"], shown["worker"], shown["reason"]) == ("req_1", "w1", "cost")
    assert [each["worker"] for each in shown["candidates"]] == ["w1", "w0"]
    for each, candidate in zip(shown["candidates"], logged.candidates, strict=True):
        assert each["total"] == candidate.total
        assert each["prefill_s"] == candidate.cost.prefill_s
    assert shown["candidates"][0]["overlap_blocks"] == 10
    (short,) = call("GET", "/v1/router/explain?candidates=1").body["data"]
    assert (len(short["candidates"]), short["num_candidates"]) == (1, 2)
    unknown = call("GET", "/v1/router/explain?request=nobody")
    assert (unknown.status, unknown.body["error"]["code"]) == (404, "not_found")
    for query in (
        "limit=0",
        "limit=x",
        "limit=0000000001000",
        "candidates=99999999999",
        "request=",
    ):
        refused = call("GET", f"/v1/router/explain?{query}")
        assert (refused.status, refused.body["error"]["param"]) == (400, query.split("=")[0])


def test_the_router_explains_a_pull(call: Any) -> None:
    """X6, part, X11, part: from whom, how much, and the price beside waiting and computing."""
    router: Router = call.service.router
    cost = Load(0, 0, 0, 0, None, FetchPrices(1e-3, 0.0, 0.0, 0.0, 0.0, 1e-3, 1e-5))
    for worker in ("w0", "w1"):
        router.on_lease(
            Lease(worker, 1, "a", "m", "f", 16, 1000, 8, 4096, 0, load=cost, serves_kv=True)
        )
    router.on_events(EventBatch("w1", 1, 0, (Stored(pack_hashes(HASHES)),)))
    router.suspend(WorkerId("w0"), 1)
    router.route(RequestId("busy"), NO_HASHES, prompt_tokens=15_000, max_tokens=8)
    router.resume(WorkerId("w0"), 1)
    router.route(RequestId("req_1"), HASHES, prompt_tokens=160, max_tokens=8)
    (shown,) = call("GET", "/v1/router/explain?request=req_1").body["data"]
    pull = shown["pull"]
    assert (shown["worker"], pull["reason"], pull["blocks"]) == ("w0", "prefix", 10)
    assert pull["from"] == [{"worker": "w1", "tokens": 160, "capsule": None}]
    assert "at w1" not in str(shown)
    assert pull["migrate_s"] == shown["candidates"][0]["total"] < pull["recompute_s"]
    assert pull["wait_s"] == shown["candidates"][1]["total"]
    assert shown["candidates"][0]["pull_s"] == pytest.approx(1e-3 + 10 * 1e-5)
    assert [each["pulled_blocks"] for each in shown["candidates"]] == [10, 0]


def test_the_workers_are_listed_as_the_router_sees_them(call: Any) -> None:
    router: Router = call.service.router
    router.on_lease(Lease("w0", 1 << 60, "a", "m", "f", 16, 1000, 8, 4096, 0))
    (worker,) = [
        each
        for each in call("GET", "/v1/router/workers").body["data"]
        if each["incarnation"] == str(1 << 60)
    ]
    assert (worker["worker"], worker["num_blocks"], worker["is_whole"]) == ("w0", 1000, True)
