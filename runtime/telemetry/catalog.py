"""Every metric family that a process of Mallee exposes: names, units, labels and meanings in one place.

Collectors, docs/metrics.md, dashboards and alerts are made from it, and a test holds it against what
processes expose, both ways. Label values are few: reasons and stages of ours, workers up to a bound, tenants
that API keys name up to another; never a client's text.

Gateways give every sample a label `gateway` beside those named here, for several may answer at one address.
Gauges and counters of workers (`mallee_worker_*`) come from their leases: every gateway shows the same.
"""

from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from mallee.protocol.errors import MalleeError, Unavailable
from mallee.protocol.messages import FinishReason

Kind: TypeAlias = Literal["counter", "gauge", "histogram", "summary"]
Process: TypeAlias = Literal["gateway", "worker", "picker", "every"]
"""Gateways expose theirs in the API and at their listeners, workers at their listeners; every: both."""

MOST_WORKERS: Final = 256
"""Workers with time series of their own. A fleet of a thousand would have a hundred thousand."""
MOST_TENANTS: Final = 100
OTHERS: Final = "others"
"""The label of all beyond the bound."""
NO_TENANT: Final = "none"

# From a fork's first token on a loaded CPU (1 ms) to a cold, long prompt.
FIRST_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
BETWEEN_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
WHOLE_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Label(NamedTuple):
    """A label: all its values, or how many different ones there are at most."""

    name: str
    values: tuple[str, ...] = ()
    most: int = 0


class Family(NamedTuple):
    """A metric family."""

    name: str  # in full: of a counter with `_total`, of a histogram without `_bucket`
    kind: Kind
    unit: str  # of its values
    text: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram
    when: str = ""  # the condition of its being exposed; empty: always
    process: Process = "gateway"
    area: str = ""

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)


def _codes(error: type[MalleeError]) -> tuple[str, ...]:
    """The codes of an error and of all that are one."""
    below = (code for each in error.__subclasses__() for code in _codes(each))
    return tuple(sorted({error.code, *below}))


def _counter(name: str, unit: str, text: str, *labels: Label, when: str = "") -> Family:
    return Family(f"{name}_total", "counter", unit, text, labels, when=when)


def _gauge(name: str, unit: str, text: str, *labels: Label, when: str = "") -> Family:
    return Family(name, "gauge", unit, text, labels, when=when)


def _seconds(
    name: str, text: str, buckets: tuple[float, ...], *labels: Label, when: str = ""
) -> Family:
    """A histogram of seconds."""
    return Family(name, "histogram", "seconds", text, labels, buckets, when)


def _area(title: str, process: Process, *families: Family) -> tuple[Family, ...]:
    return tuple(each._replace(process=process, area=title) for each in families)


_WORKER: Final = Label("worker", most=MOST_WORKERS + 1)
_ENGINE: Final = (Label("model_name", most=1), Label("engine", most=MOST_WORKERS + 1))
_TENANT: Final = Label("tenant", most=MOST_TENANTS + 2)
_HOW: Final = ("stay", "migrate", "recompute")
_PULLS: Final = ("prefix", "spill", "drain", "rebuild")
_TIERS: Final = "some worker has host memory or a disk for KV"
_LOANS: Final = "some worker lends KV (`links.lends`)"
_WORKERS: Final = "a worker has registered"

