"""The router's own counts as Prometheus families, read from its stats at each scrape."""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mallee.router.placement.pulls import PULL_REASONS
from mallee.router.sync.replicas import ReplicaStats
from mallee.router.views import RouterStats

Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily

# (name, text, attribute of RouterStats)
_GAUGES = (
    ("broker_up", "1 while the broker is reached.", "is_broker_up"),
    ("workers_alive", "Workers with a lease.", "num_workers"),
    ("workers_with_event_gaps", "Workers with events known to be missing.", "num_incomplete"),
    ("index_blocks", "Distinct blocks indexed.", "index.num_blocks"),
    ("index_entries", "(worker, block) pairs.", "index.num_entries"),
    ("index_worker_sets", "Distinct sets of workers that share blocks.", "index.num_sets"),
    ("index_bytes", "Memory of the prefix index.", "index.nbytes"),
    ("index_open_workers", "Workers whose paths are walked.", "index.num_not_prefix_closed"),
    ("index_backlog_blocks", "Blocks of snapshots not taken in yet.", "backlog_blocks"),
    ("capsules", "Capsules in the directory.", "num_capsules"),
    ("booked_requests", "Requests booked, by all gateways.", "booked_requests"),
    ("booked_rows", "Rows booked, by all gateways.", "booked_rows"),
    ("remote_requests", "Requests that other gateways booked.", "remote_requests"),
    ("predicted_prompts", "Prompts held by prediction.", "predicted_prompts"),
)
_COUNTERS = (
    (
        "route_regret_blocks",
        "Most blocks any worker had minus those of the chosen.",
        "regret_blocks",
    ),
    ("route_refusals", "Requests that no worker could take.", "refused"),
    ("routed_to_capsule", "Requests sent to the worker of a capsule.", "routed_to_capsule"),
    ("repaired_blocks", "Stale blocks found by what workers had.", "repaired_blocks"),
    ("event_gaps", "Times that events turned out to be missing.", "gaps"),
    ("ignored_messages", "Messages of past lives or strangers.", "ignored_messages"),
    ("refused_leases", "Leases that could not be taken.", "refused_leases"),
    ("index_evictions", "Blocks dropped for the byte limit.", "index.evicted"),
    ("index_lookups", "Blocks looked up by matches.", "index.probes"),
    ("expired_bookings", "Bookings not touched in time.", "expired_bookings"),
)


class RouterCollector(Collector):
    """Shows the stats of a router and, if its bookings are broadcast, of the other gateways'."""

    def __init__(
        self,
        router: Callable[[], RouterStats],
        replicas: Callable[[], ReplicaStats] | None = None,
    ) -> None:
        self._router = router
        self._replicas = replicas

    def collect(self) -> Iterator[Family]:
        stats = self._router()
        for name, text, path in _GAUGES:
            yield GaugeMetricFamily(f"mallee_{name}", text, attrgetter(path)(stats))
        others = None if self._replicas is None else self._replicas()
        text, known = "Gateways whose bookings are known.", others.gateways if others else 0
        yield GaugeMetricFamily("mallee_other_gateways", text, known)
        booked = others.bookings if others else 0
        yield GaugeMetricFamily("mallee_other_gateways_bookings", "Their live bookings.", booked)
        for name, text, path in _COUNTERS:
            yield CounterMetricFamily(f"mallee_{name}", text, attrgetter(path)(stats))
        text = "Parts of fan-outs that left their prefix's worker."
        spills = CounterMetricFamily("mallee_spills", text, labels=["how"])
        for how in ("migrate", "recompute"):
            spills.add_metric([how], stats.spilled.get(how, 0))
        yield spills
        for name, text, counts in (
            ("pulls", "Placements whose worker pulls KV from others.", stats.pulls),
            ("pull_predicted_bytes", "KV bytes that those lack.", stats.pulled_nbytes),
        ):
            family = CounterMetricFamily(f"mallee_{name}", text, labels=["reason"])
            for reason in PULL_REASONS:
                family.add_metric([reason], counts.get(reason, 0))
            yield family
