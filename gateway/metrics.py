"""One gateway's metrics, declared and counted, in a registry of their own; times are seconds.

The gateway reports events; nothing here reads a clock. Gateways give every sample a label `gateway` beside
those declared, for several may answer at one address.
"""

from collections.abc import Callable, Mapping
from typing import Final, get_args

from mallee.gateway.access.access import READINGS
from mallee.gateway.recording.recorder import StopReason
from mallee.protocol.errors import MalleeError, Unavailable
from mallee.protocol.ids import WorkerId
from mallee.protocol.messages import FinishReason
from mallee.router.dispatch.dispatcher import DispatchStats, MoveReason
from mallee.router.dispatch.verdicts import Reason, Verb
from mallee.router.placement.fanout_pricing import How
from mallee.router.placement.fanouts import SpillReason
from mallee.router.placement.pulls import PULL_REASONS
from mallee.router.sync.replicas import NO_REPLICAS, ReplicaStats
from mallee.router.views import RouterStats
from mallee.runtime.telemetry.families import (
    BETWEEN_S,
    FIRST_S,
    MOST_WORKERS,
    WHOLE_S,
    Families,
    FewNames,
    Label,
    Reading,
    exposition,
)

MOST_TENANTS: Final = 100
NO_TENANT: Final = "none"
SEARCH_REASONS: Final = ("found", "done", "tokens", "nodes", "expansions")
CALLBACK_OUTCOMES: Final = (
    *("answered", "abandoned", "slow", "unreachable", "refused", "malformed"),
)
_TENANT: Final = Label("tenant", most=MOST_TENANTS + 2)
_HOW: Final = Label("how", get_args(How))


def _codes(error: type[MalleeError]) -> tuple[str, ...]:
    """The codes of an error and of all that are one; the API's own are refused before a worker is chosen."""
    own = (each for each in error.__subclasses__() if each.__module__ == error.__module__)
    below = (code for each in own for code in _codes(each))
    return tuple(sorted({error.code, *below}))


