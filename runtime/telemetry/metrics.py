"""One gateway's counts as Prometheus text, in a registry of their own; times are seconds.

The gateway reports events; nothing here reads a clock. Names and label values are those of the catalog.
Others register collectors of their own.
"""

from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from mallee.protocol.ids import WorkerId
from mallee.protocol.messages import FinishReason
from mallee.runtime.telemetry.catalog import MOST_TENANTS, MOST_WORKERS, NO_TENANT, OTHERS
from mallee.runtime.telemetry.families import (
    Families,
    FewNames,
    Labelled,
    ProcessCollector,
)
from mallee.runtime.telemetry.workers import WorkerCollector

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text"


def content_type(accept: str) -> str:
    """The type of `exposition`."""
    return f"{OPENMETRICS}; version=1.0.0; charset=utf-8" if OPENMETRICS in accept else CONTENT_TYPE


def exposition(families: Labelled, accept: str) -> bytes:
    """Prometheus's text, or where the header `accept` names it OpenMetrics, which alone has exemplars."""
    # Without `escaping` OpenMetrics makes `vllm_` of `vllm:`.
    write = (
        partial(openmetrics, escaping="allow-utf-8") if OPENMETRICS in accept else generate_latest
    )
    text: bytes = write(families)
    return text


class GatewayMetrics:
    """One gateway's metrics. Belongs to the gateway's event loop.

    Users count with the public ones themselves; methods keep several in step.
    """

    def __init__(self, gateway: str = "") -> None:
        """With a name, every sample has it as label `gateway`: several may answer at one address."""
        self._gateway = gateway
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(ProcessCollector())
        make = Families(self.registry)
        # Requests
        self._answers = make.counter("mallee_http_answers_total")
        self.workers_expected = make.gauge("mallee_workers_expected")
        self.in_flight = make.gauge("mallee_branches_in_flight")
        self._ends = make.counter("mallee_branches_ended_total")
        self.first_token_s = make.histogram("mallee_time_to_first_token_seconds")
        self.prepare_s = make.histogram("mallee_request_preparation_seconds")
        self.token_gap_s = make.histogram("mallee_inter_token_latency_seconds")
        self._durations = make.histogram("mallee_branch_duration_seconds")
        phases = make.histogram("mallee_branch_phase_seconds")
        self._queue_s, self._prefill_s = phases.labels("queue"), phases.labels("prefill")
        self._decode_s = phases.labels("decode")
        self.output_tokens = make.counter("mallee_output_tokens_total")
        self.recorded_bytes = make.counter("mallee_session_record_bytes_total")
        self._records_stopped = make.counter("mallee_session_records_stopped_total")
        self._callbacks = make.histogram("mallee_callback_duration_seconds")
        self._searches = make.histogram("mallee_search_duration_seconds")
        # Reuse and forks
        self._cached = make.counter("mallee_cached_tokens_total")
        self._prefill = make.counter("mallee_prefill_tokens_total")
        self._prompt = make.counter("mallee_prompt_tokens_total")
        self._prompts = make.counter("mallee_prompts_served_total")
        self._retentions = make.counter("mallee_retentions_total")
        self._fork_first_s = make.histogram("mallee_branch_latency_seconds")
        self._forked = make.counter("mallee_forked_branches_total")
        # Admission and failover
        self.waiting = make.gauge("mallee_requests_waiting")
        self.admission_wait_s = make.histogram("mallee_admission_wait_seconds")
        self._refusals = make.counter("mallee_admission_refusals_total")
        self.stall_s = make.histogram("mallee_branch_stall_seconds")
        self.tenants = TenantMetrics(make)
        # The fleet
        self._route_names = FewNames(MOST_WORKERS, OTHERS)
        self._routes = make.counter("mallee_route_decisions_total")
        self._overlap = make.counter("mallee_route_overlap_blocks_total")
        self._best_overlap = make.counter("mallee_route_best_overlap_blocks_total")
        self.workers = WorkerCollector()
        self.registry.register(self.workers)
        self.resyncs = make.counter("mallee_resyncs_total")
        self._event_lag = make.histogram("mallee_event_lag_seconds")
        self._event_queue = make.gauge("mallee_event_queue_messages")
        self.dropped_events = make.counter("mallee_event_messages_dropped_total")

    def answered(self, endpoint: str, status: int) -> None:
        """Count an HTTP answer that began; `endpoint` is the path's template, not the path."""
        self._answers.labels(endpoint, str(status)).inc()

    def called_back(self, outcome: str, seconds: float) -> None:
        """Count a call of a URL that a request named."""
        self._callbacks.labels(outcome).observe(seconds)

    def searched(self, reason: str, seconds: float) -> None:
        """Count a search that has its result, so long after its request."""
        self._searches.labels(reason).observe(seconds)

    def branch_ended(
        self, reason: FinishReason, *, cached_tokens: int, prefill_tokens: int, seconds: float
    ) -> None:
        """Count a branch that ended by itself, `seconds` after its request."""
        self._end(reason, 1)
        self._cached.inc(cached_tokens)
        self._prefill.inc(prefill_tokens)
        self._prompt.inc(cached_tokens + prefill_tokens)
        self._durations.observe(seconds)

    def phases(self, placed_s: float, first_token_s: float, end_s: float) -> None:
        """Count the phases of a branch that drew and ended; all since its request."""
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

    def branches_cancelled(self, n: int) -> None:
        """Count n branches that the reader gave up before their end."""
        self._end("cancelled", n)

    def _end(self, reason: FinishReason, n: int) -> None:
        self._ends.labels(reason).inc(n)

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
        """`exposition`."""
        labels = {"gateway": self._gateway} if self._gateway else {}
        return exposition(Labelled(self.registry, labels), accept)


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

    def __init__(self, make: Families) -> None:
        self.requests = make.counter("mallee_tenant_requests_total")
        self.refusals = make.counter("mallee_tenant_refusals_total")
        self.tokens = make.counter("mallee_tenant_tokens_total")
        self.first_token_s = make.summary("mallee_tenant_first_token_seconds")
        self._names = FewNames(MOST_TENANTS, OTHERS)
        self._tenants: dict[str, Tenant] = {}

    def of(self, owner: str) -> Tenant:
        """The counts of `owner`, who is named by an API key; of those that no key names, if empty."""
        name = self._names.shown(owner) if owner else NO_TENANT
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = Tenant(self, name)
        return found
