"""The dashboard of the whole fleet: the first to open when somebody is paged."""

from typing import Final

from mallee.actors.telemetry.boards import measures
from mallee.actors.telemetry.boards.goals import (
    ANSWERED,
    FIRST_TOKEN_S,
    NEXT_TOKEN_S,
    SERVED,
    WAITING,
)
from mallee.actors.telemetry.boards.panels import (
    GATEWAY,
    JOB,
    TOKENS_S,
    Board,
    Limits,
    Panel,
    Query,
    Row,
    blocks,
    each,
    quantiles,
)
from mallee.actors.telemetry.boards.queries import Scope

_IN: Final = Scope("$__rate_interval", ("job", "gateway"))
_FIRST: Final = "mallee_time_to_first_token_seconds"
_NEXT: Final = "mallee_inter_token_latency_seconds"
_BRANCH: Final = "mallee_branch_latency_seconds"
_ENDED: Final = "mallee_branches_ended_total"

_NOW: Final = Row(
    "Now",
    (
        Panel(
            "Gateways",
            "none",
            (Query(f"count({_IN.now('mallee_workers_alive', 'gateway', how='max')})", ""),),
            "stat",
            text="Gateways that Prometheus reaches.",
            width=3,
        ),
        Panel(
            "Workers",
            "none",
            (Query(_IN.now("mallee_workers_alive", how="max"), ""),),
            "stat",
            limits=Limits(2, 1, below=True),
            width=3,
        ),
        Panel(
            "Workers missing",
            "none",
            (Query(measures.missing(_IN), ""),),
            "stat",
            limits=Limits(1, 2),
            width=3,
        ),
        Panel(
            "Broker",
            "bool_on_off",
            (Query(_IN.now("mallee_broker_up", how="min"), ""),),
            "stat",
            text="Off as soon as one gateway does not reach it.",
            limits=Limits(1, 1, below=True),
            width=3,
        ),
        Panel(
            "Availability",
            "percentunit",
            (Query(f"1 - {measures.failing(_IN)}", ""),),
            "stat",
            text="Share of clients' requests that are answered without a server's error.",
            limits=Limits(ANSWERED, 0.99, below=True),
            width=3,
            most=1,
        ),
        Panel(
            "First token, p95",
            "s",
            (Query(_IN.quantile(0.95, _FIRST), ""),),
            "stat",
            limits=Limits(FIRST_TOKEN_S, 2 * FIRST_TOKEN_S),
            width=3,
        ),
        Panel(
            "Between tokens, p99",
            "s",
            (Query(_IN.quantile(0.99, _NEXT), ""),),
            "stat",
            limits=Limits(NEXT_TOKEN_S, 2 * NEXT_TOKEN_S),
            width=3,
        ),
        Panel(
            "Output",
            TOKENS_S,
            (Query(_IN.rate("mallee_output_tokens_total"), ""),),
            "stat",
            width=3,
        ),
    ),
)

_REQUESTS: Final = Row(
    "Requests",
    (
        Panel(
            "Answers by endpoint", "reqps", each(_IN.rate, measures.ANSWERS, "endpoint"), "areas"
        ),
        Panel(
            "Answers by status",
            "reqps",
            each(_IN.rate, measures.ANSWERS, "status", where=SERVED),
            "areas",
            text="Of clients' requests; probes, scrapes and the operator's own are left out.",
        ),
        Panel(
            "Share of answers with a server's error",
            "percentunit",
            (Query(measures.failing(_IN, "gateway"), "{{gateway}}"),),
            limits=Limits(1 - ANSWERED, 0.01),
        ),
        Panel(
            "Branches in flight",
            "short",
            each(_IN.now, "mallee_branches_in_flight", "gateway"),
            "areas",
        ),
        Panel("Ends of branches", "ops", each(_IN.rate, _ENDED, "reason"), "areas"),
        Panel(
            "Refused for lack of room",
            "reqps",
            each(_IN.rate, "mallee_admission_refusals_total", "reason"),
            "areas",
        ),
    ),
)

_LATENCY: Final = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "s",
            quantiles(_IN, _FIRST),
            limits=Limits(FIRST_TOKEN_S, 2 * FIRST_TOKEN_S),
        ),
        Panel(
            "Time between tokens",
            "s",
            quantiles(_IN, _NEXT),
            limits=Limits(NEXT_TOKEN_S, 2 * NEXT_TOKEN_S),
        ),
        Panel("Whole branches", "s", quantiles(_IN, "mallee_branch_duration_seconds")),
        Panel(
            "Phases of a branch, on average",
            "s",
            each(_IN.mean, "mallee_branch_phase_seconds", "phase"),
            "areas",
            text="The phase that grows says where to look: queue, more workers; prefill, long prompts or"
            " lost caches; decode, full batches.",
        ),
        Panel(
            "Branch latency of forks, p95",
            "s",
            (Query(_IN.quantile(0.95, _BRANCH, "how"), "{{how}}"),),
        ),
        Panel(
            "Reading, rendering and tokenizing",
            "s",
            quantiles(_IN, "mallee_request_preparation_seconds"),
        ),
    ),
)

