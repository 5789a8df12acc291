"""The dashboard of routing: decisions, the index behind them, and gateways among themselves."""

from typing import Final

from mallee.actors.telemetry.boards import measures
from mallee.actors.telemetry.boards.goals import LAG_S, REGRET
from mallee.actors.telemetry.boards.panels import (
    BLOCKS_S,
    GATEWAY,
    JOB,
    Board,
    Limits,
    Panel,
    Query,
    Row,
    each,
    quantiles,
)
from mallee.actors.telemetry.boards.queries import Scope

_IN: Final = Scope("$__rate_interval", ("job", "gateway"))
_FOUND: Final = "mallee_route_overlap_blocks_total"
_BEST: Final = "mallee_route_best_overlap_blocks_total"
_DECIDED: Final = "mallee_route_decisions_total"
_LAG: Final = "mallee_event_lag_seconds"

_DECISIONS: Final = Row(
    "Decisions",
    (
        Panel(
            "Requests by worker",
            "reqps",
            each(_IN.rate, _DECIDED, "worker"),
            "areas",
            text="Even under even load; one worker alone on top is a hot prefix.",
        ),
        Panel(
            "Share of the best overlap that was chosen",
            "percentunit",
            (Query(f"{_IN.rate(_FOUND)} / {_IN.rate(_BEST)}", "chosen"),),
            text="Below 1 the router left a worker that had more of the prompt, for a shorter queue.",
            most=1,
        ),
        Panel(
            "Regret",
            "percentunit",
            (Query(measures.regret(_IN, "gateway"), "{{gateway}}"),),
            text="Share of the blocks that some worker had and the chosen one lacked.",
            limits=Limits(REGRET, 2 * REGRET),
        ),
        Panel(
            "Prompts by how they were served",
            "reqps",
            each(_IN.rate, "mallee_prompts_served_total", "served"),
            "areas",
        ),
        Panel(
            "Why less was found than could have been",
            "reqps",
            each(_IN.rate, "mallee_prompts_served_total", "reason", where='reason!=""'),
            "areas",
        ),
        Panel(
            "Placements that no worker could take",
            "ops",
            each(_IN.rate, "mallee_route_refusals_total", "gateway"),
        ),
        Panel(
            "Requests to the worker of their capsule",
            "ops",
            each(_IN.rate, "mallee_routed_to_capsule_total", "gateway"),
        ),
        Panel("Pulls", "ops", each(_IN.rate, "mallee_pulls_total", "reason")),
        Panel(
            "Bytes that those lack",
            "Bps",
            each(_IN.rate, "mallee_pull_predicted_bytes_total", "reason"),
        ),
    ),
)

_EVENTS: Final = Row(
    "Events",
    (
        Panel("Lag", "s", quantiles(_IN, _LAG), limits=Limits(LAG_S, 2 * LAG_S)),
        Panel("Events applied", "ops", each(_IN.rate, "mallee_events_applied_total", "gateway")),
        Panel(
            "Messages that wait", "short", each(_IN.now, "mallee_event_queue_messages", "gateway")
        ),
        Panel(
            "Workers with events missing",
            "short",
            each(_IN.now, "mallee_workers_with_event_gaps", "gateway"),
            limits=Limits(1, 2),
        ),
        Panel(
            "Gaps, snapshots and dropped messages",
            "ops",
            (
                Query(_IN.rate("mallee_event_gaps_total"), "gaps"),
                Query(_IN.rate("mallee_resyncs_total"), "snapshots"),
                Query(_IN.rate("mallee_event_messages_dropped_total"), "dropped"),
                Query(_IN.rate("mallee_ignored_messages_total"), "ignored"),
                Query(_IN.rate("mallee_refused_leases_total"), "refused leases"),
            ),
        ),
        Panel("Broker reached", "bool_on_off", each(_IN.now, "mallee_broker_up", "gateway")),
        Panel(
            "Workers not heard on the bus",
            "short",
            each(_IN.now, "mallee_workers_without_lease", "gateway"),
            limits=Limits(1, 2),
        ),
    ),
)

