"""The catalog of metrics against what processes expose, both ways."""

import re
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from mallee.api.callbacks.callbacks import Outcome
from mallee.gateway.recording.recorder import StopReason
from mallee.gateway.router_metrics import RouterCollector
from mallee.protocol.events import (
    EngineUse,
    Lease,
    LendingUse,
    Load,
    LoanUse,
    MemoryUse,
    TierUse,
)
from mallee.protocol.ids import WorkerId
from mallee.router.config import RouterConfig
from mallee.router.dispatch.dispatcher import DispatchStats, MoveReason
from mallee.router.dispatch.verdicts import Reason, Verb
from mallee.router.placement.fanout_pricing import How
from mallee.router.placement.fanouts import SpillReason
from mallee.router.placement.pulls import PULL_REASONS
from mallee.router.router import Router
from mallee.runtime.telemetry.catalog import FAMILIES, MOST_TENANTS, OTHERS, exposed_by, family
from mallee.runtime.telemetry.families import Labelled
from mallee.runtime.telemetry.metrics import OPENMETRICS, GatewayMetrics, exposition
from mallee.search.driver import Reason as SearchReason
from support.expositions import check_against_catalog

UNITS: Final = ("seconds", "bytes", "blocks", "tokens")
LOAN: Final = LoanUse(1, 7, 2, 3, 4096, 0.5)


def full_gateway() -> GatewayMetrics:
    """A gateway of whose workers one has everything."""
    metrics = GatewayMetrics("g0")
    router = Router(RouterConfig(max_workers=4), clock=lambda: 0.0)
    metrics.registry.register(RouterCollector(router.stats, lambda: DispatchStats({}, 0)))
    tiers = TierUse(1024, 7, 3, 20, 11, 1, 4, 21, 5, 6, 2, 1)
    use = EngineUse(100, 1, 0, 0, 0, 0, 2, 0, 0, 0, tiers=tiers)
    lease = Lease(
        *(WorkerId("w0"), 1, "a", "m", "f", 16, 100, 8, 4096, 0),
        load=Load(1, 0, 1, 0, use),
        lending=LendingUse(LOAN, LOAN),
        memory=MemoryUse(3, 2, 1, 1),
    )
    metrics.workers.heard(lease)
    metrics.routed(WorkerId("w0"), 1, 1)
    metrics.answered("/v1/completions", 200)
    metrics.tenants.of("acme").asked()
    return metrics


def test_a_gateway_exposes_its_part_of_the_catalog_and_nothing_else() -> None:
    """D22, part: names, kinds, texts, labels and their values, both ways."""
    found = check_against_catalog(full_gateway().render().decode(), "gateway")
    assert found == {each.name for each in exposed_by("gateway")}


def test_known_values_of_labels_are_shown_from_the_start() -> None:
    """A rate needs a 0 before its 1; times at which counters were made are no series."""
    text = GatewayMetrics().render().decode()
    for reason in family("mallee_admission_refusals_total").labels[0].values:
        assert f'mallee_admission_refusals_total{{reason="{reason}"}} 0.0' in text
    assert 'mallee_branches_ended_total{reason="error"} 0.0' in text
    assert 'mallee_branch_latency_seconds_count{how="migrate"} 0.0' in text
    assert "_created" not in text


def test_values_of_labels_are_those_that_the_code_has() -> None:
    def values(name: str, label: str) -> set[str]:
        return {
            value for each in family(name).labels if each.name == label for value in each.values
        }

    assert values("mallee_prompts_served_total", "served") == set(get_args(Verb))
    assert values("mallee_prompts_served_total", "reason") == {"", *get_args(Reason)}
    assert values("mallee_spills_total", "how") == set(get_args(How)) - {"stay"}
    assert values("mallee_spills_total", "reason") == set(get_args(SpillReason))
    assert values("mallee_forked_branches_total", "how") == set(get_args(How))
    assert values("mallee_pulls_total", "reason") == set(PULL_REASONS)
    assert values("mallee_branches_moved_total", "reason") == set(get_args(MoveReason))
    assert values("mallee_session_records_stopped_total", "reason") == set(get_args(StopReason))
    assert values("mallee_callback_duration_seconds", "outcome") == set(get_args(Outcome))
    assert values("mallee_search_duration_seconds", "reason") == set(get_args(SearchReason))


def test_families_have_names_units_and_bounds() -> None:
    """Prometheus's conventions; a label has all its values, or a number that they don't exceed."""
    names = [each.name for each in FAMILIES]
    assert len(names) == len(set(names))
    for each in FAMILIES:
        assert re.fullmatch(r"[a-z]+[a-z0-9_]*(:[a-z0-9_]+)?", each.name), each.name
        assert (each.kind == "counter") == each.name.endswith("_total"), each.name
        assert bool(each.buckets) == (each.kind == "histogram"), each.name
        assert each.area, each.name
        assert each.text.rstrip().endswith((".", "`).")), each.name
        base = each.name.removesuffix("_total")
        for unit in UNITS:
            if base.endswith(f"_{unit}"):
                assert each.unit == unit, each.name
        for label in each.labels:
            assert bool(label.values) != bool(label.most), f"{each.name}: {label.name}"


def test_counts_of_tokens_are_those_that_prometheus_own_classes_have() -> None:
    """Values on a bound, below the first and beyond the last."""
    own, theirs = GatewayMetrics().token_gap_s, CollectorRegistry()
    found = family("mallee_inter_token_latency_seconds")
    expected = Histogram(found.name, found.text, buckets=found.buckets, registry=theirs)
    for amount in (0.0, 0.0005, 0.00051, 0.02, 5.0, 5.1, 1e9):
        own.observe(amount)
        expected.observe(amount)
    registry = CollectorRegistry()
    registry.register(own)
    text = generate_latest(theirs).decode()
    lines = [line for line in text.splitlines() if "_created" not in line]
    assert generate_latest(registry).decode().splitlines() == lines


def test_tenants_beyond_the_bound_are_one() -> None:
    """Those that no key names are one, too."""
    metrics = GatewayMetrics()
    for i in range(MOST_TENANTS + 5):
        tenant = metrics.tenants.of(f"t{i}")
        tenant.asked()
        tenant.branch_ended(cached_tokens=1, prefill_tokens=2, output_tokens=3)
    metrics.refused("overloaded", metrics.tenants.of(""))
    lines = metrics.render().decode().splitlines()
    assert sum(line.startswith("mallee_tenant_requests_total{") for line in lines) == (
        MOST_TENANTS + 2
    )
    assert f'mallee_tenant_requests_total{{tenant="{OTHERS}"}} 5.0' in lines
    assert f'mallee_tenant_tokens_total{{kind="output",tenant="{OTHERS}"}} 15.0' in lines
    assert 'mallee_tenant_refusals_total{tenant="none"} 1.0' in lines


def test_openmetrics_has_the_same_names() -> None:
    """Prometheus asks for OpenMetrics: a colon of vLLM's names stays there too."""
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Branches that run.", registry=registry).set(1)
    for accept in ("", OPENMETRICS):
        text = exposition(Labelled(registry, {}), accept).decode()
        assert "vllm:num_requests_running 1.0" in text.splitlines()
