"""Load and memory of workers, by their last leases, as Prometheus families."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, TypeAlias, TypeVar

from prometheus_client.registry import Collector

from mallee.protocol.events import Lease, LendingUse, Load, MemoryUse, TierUse
from mallee.protocol.ids import WorkerId
from mallee.runtime.telemetry.catalog import MOST_WORKERS, OTHERS
from mallee.runtime.telemetry.families import Shown, shown

R = TypeVar("R", Load, TierUse, LendingUse, MemoryUse)
Table: TypeAlias = Mapping[tuple[str, ...], Callable[[Sequence[R]], float]]
"""The value of several workers' reports together, by a family's name and the labels after `worker`."""


def _sum(field: str | Callable[[R], float]) -> Callable[[Sequence[R]], float]:
    read: Callable[[R], float] = attrgetter(field) if isinstance(field, str) else field
    return lambda reports: sum(map(read, reports))


def _mean(total: Callable[[Load], float]) -> Callable[[Sequence[Load]], float]:
    """Of a branch or capsule."""

    def mean(loads: Sequence[Load]) -> float:
        readers = sum(load.use.readers for load in loads if load.use is not None)
        return sum(map(total, loads)) / readers if readers else 0.0

    return mean


def _live_nbytes(load: Load) -> float:
    assert load.use is not None, "a report without use"
    return load.use.live_blocks * load.use.block_nbytes


def _kept(tier: int) -> Callable[[Load], float]:
    return lambda load: load.use.kept_by_tier[tier].capsules if load.use is not None else 0.0


def _kept_nbytes(tier: int) -> Callable[[Load], float]:
    def nbytes(load: Load) -> float:
        assert load.use is not None, "a report without use"
        return load.use.kept_by_tier[tier].blocks * load.use.block_nbytes

    return nbytes


def _kept_limit_nbytes(load: Load) -> float:
    assert load.use is not None, "a report without use"
    return load.use.max_kept_blocks * load.use.block_nbytes


_LOADS: Final[Table[Load]] = {
    ("mallee_worker_running_branches",): _sum("rows"),
    ("mallee_worker_waiting_branches",): _sum("waiting"),
    ("mallee_worker_total_blocks",): _sum("use.total_blocks"),
    ("mallee_worker_live_blocks",): _sum("use.live_blocks"),
    ("mallee_worker_shared_blocks",): _sum("use.shared_blocks"),
    ("mallee_worker_cached_blocks",): _sum("use.cached_blocks"),
    ("mallee_worker_readers",): _sum("use.readers"),
    ("mallee_worker_block_references",): _sum("use.references"),
    ("mallee_worker_branch_blocks",): _mean(attrgetter("use.references")),
    ("mallee_worker_branch_bytes",): _mean(_live_nbytes),
    ("mallee_worker_constraint_states",): _sum("use.constraint_states"),
    **{("mallee_worker_capsules", str(tier)): _sum(_kept(tier)) for tier in range(3)},
    **{("mallee_worker_capsule_bytes", str(tier)): _sum(_kept_nbytes(tier)) for tier in range(3)},
    ("mallee_worker_capsule_limit_bytes",): _sum(_kept_limit_nbytes),
    ("mallee_worker_kept_below_bytes",): _sum("use.kept_below_bytes"),
    ("mallee_worker_prefill_tokens_total",): _sum("use.num_prefill_tokens"),
    ("mallee_worker_cached_tokens_total",): _sum("use.num_cached_tokens"),
    ("mallee_worker_output_tokens_total",): _sum("use.num_output_tokens"),
    ("mallee_worker_drafted_tokens_total",): _sum("use.num_drafted_tokens"),
    ("mallee_worker_accepted_tokens_total",): _sum("use.num_accepted_tokens"),
    ("mallee_worker_ahead_rows_total",): _sum("use.num_ahead_rows"),
    ("mallee_worker_ahead_void_rows_total",): _sum("use.num_ahead_void_rows"),
    ("mallee_worker_host_gap_seconds_total",): _sum("use.host_gap_s"),
    ("mallee_worker_forks_total",): _sum("use.num_forks"),
    ("mallee_worker_copied_blocks_total",): _sum("use.num_copied_blocks"),
    ("mallee_worker_evicted_blocks_total",): _sum("use.num_evicted_blocks"),
    ("mallee_worker_preemptions_total",): _sum("use.num_preemptions"),
    ("mallee_worker_kv_faults_total",): _sum("use.num_faults"),
    ("mallee_worker_refused_capsules_total",): _sum("use.num_refused_capsules"),
    ("mallee_worker_lent_blocks_total",): _sum("use.num_lent_blocks"),
}
_MEMORY: Final[Table[MemoryUse]] = {
    ("mallee_worker_memory_bytes", part): _sum(part)
    for part in ("weights", "kv", "graphs", "other")
}

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


def _nbytes(num_blocks: Callable[[TierUse], int]) -> Callable[[TierUse], float]:
    return lambda use: num_blocks(use) * use.block_nbytes


_TIERS: Final[Table[TierUse]] = {
    **{("mallee_worker_tier_blocks", tier): _sum(num) for tier, num in LYING.items()},
    **{("mallee_worker_tier_bytes", tier): _sum(_nbytes(num)) for tier, num in LYING.items()},
    ("mallee_worker_host_held_blocks",): _sum("host_held"),
    ("mallee_worker_host_room_blocks",): _sum("host_room"),
    ("mallee_worker_disk_limit_bytes",): _sum("disk_limit_nbytes"),
    **{("mallee_worker_moved_blocks_total", move): _sum(num) for move, num in MOVED.items()},
    **{
        ("mallee_worker_moved_bytes_total", move): _sum(_nbytes(num)) for move, num in MOVED.items()
    },
    ("mallee_worker_dropped_blocks_total",): _sum("num_dropped"),
    ("mallee_worker_declined_blocks_total",): _sum("num_declined"),
    ("mallee_worker_peer_seconds_total",): _sum("fetched_peer_s"),
    ("mallee_worker_failed_moves_total",): _sum("num_failed"),
    ("mallee_worker_unreadable_capsules",): _sum("num_unreadable"),
}
_LOAN_FIELDS: Final[dict[str, str]] = {
    "mallee_worker_open_loans": "num_open",
    "mallee_worker_loans_total": "num_granted",
    "mallee_worker_refused_loans_total": "num_refused",
    "mallee_worker_failed_loans_total": "num_failed",
    "mallee_worker_loan_bytes_total": "nbytes",
    "mallee_worker_loan_seconds_total": "seconds",
}
_LOANS: Final[Table[LendingUse]] = {
    (name, direction): _sum(f"{direction}.{field}")
    for name, field in _LOAN_FIELDS.items()
    for direction in ("borrowed", "lent")
}


class WorkerCollector(Collector):
    """Shows each worker's last report; beyond `most` workers, the sum over the rest."""

    def __init__(self, most: int = MOST_WORKERS) -> None:
        self._most = most
        self._leases: dict[WorkerId, Lease] = {}

    def heard(self, lease: Lease) -> None:
        """Take in a worker's lease."""
        self._leases[lease.worker] = lease

    def keep(self, alive: Container[WorkerId]) -> None:
        """Drop the reports of workers that are not `alive`."""
        self._leases = {worker: each for worker, each in self._leases.items() if worker in alive}

    def addresses(self) -> set[str]:
        """Addresses of the metrics of workers' processes, of those that serve them."""
        return {lease.metrics_at for lease in self._leases.values() if lease.metrics_at}

    def tiers_of(self, worker: WorkerId) -> TierUse | None:
        """The last report of `worker` on the tiers below its device, if it has any."""
        lease = self._leases.get(worker)
        return None if lease is None else _tiers(lease)

    def collect(self) -> Iterator[Shown]:
        loads = self._reports(lambda lease: lease.load if _has_use(lease) else None)
        yield from self._collect(loads, _LOADS)
        yield from self._collect(self._reports(lambda lease: lease.memory), _MEMORY)
        yield from self._collect(self._reports(_tiers), _TIERS)
        yield from self._collect(self._reports(lambda lease: lease.lending), _LOANS)

    def _reports(self, read: Callable[[Lease], R | None]) -> dict[WorkerId, R]:
        found = ((worker, read(lease)) for worker, lease in self._leases.items())
        return {worker: report for worker, report in found if report is not None}

    def _collect(self, reports: Mapping[WorkerId, R], table: Table[R]) -> Iterator[Shown]:
        """The families of `table`; none without a report."""
        if not reports:
            return
        groups = grouped(reports, self._most)
        made: dict[str, Shown] = {}
        for (name, *labels), value in table.items():
            each = made.get(name)
            if each is None:
                each = made[name] = shown(name)
            for worker, group in groups:
                each.add_metric([worker, *labels], value(group))
        yield from made.values()


def grouped(reports: Mapping[WorkerId, R], most: int) -> list[tuple[str, list[R]]]:
    """Reports under the names that they are shown by: beyond `most` workers, all under one."""
    each = list(reports.items())
    groups: list[tuple[str, list[R]]] = [(worker, [report]) for worker, report in each[:most]]
    if rest := each[most:]:
        groups.append((OTHERS, [report for _, report in rest]))
    return groups


def _has_use(lease: Lease) -> bool:
    return lease.load is not None and lease.load.use is not None


def _tiers(lease: Lease) -> TierUse | None:
    load = lease.load
    return None if load is None or load.use is None else load.use.tiers