class GatewayMetrics:
    """One gateway's metrics. Belongs to the gateway's event loop.

    Users count with the public ones themselves; methods keep several in step.
    """

    def __init__(self, gateway: str = "") -> None:
        """With a name, every sample has it as label `gateway`."""
        self._labels = {"gateway": gateway} if gateway else {}
        self.registry = Families()
        self._declare_requests()
        self._declare_forks()
        self.tenants = TenantMetrics(self.registry)
        self._declare_fleet()

    def _declare_requests(self) -> None:
        area = self.registry.area("Requests")
        self._answers = area.counter(
            "mallee_http_answers_total",
            "HTTP answers. `endpoint` is the path's template.",
            Label("endpoint", most=48),
            Label("status", most=32),
        )
        self.free_tools = area.counter(
            "mallee_free_tools_total",
            "Places in schemas of tools that can't be held to, so that arguments are free.",
        )
        self.in_flight = area.gauge("mallee_branches_in_flight", "Branches begun and not ended.")
        self._ends = area.counter(
            "mallee_branches_ended_total",
            "Branches by how they ended.",
            Label("reason", get_args(FinishReason)),
        )
        self.first_token_s = area.histogram(
            "mallee_time_to_first_token_seconds",
            "From a branch's request to its first token.",
            FIRST_S,
        )
        self.token_gap_s = area.histogram(
            "mallee_inter_token_latency_seconds", "Between two tokens of a branch.", BETWEEN_S
        )
        self._durations = area.histogram(
            "mallee_branch_duration_seconds",
            "From a branch's request to its end; cancelled branches are not in it.",
            WHOLE_S,
        )
        self.prepare_s = area.histogram(
            "mallee_request_preparation_seconds",
            "From a request's head to its tokens: reading, rendering, tokenizing.",
            FIRST_S,
        )
        phases = area.histogram(
            "mallee_branch_phase_seconds",
            "Phases of a branch that was not cancelled: `queue` until a worker was chosen, `prefill`"
            " until its first token, `decode` until its end.",
            WHOLE_S,
            Label("phase", ("queue", "prefill", "decode")),
        )
        self._queue_s, self._prefill_s = phases.labels("queue"), phases.labels("prefill")
        self._decode_s = phases.labels("decode")
        self.output_tokens = area.counter("mallee_output_tokens_total", "Tokens generated.")
        self.recorded_bytes = area.counter(
            "mallee_session_record_bytes_total", "Bytes of sessions' records written."
        )
        self._records_stopped = area.counter(
            "mallee_session_records_stopped_total",
            "Records of sessions that ended before their session.",
            Label("reason", get_args(StopReason)),
        )
        self._searches = area.histogram(
            "mallee_search_duration_seconds",
            "Time to solution: from a search's request to its result. `found`: a solution was"
            " found, `done`: the policy was through, the others: that part of its budget was used"
            " up.",
            WHOLE_S,
            Label("reason", SEARCH_REASONS),
        )
        self._callbacks = self.registry.area("Callbacks").histogram(
            "mallee_callback_duration_seconds",
            "Calls of URLs that requests named (`http.callbacks`), by how they ended: `abandoned`:"
            " their request was over first, `slow`: no answer came in time, `refused`: its status"
            " was not 200, `malformed`: it had another shape.",
            WHOLE_S,
            Label("outcome", CALLBACK_OUTCOMES),
        )

        answers = self.registry.area("The gateways' store").histogram(
            "mallee_store_answer_seconds",
            "Answers of the broker to a `read` of what is stored, or a `write` that was waited for.",
            BETWEEN_S,
            Label("how", ("read", "write")),
        )
        self._store_s = {how: answers.labels(how) for how in ("read", "write")}

    def _declare_forks(self) -> None:
        area = self.registry.area("Reuse of prompts")
        self._cached = area.counter(
            "mallee_cached_tokens_total", "Prompt tokens whose KV was there."
        )
        self._prefill = area.counter("mallee_prefill_tokens_total", "Prompt tokens computed.")
        self._prompt = area.counter(
            "mallee_prompt_tokens_total", "Prompt tokens of ended branches, cached or not."
        )
        self._prompts = area.counter(
            "mallee_prompts_served_total",
            "Prompts and forks by how they were served, and why less was there than could have"
            " been.",
            Label("served", get_args(Verb)),
            Label("reason", ("", *get_args(Reason))),
        )
        self._retentions = area.counter(
            "mallee_retentions_total",
            "Branches whose KV was to be retained, by outcome.",
            Label("outcome", ("applied", "clipped", "refused")),
        )
        area = self.registry.area("Forks and fan-outs")
        self._fork_first_s = area.histogram(
            "mallee_branch_latency_seconds",
            "Branch latency: from a fork's request to the first token of each of its branches."
            " `how` the branch got its prefix: it stayed where that is, or went elsewhere and"
            " pulled or computed it.",
            FIRST_S,
            _HOW,
        )
        self._forked = area.counter(
            "mallee_forked_branches_total",
            "Branches of capsules that were placed for the first time.",
            _HOW,
        )
        area = self.registry.area("Waiting and refusals")
        self.waiting = area.gauge(
            "mallee_requests_waiting", "Requests that wait for a worker with room."
        )
        self.admission_wait_s = area.histogram(
            "mallee_admission_wait_seconds",
            "How long those requests that had to wait for a worker waited, until one took them.",
            FIRST_S,
        )
        self._refusals = area.counter(
            "mallee_admission_refusals_total",
            "Requests that no worker took, by the error's code: their queue was full, or they"
            " waited too long.",
            Label("reason", _codes(Unavailable)),
        )
        self.stall_s = self.registry.area("Failover").histogram(
            "mallee_branch_stall_seconds",
            "Pauses of moved branches that had begun to answer, from token to token.",
            FIRST_S,
        )

    def _declare_fleet(self) -> None:
        area = self.registry.area("Routing")
        self._route_names = FewNames(MOST_WORKERS)
        self._routes = area.counter(
            "mallee_route_decisions_total",
            "Requests placed, and placed again after a move, by worker.",
            Label("worker", most=MOST_WORKERS + 1),
        )
        self._overlap = area.counter(
            "mallee_route_overlap_blocks_total", "Prompt blocks that the chosen worker had."
        )
        self._best_overlap = area.counter(
            "mallee_route_best_overlap_blocks_total", "The most blocks that any worker had."
        )
        self.workers_expected = area.gauge(
            "mallee_workers_expected", "Workers that there should be."
        )
        area = self.registry.area("Index and events")
        self.resyncs = area.counter("mallee_resyncs_total", "Worker snapshots taken in.")
        self._event_lag = area.histogram(
            "mallee_event_lag_seconds",
            "How long the oldest message from the bus had waited, at each turn that took some in.",
            BETWEEN_S,
        )
        self._event_queue = area.gauge(
            "mallee_event_queue_messages", "Messages from the bus that wait."
        )
        self.dropped_events = area.counter(
            "mallee_event_messages_dropped_total", "Messages dropped for lack of room."
        )

    def show_router(
        self,
        router: Callable[[], RouterStats],
        dispatcher: Callable[[], DispatchStats],
        replicas: Callable[[], ReplicaStats] | None = None,
        questions: Mapping[str, int] | None = None,
    ) -> None:
        """Show the stats of a router, of its dispatcher and, if bookings are broadcast, of other gateways.

        `questions` to other gateways, by outcome. Once.
        """
        area = self.registry.area
        area("Forks and fan-outs").readings(router, _FORKS)
        area("Waiting and refusals").readings(router, _REFUSALS)
        area("Failover").readings(dispatcher, _DISPATCHER)
        area("Routing").readings(router, _ROUTING)
        area("Index and events").readings(router, _INDEX)
        others = area("Gateways among themselves")
        others.readings(replicas or (lambda: NO_REPLICAS), _REPLICAS)
        others.readings(lambda: questions or {}, [_QUESTIONS])
        others.readings(router, _OTHERS)

    def show_store(self, store: object) -> None:
        """Show what waits for the store. Once."""
        self.registry.area("The gateways' store").readings(lambda: store, _STORE)

    def show_access(self, access: object) -> None:
        """Show the state of API keys, and what expires. Once."""
        self.registry.area("Keys and certificates").readings(lambda: access, READINGS)

    def stored(self, how: str, seconds: float) -> None:
        """Count an answer of the store."""
        self._store_s[how].observe(seconds)

    def answered(self, endpoint: str, status: int) -> None:
        """Count an HTTP answer that began; `endpoint` is the path's template, not the path."""
        self._answers.labels(endpoint, str(status)).inc()

    def called_back(self, outcome: str, seconds: float) -> None:
        """Count a call of a URL that a request named."""
        self._callbacks.labels(outcome).observe(seconds)

    def searched(self, reason: str, seconds: float) -> None:
        """Count a search that has its result, so long after its request."""
        self._searches.labels(reason).observe(seconds)

    def branch_ended(self, reason: str, *, cached_tokens: int, prefill_tokens: int) -> None:
        """Count a branch that ended."""
        self._ends.labels(reason).inc()
        self._cached.inc(cached_tokens)
        self._prefill.inc(prefill_tokens)
        self._prompt.inc(cached_tokens + prefill_tokens)

    def times(self, placed_s: float | None, first_token_s: float | None, end_s: float) -> None:
        """Count the times of a branch that was not cancelled; all since its request."""
        self._durations.observe(end_s)
        if placed_s is None or first_token_s is None:
            return
        self._queue_s.observe(placed_s)
        self._prefill_s.observe(first_token_s - placed_s)
        self._decode_s.observe(end_s - first_token_s)

    def forked(self, how: str, num_branches: int) -> None:
        """Count branches of a capsule that were placed."""
        self._forked.labels(how).inc(num_branches)

    def fork_answers(self, how: str, seconds: float) -> None:
        """Count the first token of a branch of a capsule, so long after its request."""
        self._fork_first_s.labels(how).observe(seconds)

    def prompt_served(self, served: str, reason: str | None) -> None:
        """Count a request's prompt, or its fork."""
        self._prompts.labels(served, reason or "").inc()

    def retained(self, outcome: str) -> None:
        """Count a reply to a wish for retention."""
        self._retentions.labels(outcome).inc()

    def record_stopped(self, reason: str) -> None:
        """Count a session's record that ended too early."""
        self._records_stopped.labels(reason).inc()

    def refused(self, reason: str, tenant: "Tenant") -> None:
        """Count a refused request; `reason` is an error's code."""
        self._refusals.labels(reason).inc()
        tenant.refused()

    def routed(self, worker: WorkerId, overlap_blocks: int, best_overlap_blocks: int) -> None:
        """Count a request sent to `worker`, which held `overlap_blocks` of its prompt."""
        self._routes.labels(self._route_names.shown(worker)).inc()
        self._overlap.inc(overlap_blocks)
        self._best_overlap.inc(best_overlap_blocks)

    def pumped(self, lag_s: float, queued: int) -> None:
        """Note a turn that takes messages in; `queued` wait, the oldest for `lag_s`."""
        self._event_lag.observe(lag_s)
        self._event_queue.set(queued)

    def render(self, accept: str = "") -> bytes:
        """All of them as `exposition`."""
        return b"".join(exposition(self.registry, accept, self._labels))


