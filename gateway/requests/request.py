"""One running request: the dispatcher's effects become deltas for its client; observers see them pass."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mallee.gateway.requests.deltas import Delta, DeltaQueue
from mallee.gateway.requests.lives import RequestLife
from mallee.gateway.requests.observers import Observer
from mallee.protocol.errors import MalleeError
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import FinishReason
from mallee.router.dispatch.effects import Deliver
from mallee.router.dispatch.shards import Shard
from mallee.router.dispatch.verdicts import Comparison
from mallee.router.placement.placer import Placement
from mallee.runtime.telemetry.logs import ids

if TYPE_CHECKING:
    from mallee.gateway.requests.spans import RequestTrace

log = logging.getLogger(__name__)


class Owner(Protocol):
    """Carries out what the client of a request wants."""

    def cancel(self, request: RequestId, branch: int | None) -> None:
        """End a branch, or all that run."""
        ...

    def cut(self, request: RequestId, branch: int, at: int, residue: Tokens) -> CapsuleId | None:
        """End a branch behind the first `at` tokens of its text and `residue`; the capsule of that text.

        Of the end nothing is delivered before `carry_out`.
        """
        ...

    def carry_out(self) -> None:
        """Deliver what follows from a cut."""
        ...

    def shorten(self, capsule: CapsuleId, at: int, residue: Tokens) -> None:
        """As `cut`, for the capsule of a branch that has ended."""
        ...


class RunningRequest:
    """One request, from its acceptance to its end: a stream of deltas of all its branches, interleaved.

    Belongs to one event loop. Every branch that its client lets run gets one delta with `finish`, and none
    after it; then the iteration ends. Leaving it early must be followed by `aclose`, which cancels what runs.
    """

    __slots__ = (
        *("_branches", "_clock", "_comparison", "_deltas", "_is_held_elsewhere", "_is_over"),
        *("_life", "_observers", "_open", "_owner", "_weights", "placed", "request", "take"),
        *("trace", "worker"),
    )

    def __init__(
        self,
        request: RequestId,
        *,
        owner: Owner,
        life: RequestLife,
        comparison: Comparison,
        observers: Sequence[Observer],
        trace: "RequestTrace | None",
        clock: Callable[[], float],
    ) -> None:
        """`trace` is one of `observers`, if the request is traced."""
        self.request = request
        self.worker = WorkerId("")  # that branch 0 began on, once the request is `opened`
        self.placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.trace = trace
        self._owner = owner
        self._branches = life.branches
        self._life = life
        self._comparison = comparison
        self._observers = observers
        self._clock = clock
        self._open = set(range(len(life.branches)))
        self._deltas = DeltaQueue()
        self.take = self._deltas.take  # the next delta if one waits; None also at the end
        self._is_held_elsewhere = False  # more of the prompt than where branch 0 is
        self._weights: dict[int, str] = {}  # that branches began with
        self._is_over = False

    # The client

    async def opened(self) -> None:
        """Return once a worker has the job. Raises MalleeError if none will; cancelled, it is given up."""
        if self.placed.done():
            self.placed.result()
            return
        try:
            await asyncio.shield(self.placed)
        except asyncio.CancelledError:
            self.placed.cancel()
            await self.aclose()
            raise

    def __aiter__(self) -> DeltaQueue:
        return self._deltas

    def cancel(self, branch: int) -> None:
        """End one branch early: nothing of it follows the deltas that wait."""
        if branch in self._open:
            self._give_up([branch])
            self._owner.cancel(self.request, branch)

    def cut(
        self, branch: int, at: int, residue: Tokens, end: FinishReason = "stop"
    ) -> CapsuleId | None:
        """End a branch where its client saw its last text: after `at` tokens, prompt and all, and `residue`.

        Returns the capsule of that text, also if the branch has ended by itself; None: it left none.
        """
        life = self._branches[branch]
        if branch in self._open:
            self._open.discard(branch)
            life.finish(end, self._at_s())
            life.capsule = self._owner.cut(self.request, branch, at, residue)
            for observer in self._observers:
                observer.cut(life, at, residue)
            self._owner.carry_out()  # the request may end by it
            return life.capsule
        if life.capsule is not None:
            self._owner.shorten(life.capsule, at, residue)
        for observer in self._observers:
            observer.shortened(life, at, residue, life.capsule)
        return life.capsule

    async def aclose(self) -> None:
        """Cancel every branch still running. Idempotent."""
        if self._open:
            self._cancel_all()

    def _cancel_all(self) -> None:
        if self._open:
            self._give_up(list(self._open))
            self._owner.cancel(self.request, None)

    def _give_up(self, branches: Collection[int]) -> None:
        """Take no more of open branches, which are to be cancelled."""
        at_s = self._at_s()
        for branch in branches:
            self._open.discard(branch)
            life = self._branches[branch]
            life.finish("cancelled", at_s)
            for observer in self._observers:
                observer.gave_up(life)

    # Others

    @property
    def num_branches(self) -> int:
        return len(self._branches)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def num_tokens(self, branch: int) -> int:
        """Tokens of its answer so far."""
        return self._branches[branch].num_tokens

    def prune(self, branches: Collection[int]) -> list[int]:
        """Cancel those of `branches` that are open, and tell their reader; returns them."""
        ended = sorted(self._open.intersection(branches))
        self._give_up(ended)
        now = self._clock()
        for branch in ended:
            life = self._branches[branch]
            delta = Delta.end(branch, "cancelled")
            cached, computed = life.cached_tokens, life.prefill_tokens
            self._deltas.put(delta._replace(cached_tokens=cached, prefill_tokens=computed), now)
        for branch in ended:
            self._owner.cancel(self.request, branch)
        return ended

    def captured(self, branch: int, capsule: CapsuleId, boundary: int) -> None:
        """A capsule was taken of a running branch."""
        for observer in self._observers:
            observer.captured(branch, capsule, boundary)

    # The dispatcher's effects

    def refuse(self, error: MalleeError) -> None:
        """Nothing of it was sent to a worker."""
        refuse(self._life, self._observers, error, self._at_s())
        self._open.clear()
        self._is_over = True
        self.placed.set_exception(error)

    def place(self, shard: Shard, placement: Placement, now: float) -> None:
        """Branches are on a worker, for the first time or once more."""
        at_s, is_moved = now - self._life.began, shard.dispatch.is_moved
        for branch in shard.branches:
            life = self._branches[branch]
            if life.last_token_s is None:
                self._weights[branch] = shard.weights.label
            life.place(shard.worker, at_s, is_moved=is_moved)
        if not shard.branches.start:
            self._is_held_elsewhere = placement.best_overlap_blocks > placement.overlap_blocks
        for observer in self._observers:
            observer.placed(shard, placement, at_s)
        if not self.placed.done():
            self.worker = placement.worker
            self.placed.set_result(None)

    def deliver(self, effect: Deliver, now: float) -> None:
        """A branch has drawn tokens, or has ended."""
        update: Any = effect.update
        branch, worker = effect.branch, effect.shard.worker
        cached, computed = effect.prompt
        serving = effect.shard.weights.label
        if not branch and self._life.verdict is None:
            self._judge(effect)
        delta = Delta(
            branch=branch,
            tokens=update.tokens,
            finish=update.finish,
            cached_tokens=cached,
            prefill_tokens=computed,
            capsule=None if update.capsule is None else CapsuleId(update.capsule),
            boundary=update.boundary,
            error=None,
            worker=None if worker == self.worker else worker,
            logprobs=update.logprobs,
            verdict=None if branch else self._life.verdict,
            retained=update.retained,
            weights=(self._weights.get(branch, serving), serving),
            kept=update.kept,
            drafts=update.drafts,
            injected=(((self.num_tokens(branch), len(update.tokens)),) if update.injected else ()),
            end_token=update.end_token,
            prompt_logprobs=update.prompt_logprobs,
            resampled=update.resampled,
        )
        self._put(delta, now)

    def _judge(self, first: Deliver) -> None:
        verdict = self._comparison.verdict(first, is_held_elsewhere=self._is_held_elsewhere)
        self._life.verdict = verdict
        for observer in self._observers:
            observer.judged(verdict)
        if log.isEnabledFor(logging.DEBUG):
            extra = ids(request=self.request, worker=first.shard.worker)
            log.debug("%s: %s (%s)", self.request, verdict.verb, verdict.reason, extra=extra)

    def fail(self, branch: int, error: MalleeError, now: float, weights: str) -> None:
        """End `branch` with `error`, while `weights` serve."""
        versions = (self._weights.get(branch, weights), weights)
        self._put(Delta.end(branch, "error")._replace(error=error, weights=versions), now)

    def fail_all(self, error: MalleeError, now: float, weights: str) -> None:
        """End every branch still running with `error`."""
        for branch in sorted(self._open):
            self.fail(branch, error, now, weights)

    def end(self) -> None:
        """End the iteration: nothing follows."""
        self._deltas.end()
        if not self._is_over:
            self._is_over = True
            for observer in self._observers:
                observer.ended(self._branches, None)
        if log.isEnabledFor(logging.DEBUG):
            trace = None if self.trace is None else self.trace.trace_id
            extra = ids(request=self.request, worker=self._branches[0].worker, trace_id=trace)
            log.debug("%s ended: %s", self.request, self._life.summary, extra=extra)

    def _put(self, delta: Delta, now: float) -> None:
        branch = delta.branch
        if branch not in self._open:
            return
        if not self._deltas.put(delta, now):
            text = "%s: its client does not read, it is given up"
            log.warning(text, self.request, extra=ids(request=self.request))
            asyncio.get_running_loop().call_soon(self._cancel_all)
        life = self._branches[branch]
        life.take(delta, now - self._life.began)
        for observer in self._observers:
            observer.delivered(life, delta)
        if delta.finish is not None:
            self._open.discard(branch)

    def _at_s(self) -> float:
        return self._clock() - self._life.began


def refuse(
    life: RequestLife, observers: Sequence[Observer], error: MalleeError, at_s: float
) -> None:
    """End a request of which nothing was sent to a worker."""
    for branch in life.branches:
        branch.finish("refused", at_s)
        branch.error = error.code
    for observer in observers:
        observer.ended(life.branches, error)