_REQUESTS: Final = _area(
    "Requests",
    "gateway",
    _counter(
        "mallee_http_answers",
        "answers",
        "HTTP answers. `endpoint` is the path's template.",
        Label("endpoint", most=48),
        Label("status", most=32),
    ),
    _gauge("mallee_branches_in_flight", "branches", "Branches begun and not ended."),
    _counter(
        "mallee_branches_ended",
        "branches",
        "Branches by how they ended.",
        Label("reason", get_args(FinishReason)),
    ),
    _seconds(
        "mallee_time_to_first_token_seconds",
        "From a branch's request to its first token.",
        FIRST_S,
    ),
    _seconds("mallee_inter_token_latency_seconds", "Between two tokens of a branch.", BETWEEN_S),
    _seconds(
        "mallee_branch_duration_seconds",
        "From a branch's request to its end; cancelled branches are not in it.",
        WHOLE_S,
    ),
    _seconds(
        "mallee_request_preparation_seconds",
        "From a request's head to its tokens: reading, rendering, tokenizing.",
        FIRST_S,
    ),
    _seconds(
        "mallee_branch_phase_seconds",
        "Phases of a branch that ended by itself: `queue` until a worker was chosen, `prefill` until its"
        " first token, `decode` until its end.",
        WHOLE_S,
        Label("phase", ("queue", "prefill", "decode")),
    ),
    _counter("mallee_output_tokens", "tokens", "Tokens generated."),
    _counter("mallee_session_record_bytes", "bytes", "Bytes of sessions' records written."),
    _counter(
        "mallee_session_records_stopped",
        "records",
        "Records of sessions that ended before their session.",
        Label("reason", ("session_bytes", "sessions", "tenant_sessions", "disk", "disk_slow")),
    ),
    _seconds(
        "mallee_search_duration_seconds",
        "Time to solution: from a search's request to its result. `found`: a solution was found, `done`: the"
        " policy was through, the others: that part of its budget was used up.",
        WHOLE_S,
        Label("reason", ("found", "done", "tokens", "nodes", "expansions")),
    ),
)

_CALLBACKS: Final = _area(
    "Callbacks",
    "gateway",
    _seconds(
        "mallee_callback_duration_seconds",
        "Calls of URLs that requests named (`http.callbacks`), by how they ended: `abandoned`: their request"
        " was over first, `slow`: no answer came in time, `refused`: its status was not 200, `malformed`: it"
        " had another shape.",
        WHOLE_S,
        Label("outcome", ("answered", "abandoned", "slow", "unreachable", "refused", "malformed")),
    ),
)

_REUSE: Final = _area(
    "Reuse of prompts",
    "gateway",
    _counter("mallee_cached_tokens", "tokens", "Prompt tokens whose KV was there."),
    _counter("mallee_prefill_tokens", "tokens", "Prompt tokens computed."),
    _counter("mallee_prompt_tokens", "tokens", "Prompt tokens of ended branches, cached or not."),
    _counter(
        "mallee_prompts_served",
        "requests",
        "Prompts and forks by how they were served, and why less was there than could have been.",
        Label(
            "served",
            ("exact", "append", "message-append", "truncate", "fork", "restore", "rebuild"),
        ),
        Label(
            "reason",
            (
                *("", "never_seen", "input_changed", "evicted", "elsewhere"),
                *("prompt_cache_key_changed", "model_changed", "capsule_computed_again"),
            ),
        ),
    ),
    _counter(
        "mallee_retentions",
        "branches",
        "Branches whose KV was to be retained, by outcome.",
        Label("outcome", ("applied", "clipped", "refused")),
    ),
)

_FORKS: Final = _area(
    "Forks and fan-outs",
    "gateway",
    _seconds(
        "mallee_branch_latency_seconds",
        "Branch latency: from a fork's request to the first token of each of its branches. `how` the branch"
        " got its prefix: it stayed where that is, or went elsewhere and pulled or computed it.",
        FIRST_S,
        Label("how", _HOW),
    ),
    _counter(
        "mallee_forked_branches",
        "branches",
        "Branches of capsules that were placed for the first time.",
        Label("how", _HOW),
    ),
    _counter(
        "mallee_spills",
        "parts",
        "Parts of fan-outs that left their prefix's worker: it was `full`, or they end `sooner` elsewhere.",
        Label("how", _HOW[1:]),
        Label("reason", ("full", "sooner")),
    ),
    _counter(
        "mallee_pulls",
        "placements",
        "Placements whose worker pulls KV from others: `prefix` of a prompt, `spill` of a fan-out, `drain` of"
        " a worker, `rebuild` of a capsule that is gone.",
        Label("reason", _PULLS),
    ),
    _counter(
        "mallee_pull_predicted_bytes", "bytes", "KV bytes that those lack.", Label("reason", _PULLS)
    ),
    _gauge(
        "mallee_prefix_copies",
        "workers",
        "Workers that hold a block of the index, on average over its blocks.",
    ),
)