_TOKENS: Final = Row(
    "Tokens",
    (
        Panel(
            "Generated", TOKENS_S, each(_IN.rate, "mallee_output_tokens_total", "gateway"), "areas"
        ),
        Panel(
            "Prompts: found and computed",
            TOKENS_S,
            (
                Query(_IN.rate("mallee_cached_tokens_total"), "found"),
                Query(_IN.rate("mallee_prefill_tokens_total"), "computed"),
            ),
            "areas",
        ),
        Panel(
            "Share of prompt tokens found",
            "percentunit",
            (
                Query(
                    f"{_IN.rate('mallee_cached_tokens_total')}"
                    f" / {_IN.rate('mallee_prompt_tokens_total')}",
                    "found",
                ),
            ),
            most=1,
        ),
    ),
)

_WAITING: Final = Row(
    "Waiting",
    (
        Panel(
            "Requests that wait in gateways",
            "short",
            each(_IN.now, "mallee_requests_waiting", "gateway"),
            "areas",
            limits=Limits(WAITING, 10 * WAITING),
        ),
        Panel(
            "Branches in workers",
            "short",
            (
                Query(_IN.now("mallee_worker_running_branches"), "running"),
                Query(_IN.now("mallee_worker_waiting_branches"), "waiting"),
            ),
            "areas",
        ),
        Panel("Wait for a worker", "s", quantiles(_IN, "mallee_admission_wait_seconds")),
    ),
)

_MEMORY: Final = Row(
    "KV memory",
    (
        Panel("Blocks of all workers", "short", blocks(_IN), "areas"),
        Panel(
            "Blocks saved by sharing",
            "short",
            (
                Query(
                    _IN.ratio("mallee_worker_block_references", "mallee_worker_live_blocks"),
                    "references a block",
                ),
            ),
            text="How many times the memory would be needed if no branch shared a block.",
        ),
        Panel(
            "Capsules by tier",
            "short",
            each(_IN.now, "mallee_worker_capsules", "tier", legend="tier {{tier}}"),
            "areas",
        ),
    ),
)

_FORKS: Final = Row(
    "Forks",
    (
        Panel(
            "Branches of capsules",
            "ops",
            each(_IN.rate, "mallee_forked_branches_total", "how"),
            "areas",
        ),
        Panel(
            "Parts of fan-outs that left their prefix",
            "ops",
            (Query(_IN.rate("mallee_spills_total", "how", "reason"), "{{how}}, {{reason}}"),),
        ),
        Panel(
            "KV memory of a branch",
            "bytes",
            (Query(_IN.now("mallee_worker_branch_bytes", how="avg"), "on average"),),
        ),
    ),
)

_FAULTS: Final = Row(
    "Faults",
    (
        Panel(
            "Branches that went on elsewhere",
            "ops",
            each(_IN.rate, "mallee_branches_moved_total", "reason"),
        ),
        Panel("Pauses of those that had begun", "s", quantiles(_IN, "mallee_branch_stall_seconds")),
        Panel(
            "Gaps in events, capsules computed again",
            "ops",
            (
                Query(_IN.rate("mallee_event_gaps_total"), "gaps"),
                Query(_IN.rate("mallee_capsules_rebuilt_total"), "capsules"),
                Query(_IN.rate("mallee_event_messages_dropped_total"), "dropped messages"),
            ),
        ),
        Panel(
            "Records of sessions that ended early",
            "ops",
            each(_IN.rate, "mallee_session_records_stopped_total", "reason"),
        ),
        Panel(
            "Calls of URLs that requests named",
            "ops",
            each(_IN.observed, "mallee_callback_duration_seconds", "outcome"),
        ),
        Panel("Searches until their result", "s", quantiles(_IN, "mallee_search_duration_seconds")),
    ),
)

_PROCESSES: Final = Row(
    "Processes",
    (
        Panel(
            "CPU",
            "percentunit",
            each(_IN.rate, "process_cpu_seconds_total", "instance"),
            text="1 is a whole core.",
        ),
        Panel("Memory", "bytes", each(_IN.now, "process_resident_memory_bytes", "instance")),
        Panel(
            "Open files, of those allowed",
            "percentunit",
            (Query(measures.open_files(_IN), "{{instance}}"),),
            limits=Limits(0.7, 0.9),
        ),
    ),
)

BOARD: Final = Board(
    "fleet",
    "Fleet",
    "Availability, latency, tokens, waiting and memory of all gateways and workers.",
    (JOB, GATEWAY),
    (_NOW, _REQUESTS, _LATENCY, _TOKENS, _WAITING, _MEMORY, _FORKS, _FAULTS, _PROCESSES),
)
