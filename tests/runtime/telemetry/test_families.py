"""The families that processes declare, and their text."""

import re
from typing import Final, get_args

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from bench.doubles.bus import LocalBus, LocalHub
from mallee.api.callbacks.callbacks import Outcome
from mallee.cli.metrics import declared
from mallee.gateway.access.access import Access
from mallee.gateway.metrics import MOST_TENANTS, GatewayMetrics
from mallee.gateway.store.store import Store, StoreTerms
from mallee.protocol.ids import WorkerId
from mallee.router.config import RouterConfig
from mallee.router.dispatch.dispatcher import DispatchStats
from mallee.router.router import Router
from mallee.runtime.telemetry.families import (
    MOST_WORKERS,
    OPENMETRICS,
    OTHERS,
    Families,
    exposition,
)
from mallee.search.driver import Reason as SearchReason
from support.expositions import check_exposition

DECLARED: Final = {name: each for found in declared().values() for name, each in found.items()}


def full_gateway() -> GatewayMetrics:
    metrics = GatewayMetrics("g0")
    router = Router(RouterConfig(max_workers=4), clock=lambda: 0.0)
    metrics.show_router(router.stats, lambda: DispatchStats({}, 0))
    metrics.show_store(Store(LocalBus(LocalHub()), StoreTerms("f")))
    metrics.show_access(Access(None, {}))
    metrics.routed(WorkerId("w0"), 1, 1)
    metrics.answered("/v1/completions", 200)
    metrics.tenants.of("acme").asked()
    return metrics


def test_a_gateway_exposes_what_it_declares_and_nothing_else() -> None:
    """D22, part: names, kinds, texts, labels and their values, both ways; of workers nothing."""
    text = full_gateway().render().decode()
    assert not check_exposition(text, "gateway")
    assert "mallee_worker_" not in text
    assert "_created" not in text, "times at which counters were made are no series"


def test_known_values_of_labels_are_shown_from_the_start() -> None:
    """A rate needs a 0 before its 1."""
    text = GatewayMetrics().render().decode()
    for reason in DECLARED["mallee_admission_refusals_total"].labels[0].values:
        assert f'mallee_admission_refusals_total{{reason="{reason}"}} 0.0' in text
    assert 'mallee_branches_ended_total{reason="error"} 0.0' in text
    assert 'mallee_branch_latency_seconds_count{how="migrate"} 0.0' in text


def test_labels_have_the_values_of_rooms_that_gateways_do_not_import() -> None:
    for name, values in (
        ("mallee_callback_duration_seconds", Outcome),
        ("mallee_search_duration_seconds", SearchReason),
    ):
        assert set(DECLARED[name].labels[0].values) == set(get_args(values))


def test_families_have_names_and_bounds() -> None:
    """Prometheus's conventions; a label has all its values, or a number that they don't exceed."""
    for name, each in DECLARED.items():
        assert re.fullmatch(r"[a-z]+[a-z0-9_]*(:[a-z0-9_]+)?", name), name
        assert (each.kind == "counter") == name.endswith("_total"), name
        assert each.text.rstrip().endswith((".", "`).")), name
        for label in each.labels:
            assert bool(label.values) != bool(label.most), f"{name}: {label.name}"


def test_a_family_is_declared_once() -> None:
    area = Families().area("Requests")
    area.gauge("mallee_x", "One.")
    with pytest.raises(AssertionError, match="mallee_x is declared twice"):
        area.counter("mallee_x", "Another.")


def test_counts_of_tokens_are_those_that_prometheus_own_classes_have() -> None:
    """Values on a bound, below the first and beyond the last."""
    own, theirs = GatewayMetrics().token_gap_s, CollectorRegistry()
    found = DECLARED["mallee_inter_token_latency_seconds"]
    expected = Histogram(found.name, found.text, buckets=found.buckets, registry=theirs)
    for amount in (0.0, 0.0005, 0.00051, 0.02, 5.0, 5.1, 1e9):
        own.observe(amount)
        expected.observe(amount)
    registry = CollectorRegistry()
    registry.register(own)
    text = generate_latest(theirs).decode()
    lines = [line for line in text.splitlines() if "_created" not in line]
    assert generate_latest(registry).decode().splitlines() == lines


def test_tenants_and_workers_beyond_the_bound_are_one() -> None:
    """D36, part: and so are tenants that no key names."""
    metrics = GatewayMetrics()
    for i in range(MOST_TENANTS + 5):
        tenant = metrics.tenants.of(f"t{i}")
        tenant.asked()
        tenant.branch_ended(cached_tokens=1, prefill_tokens=2, output_tokens=3)
    for i in range(MOST_WORKERS + 3):
        metrics.routed(WorkerId(f"w{i}"), 1, 2)
    metrics.refused("overloaded", metrics.tenants.of(""))
    lines = metrics.render().decode().splitlines()
    for family, most in (
        ("tenant_requests", MOST_TENANTS + 2),
        ("route_decisions", MOST_WORKERS + 1),
    ):
        assert sum(line.startswith(f"mallee_{family}_total{{") for line in lines) == most
    assert f'mallee_tenant_requests_total{{tenant="{OTHERS}"}} 5.0' in lines
    assert f'mallee_tenant_tokens_total{{kind="output",tenant="{OTHERS}"}} 15.0' in lines
    assert 'mallee_tenant_refusals_total{tenant="none"} 1.0' in lines
    assert f'mallee_route_decisions_total{{worker="{OTHERS}"}} 3.0' in lines


def test_openmetrics_has_the_same_names_and_one_end() -> None:
    """Prometheus asks for OpenMetrics: a colon of vLLM's names stays there too."""
    registry = CollectorRegistry()
    for name in ("running", "waiting"):
        Gauge(f"vllm:num_requests_{name}", "Branches.", registry=registry).set(1)
    for accept, ends in (("", 0), (OPENMETRICS, 1)):
        lines = b"".join(exposition(registry, accept)).decode().splitlines()
        assert "vllm:num_requests_running 1.0" in lines
        assert lines.count("# EOF") == ends
        assert not ends or lines[-1] == "# EOF"
