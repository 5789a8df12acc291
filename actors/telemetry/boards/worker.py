"""The dashboard of workers: load, work, KV memory and its tiers, loans, and their processes."""

from typing import Final

from mallee.actors.telemetry.boards.goals import FULL, KEPT
from mallee.actors.telemetry.boards.panels import (
    BLOCKS_S,
    JOB,
    TOKENS_S,
    WORKER,
    Board,
    Kind,
    Limits,
    Panel,
    Query,
    Row,
)
from mallee.actors.telemetry.boards.queries import Scope, share

_IN: Final = Scope("$__rate_interval", ("job", "worker"))
_STEP: Final = "mallee_engine_step_seconds"


def _each(title: str, name: str, unit: str = "short", kind: Kind = "lines") -> Panel:
    """A gauge of each worker."""
    return Panel(title, unit, (Query(_IN.now(name, "worker"), "{{worker}}"),), kind)


def _each_s(title: str, name: str, unit: str = "ops", kind: Kind = "lines") -> Panel:
    """A counter of each worker, in a second."""
    return Panel(title, unit, (Query(_IN.rate(name, "worker"), "{{worker}}"),), kind)


_LOAD: Final = Row(
    "Load",
    (
        _each("Branches that run", "mallee_worker_running_branches", kind="areas"),
        _each("Branches that wait in it", "mallee_worker_waiting_branches", kind="areas"),
        Panel(
            "KV blocks in use",
            "percentunit",
            (
                Query(
                    f"{_IN.now('mallee_worker_live_blocks', 'worker')}"
                    f" / {_IN.now('mallee_worker_total_blocks', 'worker')}",
                    "{{worker}}",
                ),
            ),
            limits=Limits(0.9, 0.98),
            most=1,
        ),
        Panel(
            "Step, p50 and p99",
            "s",
            (
                Query(_IN.quantile(0.5, _STEP, "engine"), "p50 {{engine}}"),
                Query(_IN.quantile(0.99, _STEP, "engine"), "p99 {{engine}}"),
            ),
        ),
        Panel(
            "First token, p95, from the worker's side",
            "s",
            (
                Query(
                    _IN.quantile(0.95, "vllm:time_to_first_token_seconds", "engine"), "{{engine}}"
                ),
            ),
        ),
        Panel(
            "Between tokens, p99",
            "s",
            (
                Query(
                    _IN.quantile(0.99, "vllm:inter_token_latency_seconds", "engine"), "{{engine}}"
                ),
            ),
        ),
    ),
)

_WORK: Final = Row(
    "Work",
    (
        _each_s("Tokens drawn", "mallee_worker_output_tokens_total", TOKENS_S, "areas"),
        _each_s("Prompt tokens computed", "mallee_worker_prefill_tokens_total", TOKENS_S, "areas"),
        Panel(
            "Share of prompt tokens found",
            "percentunit",
            (
                Query(
                    share(
                        _IN.rate("vllm:prefix_cache_hits_total", "engine"),
                        _IN.rate("vllm:prefix_cache_queries_total", "engine"),
                    ),
                    "{{engine}}",
                ),
            ),
            most=1,
        ),
        _each_s("Forks", "mallee_worker_forks_total"),
        _each_s("Preemptions", "mallee_worker_preemptions_total"),
        _each("Grammar states", "mallee_worker_constraint_states"),
    ),
)

