"""The metrics of a process of workers: what its engines hold and did, and its connections to gateways.

Workers beyond `MOST_WORKERS` are summed under one name.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from time import perf_counter, time
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client import Metric

from mallee.actors.hosting.host import Host, HostStats
from mallee.actors.hosting.worker import Capacity, Worker
from mallee.protocol.events import EngineUse, LendingUse, Load, MemoryUse, TierUse
from mallee.runtime.telemetry.engines import ENGINE, ENGINES, VLLM, EngineMeters
from mallee.runtime.telemetry.families import (
    MOST_WORKERS,
    Families,
    Family,
    FewNames,
    Label,
    Reading,
    exposition,
)

SLICE_S: Final = (
    0.005  # of the event loop's time; then others have their turn, after a whole family
)

Read: TypeAlias = str | Callable[[Any], float]
"""The path of an attribute, or a function."""


class Report(NamedTuple):
    """One worker at a scrape."""

    model: str
    worker: str  # the name that it is shown under
    load: Load
    use: EngineUse
    size: Capacity
    num_open: int  # requests
    lending: LendingUse | None
    memory: MemoryUse | None


class Row(NamedTuple):
    """A counter or gauge of workers: what `read` finds in their reports, summed; with `per`, by its sum.

    With a `label`, by its values.
    """

    name: str
    text: str
    read: Read | Mapping[str, Read]
    label: str = ""
    per: Read = ""


class Part:
    """Rows of what `of` finds in a report: a worker without it is not in them."""

    def __init__(
        self, of: Callable[[Report], Any], labels: tuple[Label, ...], rows: Sequence[Row]
    ) -> None:
        self._of = of
        self._labels = attrgetter(*(("model", "worker") if len(labels) > 1 else ("worker",)))
        self._rows: list[tuple[Family, list[tuple[tuple[str, ...], _Value]]]] = []
        for row in rows:
            reads = row.read if isinstance(row.read, Mapping) else {"": row.read}
            own = (Label(row.label, tuple(reads)),) if row.label else ()
            values: list[tuple[tuple[str, ...], _Value]] = [
                ((value,) if row.label else (), _value(read, row.per))
                for value, read in reads.items()
            ]
            self._rows.append((Family(row.name, row.text, (*labels, *own)), values))

    @property
    def families(self) -> list[Family]:
        return [family for family, _ in self._rows]

    def collect(self, groups: Sequence[Sequence[Report]]) -> Iterator[Metric]:
        """The families, if there is a report for them; `groups` are shown under one name each."""
        found = []
        for reports in groups:
            parts = [part for each in reports if (part := self._of(each)) is not None]
            if parts:
                labels = self._labels(reports[0])
                found.append((labels if isinstance(labels, tuple) else (labels,), parts))
        if not found:
            return
        for family, values in self._rows:
            shown = family.shown()
            for labels, parts in found:
                for more, value in values:
                    shown.add_metric((*labels, *more), value(parts))
            yield shown


_Value: TypeAlias = Callable[[Sequence[Any]], float]


def _value(read: Read, per: Read) -> _Value:
    total = _reader(read)
    if not per:
        return lambda parts: sum(map(total, parts))
    num = _reader(per)
    return lambda parts: sum(map(total, parts)) / (sum(map(num, parts)) or 1)


def _reader(read: Read) -> Callable[[Any], float]:
    return attrgetter(read) if isinstance(read, str) else read


_WORKER: Final = (Label("worker", most=MOST_WORKERS + 1),)


def _nbytes(num: str) -> Callable[[TierUse], int]:
    """The bytes of so many blocks."""
    read = attrgetter(num)
    return lambda tiers: read(tiers) * tiers.block_nbytes


def _kept(tier: int) -> Callable[[EngineUse], int]:
    return lambda use: use.kept_by_tier[tier].capsules


def _kept_nbytes(tier: int) -> Callable[[EngineUse], int]:
    return lambda use: use.kept_by_tier[tier].blocks * use.block_nbytes


_LYING: Final = {"host": "host_blocks", "disk": "disk_blocks"}
_MOVED: Final = {
    "offload": "num_offloaded",
    "park": "num_parked",
    "spill": "num_spilled",
    "fetch_host": "num_fetched_host",
    "fetch_disk": "num_fetched_disk",
    "fetch_peer": "num_fetched_peer",
}
_LOAD_ROWS: Final = (
    Row("mallee_worker_running_branches", "Branches that run.", "rows"),
    Row("mallee_worker_waiting_branches", "Branches that wait in it.", "waiting"),
)
_HELD_ROWS: Final = (
    Row("mallee_worker_total_blocks", "KV blocks of the worker.", "total_blocks"),
    Row("mallee_worker_live_blocks", "KV blocks in use by branches and capsules.", "live_blocks"),
    Row(
        "mallee_worker_shared_blocks",
        "Of those, in use by several branches or capsules: the share ratio is this by live blocks.",
        "shared_blocks",
    ),
    Row(
        "mallee_worker_cached_blocks",
        "KV blocks not in use, kept for prefix hits.",
        "cached_blocks",
    ),
    Row("mallee_worker_readers", "Branches and capsules that have KV blocks.", "readers"),
    Row(
        "mallee_worker_block_references",
        "Entries of all their page tables: the blocks that they would take if nothing were shared.",
        "references",
    ),
    Row(
        "mallee_worker_branch_blocks",
        "Pages of a branch or capsule, on average, shared ones counted for each.",
        "references",
        per="readers",
    ),
    Row(
        "mallee_worker_branch_bytes",
        "KV memory of a branch or capsule, on average, shared blocks counted once.",
        lambda use: use.live_blocks * use.block_nbytes,
        per="readers",
    ),
    Row(
        "mallee_worker_constraint_states",
        "Grammar states that branches and capsules hold.",
        "constraint_states",
    ),
    Row(
        "mallee_worker_capsules",
        "Capsules that were asked for, by the lowest tier where they lie: device (0), host"
        " memory (1), disk (2).",
        {str(tier): _kept(tier) for tier in range(3)},
        "tier",
    ),
    Row(
        "mallee_worker_capsule_bytes",
        "KV of those, as if they shared none.",
        {str(tier): _kept_nbytes(tier) for tier in range(3)},
        "tier",
    ),
    Row(
        "mallee_worker_capsule_limit_bytes",
        "KV that they may take on the device (`engine.max_kept_share`), shared blocks counted"
        " once.",
        lambda use: use.max_kept_blocks * use.block_nbytes,
    ),
    Row(
        "mallee_worker_kept_below_bytes",
        "Memory of texts and state of those that lie below the device.",
        "kept_below_bytes",
    ),
)
_MEMORY_ROWS: Final = (
    Row(
        "mallee_worker_memory_bytes",
        "Memory of the worker's process on its device: the `weights`, the `kv`, recorded steps"
        " (`graphs`) and all the `other`. On a CPU that is its resident memory, with the KV"
        " that was ever in use. Not of mocked engines.",
        {part: part for part in ("weights", "kv", "graphs", "other")},
        "part",
    ),
)
_WORK_ROWS: Final = (
    Row("mallee_worker_prefill_tokens_total", "Tokens computed for prompts.", "num_prefill_tokens"),
    Row(
        "mallee_worker_cached_tokens_total",
        "Prompt tokens found in its cache.",
        "num_cached_tokens",
    ),
    Row("mallee_worker_output_tokens_total", "Tokens drawn.", "num_output_tokens"),
    Row(
        "mallee_worker_drafted_tokens_total",
        "Tokens of drafts that were computed (`engine.speculation`).",
        "num_drafted_tokens",
    ),
    Row(
        "mallee_worker_accepted_tokens_total",
        "Of those, tokens that were drawn: the acceptance of speculation is this by drafted"
        " tokens.",
        "num_accepted_tokens",
    ),
    Row(
        "mallee_worker_ahead_rows_total",
        "Rows of decodes that a GPU was handed before their tokens were here.",
        "num_ahead_rows",
    ),
    Row(
        "mallee_worker_ahead_void_rows_total",
        "Of those, rows in vain: their answers ended, or went on elsewhere.",
        "num_ahead_void_rows",
    ),
    Row(
        "mallee_worker_host_gap_seconds_total",
        "Time in which the device stood still while there was work: it waited for the host.",
        "host_gap_s",
    ),
    Row(
        "mallee_worker_forks_total", "Branches that began at state shared with others.", "num_forks"
    ),
    Row("mallee_worker_copied_blocks_total", "KV blocks copied on write.", "num_copied_blocks"),
    Row(
        "mallee_worker_evicted_blocks_total",
        "Cached KV blocks that gave way.",
        "num_evicted_blocks",
    ),
    Row(
        "mallee_worker_preemptions_total",
        "Branches that lost their place for lack of blocks.",
        "num_preemptions",
    ),
    Row("mallee_worker_kv_faults_total", "Faults found by checks of the KV memory.", "num_faults"),
    Row(
        "mallee_worker_refused_capsules_total",
        "Capsules that found no room to be kept.",
        "num_refused_capsules",
    ),
    Row("mallee_worker_lent_blocks_total", "KV blocks that other workers read.", "num_lent_blocks"),
)
_BELOW_ROWS: Final = (
    Row("mallee_worker_tier_blocks", "KV blocks below the device.", _LYING, "tier"),
    Row(
        "mallee_worker_tier_bytes",
        "The bytes of those.",
        {tier: _nbytes(num) for tier, num in _LYING.items()},
        "tier",
    ),
    Row(
        "mallee_worker_host_held_blocks",
        "KV blocks in host memory that capsules hold.",
        "host_held",
    ),
    Row(
        "mallee_worker_host_room_blocks",
        "KV blocks of host memory that capsules could still have.",
        "host_room",
    ),
    Row(
        "mallee_worker_disk_limit_bytes",
        "KV that the disk may hold (`engine.disk_gib`); 0 without one, and of mocked engines.",
        "disk_limit_nbytes",
    ),
    Row(
        "mallee_worker_moved_blocks_total",
        "KV blocks moved between tiers: `offload` (evicted to host memory), `park` (capsules"
        " to host memory), `spill` (to disk), and fetched from there or from other workers.",
        _MOVED,
        "move",
    ),
    Row(
        "mallee_worker_moved_bytes_total",
        "The bytes of those.",
        {move: _nbytes(num) for move, num in _MOVED.items()},
        "move",
    ),
    Row(
        "mallee_worker_dropped_blocks_total",
        "Evicted KV blocks that host memory had no room for.",
        "num_dropped",
    ),
    Row(
        "mallee_worker_declined_blocks_total",
        "KV blocks below the device, cheaper to compute again.",
        "num_declined",
    ),
    Row(
        "mallee_worker_peer_seconds_total",
        "Seconds that fetches from other workers took.",
        "fetched_peer_s",
    ),
    Row(
        "mallee_worker_failed_moves_total",
        "Moves between tiers that ended by an error.",
        "num_failed",
    ),
    Row(
        "mallee_worker_unreadable_capsules",
        "Durable capsules that a worker found on its disk and could not take in; its log says why.",
        "num_unreadable",
    ),
)


def _both(field: str) -> dict[str, Read]:
    return {direction: f"{direction}.{field}" for direction in ("borrowed", "lent")}


_LOAN_ROWS: Final = (
    Row("mallee_worker_open_loans", "Loans of KV that are open.", _both("num_open"), "direction"),
    Row(
        "mallee_worker_loans_total",
        "Loans of KV from worker to worker.",
        _both("num_granted"),
        "direction",
    ),
    Row(
        "mallee_worker_refused_loans_total",
        "Questions for loans that got an error for an answer: the KV was gone.",
        _both("num_refused"),
        "direction",
    ),
    Row(
        "mallee_worker_failed_loans_total",
        "Loans that ended by an error, and connections that did.",
        _both("num_failed"),
        "direction",
    ),
    Row(
        "mallee_worker_loan_bytes_total", "Bytes of KV that crossed.", _both("nbytes"), "direction"
    ),
    Row(
        "mallee_worker_loan_seconds_total",
        "Seconds in which those crossed.",
        _both("seconds"),
        "direction",
    ),
)
_CONTRACT_ROWS: Final = (
    Row("vllm:num_requests_running", "Branches that run.", "load.rows"),
    Row("vllm:num_requests_waiting", "Branches that wait.", "load.waiting"),
    Row(
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that are in use, 0 to 1; cached ones that could be evicted are"
        " not.",
        "load.active_blocks",
        per="size.num_blocks",
    ),
    Row(
        "vllm:prefix_cache_queries_total",
        "Prompt tokens looked for in the cache.",
        lambda report: report.use.num_cached_tokens + report.use.num_prefill_tokens,
    ),
    Row("vllm:prefix_cache_hits_total", "Of them, those that were there.", "use.num_cached_tokens"),
    Row("vllm:prompt_tokens_total", "Tokens computed for prompts.", "use.num_prefill_tokens"),
    Row("vllm:generation_tokens_total", "Tokens drawn.", "use.num_output_tokens"),
    Row(
        "vllm:num_preemptions_total",
        "Branches that lost their place for lack of blocks.",
        "use.num_preemptions",
    ),
)
_OPEN_ROWS: Final = (Row("mallee_engine_open_requests", "Requests that are not over.", "num_open"),)
_CONFIG: Final = Family(
    "vllm:cache_config_info",
    "1; the size of the KV memory is in the labels.",
    (*ENGINE, Label("block_size", most=1), Label("num_gpu_blocks", most=MOST_WORKERS)),
)
_LORA: Final = Family(
    "vllm:lora_requests_info",
    "Time of the scrape, since the epoch. There are no adapters: the labels say so.",
    (
        *ENGINE,
        Label("max_lora", ("0",)),
        Label("running_lora_adapters", ("",)),
        Label("waiting_lora_adapters", ("",)),
    ),
)
_HOST: Final = (
    Reading(
        "mallee_host_compiling_grammars",
        "Grammars of requests that are compiled, or wait for it.",
        "compiling",
    ),
    Reading("mallee_host_gateways", "Gateways that read.", "gateways"),
    Reading("mallee_host_batches_total", "Batches of commands taken in.", "batches"),
    Reading(
        "mallee_host_slow_streams_total",
        "Streams cut, for their gateway fell behind.",
        "slow_streams",
    ),
    Reading(
        "mallee_host_silent_gateways_total",
        "Gateways given up for their silence.",
        "silent_gateways",
    ),
)
_PARTS: Final = {
    "Workers: load and memory": (
        Part(attrgetter("load"), _WORKER, _LOAD_ROWS),
        Part(attrgetter("use"), _WORKER, _HELD_ROWS),
        Part(attrgetter("memory"), _WORKER, _MEMORY_ROWS),
    ),
    "Workers: work": (Part(attrgetter("use"), _WORKER, _WORK_ROWS),),
    "Workers: below the device": (Part(attrgetter("use.tiers"), _WORKER, _BELOW_ROWS),),
    "Workers: loans": (Part(attrgetter("lending"), _WORKER, _LOAN_ROWS),),
    VLLM: (Part(lambda report: report, ENGINE, _CONTRACT_ROWS),),
    ENGINES: (Part(lambda report: report, ENGINE, _OPEN_ROWS),),
}


class WorkerMetrics:
    """The families of a process of workers: over `reports` at each scrape, and the host's `stats`."""

    def __init__(
        self, reports: Callable[[], Iterable[Report]], stats: Callable[[], HostStats]
    ) -> None:
        self.registry = Families()
        self._reports = reports
        for title, parts in _PARTS.items():
            for family in (family for part in parts for family in part.families):
                self.registry.area(title).declare(family)
        self.registry.area(VLLM).collect_by(self._collect, (_CONFIG, _LORA))
        self.registry.area(ENGINES).readings(stats, _HOST)
        self.engines = EngineMeters(self.registry)

    def _collect(self) -> Iterator[Metric]:
        groups: dict[str, list[Report]] = {}  # by the name that they are shown under
        for report in self._reports():
            groups.setdefault(report.worker, []).append(report)
        for part in (part for parts in _PARTS.values() for part in parts):
            yield from part.collect([*groups.values()])
        config, lora = _CONFIG.shown(), _LORA.shown()
        for report, *_ in groups.values():
            engine, size = (report.model, report.worker), report.size
            config.add_metric((*engine, str(size.block_size), str(size.num_blocks)), 1)
            lora.add_metric((*engine, "0", "", ""), time())
        yield from (config, lora)


