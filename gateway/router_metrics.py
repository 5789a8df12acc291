"""Counts of the router and the dispatcher as Prometheus families, read from their stats at each scrape."""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from prometheus_client.registry import Collector

from mallee.router.dispatch.dispatcher import DispatchStats
from mallee.router.sync.replicas import NO_REPLICAS, ReplicaStats
from mallee.router.views import RouterStats
from mallee.runtime.telemetry.families import Shown, by_label, shown

_ROUTER: Final[dict[str, Callable[[RouterStats], float]]] = {
    "mallee_broker_up": attrgetter("is_broker_up"),
    "mallee_workers_alive": attrgetter("num_workers"),
    "mallee_workers_without_lease": attrgetter("num_unleased"),
    "mallee_workers_with_event_gaps": attrgetter("num_incomplete"),
    "mallee_events_applied_total": attrgetter("events_applied"),
    "mallee_event_gaps_total": attrgetter("gaps"),
    "mallee_ignored_messages_total": attrgetter("ignored_messages"),
    "mallee_refused_leases_total": attrgetter("refused_leases"),
    "mallee_repaired_blocks_total": attrgetter("repaired_blocks"),
    "mallee_index_blocks": attrgetter("index.num_blocks"),
    "mallee_index_entries": attrgetter("index.num_entries"),
    "mallee_index_worker_sets": attrgetter("index.num_sets"),
    "mallee_index_bytes": attrgetter("index.nbytes"),
    "mallee_index_open_workers": attrgetter("index.num_walked"),
    "mallee_index_backlog_blocks": attrgetter("backlog_blocks"),
    "mallee_index_evictions_total": attrgetter("index.evicted"),
    "mallee_index_lookups_total": attrgetter("index.probes"),
    "mallee_prefix_copies": attrgetter("index.num_copies"),
    "mallee_capsules": attrgetter("num_capsules"),
    "mallee_booked_requests": attrgetter("booked_requests"),
    "mallee_booked_rows": attrgetter("booked_rows"),
    "mallee_expired_bookings_total": attrgetter("expired_bookings"),
    "mallee_remote_requests": attrgetter("remote_requests"),
    "mallee_replica_skew_rows": attrgetter("unknown_rows"),
    "mallee_predicted_prompts": attrgetter("predicted_prompts"),
    "mallee_route_regret_blocks_total": attrgetter("regret_blocks"),
    "mallee_route_refusals_total": attrgetter("refused"),
    "mallee_routed_to_capsule_total": attrgetter("routed_to_capsule"),
}
_REPLICAS: Final[dict[str, Callable[[ReplicaStats], float]]] = {
    "mallee_other_gateways": attrgetter("gateways"),
    "mallee_other_gateways_incomplete": attrgetter("incomplete"),
    "mallee_other_gateways_bookings": attrgetter("bookings"),
    "mallee_other_gateways_waiting_bookings": attrgetter("waiting"),
    "mallee_other_gateways_gaps_total": attrgetter("gaps"),
    "mallee_other_gateways_expired_total": attrgetter("expired_gateways"),
}


class RouterCollector(Collector):
    """Shows the stats of a router, of its dispatcher and, if bookings are broadcast, of other gateways."""

    def __init__(
        self,
        router: Callable[[], RouterStats],
        dispatcher: Callable[[], DispatchStats],
        replicas: Callable[[], ReplicaStats] | None = None,
        questions: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`questions` to other gateways, by outcome."""
        self._questions = questions
        self._router = router
        self._dispatcher = dispatcher
        self._replicas = replicas

    def collect(self) -> Iterator[Shown]:
        stats, moves = self._router(), self._dispatcher()
        for name, read in _ROUTER.items():
            yield shown(name, read(stats))
        others = NO_REPLICAS if self._replicas is None else self._replicas()
        for name, count in _REPLICAS.items():
            yield shown(name, count(others))
        yield by_label("mallee_other_gateways_questions_total", self._questions)
        yield by_label("mallee_spills_total", stats.spilled)
        yield by_label("mallee_pulls_total", stats.pulls)
        yield by_label("mallee_pull_predicted_bytes_total", stats.pulled_nbytes)
        yield by_label("mallee_branches_moved_total", moves.moved)
        yield shown("mallee_capsules_rebuilt_total", moves.num_rebuilt)
