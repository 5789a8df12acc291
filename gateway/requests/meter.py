"""The counts and latencies of one request, in the metrics of its gateway and of its tenant."""

from collections.abc import Sequence

from mallee.gateway.metrics import GatewayMetrics, Tenant
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.lives import BranchLife
from mallee.gateway.requests.observers import Observer
from mallee.protocol.errors import MalleeError, Unavailable
from mallee.protocol.hashing import Tokens
from mallee.protocol.messages import Retained
from mallee.router.dispatch.shards import Shard
from mallee.router.dispatch.verdicts import Verdict
from mallee.router.placement.placer import Placement


def outcome_of(retained: Retained) -> str:
    """The word for it in answers and metrics."""
    if retained.nbytes == retained.asked_nbytes:
        return "applied"
    return "clipped" if retained.nbytes else "refused"


class Meter(Observer):
    """Counts one request, which began at `began` (seconds)."""

    __slots__ = ("_began", "_exemplar", "_hows", "_metrics", "_paused", "_tenant")

    def __init__(
        self,
        metrics: GatewayMetrics,
        tenant: Tenant,
        began: float,
        *,
        is_fork: bool,
        exemplar: dict[str, str] | None = None,
    ) -> None:
        """`exemplar`: the labels of its trace, for histograms."""
        self._metrics = metrics
        self._tenant = tenant
        self._began = began
        self._hows: dict[int, str] | None = {} if is_fork else None  # of branches of a capsule
        self._paused: set[int] = set()  # branches that moved since their last token
        self._exemplar = exemplar

    def placed(self, shard: Shard, placement: Placement, at_s: float) -> None:
        metrics, branches, is_moved = self._metrics, shard.branches, shard.dispatch.is_moved
        metrics.routed(placement.worker, placement.overlap_blocks, placement.best_overlap_blocks)
        queued_at = shard.dispatch.queued_at
        if is_moved:
            self._paused.update(branches)
        elif not branches.start and queued_at is not None:
            metrics.admission_wait_s.observe(self._began + at_s - queued_at)
        if self._hows is not None:
            # One that could keep its capsule nowhere goes with its whole text.
            how = "recompute" if shard.job.capsule is None else shard.how
            self._hows.update(dict.fromkeys(branches, how))
            if not is_moved:
                metrics.forked(how, len(branches))

    def judged(self, verdict: Verdict) -> None:
        self._metrics.prompt_served(verdict.verb, verdict.reason)

    def delivered(self, branch: BranchLife, delta: Delta) -> None:
        metrics = self._metrics
        if delta.tokens and not delta.injected:
            if branch.gap_s is None:
                self._measure_first(branch)
            else:
                metrics.token_gap_s.observe(branch.gap_s / len(delta.tokens))
                if self._paused and delta.branch in self._paused:
                    self._paused.discard(delta.branch)
                    metrics.stall_s.observe(branch.gap_s)
            metrics.output_tokens.inc(len(delta.tokens))
        if delta.retained is not None:
            metrics.retained(outcome_of(delta.retained))
        if delta.finish is not None:
            self._ended(branch)

    def _measure_first(self, branch: BranchLife) -> None:
        """Count the first token of a branch."""
        at_s = branch.first_token_s
        assert at_s is not None, "it has just come"
        self._paused.discard(branch.index)  # it had nothing to pause
        self._metrics.first_token_s.observe(at_s, self._exemplar)
        self._tenant.first_token_s.observe(at_s)
        if self._hows is not None:
            self._metrics.fork_answers(self._hows[branch.index], at_s)

    def gave_up(self, branch: BranchLife) -> None:
        self._ended(branch)

    def cut(self, branch: BranchLife, at: int, residue: Tokens) -> None:
        self._ended(branch)

    def ended(self, branches: Sequence[BranchLife], error: MalleeError | None) -> None:
        if isinstance(error, Unavailable):
            self._metrics.refused(error.code, self._tenant)

    def _ended(self, branch: BranchLife) -> None:
        """Count a branch that is over."""
        assert branch.end is not None, "it is over"
        cached, computed = branch.cached_tokens, branch.prefill_tokens
        self._metrics.branch_ended(branch.end, cached_tokens=cached, prefill_tokens=computed)
        if branch.end != "cancelled":
            self._metrics.times(branch.placed_s, branch.first_token_s, branch.end_s or 0.0)
        self._tenant.branch_ended(
            cached_tokens=cached, prefill_tokens=computed, output_tokens=branch.num_tokens
        )