_ADMISSION: Final = _area(
    "Waiting and refusals",
    "gateway",
    _gauge("mallee_requests_waiting", "requests", "Requests that wait for a worker with room."),
    _seconds(
        "mallee_admission_wait_seconds",
        "How long those requests that had to wait for a worker waited, until one took them.",
        FIRST_S,
    ),
    _counter(
        "mallee_admission_refusals",
        "requests",
        "Requests that no worker took, by the error's code: their queue was full, or they waited too long.",
        Label("reason", _codes(Unavailable)),
    ),
    _counter("mallee_route_refusals", "placements", "Placements that no worker could take."),
)

_FAILURES: Final = _area(
    "Failover",
    "gateway",
    _counter(
        "mallee_branches_moved",
        "branches",
        "Branches that had to go on on another worker: theirs died (`death`), made no progress (`stall`) or"
        " left (`departure`), or their capsule was gone (`capsule`) or found no room (`room`).",
        Label("reason", ("death", "stall", "departure", "capsule", "room")),
    ),
    _seconds(
        "mallee_branch_stall_seconds",
        "Pauses of moved branches that had begun to answer, from token to token.",
        FIRST_S,
    ),
    _counter(
        "mallee_capsules_rebuilt", "capsules", "Capsules that were gone and are computed again."
    ),
)

_TENANTS: Final = _area(
    "Tenants",
    "gateway",
    _counter(
        "mallee_tenant_requests",
        "requests",
        f"Requests by the tenant that an API key names (`{NO_TENANT}`: no key does).",
        _TENANT,
        when="a request has come",
    ),
    _counter(
        "mallee_tenant_refusals",
        "requests",
        "Of them, those that no worker took.",
        _TENANT,
        when="a request has come",
    ),
    _counter(
        "mallee_tenant_tokens",
        "tokens",
        "Tokens of ended branches: prompt tokens found (`cached`) and computed (`prefill`), tokens generated"
        " (`output`).",
        _TENANT,
        Label("kind", ("cached", "prefill", "output")),
        when="a request has come",
    ),
    Family(
        "mallee_tenant_first_token_seconds",
        "summary",
        "seconds",
        "From a branch's request to its first token.",
        (_TENANT,),
        when="a request has come",
    ),
)

_ROUTING: Final = _area(
    "Routing",
    "gateway",
    _counter(
        "mallee_route_decisions", "requests", "Requests sent, by worker.", _WORKER, when=_WORKERS
    ),
    _counter("mallee_route_overlap_blocks", "blocks", "Prompt blocks that the chosen worker had."),
    _counter("mallee_route_best_overlap_blocks", "blocks", "The most blocks that any worker had."),
    _counter(
        "mallee_route_regret_blocks",
        "blocks",
        "Most blocks any worker had minus those of the chosen.",
    ),
    _counter("mallee_routed_to_capsule", "requests", "Requests sent to the worker of a capsule."),
    _gauge("mallee_workers_alive", "workers", "Workers that can be given requests."),
    _gauge("mallee_workers_expected", "workers", "Workers that there should be."),
    _gauge("mallee_booked_requests", "requests", "Requests booked, by all gateways."),
    _gauge("mallee_booked_rows", "branches", "Rows booked, by all gateways."),
    _counter("mallee_expired_bookings", "bookings", "Bookings not touched in time."),
    _gauge("mallee_predicted_prompts", "prompts", "Prompts held by prediction."),
    _gauge("mallee_capsules", "capsules", "Capsules in the directory."),
)

_GATEWAYS: Final = _area(
    "Gateways among themselves",
    "gateway",
    _gauge("mallee_other_gateways", "gateways", "Gateways whose bookings are known."),
    _gauge(
        "mallee_other_gateways_incomplete", "gateways", "Of them, those with operations missing."
    ),
    _gauge("mallee_other_gateways_bookings", "bookings", "Their live bookings."),
    _gauge(
        "mallee_other_gateways_waiting_bookings",
        "bookings",
        "Of them, those on lives of workers that are not known here.",
    ),
    _counter(
        "mallee_other_gateways_gaps", "times", "Times that operations turned out to be missing."
    ),
    _counter("mallee_other_gateways_expired", "gateways", "Gateways that fell silent."),
    _counter(
        "mallee_other_gateways_questions",
        "questions",
        "Questions to all other gateways for what a client names and this one doesn't know. `unanswered`:"
        " none knew it, and not all have answered: its client got a 503.",
        Label("outcome", ("found", "unknown", "unanswered")),
    ),
    _gauge("mallee_remote_requests", "requests", "Requests that other gateways booked."),
    _gauge(
        "mallee_replica_skew_rows",
        "branches",
        "Rows that workers have, as they said last, beyond those that this gateway knows to be booked: other"
        " gateways', of which it has not heard.",
    ),
)

