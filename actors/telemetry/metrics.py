"""One gateway's counts as Prometheus text, in a registry of their own; times are seconds.

The gateway reports events; nothing here reads a clock. Label values are workers, endpoints,
HTTP statuses and reasons: few, and never a client's text. Others register collectors of their own.
"""

from collections.abc import Iterator
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
)
from prometheus_client.registry import Collector

from mallee.actors.telemetry.workers import FewNames, WorkerCollector
from mallee.protocol.ids import WorkerId
from mallee.protocol.messages import FinishReason

# From a fork's first token on a loaded CPU (1 ms) to a cold, long prompt.
_FIRST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_BETWEEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class GatewayMetrics:
    """One gateway's metrics. Belongs to the gateway's event loop.

    Users count with the public ones themselves; methods keep several in step.
    """

    def __init__(self, gateway: str = "") -> None:
        """With a name, every sample has it as label `gateway`: several may answer at one address."""
        self._gateway = gateway
        to = self.registry = CollectorRegistry(auto_describe=True)
        counter = partial(Counter, namespace="mallee", registry=to)
        gauge = partial(Gauge, namespace="mallee", registry=to)
        histogram = partial(Histogram, namespace="mallee", registry=to)
        # Requests
        self._answers = counter("http_answers", "HTTP answers.", ["endpoint", "status"])
        self.in_flight = gauge("branches_in_flight", "Branches begun and not ended.")
        self._ends = counter("branches_ended", "Branches by how they ended.", ["reason"])
        text = "From a branch's request to its first token."
        self.first_token_s = histogram("time_to_first_token_seconds", text, buckets=_FIRST)
        text = "From a request's head to its tokens: reading, rendering, tokenizing."
        self.prepare_s = histogram("request_preparation_seconds", text, buckets=_FIRST)
        text = "Between two tokens of a branch."
        self.token_gap_s = histogram("inter_token_latency_seconds", text, buckets=_BETWEEN)
        text = "From a branch's request to its end; cancelled branches are not in it."
        self._durations = histogram("branch_duration_seconds", text, buckets=_WHOLE)
        self._cached = counter("cached_tokens", "Prompt tokens whose KV was there.")
        self._prefill = counter("prefill_tokens", "Prompt tokens computed.")
        text = "Prompt tokens of ended branches, cached or not."
        self._prompt = counter("prompt_tokens", text)
        text = "Prompts and forks by how they were served, and why less was there than could have been."
        self._prompts = counter("prompts_served", text, ["served", "reason"])
        text = "Branches whose KV was to be retained, by outcome."
        self._retentions = counter("retentions", text, ["outcome"])
        self.output_tokens = counter("output_tokens", "Tokens generated.")
        # Records of sessions
        self.recorded_bytes = counter("session_record_bytes", "Bytes of sessions' records written.")
        text = "Records of sessions that ended before their session."
        self._records_stopped = counter("session_records_stopped", text, ["reason"])
        # Admission
        self.waiting = gauge("requests_waiting", "Requests that wait for a worker with room.")
        text = "How long those requests that had to wait for a worker waited, until one took them."
        self.admission_wait_s = histogram("admission_wait_seconds", text, buckets=_FIRST)
        text = "Requests that no worker took: their queue was full, or they waited too long."
        self._refusals = counter("admission_refusals", text, ["reason"])
        # The fleet
        self._route_names = FewNames()
        self._routes = counter("route_decisions", "Requests sent, by worker.", ["worker"])
        text = "Prompt blocks that the chosen worker had."
        self._overlap = counter("route_overlap_blocks", text)
        text = "The most blocks that any worker had."
        self._best_overlap = counter("route_best_overlap_blocks", text)
        self.workers = WorkerCollector()
        to.register(self.workers)
        self.resyncs = counter("resyncs", "Worker snapshots taken in.")
        text = (
            "How long the oldest message from the bus had waited, at each turn that took some in."
        )
        self._event_lag = histogram("event_lag_seconds", text, buckets=_BETWEEN)
        self._event_queue = gauge("event_queue_messages", "Messages from the bus that wait.")
        text = "Messages dropped for lack of room."
        self.dropped_events = counter("event_messages_dropped", text)

    def answered(self, endpoint: str, status: int) -> None:
        """Count an HTTP answer that began; `endpoint` is the path's template, not the path."""
        self._answers.labels(endpoint, str(status)).inc()

    def branch_ended(
        self, reason: FinishReason, *, cached_tokens: int, prefill_tokens: int, seconds: float
    ) -> None:
        """Count a branch that ended by itself, `seconds` after its request."""
        self._end(reason, 1)
        self._cached.inc(cached_tokens)
        self._prefill.inc(prefill_tokens)
        self._prompt.inc(cached_tokens + prefill_tokens)
        self._durations.observe(seconds)

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

    def refused(self, reason: str) -> None:
        """Count a refused request; `reason` is an error's code."""
        self._refusals.labels(reason).inc()

    def routed(self, worker: WorkerId, overlap_blocks: int, best_overlap_blocks: int) -> None:
        """Count a request sent to `worker`, which held `overlap_blocks` of its prompt."""
        self._routes.labels(self._route_names.shown(worker)).inc()
        self._overlap.inc(overlap_blocks)
        self._best_overlap.inc(best_overlap_blocks)

    def pumped(self, lag_s: float, queued: int) -> None:
        """Note a turn that takes messages in; `queued` wait, the oldest for `lag_s`."""
        self._event_lag.observe(lag_s)
        self._event_queue.set(queued)

    def render(self) -> bytes:
        """Prometheus text exposition."""
        return generate_latest(_Labelled(self.registry, self._gateway))


class _Labelled(Collector):
    """The samples of a registry, with one label more."""

    def __init__(self, registry: CollectorRegistry, gateway: str) -> None:
        self._registry = registry
        self._more = {"gateway": gateway} if gateway else {}

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, **self._more}) for sample in family.samples
            ]
            yield family