_MEMORY: Final = Row(
    "KV memory",
    (
        Panel(
            "Blocks",
            "short",
            (
                Query(_IN.now("mallee_worker_live_blocks"), "in use"),
                Query(_IN.now("mallee_worker_cached_blocks"), "cached"),
                Query(
                    f"{_IN.now('mallee_worker_total_blocks')}"
                    f" - {_IN.now('mallee_worker_live_blocks')}"
                    f" - {_IN.now('mallee_worker_cached_blocks')}",
                    "free",
                ),
            ),
            "areas",
        ),
        Panel(
            "Share of used blocks that several use",
            "percentunit",
            (
                Query(
                    f"{_IN.now('mallee_worker_shared_blocks', 'worker')}"
                    f" / {_IN.now('mallee_worker_live_blocks', 'worker')}",
                    "{{worker}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Copied on write, evicted",
            BLOCKS_S,
            (
                Query(_IN.rate("mallee_worker_copied_blocks_total"), "copied"),
                Query(_IN.rate("mallee_worker_evicted_blocks_total"), "evicted"),
            ),
        ),
        _each("Memory of a branch", "mallee_worker_branch_bytes", "bytes"),
        _each("Pages of a branch", "mallee_worker_branch_blocks"),
        Panel(
            "Memory of the processes",
            "bytes",
            (Query(_IN.now("mallee_worker_memory_bytes", "part"), "{{part}}"),),
            "areas",
        ),
    ),
)

_CAPSULES: Final = Row(
    "Capsules",
    (
        Panel(
            "Capsules",
            "short",
            (Query(_IN.now("mallee_worker_capsules", "tier"), "tier {{tier}}"),),
            "areas",
        ),
        Panel(
            "Their KV",
            "bytes",
            (Query(_IN.now("mallee_worker_capsule_bytes", "tier"), "tier {{tier}}"),),
            "areas",
        ),
        Panel(
            "Room of capsules on the device",
            "percentunit",
            (
                Query(
                    f"""{_IN.now("mallee_worker_capsule_bytes", "worker", where='tier="0"')}"""
                    f" / {_IN.now('mallee_worker_capsule_limit_bytes', 'worker')}",
                    "{{worker}}",
                ),
            ),
            text="Of those that were asked for, as if they shared nothing: above 1 they do share.",
            limits=Limits(KEPT, 1),
        ),
        _each_s("Refused capsules", "mallee_worker_refused_capsules_total"),
        _each("Branches and capsules with blocks", "mallee_worker_readers"),
        _each("Texts and state below the device", "mallee_worker_kept_below_bytes", "bytes"),
    ),
)

_BELOW: Final = Row(
    "Host memory and disk",
    (
        Panel(
            "KV below the device",
            "bytes",
            (Query(_IN.now("mallee_worker_tier_bytes", "tier"), "{{tier}}"),),
            "areas",
        ),
        Panel(
            "Blocks below the device",
            "short",
            (Query(_IN.now("mallee_worker_tier_blocks", "tier"), "{{tier}}"),),
            "areas",
        ),
        Panel(
            "Room that capsules take below the device",
            "percentunit",
            (
                Query(
                    f"{_IN.now('mallee_worker_host_held_blocks', 'worker')}"
                    f" / ({_IN.now('mallee_worker_host_held_blocks', 'worker')}"
                    f" + {_IN.now('mallee_worker_host_room_blocks', 'worker')})",
                    "host, {{worker}}",
                ),
                Query(
                    f"""{_IN.now("mallee_worker_capsule_bytes", "worker", where='tier="2"')}"""
                    f" / ({_IN.now('mallee_worker_disk_limit_bytes', 'worker')} > 0)",
                    "disk, {{worker}}",
                ),
            ),
            limits=Limits(FULL, 1),
        ),
        Panel(
            "Moves",
            BLOCKS_S,
            (Query(_IN.rate("mallee_worker_moved_blocks_total", "move"), "{{move}}"),),
        ),
        Panel(
            "Bytes moved",
            "Bps",
            (Query(_IN.rate("mallee_worker_moved_bytes_total", "move"), "{{move}}"),),
        ),
        Panel(
            "Moves that failed, blocks that were not kept or fetched",
            "ops",
            (
                Query(_IN.rate("mallee_worker_failed_moves_total"), "failed"),
                Query(_IN.rate("mallee_worker_dropped_blocks_total"), "no room in host memory"),
                Query(_IN.rate("mallee_worker_declined_blocks_total"), "cheaper to compute"),
            ),
        ),
    ),
)

_LOANS: Final = Row(
    "Loans between workers",
    (
        Panel(
            "Loans",
            "ops",
            (Query(_IN.rate("mallee_worker_loans_total", "direction"), "{{direction}}"),),
        ),
        Panel(
            "Bytes lent",
            "Bps",
            (
                Query(
                    _IN.rate("mallee_worker_loan_bytes_total", "worker", where='direction="lent"'),
                    "{{worker}}",
                ),
            ),
        ),
        Panel(
            "Refused and failed loans, open ones",
            "ops",
            (
                Query(_IN.rate("mallee_worker_refused_loans_total"), "refused in a second"),
                Query(_IN.rate("mallee_worker_failed_loans_total"), "failed in a second"),
                Query(_IN.now("mallee_worker_open_loans"), "open"),
            ),
        ),
    ),
)

_HOSTS: Final = Row(
    "Processes of workers",
    (
        Panel(
            "Open requests",
            "short",
            (Query(_IN.now("mallee_engine_open_requests", "engine"), "{{engine}}"),),
            "areas",
        ),
        Panel(
            "Gateways that read, grammars that are compiled",
            "short",
            (
                Query(_IN.now("mallee_host_gateways", "instance"), "gateways, {{instance}}"),
                Query(
                    _IN.now("mallee_host_compiling_grammars", "instance"), "grammars, {{instance}}"
                ),
            ),
        ),
        Panel(
            "Batches taken in, streams and gateways given up",
            "ops",
            (
                Query(_IN.rate("mallee_host_batches_total"), "batches"),
                Query(_IN.rate("mallee_host_slow_streams_total"), "slow streams"),
                Query(_IN.rate("mallee_host_silent_gateways_total"), "silent gateways"),
            ),
        ),
        Panel(
            "As vLLM's scrapers see it",
            "short",
            (
                Query(_IN.now("vllm:num_requests_running", "model_name"), "running"),
                Query(_IN.now("vllm:num_requests_waiting", "model_name"), "waiting"),
            ),
            text="The names by which other routers read a worker's load.",
        ),
        Panel(
            "KV use, as those read it",
            "percentunit",
            (Query(_IN.now("vllm:kv_cache_usage_perc", "engine"), "{{engine}}"),),
            most=1,
        ),
        Panel(
            "Faults of the KV memory",
            "short",
            (Query(_IN.growth("mallee_worker_kv_faults_total", "worker"), "{{worker}}"),),
            text="`experimental.kv_checks` looks for them.",
            limits=Limits(1, 1),
        ),
    ),
)

BOARD: Final = Board(
    "worker",
    "Worker",
    "Load, work, memory, capsules, tiers and loans of the chosen workers.",
    (JOB, WORKER),
    (_LOAD, _WORK, _MEMORY, _CAPSULES, _BELOW, _LOANS, _HOSTS),
)
