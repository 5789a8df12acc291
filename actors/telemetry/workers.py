"""The use of workers' KV memory, by their last leases, as Prometheus families."""

from collections.abc import Callable, Container, Iterator, Mapping
from operator import attrgetter
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mallee.protocol.events import EngineUse, LendingUse, LoanUse, TierUse
from mallee.protocol.ids import WorkerId

_GAUGES = (
    ("total_blocks", "KV blocks of the worker."),
    ("live_blocks", "KV blocks in use by branches and capsules."),
    ("shared_blocks", "KV blocks in use by several branches or capsules."),
    ("cached_blocks", "KV blocks not in use, kept for prefix hits."),
    ("readers", "Branches and capsules that have KV blocks."),
    ("kept_capsules", "Capsules that were asked for."),
    ("kept_below_bytes", "Memory of texts and state of those that lie below the device."),
)
_COUNTERS = (
    ("num_copied_blocks", "copied_blocks", "KV blocks copied on write."),
    ("num_evicted_blocks", "evicted_blocks", "Cached KV blocks that gave way."),
    ("num_preemptions", "preemptions", "Branches that lost their place for lack of blocks."),
    ("num_faults", "kv_faults", "Faults found by checks of the KV memory."),
    ("num_lent_blocks", "lent_blocks", "KV blocks that other workers read."),
    ("num_refused_capsules", "refused_capsules", "Capsules that found no room to be kept."),
)
_TIER_COUNTERS = (
    ("num_dropped", "dropped_blocks", "Evicted KV blocks that host memory had no room for."),
    ("num_declined", "declined_blocks", "KV blocks below the device, cheaper to compute again."),
    ("fetched_peer_s", "peer_seconds", "Seconds that fetches from other workers took."),
    ("num_failed", "failed_moves", "Moves between tiers that ended by an error."),
)
LYING: Final[dict[str, Callable[[TierUse], int]]] = {
    "host": attrgetter("host_blocks"),
    "disk": attrgetter("disk_blocks"),
}
MOVED: Final[dict[str, Callable[[TierUse], int]]] = {
    "offload": attrgetter("num_offloaded"),
    "park": attrgetter("num_parked"),
    "spill": attrgetter("num_spilled"),
    "fetch_host": attrgetter("num_fetched_host"),
    "fetch_disk": attrgetter("num_fetched_disk"),
    "fetch_peer": attrgetter("num_fetched_peer"),
}

_LOANS: Final[tuple[tuple[str, str, str], ...]] = (
    ("num_granted", "loans", "Loans of KV from worker to worker."),
    ("num_refused", "refused_loans", "Questions for loans that got an error for an answer."),
    ("num_failed", "failed_loans", "Loans that ended by an error, and connections that did."),
    ("nbytes", "loan_bytes", "Bytes of KV that crossed."),
    ("seconds", "loan_seconds", "Seconds in which those crossed."),
)
LOANS: Final[dict[str, Callable[[LendingUse], LoanUse]]] = {
    "borrowed": attrgetter("borrowed"),
    "lent": attrgetter("lent"),
}

F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)
R = TypeVar("R", EngineUse, TierUse, LendingUse)

# Workers with time series of their own. A fleet of a thousand would have a hundred thousand.
MAX_SHOWN: Final = 256
OTHERS: Final = WorkerId("others")