_REASON: Final = Label("reason", PULL_REASONS)
_FORKS: Final = (
    Reading(
        "mallee_spills_total",
        "Parts of fan-outs that left their prefix's worker: it was `full`, or they end `sooner`"
        " elsewhere.",
        "spilled",
        (Label("how", get_args(How)[1:]), Label("reason", get_args(SpillReason))),
    ),
    Reading(
        "mallee_pulls_total",
        "Placements whose worker pulls KV from others: `prefix` of a prompt, `spill` of a fan-out,"
        " `drain` of a worker, `rebuild` of a capsule that is gone.",
        "pulls",
        (_REASON,),
    ),
    Reading(
        "mallee_pull_predicted_bytes_total",
        "KV bytes that those lack.",
        "pulled_nbytes",
        (_REASON,),
    ),
    Reading(
        "mallee_prefix_copies",
        "Workers that hold a block of the index, on average over its blocks.",
        "index.num_copies",
    ),
)
_REFUSALS: Final = (
    Reading("mallee_route_refusals_total", "Placements that no worker could take.", "refused"),
)
_ROUTING: Final = (
    Reading(
        "mallee_route_regret_blocks_total",
        "Most blocks any worker had minus those of the chosen.",
        "regret_blocks",
    ),
    Reading(
        "mallee_routed_to_capsule_total",
        "Requests sent to the worker of a capsule.",
        "routed_to_capsule",
    ),
    Reading("mallee_workers_alive", "Workers that can be given requests.", "num_workers"),
    Reading("mallee_booked_requests", "Requests booked, by all gateways.", "booked_requests"),
    Reading("mallee_booked_rows", "Rows booked, by all gateways.", "booked_rows"),
    Reading("mallee_expired_bookings_total", "Bookings not touched in time.", "expired_bookings"),
    Reading("mallee_predicted_prompts", "Prompts held by prediction.", "predicted_prompts"),
    Reading("mallee_capsules", "Capsules in the directory.", "num_capsules"),
)
_OTHERS: Final = (
    Reading("mallee_remote_requests", "Requests that other gateways booked.", "remote_requests"),
    Reading(
        "mallee_replica_skew_rows",
        "Rows that workers have, as they said last, beyond those that this gateway knows to be"
        " booked: other gateways', of which it has not heard.",
        "unknown_rows",
    ),
)
_INDEX: Final = (
    Reading("mallee_broker_up", "1 while the broker is reached.", "is_broker_up"),
    Reading("mallee_events_applied_total", "Cache events of workers taken in.", "events_applied"),
    Reading("mallee_event_gaps_total", "Times that events turned out to be missing.", "gaps"),
    Reading(
        "mallee_workers_without_lease",
        "Workers heard by their links, not on the bus.",
        "num_unleased",
    ),
    Reading(
        "mallee_workers_with_event_gaps",
        "Workers with events known to be missing.",
        "num_incomplete",
    ),
    Reading(
        "mallee_ignored_messages_total", "Messages of past lives or strangers.", "ignored_messages"
    ),
    Reading("mallee_refused_leases_total", "Leases that could not be taken.", "refused_leases"),
    Reading(
        "mallee_repaired_blocks_total", "Stale blocks found by what workers had.", "repaired_blocks"
    ),
    Reading("mallee_index_blocks", "Distinct blocks indexed.", "index.num_blocks"),
    Reading("mallee_index_entries", "(worker, block) pairs.", "index.num_entries"),
    Reading(
        "mallee_index_worker_sets", "Distinct sets of workers that share blocks.", "index.num_sets"
    ),
    Reading("mallee_index_bytes", "Memory of the prefix index.", "index.nbytes"),
    Reading(
        "mallee_index_open_workers",
        "Workers with blocks whose paths may have holes: matches look every block up.",
        "index.num_walked",
    ),
    Reading(
        "mallee_index_backlog_blocks", "Blocks of snapshots not taken in yet.", "backlog_blocks"
    ),
    Reading("mallee_index_evictions_total", "Blocks dropped for the byte limit.", "index.evicted"),
    Reading("mallee_index_lookups_total", "Blocks looked up by matches.", "index.probes"),
)
_DISPATCHER: Final = (
    Reading(
        "mallee_branches_moved_total",
        "Branches that had to go on on another worker: theirs died (`death`), made no progress"
        " (`stall`) or left (`departure`), or their capsule was gone (`capsule`) or found no room"
        " (`room`).",
        "moved",
        (Label("reason", get_args(MoveReason)),),
    ),
    Reading(
        "mallee_capsules_rebuilt_total",
        "Capsules that were gone and are computed again.",
        "num_rebuilt",
    ),
)
_REPLICAS: Final = (
    Reading("mallee_other_gateways", "Gateways whose bookings are known.", "gateways"),
    Reading(
        "mallee_other_gateways_incomplete", "Of them, those with operations missing.", "incomplete"
    ),
    Reading("mallee_other_gateways_bookings", "Their live bookings.", "bookings"),
    Reading(
        "mallee_other_gateways_waiting_bookings",
        "Of them, those on lives of workers that are not known here.",
        "waiting",
    ),
    Reading(
        "mallee_other_gateways_gaps_total",
        "Times that operations turned out to be missing.",
        "gaps",
    ),
    Reading(
        "mallee_other_gateways_expired_total", "Gateways that fell silent.", "expired_gateways"
    ),
)
_STORE: Final = (
    Reading("mallee_store_waiting_writes", "Writes that are not in the store yet.", "num_waiting"),
    Reading("mallee_store_waiting_bytes", "Their memory.", "waiting_nbytes"),
    Reading(
        "mallee_store_written_bytes_total", "Bytes of values that were stored.", "written_nbytes"
    ),
    Reading(
        "mallee_store_refused_writes_total",
        "Writes that the broker, or the queue to it, had no room for.",
        "num_refused",
    ),
)
_QUESTIONS: Final = Reading(
    "mallee_other_gateways_questions_total",
    "Questions to other gateways for what runs there. `unanswered`: its client got a 503, or less"
    " than all.",
    dict,
    (Label("outcome", ("found", "unknown", "unanswered")),),
)


