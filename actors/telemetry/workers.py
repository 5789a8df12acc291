"""The use of workers' KV memory, by their last leases, as Prometheus families."""

from collections.abc import Container, Iterator
from operator import attrgetter
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mallee.protocol.events import EngineUse
from mallee.protocol.ids import WorkerId

_GAUGES = (
    ("total_blocks", "KV blocks of the worker."),
    ("live_blocks", "KV blocks in use by branches and capsules."),
    ("shared_blocks", "KV blocks in use by several branches or capsules."),
    ("cached_blocks", "KV blocks not in use, kept for prefix hits."),
    ("readers", "Branches and capsules that have KV blocks."),
    ("kept_capsules", "Capsules that were asked for."),
)
_COUNTERS = (
    ("num_copied_blocks", "copied_blocks", "KV blocks copied on write."),
    ("num_evicted_blocks", "evicted_blocks", "Cached KV blocks that gave way."),
    ("num_preemptions", "preemptions", "Branches that lost their place for lack of blocks."),
    ("num_faults", "kv_faults", "Faults found by checks of the KV memory."),
)


# Workers with time series of their own. A fleet of a thousand would have a hundred thousand.
MAX_SHOWN: Final = 256
OTHERS: Final = WorkerId("others")


class WorkerCollector(Collector):
    """Shows each worker's last report; beyond `max_shown` workers, the sum over the rest."""

    def __init__(self, max_shown: int = MAX_SHOWN) -> None:
        self._max_shown = max_shown
        self._uses: dict[WorkerId, EngineUse] = {}

    def reported(self, worker: WorkerId, use: EngineUse) -> None:
        self._uses[worker] = use

    def keep(self, alive: Container[WorkerId]) -> None:
        """Drop the reports of workers that are not `alive`."""
        self._uses = {worker: use for worker, use in self._uses.items() if worker in alive}

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        if not self._uses:
            return
        for field, text in _GAUGES:
            yield self._fill(
                GaugeMetricFamily(f"mallee_worker_{field}", text, labels=["worker"]), field
            )
        for field, name, text in _COUNTERS:
            yield self._fill(
                CounterMetricFamily(f"mallee_worker_{name}", text, labels=["worker"]), field
            )

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, field: str
    ) -> GaugeMetricFamily | CounterMetricFamily:
        value = attrgetter(field)
        uses = list(self._uses.items())
        for worker, use in uses[: self._max_shown]:
            family.add_metric([worker], value(use))
        if rest := uses[self._max_shown :]:
            family.add_metric([OTHERS], sum(value(use) for _, use in rest))
        return family


class FewNames:
    """Names of the first `max_shown` workers as they are, one name for all others."""

    def __init__(self, max_shown: int = MAX_SHOWN) -> None:
        self._max_shown = max_shown
        self._names: set[WorkerId] = set()

    def shown(self, worker: WorkerId) -> WorkerId:
        if worker in self._names:
            return worker
        if len(self._names) >= self._max_shown:
            return OTHERS
        self._names.add(worker)
        return worker