_INDEX: Final = _area(
    "Index and events",
    "gateway",
    _gauge("mallee_broker_up", "", "1 while the broker is reached."),
    _counter("mallee_events_applied", "events", "Cache events of workers taken in."),
    _seconds(
        "mallee_event_lag_seconds",
        "How long the oldest message from the bus had waited, at each turn that took some in.",
        BETWEEN_S,
    ),
    _gauge("mallee_event_queue_messages", "messages", "Messages from the bus that wait."),
    _counter("mallee_event_messages_dropped", "messages", "Messages dropped for lack of room."),
    _counter("mallee_event_gaps", "times", "Times that events turned out to be missing."),
    _gauge(
        "mallee_workers_without_lease", "workers", "Workers heard by their links, not on the bus."
    ),
    _gauge("mallee_workers_with_event_gaps", "workers", "Workers with events known to be missing."),
    _counter("mallee_resyncs", "snapshots", "Worker snapshots taken in."),
    _counter("mallee_ignored_messages", "messages", "Messages of past lives or strangers."),
    _counter("mallee_refused_leases", "leases", "Leases that could not be taken."),
    _counter("mallee_repaired_blocks", "blocks", "Stale blocks found by what workers had."),
    _gauge("mallee_index_blocks", "blocks", "Distinct blocks indexed."),
    _gauge("mallee_index_entries", "pairs", "(worker, block) pairs."),
    _gauge("mallee_index_worker_sets", "sets", "Distinct sets of workers that share blocks."),
    _gauge("mallee_index_bytes", "bytes", "Memory of the prefix index."),
    _gauge(
        "mallee_index_open_workers",
        "workers",
        "Workers with blocks whose paths may have holes: matches look every block up.",
    ),
    _gauge("mallee_index_backlog_blocks", "blocks", "Blocks of snapshots not taken in yet."),
    _counter("mallee_index_evictions", "blocks", "Blocks dropped for the byte limit."),
    _counter("mallee_index_lookups", "blocks", "Blocks looked up by matches."),
)

_LOAD: Final = _area(
    "Workers: load and memory",
    "gateway",
    _gauge("mallee_worker_running_branches", "branches", "Branches that run.", _WORKER),
    _gauge("mallee_worker_waiting_branches", "branches", "Branches that wait in it.", _WORKER),
    _gauge("mallee_worker_total_blocks", "blocks", "KV blocks of the worker.", _WORKER),
    _gauge(
        "mallee_worker_live_blocks", "blocks", "KV blocks in use by branches and capsules.", _WORKER
    ),
    _gauge(
        "mallee_worker_shared_blocks",
        "blocks",
        "Of those, in use by several branches or capsules: the share ratio is this by live blocks.",
        _WORKER,
    ),
    _gauge(
        "mallee_worker_cached_blocks",
        "blocks",
        "KV blocks not in use, kept for prefix hits.",
        _WORKER,
    ),
    _gauge(
        "mallee_worker_readers", "readers", "Branches and capsules that have KV blocks.", _WORKER
    ),
    _gauge(
        "mallee_worker_block_references",
        "references",
        "Entries of all their page tables: the blocks that they would take if nothing were shared.",
        _WORKER,
    ),
    _gauge(
        "mallee_worker_branch_blocks",
        "blocks",
        "Pages of a branch or capsule, on average, shared ones counted for each.",
        _WORKER,
    ),
    _gauge(
        "mallee_worker_branch_bytes",
        "bytes",
        "KV memory of a branch or capsule, on average, shared blocks counted once.",
        _WORKER,
    ),
    _gauge(
        "mallee_worker_memory_bytes",
        "bytes",
        "Memory of the worker's process on its device: the `weights`, the `kv`, recorded steps (`graphs`) and"
        " all the `other`. On a CPU that is its resident memory, with the KV that was ever in use.",
        _WORKER,
        Label("part", ("weights", "kv", "graphs", "other")),
        when="some worker is no mocked engine",
    ),
    _gauge(
        "mallee_worker_constraint_states",
        "states",
        "Grammar states that branches and capsules hold.",
        _WORKER,
    ),
    _gauge(
        "mallee_worker_capsules",
        "capsules",
        "Capsules that were asked for, by the lowest tier where they lie: device (0), host memory (1), disk"
        " (2).",
        _WORKER,
        Label("tier", ("0", "1", "2")),
    ),
    _gauge(
        "mallee_worker_capsule_bytes",
        "bytes",
        "KV of those, as if they shared none.",
        _WORKER,
        Label("tier", ("0", "1", "2")),
    ),
    _gauge(
        "mallee_worker_capsule_limit_bytes",
        "bytes",
        "KV that they may take on the device (`engine.max_kept_share`), shared blocks counted once.",
        _WORKER,
    ),
    _gauge(
        "mallee_worker_kept_below_bytes",
        "bytes",
        "Memory of texts and state of those that lie below the device.",
        _WORKER,
    ),
)