class Tenant:
    """The counts of one tenant, or of all beyond the bound."""

    __slots__ = ("_cached", "_output", "_prefill", "_refusals", "_requests", "first_token_s")

    def __init__(self, families: "TenantMetrics", name: str) -> None:
        self._requests = families.requests.labels(name)
        self._refusals = families.refusals.labels(name)
        self.first_token_s = families.first_token_s.labels(name)
        tokens = families.tokens
        self._cached, self._prefill = tokens.labels(name, "cached"), tokens.labels(name, "prefill")
        self._output = tokens.labels(name, "output")

    def asked(self) -> None:
        """Count a request."""
        self._requests.inc()

    def refused(self) -> None:
        """Count a request that no worker took."""
        self._refusals.inc()

    def branch_ended(self, *, cached_tokens: int, prefill_tokens: int, output_tokens: int) -> None:
        """Count the tokens of a branch that ended, however it did."""
        self._cached.inc(cached_tokens)
        self._prefill.inc(prefill_tokens)
        self._output.inc(output_tokens)


class TenantMetrics:
    """Counts by tenant: of those that API keys name, the first `MOST_TENANTS` that send something."""

    def __init__(self, registry: Families) -> None:
        area = registry.area("Tenants")
        self.requests = area.counter(
            "mallee_tenant_requests_total",
            f"Requests by the tenant that an API key names (`{NO_TENANT}`: no key does).",
            _TENANT,
        )
        self.refusals = area.counter(
            "mallee_tenant_refusals_total", "Of them, those that no worker took.", _TENANT
        )
        self.tokens = area.counter(
            "mallee_tenant_tokens_total",
            "Tokens of ended branches: prompt tokens found (`cached`) and computed (`prefill`),"
            " tokens generated (`output`).",
            _TENANT,
            Label("kind", ("cached", "prefill", "output")),
        )
        self.first_token_s = area.summary(
            "mallee_tenant_first_token_seconds",
            "From a branch's request to its first token.",
            _TENANT,
        )
        self._names = FewNames(MOST_TENANTS)
        self._tenants: dict[str, Tenant] = {}

    def of(self, owner: str) -> Tenant:
        """The counts of `owner`, who is named by an API key; of those that no key names, if empty."""
        name = self._names.shown(owner) if owner else NO_TENANT
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = Tenant(self, name)
        return found