class WorkerCollector(Collector):
    """Shows each worker's last report; beyond `max_shown` workers, the sum over the rest."""

    def __init__(self, max_shown: int = MAX_SHOWN) -> None:
        self._max_shown = max_shown
        self._uses: dict[WorkerId, EngineUse] = {}
        self._lending: dict[WorkerId, LendingUse] = {}

    def reported(self, worker: WorkerId, use: EngineUse) -> None:
        self._uses[worker] = use

    def lends(self, worker: WorkerId, use: LendingUse) -> None:
        """Take the last report of the loans of `worker`."""
        self._lending[worker] = use

    def keep(self, alive: Container[WorkerId]) -> None:
        """Drop the reports of workers that are not `alive`."""
        self._uses = {worker: use for worker, use in self._uses.items() if worker in alive}
        self._lending = {worker: use for worker, use in self._lending.items() if worker in alive}

    def tiers_of(self, worker: WorkerId) -> TierUse | None:
        """The last report of `worker` on the tiers below its device, if it has any."""
        use = self._uses.get(worker)
        return None if use is None else use.tiers

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        if self._lending:
            yield from _collect_loans(self._shown(self._lending))
        if not self._uses:
            return
        uses = self._shown(self._uses)
        for field, text in _GAUGES:
            gauge = GaugeMetricFamily(f"mallee_worker_{field}", text, labels=["worker"])
            yield _fill(gauge, uses, (), attrgetter(field))
        for field, name, text in _COUNTERS:
            counter = CounterMetricFamily(f"mallee_worker_{name}", text, labels=["worker"])
            yield _fill(counter, uses, (), attrgetter(field))
        tiers = {name: use.tiers for name, use in self._uses.items() if use.tiers is not None}
        if tiers:
            yield from _collect_tiers(self._shown(tiers))

    def _shown(self, reports: Mapping[WorkerId, R]) -> list[tuple[WorkerId, list[R]]]:
        """Reports under the names that they are shown by."""
        each = list(reports.items())
        shown = [(worker, [report]) for worker, report in each[: self._max_shown]]
        if rest := each[self._max_shown :]:
            shown.append((OTHERS, [report for _, report in rest]))
        return shown


def _collect_tiers(
    uses: list[tuple[WorkerId, list[TierUse]]],
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    lying = GaugeMetricFamily(
        "mallee_worker_tier_blocks", "KV blocks below the device.", labels=["worker", "tier"]
    )
    nbytes = GaugeMetricFamily(
        "mallee_worker_tier_bytes", "The bytes of those.", labels=["worker", "tier"]
    )
    for tier, num in LYING.items():
        _fill(lying, uses, (tier,), num)
        _fill(nbytes, uses, (tier,), _nbytes(num))
    moved = CounterMetricFamily(
        "mallee_worker_moved_blocks", "KV blocks moved between tiers.", labels=["worker", "move"]
    )
    moved_nbytes = CounterMetricFamily(
        "mallee_worker_moved_bytes", "The bytes of those.", labels=["worker", "move"]
    )
    for move, num in MOVED.items():
        _fill(moved, uses, (move,), num)
        _fill(moved_nbytes, uses, (move,), _nbytes(num))
    yield from (lying, nbytes, moved, moved_nbytes)
    held = GaugeMetricFamily(
        "mallee_worker_host_held_blocks",
        "KV blocks in host memory that capsules hold.",
        labels=["worker"],
    )
    yield _fill(held, uses, (), attrgetter("host_held"))
    for field, name, text in _TIER_COUNTERS:
        counter = CounterMetricFamily(f"mallee_worker_{name}", text, labels=["worker"])
        yield _fill(counter, uses, (), attrgetter(field))


def _collect_loans(
    uses: list[tuple[WorkerId, list[LendingUse]]],
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    labels = ["worker", "direction"]
    text = "Loans of KV that are open."
    families: list[tuple[str, GaugeMetricFamily | CounterMetricFamily]] = [
        ("num_open", GaugeMetricFamily("mallee_worker_open_loans", text, labels=labels))
    ]
    for field, name, text in _LOANS:
        family = CounterMetricFamily(f"mallee_worker_{name}", text, labels=labels)
        families.append((field, family))
    for field, each in families:
        for direction, side in LOANS.items():
            for worker, shown in uses:
                value = sum(getattr(side(use), field) for use in shown)
                each.add_metric([worker, direction], value)
        yield each


def _nbytes(num_blocks: Callable[[TierUse], int]) -> Callable[[TierUse], int]:
    return lambda use: num_blocks(use) * use.block_nbytes


def _fill(
    family: F,
    uses: list[tuple[WorkerId, list[R]]],
    labels: tuple[str, ...],
    value: Callable[[R], int],
) -> F:
    """`family` with a sample per worker of `uses`, labelled by its name and `labels`."""
    for worker, shown in uses:
        family.add_metric([worker, *labels], sum(map(value, shown)))
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