_WORK: Final = _area(
    "Workers: work",
    "gateway",
    _counter("mallee_worker_prefill_tokens", "tokens", "Tokens computed for prompts.", _WORKER),
    _counter("mallee_worker_cached_tokens", "tokens", "Prompt tokens found in its cache.", _WORKER),
    _counter("mallee_worker_output_tokens", "tokens", "Tokens drawn.", _WORKER),
    _counter(
        "mallee_worker_drafted_tokens",
        "tokens",
        "Tokens of drafts that were computed (`engine.speculation`).",
        _WORKER,
    ),
    _counter(
        "mallee_worker_accepted_tokens",
        "tokens",
        "Of those, tokens that were drawn: the acceptance of speculation is this by drafted tokens.",
        _WORKER,
    ),
    _counter(
        "mallee_worker_ahead_rows",
        "rows",
        "Rows of decodes that a GPU was handed before their tokens were here.",
        _WORKER,
    ),
    _counter(
        "mallee_worker_ahead_void_rows",
        "rows",
        "Of those, rows in vain: their answers ended, or went on elsewhere.",
        _WORKER,
    ),
    _counter(
        "mallee_worker_host_gap_seconds",
        "seconds",
        "Time in which the device stood still while there was work: it waited for the host.",
        _WORKER,
    ),
    _counter(
        "mallee_worker_forks",
        "branches",
        "Branches that began at state shared with others.",
        _WORKER,
    ),
    _counter("mallee_worker_copied_blocks", "blocks", "KV blocks copied on write.", _WORKER),
    _counter("mallee_worker_evicted_blocks", "blocks", "Cached KV blocks that gave way.", _WORKER),
    _counter(
        "mallee_worker_preemptions",
        "branches",
        "Branches that lost their place for lack of blocks.",
        _WORKER,
    ),
    _counter(
        "mallee_worker_kv_faults", "faults", "Faults found by checks of the KV memory.", _WORKER
    ),
    _counter(
        "mallee_worker_refused_capsules",
        "capsules",
        "Capsules that found no room to be kept.",
        _WORKER,
    ),
    _counter("mallee_worker_lent_blocks", "blocks", "KV blocks that other workers read.", _WORKER),
)

