"""Models, health, metrics, and the metrics themselves."""

from typing import Any

import pytest

from mallee.actors.metrics import GatewayMetrics
from mallee.protocol.ids import WorkerId
from mallee.router.capsules import CapsuleStats
from mallee.router.index import IndexStats
from mallee.router.records import RouterStats
from mallee.router.slots import SlotStats


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


@pytest.mark.parametrize(("status", "http"), [("ok", 200), ("degraded", 200), ("unavailable", 503)])
def test_health_is_a_status_code_too(call: Any, status: str, http: int) -> None:
    call.service.status = status
    answer = call("GET", "/health")
    assert (answer.status, answer.body["status"]) == (http, status)
    assert ("retry-after" in answer.headers) == (http == 503)


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
    metrics.branches_started(3)
    metrics.first_token(0.015)
    metrics.next_token(0.003)
    metrics.output_tokens(2)
    metrics.branch_ended("stop", cached_tokens=96, prefill_tokens=32, seconds=0.5)
    metrics.branches_cancelled(1)
    metrics.routed(WorkerId("w1"), 6, 8)
    metrics.resynced()
    metrics.check()
    assert metrics.stats() == (3, 2, 1)
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


def test_gateway_metrics_show_the_router_s_sizes() -> None:
    metrics = GatewayMetrics()
    stats = RouterStats(
        num_workers=3,
        num_incomplete=1,
        is_broker_up=False,
        num_orphans=0,
        routed=0,
        routed_to_capsule=0,
        refused=0,
        repaired_blocks=0,
        ignored_messages=0,
        refused_leases=0,
        index=IndexStats(10, 25, 0, 0),
        slots=SlotStats(0, 0, 0, 0, 0, 0),
        capsules=CapsuleStats(4, 0, 0),
    )
    metrics.set_broker_up(True)
    metrics.observe(stats)
    lines = metrics.render().decode().splitlines()
    for line in (
        "mallee_workers_alive 3.0",
        "mallee_workers_with_event_gaps 1.0",
        "mallee_index_blocks 10.0",
        "mallee_index_entries 25.0",
        "mallee_capsules 4.0",
        "mallee_broker_up 0.0",
    ):
        assert line in lines


def test_two_gateways_share_no_registry() -> None:
    one, other = GatewayMetrics(), GatewayMetrics()
    one.output_tokens(5)
    assert "mallee_output_tokens_total 0.0" in other.render().decode()


def test_ending_more_branches_than_began_breaks_the_check() -> None:
    metrics = GatewayMetrics()
    metrics.branches_cancelled(1)
    with pytest.raises(AssertionError):
        metrics.check()
