"""The router's own counts as Prometheus families, read from its stats at each scrape."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mallee.router.sync.replicas import ReplicaStats
from mallee.router.views import RouterStats

Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily


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
        yield from _gauges(stats, None if self._replicas is None else self._replicas())
        yield from _counters(stats)


def _gauges(stats: RouterStats, replicas: ReplicaStats | None) -> Iterator[Family]:
    for name, text, value in (
        ("broker_up", "1 while the broker is reached.", stats.is_broker_up),
        (
            "other_gateways",
            "Gateways whose bookings are known.",
            replicas.gateways if replicas else 0,
        ),
        ("other_gateways_bookings", "Their live bookings.", replicas.bookings if replicas else 0),
        ("workers_alive", "Workers with a lease.", stats.num_workers),
        (
            "workers_with_event_gaps",
            "Workers with events known to be missing.",
            stats.num_incomplete,
        ),
        ("index_blocks", "Distinct blocks indexed.", stats.index.num_blocks),
        ("index_entries", "(worker, block) pairs.", stats.index.num_entries),
        ("index_worker_sets", "Distinct sets of workers that share blocks.", stats.index.num_sets),
        ("index_bytes", "Memory of the prefix index.", stats.index.nbytes),
        (
            "index_open_workers",
            "Workers whose paths are walked.",
            stats.index.num_not_prefix_closed,
        ),
        ("index_backlog_blocks", "Blocks of snapshots not taken in yet.", stats.backlog_blocks),
        ("capsules", "Capsules in the directory.", stats.capsules.num_capsules),
        ("booked_requests", "Requests booked, by all gateways.", stats.slots.num_requests),
        ("booked_rows", "Rows booked, by all gateways.", stats.slots.rows),
        ("remote_requests", "Requests that other gateways booked.", stats.remote_requests),
        ("predicted_prompts", "Prompts held by prediction.", stats.predictions.num_prompts),
    ):
        yield GaugeMetricFamily(f"mallee_{name}", text, value)


def _counters(stats: RouterStats) -> Iterator[Family]:
    for name, text, value in (
        (
            "route_regret_blocks",
            "Most blocks any worker had minus those of the chosen.",
            stats.regret_blocks,
        ),
        ("route_refusals", "Requests that no worker could take.", stats.refused),
        ("routed_to_capsule", "Requests sent to the worker of a capsule.", stats.routed_to_capsule),
        ("repaired_blocks", "Stale blocks found by what workers had.", stats.repaired_blocks),
        ("event_gaps", "Times that events turned out to be missing.", stats.gaps),
        ("ignored_messages", "Messages of past lives or strangers.", stats.ignored_messages),
        ("refused_leases", "Leases that could not be taken.", stats.refused_leases),
        ("index_evictions", "Blocks dropped for the byte limit.", stats.index.evicted),
        ("index_lookups", "Blocks looked up by matches.", stats.index.probes),
        ("expired_bookings", "Bookings not touched in time.", stats.slots.expired),
    ):
        yield CounterMetricFamily(f"mallee_{name}", text, value)
    spills = CounterMetricFamily(
        "mallee_spills", "Parts of fan-outs that left their prefix's worker.", labels=["how"]
    )
    for how in ("migrate", "recompute"):
        spills.add_metric([how], stats.spilled.get(how, 0))
    yield spills
