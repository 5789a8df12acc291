"""The running answer to one job: what the dispatcher delivers becomes deltas for a reader."""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from mallee.gateway.judge import Judge
from mallee.gateway.lives import BranchLife, RequestLife
from mallee.gateway.metrics import GatewayMetrics, Tenant
from mallee.gateway.recording.recorder import RequestTape
from mallee.gateway.service import Delta, DeltaQueue
from mallee.protocol.errors import MalleeError
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import FinishReason, Retained
from mallee.router.dispatch.effects import Deliver
from mallee.router.dispatch.shards import Shard
from mallee.router.dispatch.verdicts import Verdict
from mallee.router.placement.placer import Placement
from mallee.runtime.telemetry.logs import ids

if TYPE_CHECKING:
    from mallee.runtime.telemetry.tracing.requests import RequestTrace

log = logging.getLogger(__name__)


def outcome_of(retained: Retained) -> str:
    """The word for it in answers and metrics."""
    if retained.nbytes == retained.asked_nbytes:
        return "applied"
    return "clipped" if retained.nbytes else "refused"


CancelBranch: TypeAlias = Callable[[RequestId, int | None], None]
CutBranch: TypeAlias = Callable[[RequestId, int, int, Tokens], CapsuleId | None]
CutCapsule: TypeAlias = Callable[[CapsuleId, int, Tokens], None]