class HostMetrics:
    """The metrics of the workers of `host`, and of those that it gets later. Belongs to its event loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._names = FewNames(MOST_WORKERS)
        self._metrics = WorkerMetrics(self._reports, host.stats)
        host.on_add = self._watch
        for worker in host.workers.values():
            self._watch(worker)

    async def render(self, accept: str = "") -> bytes:
        """Prometheus text, with loads as fresh as a moment's wait gives them."""
        await self._host.renew_loads()
        parts, due = [], perf_counter() + SLICE_S
        for part in exposition(self._metrics.registry, accept):
            parts.append(part)
            if perf_counter() > due:
                await asyncio.sleep(0)
                due = perf_counter() + SLICE_S
        return b"".join(parts)

    def _watch(self, worker: Worker) -> None:
        name = self._names.shown(worker.worker)
        worker.meter = self._metrics.engines.meter(worker.model.name, name)
        worker.runner.on_step = worker.meter.stepped

    def _reports(self) -> Iterator[Report]:
        lending = None if self._host.lending is None else self._host.lending()
        memory = None if self._host.memory is None else self._host.memory()
        for worker in self._host.workers.values():
            if (load := worker.load) is not None and load.use is not None:
                yield Report(
                    model=worker.model.name,
                    worker=self._names.shown(worker.worker),
                    load=load,
                    use=load.use,
                    size=worker.capacity,
                    num_open=worker.num_open,
                    lending=lending,
                    memory=memory,
                )