_BELOW: Final = _area(
    "Workers: below the device",
    "gateway",
    _gauge(
        "mallee_worker_tier_blocks",
        "blocks",
        "KV blocks below the device.",
        _WORKER,
        Label("tier", ("host", "disk")),
        when=_TIERS,
    ),
    _gauge(
        "mallee_worker_tier_bytes",
        "bytes",
        "The bytes of those.",
        _WORKER,
        Label("tier", ("host", "disk")),
        when=_TIERS,
    ),
    _gauge(
        "mallee_worker_host_held_blocks",
        "blocks",
        "KV blocks in host memory that capsules hold.",
        _WORKER,
        when=_TIERS,
    ),
    _gauge(
        "mallee_worker_host_room_blocks",
        "blocks",
        "KV blocks of host memory that capsules could still have.",
        _WORKER,
        when=_TIERS,
    ),
    _gauge(
        "mallee_worker_disk_limit_bytes",
        "bytes",
        "KV that the disk may hold (`engine.disk_gib`); 0 without one, and of mocked engines.",
        _WORKER,
        when=_TIERS,
    ),
    *(
        _counter(
            f"mallee_worker_moved_{unit}",
            unit,
            text,
            _WORKER,
            Label("move", ("offload", "park", "spill", "fetch_host", "fetch_disk", "fetch_peer")),
            when=_TIERS,
        )
        for unit, text in (
            (
                "blocks",
                "KV blocks moved between tiers: `offload` (evicted to host memory), `park` (capsules to host"
                " memory), `spill` (to disk), and fetched from there or from other workers.",
            ),
            ("bytes", "The bytes of those."),
        )
    ),
    _counter(
        "mallee_worker_dropped_blocks",
        "blocks",
        "Evicted KV blocks that host memory had no room for.",
        _WORKER,
        when=_TIERS,
    ),
    _counter(
        "mallee_worker_declined_blocks",
        "blocks",
        "KV blocks below the device, cheaper to compute again.",
        _WORKER,
        when=_TIERS,
    ),
    _counter(
        "mallee_worker_peer_seconds",
        "seconds",
        "Seconds that fetches from other workers took.",
        _WORKER,
        when=_TIERS,
    ),
    _counter(
        "mallee_worker_failed_moves",
        "moves",
        "Moves between tiers that ended by an error.",
        _WORKER,
        when=_TIERS,
    ),
    _gauge(
        "mallee_worker_unreadable_capsules",
        "capsules",
        "Durable capsules that a worker found on its disk and could not take in; its log says why.",
        _WORKER,
        when=_TIERS,
    ),
)

_DIRECTION: Final = Label("direction", ("borrowed", "lent"))
_LENDING: Final = _area(
    "Workers: loans",
    "gateway",
    _gauge(
        "mallee_worker_open_loans",
        "loans",
        "Loans of KV that are open.",
        _WORKER,
        _DIRECTION,
        when=_LOANS,
    ),
    *(
        _counter(f"mallee_worker_{name}", unit, text, _WORKER, _DIRECTION, when=_LOANS)
        for name, unit, text in (
            ("loans", "loans", "Loans of KV from worker to worker."),
            (
                "refused_loans",
                "loans",
                "Questions for loans that got an error for an answer: the KV was gone.",
            ),
            ("failed_loans", "loans", "Loans that ended by an error, and connections that did."),
            ("loan_bytes", "bytes", "Bytes of KV that crossed."),
            ("loan_seconds", "seconds", "Seconds in which those crossed."),
        )
    ),
)

_CONTRACT: Final = _area(
    "Worker processes: vLLM's names",
    "worker",
    _gauge("vllm:num_requests_running", "branches", "Branches that run.", *_ENGINE),
    _gauge("vllm:num_requests_waiting", "branches", "Branches that wait.", *_ENGINE),
    _gauge(
        "vllm:kv_cache_usage_perc",
        "",
        "Share of the KV blocks that are in use, 0 to 1; cached ones that could be evicted are not.",
        *_ENGINE,
    ),
    _gauge(
        "vllm:cache_config_info",
        "",
        "1; the size of the KV memory is in the labels.",
        *_ENGINE,
        Label("block_size", most=1),
        Label("num_gpu_blocks", most=MOST_WORKERS),
    ),
    _gauge(
        "vllm:lora_requests_info",
        "seconds",
        "Time of the scrape, since the epoch. There are no adapters: the labels say so.",
        *_ENGINE,
        Label("max_lora", ("0",)),
        Label("running_lora_adapters", ("",)),
        Label("waiting_lora_adapters", ("",)),
    ),
    _counter(
        "vllm:prefix_cache_queries", "tokens", "Prompt tokens looked for in the cache.", *_ENGINE
    ),
    _counter("vllm:prefix_cache_hits", "tokens", "Of them, those that were there.", *_ENGINE),
    _counter("vllm:prompt_tokens", "tokens", "Tokens computed for prompts.", *_ENGINE),
    _counter("vllm:generation_tokens", "tokens", "Tokens drawn.", *_ENGINE),
    _counter(
        "vllm:num_preemptions",
        "branches",
        "Branches that lost their place for lack of blocks.",
        *_ENGINE,
    ),
    _seconds(
        "vllm:time_to_first_token_seconds",
        "From a request's handing over to the engine to the first token of each branch.",
        FIRST_S,
        *_ENGINE,
    ),
    _seconds(
        "vllm:inter_token_latency_seconds", "Between two tokens of a branch.", BETWEEN_S, *_ENGINE
    ),
)

