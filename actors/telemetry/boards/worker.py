"""The dashboard of workers: load, work, KV memory and its tiers, loans, and their processes."""

from typing import Final

from mallee.actors.telemetry.boards import measures
from mallee.actors.telemetry.boards.goals import FULL, KEPT
from mallee.actors.telemetry.boards.panels import (
    BLOCKS_S,
    JOB,
    TOKENS_S,
    WORKER,
    Board,
    Limits,
    Panel,
    Query,
    Row,
    blocks,
    each,
)
from mallee.actors.telemetry.boards.queries import Scope, share

_IN: Final = Scope("$__rate_interval", ("job", "worker"))
_STEP: Final = "mallee_engine_step_seconds"

_LOAD: Final = Row(
    "Load",
    (
        Panel(
            "Branches that run",
            "short",
            each(_IN.now, "mallee_worker_running_branches", "worker"),
            "areas",
        ),
        Panel(
            "Branches that wait in it",
            "short",
            each(_IN.now, "mallee_worker_waiting_branches", "worker"),
            "areas",
        ),
        Panel(
            "KV blocks in use",
            "percentunit",
            (Query(measures.in_use(_IN), "{{worker}}"),),
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
        Panel(
            "Tokens drawn",
            TOKENS_S,
            each(_IN.rate, "mallee_worker_output_tokens_total", "worker"),
            "areas",
        ),
        Panel(
            "Prompt tokens computed",
            TOKENS_S,
            each(_IN.rate, "mallee_worker_prefill_tokens_total", "worker"),
            "areas",
        ),
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
        Panel("Forks", "ops", each(_IN.rate, "mallee_worker_forks_total", "worker")),
        Panel("Preemptions", "ops", each(_IN.rate, "mallee_worker_preemptions_total", "worker")),
        Panel(
            "Grammar states", "short", each(_IN.now, "mallee_worker_constraint_states", "worker")
        ),
        Panel(
            "Tokens drafted",
            TOKENS_S,
            each(_IN.rate, "mallee_worker_drafted_tokens_total", "worker"),
        ),
        Panel(
            "Share of drafted tokens that were drawn",
            "percentunit",
            (
                Query(
                    share(
                        _IN.rate("mallee_worker_accepted_tokens_total", "worker"),
                        _IN.rate("mallee_worker_drafted_tokens_total", "worker"),
                    ),
                    "{{worker}}",
                ),
            ),
            most=1,
        ),
    ),
)

_MEMORY: Final = Row(
    "KV memory",
    (
        Panel("Blocks", "short", blocks(_IN), "areas"),
        Panel(
            "Share of used blocks that several use",
            "percentunit",
            (
                Query(
                    _IN.ratio("mallee_worker_shared_blocks", "mallee_worker_live_blocks", "worker"),
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
        Panel("Memory of a branch", "bytes", each(_IN.now, "mallee_worker_branch_bytes", "worker")),
        Panel("Pages of a branch", "short", each(_IN.now, "mallee_worker_branch_blocks", "worker")),
        Panel(
            "Memory of the processes",
            "bytes",
            each(_IN.now, "mallee_worker_memory_bytes", "part"),
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
            each(_IN.now, "mallee_worker_capsules", "tier", legend="tier {{tier}}"),
            "areas",
        ),
        Panel(
            "Their KV",
            "bytes",
            each(_IN.now, "mallee_worker_capsule_bytes", "tier", legend="tier {{tier}}"),
            "areas",
        ),
        Panel(
            "Room of capsules on the device",
            "percentunit",
            (Query(measures.kept_on_device(_IN), "{{worker}}"),),
            text="Of those that were asked for, as if they shared nothing: above 1 they do share.",
            limits=Limits(KEPT, 1),
        ),
        Panel(
            "Refused capsules",
            "ops",
            each(_IN.rate, "mallee_worker_refused_capsules_total", "worker"),
        ),
        Panel(
            "Branches and capsules with blocks",
            "short",
            each(_IN.now, "mallee_worker_readers", "worker"),
        ),
        Panel(
            "Texts and state below the device",
            "bytes",
            each(_IN.now, "mallee_worker_kept_below_bytes", "worker"),
        ),
    ),
)

_BELOW: Final = Row(
    "Host memory and disk",
    (
        Panel(
            "KV below the device",
            "bytes",
            each(_IN.now, "mallee_worker_tier_bytes", "tier"),
            "areas",
        ),
        Panel(
            "Blocks below the device",
            "short",
            each(_IN.now, "mallee_worker_tier_blocks", "tier"),
            "areas",
        ),
        Panel(
            "Room that capsules take below the device",
            "percentunit",
            (
                Query(measures.kept_in_host(_IN), "host, {{worker}}"),
                Query(measures.kept_on_disk(_IN), "disk, {{worker}}"),
            ),
            limits=Limits(FULL, 1),
        ),
        Panel("Moves", BLOCKS_S, each(_IN.rate, "mallee_worker_moved_blocks_total", "move")),
        Panel("Bytes moved", "Bps", each(_IN.rate, "mallee_worker_moved_bytes_total", "move")),
        Panel(
            "Moves that failed, blocks that were not kept or fetched",
            "ops",
            (
                Query(_IN.rate("mallee_worker_failed_moves_total"), "failed"),
                Query(_IN.rate("mallee_worker_dropped_blocks_total"), "no room in host memory"),
                Query(_IN.rate("mallee_worker_declined_blocks_total"), "cheaper to compute"),
            ),
        ),
        Panel(
            "Capsules on disk that can't be used",
            "short",
            (Query(_IN.now("mallee_worker_unreadable_capsules"), "{{worker}}"),),
        ),
    ),
)

_LOANS: Final = Row(
    "Loans between workers",
    (
        Panel("Loans", "ops", each(_IN.rate, "mallee_worker_loans_total", "direction")),
        Panel(
            "Bytes lent",
            "Bps",
            each(_IN.rate, "mallee_worker_loan_bytes_total", "worker", where='direction="lent"'),
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
            each(_IN.now, "mallee_engine_open_requests", "engine"),
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
            each(_IN.now, "vllm:kv_cache_usage_perc", "engine"),
            most=1,
        ),
        Panel(
            "Faults of the KV memory",
            "short",
            each(_IN.growth, "mallee_worker_kv_faults_total", "worker"),
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