class Answer:
    """A `BranchStream`. Belongs to one event loop.

    Every branch gets exactly one delta with `finish`, however it ends; then the iteration ends.
    `cancel(request, branch | None)` is called when the reader gives up a branch, or all still open,
    `cut(request, branch, at, residue)` when it saw the beginning of one, `shorten(capsule, at, residue)` if
    that one had ended.
    """

    def __init__(
        self,
        request: RequestId,
        *,
        life: RequestLife,
        cancel: CancelBranch,
        cut: CutBranch,
        shorten: CutCapsule,
        started: float,
        metrics: GatewayMetrics,
        tenant: Tenant,
        is_fork: bool,
        clock: Callable[[], float],
        judge: Judge,
        trace: "RequestTrace | None" = None,
    ) -> None:
        self.request = request
        self.placed: asyncio.Future[WorkerId] = asyncio.get_running_loop().create_future()
        self._life = life
        self._open = set(range(len(life.branches)))
        self._cancel = cancel
        self._cut = cut
        self._shorten = shorten
        self._left: dict[int, CapsuleId] = {}  # by branches that have ended
        self._started = started
        self._metrics = metrics
        self.tenant = tenant
        self._hows: dict[int, str] | None = {} if is_fork else None  # of branches of a capsule
        self._paused: set[int] = set()  # branches that moved since their last token
        self._clock = clock
        self._deltas = DeltaQueue()
        self.judge = judge
        self.trace = trace
        self.tape: RequestTape | None = None  # of its session's record
        self._verdict: Verdict | None = None
        self._weights: dict[int, str] = {}  # that branches began with

    @property
    def worker(self) -> WorkerId:
        """The worker that branch 0 began on."""
        return self.placed.result()

    async def opened(self) -> None:
        try:
            await asyncio.shield(self.placed)
        except asyncio.CancelledError:
            self.placed.cancel()
            await self.aclose()
            raise

    def num_tokens(self, branch: int) -> int:
        """Tokens of its answer so far."""
        return self._life.branches[branch].num_tokens

    @property
    def num_branches(self) -> int:
        return len(self._life.branches)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._deltas.get()
        if delta is None:
            raise StopAsyncIteration
        return delta

    def take(self) -> Delta | None:
        """The next delta if one waits."""
        return self._deltas.take()

    def cancel(self, branch: int) -> None:
        if branch in self._open:
            self._open.discard(branch)
            self._cancelled([branch])
            self._cancel(self.request, branch)

    def cut(
        self, branch: int, at: int, residue: Tokens, end: FinishReason = "stop"
    ) -> CapsuleId | None:
        if branch in self._open:
            self._open.discard(branch)
            self._ended_here([branch], end)
            left = self._cut(self.request, branch, at, residue)
            self._life.branches[branch].capsule = left
        else:
            left = self._left.get(branch)
            if left is not None:
                self._shorten(left, at, residue)
        if self.tape is not None:
            self.tape.cut(branch, at, residue, left)
        return left

    def prune(self, branches: Collection[int], now: float) -> list[int]:
        """Cancel those of `branches` that are open, and tell their reader; returns them."""
        ended = sorted(self._open.intersection(branches))
        self._open.difference_update(ended)
        self._cancelled(ended)
        for branch in ended:
            life = self._life.branches[branch]
            counts = (life.cached_tokens, life.prefill_tokens)
            self._deltas.put(Delta(branch, (), "cancelled", *counts, None, 0, None), now)
        for branch in ended:
            self._cancel(self.request, branch)
        return ended

    async def aclose(self) -> None:
        self._give_up()

    def _give_up(self) -> None:
        """Cancel every branch still running."""
        if self._open:
            self._cancelled(self._open)
            self._open.clear()
            self._cancel(self.request, None)

    def _cancelled(self, branches: Collection[int]) -> None:
        self._ended_here(branches, "cancelled")
        if self.tape is not None:
            for branch in branches:
                self.tape.given_up(branch)

    def _ended_here(self, branches: Collection[int], end: FinishReason) -> None:
        """Count branches of which the client wants no more."""
        self._metrics.branches_cancelled(len(branches))
        at_s = self._clock() - self._started
        for branch in branches:
            life = self._life.branches[branch]
            life.finish(end, at_s)
            self._count_tokens(life)
            if self.trace is not None:
                self.trace.branch_ended(branch, life)

    def _count_tokens(self, life: BranchLife) -> None:
        """Count the tokens of a branch that is over."""
        self.tenant.branch_ended(
            cached_tokens=life.cached_tokens,
            prefill_tokens=life.prefill_tokens,
            output_tokens=life.num_tokens,
        )

    # What the dispatcher says

    def refuse(self, error: MalleeError, now: float) -> None:
        """Nothing of it was sent to a worker."""
        for life in self._life.branches:
            life.finish("refused", now - self._started)
            life.error = error.code
        if self.trace is not None:
            self.trace.end(self._life.branches, error)
            self.trace = None
        self.placed.set_exception(error)

    def place(self, shard: Shard, placement: Placement, now: float) -> None:
        """Branches are on a worker, for the first time or once more."""
        if self.trace is not None:
            self.trace.place(shard, placement, now - self._started)
        for branch in shard.branches:
            life = self._life.branches[branch]
            if life.last_token_s is None:
                self._weights[branch] = shard.weights.label
            elif shard.dispatch.is_moved:
                self._paused.add(branch)
            life.place(shard.worker, now - self._started, is_moved=shard.dispatch.is_moved)
        if self._hows is not None:
            # One that could keep its capsule nowhere goes with its whole text.
            how = "recompute" if shard.job.capsule is None else shard.how
            self._hows.update(dict.fromkeys(shard.branches, how))
            if not shard.dispatch.is_moved:
                self._metrics.forked(how, len(shard.branches))
        if self.tape is not None:
            self.tape.placed(shard)

    def deliver(self, effect: Deliver, now: float) -> None:
        update: Any = effect.update
        cached, computed = effect.prompt
        if effect.branch == 0 and self._verdict is None:
            self._verdict = self._life.verdict = verdict = self.judge.verdict(effect)
            self._metrics.prompt_served(verdict.verb, verdict.reason)
            log.debug(
                "%s: %s (%s)",
                self.request,
                verdict.verb,
                verdict.reason,
                extra=ids(request=self.request, worker=effect.shard.worker),
            )
        worker, serving = effect.shard.worker, effect.shard.weights.label
        if update.capsule is not None:
            self._left[effect.branch] = CapsuleId(update.capsule)
        self._put(
            Delta(
                effect.branch,
                update.tokens,
                update.finish,
                cached,
                computed,
                CapsuleId(update.capsule) if update.capsule is not None else None,
                update.boundary,
                None,
                None if worker == self.worker else worker,
                update.logprobs,
                None if effect.branch else self._verdict,
                update.retained,
                (self._weights.get(effect.branch, serving), serving),
                update.kept,
                update.drafts,
                ((self.num_tokens(effect.branch), len(update.tokens)),) if update.injected else (),
            ),
            now,
        )

    def fail(self, branch: int, error: MalleeError, now: float, weights: str) -> None:
        """End `branch` with `error`, while `weights` serve."""
        versions = (self._weights.get(branch, weights), weights)
        self._put(Delta(branch, (), "error", 0, 0, None, 0, error, weights=versions), now)

    def fail_all(self, error: MalleeError, now: float, weights: str) -> None:
        """End every branch still running with `error`."""
        for branch in sorted(self._open):
            self.fail(branch, error, now, weights)

    def end(self) -> None:
        """End the iteration: nothing follows."""
        self._deltas.end()
        if self.trace is not None:
            self.trace.end(self._life.branches)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s ended: %s",
                self.request,
                self._life.summary,
                extra=ids(
                    request=self.request,
                    worker=self._life.branches[0].worker,
                    trace_id=None if self.trace is None else self.trace.trace_id,
                ),
            )

    def _put(self, delta: Delta, now: float) -> None:
        if delta.branch not in self._open:
            return
        if not self._deltas.put(delta, now):
            log.warning(
                "%s: its client does not read, it is given up",
                self.request,
                extra=ids(request=self.request),
            )
            asyncio.get_running_loop().call_soon(self._give_up)
        self._measure(delta, now)
        if self.tape is not None:
            self.tape.got(
                delta.branch,
                delta.tokens,
                delta.finish,
                capsule=delta.capsule,
                boundary=delta.boundary,
                error=None if delta.error is None else delta.error.code,
                logprobs=delta.logprobs,
            )
        if delta.finish is not None:
            self._open.discard(delta.branch)
            if self.trace is not None:
                life = self._life.branches[delta.branch]
                self.trace.branch_ended(delta.branch, life, delta.error)

    def _measure(self, delta: Delta, now: float) -> None:
        """Count the delta; one token's latency is measured from the branch's token before it."""
        metrics, life = self._metrics, self._life.branches[delta.branch]
        at_s = now - self._started
        last_s = life.last_token_s
        life.take(delta, at_s)
        if delta.tokens:
            if last_s is None:
                self._measure_first(delta.branch, at_s)
            else:
                metrics.token_gap_s.observe(at_s - last_s)
                if self._paused and delta.branch in self._paused:
                    self._paused.discard(delta.branch)
                    metrics.stall_s.observe(at_s - last_s)
            metrics.output_tokens.inc(len(delta.tokens))
        if delta.retained is not None:
            metrics.retained(outcome_of(delta.retained))
        if delta.finish is not None:
            metrics.branch_ended(
                delta.finish,
                cached_tokens=delta.cached_tokens,
                prefill_tokens=delta.prefill_tokens,
                seconds=at_s,
            )
            if life.placed_s is not None and life.first_token_s is not None:
                metrics.phases(life.placed_s, life.first_token_s, at_s)
            self._count_tokens(life)

    def _measure_first(self, branch: int, at_s: float) -> None:
        """Count the first token of a branch."""
        exemplar = None if self.trace is None else self.trace.exemplar
        self._metrics.first_token_s.observe(at_s, exemplar)
        self.tenant.first_token_s.observe(at_s)
        if self._hows is not None:
            self._metrics.fork_answers(self._hows[branch], at_s)