_HOST: Final = _area(
    "Worker processes: engines and connections",
    "worker",
    _seconds(
        "mallee_engine_step_seconds",
        "Steps of the engine, from the plan to what was drawn.",
        BETWEEN_S,
        *_ENGINE,
    ),
    _gauge("mallee_engine_open_requests", "requests", "Requests that are not over.", *_ENGINE),
    _gauge(
        "mallee_host_compiling_grammars",
        "grammars",
        "Grammars of requests that are compiled, or wait for it.",
    ),
    _gauge("mallee_host_gateways", "gateways", "Gateways that read."),
    _counter("mallee_host_batches", "batches", "Batches of commands taken in."),
    _counter("mallee_host_slow_streams", "streams", "Streams cut, for their gateway fell behind."),
    _counter("mallee_host_silent_gateways", "gateways", "Gateways given up for their silence."),
)

_PICKER: Final = _area(
    "Pickers",
    "picker",
    _counter(
        "mallee_picker_decisions",
        "requests",
        "Requests by outcome: picked, or the status that refused them.",
        Label("outcome", ("picked", "429", "503")),
    ),
    _seconds(
        "mallee_picker_decision_seconds",
        "From a whole request to its endpoint, tokenizing included.",
        BETWEEN_S,
    ),
    _counter("mallee_picker_prompt_blocks", "blocks", "KV blocks of prompts that were placed."),
    _counter(
        "mallee_picker_overlap_blocks",
        "blocks",
        "Those of them that were known on the endpoint, or expected there.",
    ),
    _counter(
        "mallee_picker_served_elsewhere",
        "requests",
        "Requests that another endpoint served than the first one given.",
    ),
    _counter(
        "mallee_picker_failed_streams",
        "streams",
        "Streams ended by a fault, and left to the proxy's failure mode.",
    ),
    _gauge("mallee_picker_endpoints", "endpoints", "Endpoints that are followed."),
    _gauge("mallee_picker_ready_endpoints", "endpoints", "Endpoints that take requests."),
    _gauge(
        "mallee_picker_incomplete_endpoints",
        "endpoints",
        "Endpoints whose KV events are not known from the beginning: caches there are predicted.",
    ),
    _gauge(
        "mallee_picker_event_gaps", "gaps", "Times that KV events of these endpoints were missing."
    ),
    _gauge(
        "mallee_picker_unknown_blocks",
        "blocks",
        "Blocks in KV events of these endpoints whose beginning was not known.",
    ),
    _gauge("mallee_picker_remote_requests", "requests", "Requests that other pickers booked."),
)

_PROCESS: Final = _area(
    "Processes",
    "every",
    _gauge(
        "mallee_build_info",
        "",
        "1; the version is in the label.",
        Label("version", most=1),
    ),
    _gauge("process_resident_memory_bytes", "bytes", "Memory of the process, shared pages too."),
    _counter("process_cpu_seconds", "seconds", "CPU time of the process."),
    _gauge("process_open_fds", "files", "Open files and sockets."),
    _gauge("process_max_fds", "files", "The most that it may open."),
    _gauge("process_start_time_seconds", "seconds", "Start of the process, since the epoch."),
    _gauge("process_virtual_memory_bytes", "bytes", "Address space of the process."),
)

FAMILIES: Final[tuple[Family, ...]] = (
    *(*_REQUESTS, *_CALLBACKS, *_REUSE, *_FORKS, *_ADMISSION, *_FAILURES, *_TENANTS),
    *(*_ROUTING, *_GATEWAYS, *_INDEX, *_LOAD, *_WORK, *_BELOW, *_LENDING),
    *(*_CONTRACT, *_HOST, *_PICKER, *_PROCESS),
)
"""All families, by area."""

_BY_NAME: Final = {family.name: family for family in FAMILIES}


def family(name: str) -> Family:
    """The family of that name. Raises KeyError: it has to be added here first."""
    return _BY_NAME[name]


def exposed_by(process: Process) -> tuple[Family, ...]:
    """The families on `/metrics` of that process's listener."""
    return tuple(each for each in FAMILIES if each.process in (process, "every"))