_INDEX: Final = Row(
    "Index",
    (
        Panel(
            "Blocks and pairs",
            "short",
            (
                Query(_IN.now("mallee_index_blocks", "gateway"), "blocks, {{gateway}}"),
                Query(_IN.now("mallee_index_entries", "gateway"), "pairs, {{gateway}}"),
            ),
            text="All gateways should show the same; one that stays apart has missed events.",
        ),
        Panel("Memory", "bytes", each(_IN.now, "mallee_index_bytes", "gateway")),
        Panel("Copies of a block", "short", each(_IN.now, "mallee_prefix_copies", "gateway")),
        Panel(
            "Blocks dropped and repaired",
            BLOCKS_S,
            (
                Query(_IN.rate("mallee_index_evictions_total"), "for the byte limit"),
                Query(_IN.rate("mallee_repaired_blocks_total"), "stale"),
            ),
        ),
        Panel(
            "Blocks looked up", BLOCKS_S, each(_IN.rate, "mallee_index_lookups_total", "gateway")
        ),
        Panel(
            "Snapshots to take in, sets of workers",
            "short",
            (
                Query(_IN.now("mallee_index_backlog_blocks"), "blocks to take in"),
                Query(_IN.now("mallee_index_worker_sets"), "sets of workers"),
            ),
        ),
    ),
)

_BOOKINGS: Final = Row(
    "Bookings and gateways",
    (
        Panel(
            "Booked rows",
            "short",
            each(_IN.now, "mallee_booked_rows", "gateway"),
            text="By all gateways, as each of them sees it: the lines lie on each other.",
        ),
        Panel(
            "Rows that workers tell and a gateway does not know",
            "short",
            each(_IN.now, "mallee_replica_skew_rows", "gateway"),
        ),
        Panel(
            "Requests booked",
            "short",
            (
                Query(_IN.now("mallee_booked_requests", "gateway"), "all, {{gateway}}"),
                Query(_IN.now("mallee_remote_requests", "gateway"), "by others, {{gateway}}"),
            ),
        ),
        Panel(
            "Other gateways",
            "short",
            (
                Query(_IN.now("mallee_other_gateways", "gateway"), "known, {{gateway}}"),
                Query(
                    _IN.now("mallee_other_gateways_incomplete", "gateway"),
                    "with operations missing, {{gateway}}",
                ),
            ),
        ),
        Panel(
            "Their bookings",
            "short",
            (
                Query(_IN.now("mallee_other_gateways_bookings", "gateway"), "live, {{gateway}}"),
                Query(
                    _IN.now("mallee_other_gateways_waiting_bookings", "gateway"),
                    "on unknown lives, {{gateway}}",
                ),
            ),
        ),
        Panel(
            "Expired bookings, silent gateways, gaps",
            "ops",
            (
                Query(_IN.rate("mallee_expired_bookings_total"), "bookings"),
                Query(_IN.rate("mallee_other_gateways_expired_total"), "gateways"),
                Query(_IN.rate("mallee_other_gateways_gaps_total"), "gaps"),
            ),
        ),
        Panel(
            "Questions for what other gateways know",
            "ops",
            each(_IN.rate, "mallee_other_gateways_questions_total", "outcome"),
        ),
        Panel("Capsules in the directory", "short", each(_IN.now, "mallee_capsules", "gateway")),
        Panel(
            "Prompts held by prediction",
            "short",
            each(_IN.now, "mallee_predicted_prompts", "gateway"),
        ),
        Panel("Retention", "ops", each(_IN.rate, "mallee_retentions_total", "outcome")),
    ),
)

BOARD: Final = Board(
    "router",
    "Router",
    "Decisions, overlap and regret, events, the index, and what gateways know of each other.",
    (JOB, GATEWAY),
    (_DECISIONS, _EVENTS, _INDEX, _BOOKINGS),
)
