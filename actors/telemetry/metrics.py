"""One gateway's counts as Prometheus text, in a registry of their own; times are seconds.

The gateway reports events; nothing here reads a clock. Label values are workers, endpoints,
HTTP statuses and reasons: few, and never a client's text. Others register collectors of their own.
"""

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mallee.actors.telemetry.workers import FewNames, WorkerCollector
from mallee.protocol.ids import WorkerId
from mallee.protocol.messages import FinishReason

# From a fork's first token on a loaded CPU (1 ms) to a cold, long prompt.
_FIRST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_BETWEEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class GatewayCounts(NamedTuple):
    """The counts that have to agree with each other."""

    branches_started: int
    branches_ended: int  # cancelled ones too
    in_flight: int


class GatewayMetrics:
    """One gateway's metrics. Belongs to the gateway's event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._started = 0
        self._ended = 0
        self._make_request_metrics(self.registry)
        self._make_admission_metrics(self.registry)
        self._make_fleet_metrics(self.registry)

    def _make_request_metrics(self, to: CollectorRegistry) -> None:
        self._answers = Counter(
            "mallee_http_answers", "HTTP answers.", ["endpoint", "status"], registry=to
        )
        self._in_flight = Gauge(
            "mallee_branches_in_flight", "Branches begun and not ended.", registry=to
        )
        self._ends = Counter(
            "mallee_branches_ended", "Branches by how they ended.", ["reason"], registry=to
        )
        self._ttft = Histogram(
            "mallee_time_to_first_token_seconds",
            "From a branch's request to its first token.",
            buckets=_FIRST,
            registry=to,
        )
        self._itl = Histogram(
            "mallee_inter_token_latency_seconds",
            "Between two tokens of a branch.",
            buckets=_BETWEEN,
            registry=to,
        )
        self._e2e = Histogram(
            "mallee_branch_duration_seconds",
            "From a branch's request to its end; cancelled branches are not in it.",
            buckets=_WHOLE,
            registry=to,
        )
        self._cached = Counter(
            "mallee_cached_tokens", "Prompt tokens whose KV was there.", registry=to
        )
        self._prefill = Counter("mallee_prefill_tokens", "Prompt tokens computed.", registry=to)
        self._prompt = Counter(
            "mallee_prompt_tokens", "Prompt tokens of ended branches, cached or not.", registry=to
        )
        self._output = Counter("mallee_output_tokens", "Tokens generated.", registry=to)

    def _make_admission_metrics(self, to: CollectorRegistry) -> None:
        self._waiting = Gauge(
            "mallee_requests_waiting", "Requests that wait for a worker with room.", registry=to
        )
        self._waits = Histogram(
            "mallee_admission_wait_seconds",
            "How long those requests that had to wait for a worker waited, until one took them.",
            buckets=_FIRST,
            registry=to,
        )
        self._refusals = Counter(
            "mallee_admission_refusals",
            "Requests that no worker took: their queue was full, or they waited too long.",
            ["reason"],
            registry=to,
        )

    def _make_fleet_metrics(self, to: CollectorRegistry) -> None:
        self._route_names = FewNames()
        self._routes = Counter(
            "mallee_route_decisions", "Requests sent, by worker.", ["worker"], registry=to
        )
        self._overlap = Counter(
            "mallee_route_overlap_blocks", "Prompt blocks that the chosen worker had.", registry=to
        )
        self._best_overlap = Counter(
            "mallee_route_best_overlap_blocks", "The most blocks that any worker had.", registry=to
        )
        self.workers = WorkerCollector()
        to.register(self.workers)
        self._resyncs = Counter("mallee_resyncs", "Worker snapshots taken in.", registry=to)
        self._make_pump_metrics(to)

    def _make_pump_metrics(self, to: CollectorRegistry) -> None:
        self._event_lag = Histogram(
            "mallee_event_lag_seconds",
            "How long the oldest message from the bus had waited, at each turn that took some in.",
            buckets=_BETWEEN,
            registry=to,
        )
        self._event_queue = Gauge(
            "mallee_event_queue_messages", "Messages from the bus that wait.", registry=to
        )
        self._dropped_events = Counter(
            "mallee_event_messages_dropped", "Messages dropped for lack of room.", registry=to
        )

    # Requests

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP answer began; `endpoint` is the path's template, not the path."""
        self._answers.labels(endpoint, str(status)).inc()

    def branches_started(self, n: int) -> None:
        self._started += n
        self._in_flight.inc(n)

    def first_token(self, seconds: float) -> None:
        """Count a branch's first token, `seconds` after its request."""
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Count a branch's token, `seconds` after the one before."""
        self._itl.observe(seconds)

    def output_tokens(self, n: int) -> None:
        self._output.inc(n)

    def branch_ended(
        self, reason: FinishReason, *, cached_tokens: int, prefill_tokens: int, seconds: float
    ) -> None:
        """Count a branch that ended by itself, `seconds` after its request."""
        self._end(reason, 1)
        self._cached.inc(cached_tokens)
        self._prefill.inc(prefill_tokens)
        self._prompt.inc(cached_tokens + prefill_tokens)
        self._e2e.observe(seconds)

    def branches_cancelled(self, n: int) -> None:
        """Count n branches that the reader gave up before their end."""
        self._end("cancelled", n)

    def _end(self, reason: FinishReason, n: int) -> None:
        self._ended += n
        self._ends.labels(reason).inc(n)
        self._in_flight.dec(n)

    # Admission

    def waiting(self, n: int) -> None:
        """Show the number of requests that wait for a worker."""
        self._waiting.set(n)

    def waited(self, seconds: float) -> None:
        """Count a request that a worker took after a wait."""
        self._waits.observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a refused request; `reason` is an error's code."""
        self._refusals.labels(reason).inc()

    # The fleet

    def routed(self, worker: WorkerId, overlap_blocks: int, best_overlap_blocks: int) -> None:
        """Count a request sent to `worker`, which held `overlap_blocks` of its prompt."""
        self._routes.labels(self._route_names.shown(worker)).inc()
        self._overlap.inc(overlap_blocks)
        self._best_overlap.inc(best_overlap_blocks)

    def resynced(self) -> None:
        """Count a snapshot that replaced what was known of a worker."""
        self._resyncs.inc()

    def pumped(self, lag_s: float, queued: int) -> None:
        """A turn takes messages in; `queued` wait, the oldest for `lag_s`."""
        self._event_lag.observe(lag_s)
        self._event_queue.set(queued)

    def events_dropped(self, n: int) -> None:
        self._dropped_events.inc(n)

    # Reading

    def render(self) -> bytes:
        """Prometheus text exposition."""
        return generate_latest(self.registry)

    def stats(self) -> GatewayCounts:
        return GatewayCounts(self._started, self._ended, self._started - self._ended)

    def check(self) -> None:
        """Raises AssertionError if more branches ended than began, or the gauge disagrees."""
        counts = self.stats()
        assert counts.in_flight >= 0, counts
        shown = self.registry.get_sample_value("mallee_branches_in_flight")
        assert shown == counts.in_flight, (shown, counts)
