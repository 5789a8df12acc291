"""The metrics of a process of workers: what its engines hold and did, and its connections to gateways.

Workers beyond `MOST_WORKERS` are summed under one name.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from time import perf_counter, time
from typing import Any, Final, NamedTuple

from msgspec import structs
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
    Groups,
    Label,
    Reading,
    exposition,
)

SLICE_S: Final = 0.005  # that a scrape takes the event loop for, but for the rest of a family


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


_WORKER: Final = (Label("worker", most=MOST_WORKERS + 1),)
_TIER: Final = Label("tier", ("0", "1", "2"))
_BELOW: Final = Label("tier", ("host", "disk"))
_MOVE: Final = Label("move", ("offload", "park", "spill", "fetch_host", "fetch_disk", "fetch_peer"))
_DIRECTION: Final = Label("direction", ("borrowed", "lent"))


def _nbytes(blocks: str) -> Callable[[TierUse], dict[str, int]]:
    read = attrgetter(blocks)
    return lambda tiers: {name: num * tiers.block_nbytes for name, num in read(tiers).items()}


def _kept(use: EngineUse) -> dict[str, int]:
    return {str(tier): kept.capsules for tier, kept in enumerate(use.kept_by_tier)}


def _kept_nbytes(use: EngineUse) -> dict[str, int]:
    return {str(tier): kept.blocks * use.block_nbytes for tier, kept in enumerate(use.kept_by_tier)}


def _both(field: str) -> Callable[[LendingUse], dict[str, float]]:
    read = attrgetter(field)
    return lambda loans: {"borrowed": read(loans.borrowed), "lent": read(loans.lent)}


_LOAD: Final = (
    Reading("mallee_worker_running_branches", "Branches that run.", "rows"),
    Reading("mallee_worker_waiting_branches", "Branches that wait in it.", "waiting"),
)
_HELD: Final = (
    Reading("mallee_worker_total_blocks", "KV blocks of the worker.", "total_blocks"),
    Reading(
        "mallee_worker_live_blocks", "KV blocks in use by branches and capsules.", "live_blocks"
    ),
    Reading(
        "mallee_worker_shared_blocks",
        "Of those, in use by several branches or capsules: the share ratio is this by live blocks.",
        "shared_blocks",
    ),
    Reading(
        "mallee_worker_cached_blocks",
        "KV blocks not in use, kept for prefix hits.",
        "cached_blocks",
    ),
    Reading("mallee_worker_readers", "Branches and capsules that have KV blocks.", "readers"),
    Reading(
        "mallee_worker_block_references",
        "Entries of all their page tables: the blocks that they would take if nothing were shared.",
        "references",
    ),
    Reading(
        "mallee_worker_branch_blocks",
        "Pages of a branch or capsule, on average, shared ones counted for each.",
        "references",
        per="readers",
    ),
    Reading(
        "mallee_worker_branch_bytes",
        "KV memory of a branch or capsule, on average, shared blocks counted once.",
        lambda use: use.live_blocks * use.block_nbytes,
        per="readers",
    ),
    Reading(
        "mallee_worker_constraint_states",
        "Grammar states that branches and capsules hold.",
        "constraint_states",
    ),
    Reading(
        "mallee_worker_capsules",
        "Capsules that were asked for, by the lowest tier where they lie: device (0), host"
        " memory (1), disk (2).",
        _kept,
        (_TIER,),
    ),
    Reading(
        "mallee_worker_capsule_bytes",
        "KV of those, as if they shared none.",
        _kept_nbytes,
        (_TIER,),
    ),
    Reading(
        "mallee_worker_capsule_limit_bytes",
        "KV that they may take on the device (`engine.max_kept_share`), shared blocks counted"
        " once.",
        lambda use: use.max_kept_blocks * use.block_nbytes,
    ),
    Reading(
        "mallee_worker_kept_below_bytes",
        "Memory of texts and state of those that lie below the device.",
        "kept_below_bytes",
    ),
)
_MEMORY: Final = (
    Reading(
        "mallee_worker_memory_bytes",
        "Memory of the worker's process on its device: the `weights`, the `kv`, recorded steps"
        " (`graphs`) and all the `other`. On a CPU that is its resident memory, with the KV"
        " that was ever in use. Not of mocked engines.",
        structs.asdict,
        (Label("part", ("weights", "kv", "graphs", "other")),),
    ),
)
_WORK: Final = (
    Reading(
        "mallee_worker_prefill_tokens_total", "Tokens computed for prompts.", "num_prefill_tokens"
    ),
    Reading(
        "mallee_worker_cached_tokens_total",
        "Prompt tokens found in its cache.",
        "num_cached_tokens",
    ),
    Reading("mallee_worker_output_tokens_total", "Tokens drawn.", "num_output_tokens"),
    Reading(
        "mallee_worker_drafted_tokens_total",
        "Tokens of drafts that were computed (`engine.speculation`).",
        "num_drafted_tokens",
    ),
    Reading(
        "mallee_worker_accepted_tokens_total",
        "Of those, tokens that were drawn: the acceptance of speculation is this by drafted"
        " tokens.",
        "num_accepted_tokens",
    ),
    Reading(
        "mallee_worker_ahead_rows_total",
        "Rows of decodes that a GPU was handed before their tokens were here.",
        "num_ahead_rows",
    ),
    Reading(
        "mallee_worker_ahead_void_rows_total",
        "Of those, rows in vain: their answers ended, or went on elsewhere.",
        "num_ahead_void_rows",
    ),
    Reading(
        "mallee_worker_host_gap_seconds_total",
        "Time in which the device stood still while there was work: it waited for the host.",
        "host_gap_s",
    ),
    Reading(
        "mallee_worker_forks_total", "Branches that began at state shared with others.", "num_forks"
    ),
    Reading("mallee_worker_copied_blocks_total", "KV blocks copied on write.", "num_copied_blocks"),
    Reading(
        "mallee_worker_evicted_blocks_total",
        "Cached KV blocks that gave way.",
        "num_evicted_blocks",
    ),
    Reading(
        "mallee_worker_preemptions_total",
        "Branches that lost their place for lack of blocks.",
        "num_preemptions",
    ),
    Reading(
        "mallee_worker_kv_faults_total", "Faults found by checks of the KV memory.", "num_faults"
    ),
    Reading(
        "mallee_worker_refused_capsules_total",
        "Capsules that found no room to be kept.",
        "num_refused_capsules",
    ),
    Reading(
        "mallee_worker_lent_blocks_total", "KV blocks that other workers read.", "num_lent_blocks"
    ),
)
_STATES: Final = (
    Reading(
        "mallee_worker_cached_states",
        "States kept to go on from, by what they were left for: the `end` of a prompt, a place that a client"
        " `named`, one where texts part (`branching`) or that a branch `awaited`, the end of an `answer`, or"
        " of a chunk (`cadence`).",
        "by_reason",
        (Label("reason", ("end", "named", "branching", "awaited", "answer", "cadence")),),
    ),
    Reading(
        "mallee_worker_cached_state_bytes",
        "The bytes of those.",
        lambda use: sum(use.by_reason.values()) * use.nbytes,
    ),
    Reading("mallee_worker_evicted_states_total", "Of those, states that gave way.", "num_evicted"),
)
_TIERS: Final = (
    Reading("mallee_worker_tier_blocks", "KV blocks below the device.", "blocks", (_BELOW,)),
    Reading("mallee_worker_tier_bytes", "The bytes of those.", _nbytes("blocks"), (_BELOW,)),
    Reading(
        "mallee_worker_host_held_blocks",
        "KV blocks in host memory that capsules hold.",
        "host_held",
    ),
    Reading(
        "mallee_worker_host_room_blocks",
        "KV blocks of host memory that capsules could still have.",
        "host_room",
    ),
    Reading(
        "mallee_worker_disk_limit_bytes",
        "KV that the disk may hold (`engine.disk_gib`); 0 without one, and of mocked engines.",
        "disk_limit_nbytes",
    ),
    Reading(
        "mallee_worker_moved_blocks_total",
        "KV blocks moved between tiers: `offload` (evicted to host memory), `park` (capsules"
        " to host memory), `spill` (to disk), and fetched from there or from other workers.",
        "moved_blocks",
        (_MOVE,),
    ),
    Reading(
        "mallee_worker_moved_bytes_total", "The bytes of those.", _nbytes("moved_blocks"), (_MOVE,)
    ),
    Reading(
        "mallee_worker_dropped_blocks_total",
        "Evicted KV blocks that host memory had no room for.",
        "num_dropped",
    ),
    Reading(
        "mallee_worker_declined_blocks_total",
        "KV blocks below the device, cheaper to compute again.",
        "num_declined",
    ),
    Reading(
        "mallee_worker_peer_seconds_total",
        "Seconds that fetches from other workers took.",
        "fetched_peer_s",
    ),
    Reading(
        "mallee_worker_failed_moves_total",
        "Moves between tiers that ended by an error.",
        "num_failed",
    ),
    Reading(
        "mallee_worker_unreadable_capsules",
        "Durable capsules that a worker found on its disk and could not take in; its log says why.",
        "num_unreadable",
    ),
)


_LOANS: Final = (
    Reading(
        "mallee_worker_open_loans", "Loans of KV that are open.", _both("num_open"), (_DIRECTION,)
    ),
    Reading(
        "mallee_worker_loans_total",
        "Loans of KV from worker to worker.",
        _both("num_granted"),
        (_DIRECTION,),
    ),
    Reading(
        "mallee_worker_refused_loans_total",
        "Questions for loans that got an error for an answer: the KV was gone.",
        _both("num_refused"),
        (_DIRECTION,),
    ),
    Reading(
        "mallee_worker_failed_loans_total",
        "Loans that ended by an error, and connections that did.",
        _both("num_failed"),
        (_DIRECTION,),
    ),
    Reading(
        "mallee_worker_loan_bytes_total",
        "Bytes of KV that crossed.",
        _both("nbytes"),
        (_DIRECTION,),
    ),
    Reading(
        "mallee_worker_loan_seconds_total",
        "Seconds in which those crossed.",
        _both("seconds"),
        (_DIRECTION,),
    ),
)
_CONTRACT: Final = (
    Reading("vllm:num_requests_running", "Branches that run.", "load.rows"),
    Reading("vllm:num_requests_waiting", "Branches that wait.", "load.waiting"),
    Reading(
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that are in use, 0 to 1; cached ones that could be evicted are"
        " not.",
        "load.active_blocks",
        per="size.num_blocks",
    ),
    Reading(
        "vllm:prefix_cache_queries_total",
        "Prompt tokens looked for in the cache.",
        lambda report: report.use.num_cached_tokens + report.use.num_prefill_tokens,
    ),
    Reading(
        "vllm:prefix_cache_hits_total", "Of them, those that were there.", "use.num_cached_tokens"
    ),
    Reading("vllm:prompt_tokens_total", "Tokens computed for prompts.", "use.num_prefill_tokens"),
    Reading("vllm:generation_tokens_total", "Tokens drawn.", "use.num_output_tokens"),
    Reading(
        "vllm:num_preemptions_total",
        "Branches that lost their place for lack of blocks.",
        "use.num_preemptions",
    ),
)
_OPEN: Final = (Reading("mallee_engine_open_requests", "Requests that are not over.", "num_open"),)
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


class WorkerMetrics:
    """The families of a process of workers, of the `reports` at a scrape, and of the host's `stats`."""

    def __init__(self, stats: Callable[[], HostStats]) -> None:
        self.registry = Families()
        self.reports: Sequence[Report] = ()
        area = self.registry.area
        for title, path, readings in (
            ("Workers: load and memory", "load", _LOAD),
            ("Workers: load and memory", "use", _HELD),
            ("Workers: load and memory", "memory", _MEMORY),
            ("Workers: work", "use", _WORK),
            ("Workers: states of recurrent layers", "use.states", _STATES),
            ("Workers: below the device", "use.tiers", _TIERS),
            ("Workers: loans", "lending", _LOANS),
        ):
            area(title).grouped(self._each(path), readings, _WORKER)
        area(VLLM).grouped(self._engines, _CONTRACT, ENGINE)
        area(VLLM).collect_by(self._collect_sizes, (_CONFIG, _LORA))
        area(ENGINES).grouped(self._engines, _OPEN, ENGINE)
        area(ENGINES).readings(stats, _HOST)
        self.engines = EngineMeters(self.registry)

    def _each(self, path: str) -> Callable[[], Groups]:
        """That part of the reports that have it, by worker."""
        part = attrgetter(path)

        def groups() -> Groups:
            found: dict[str, list[Any]] = {}
            for report in self.reports:
                if (state := part(report)) is not None:
                    found.setdefault(report.worker, []).append(state)
            return [((worker,), states) for worker, states in found.items()]

        return groups

    def _engines(self) -> Groups:
        found: dict[tuple[str, str], list[Report]] = {}
        for report in self.reports:
            found.setdefault((report.model, report.worker), []).append(report)
        return [*found.items()]

    def _collect_sizes(self) -> Iterator[Metric]:
        config, lora = _CONFIG.shown(), _LORA.shown()
        for engine, (report, *_) in self._engines():
            size = report.size
            config.add_metric((*engine, str(size.block_size), str(size.num_blocks)), 1)
            lora.add_metric((*engine, "0", "", ""), time())
        yield from (config, lora)


class HostMetrics:
    """The metrics of the workers of `host`, and of those that it gets later. Belongs to its event loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._names = FewNames(MOST_WORKERS)
        self._metrics = WorkerMetrics(host.stats)
        host.on_add = self._watch
        for worker in host.workers.values():
            self._watch(worker)

    async def render(self, accept: str = "") -> bytes:
        """Prometheus text, with loads as fresh as a moment's wait gives them."""
        await self._host.renew_loads()
        self._metrics.reports = [*self._reports()]
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
        lending = None if self._host.kv_use is None else self._host.kv_use()
        memory = self._host.memory()
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
