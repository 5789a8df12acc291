"""The running answer to one job: what the dispatcher delivers becomes deltas for a reader."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Self, TypeAlias

from mallee.actors.gateway.service import Delta, DeltaQueue
from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.protocol.errors import MalleeError
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.router.dispatch.effects import Deliver

log = logging.getLogger(__name__)

CancelBranch: TypeAlias = Callable[[RequestId, int | None], None]


class Answer:
    """A `BranchStream`. Belongs to one event loop.

    Every branch gets exactly one delta with `finish`, however it ends; then the iteration ends.
    `cancel(request, branch | None)` is called when the reader gives up a branch, or all still open.
    """

    def __init__(
        self,
        request: RequestId,
        num_branches: int,
        *,
        cancel: CancelBranch,
        started: float,
        metrics: GatewayMetrics,
    ) -> None:
        self.request = request
        self.placed: asyncio.Future[WorkerId] = asyncio.get_running_loop().create_future()
        self._open = set(range(num_branches))
        self._cancel = cancel
        self._started = started
        self._metrics = metrics
        self._last_token: dict[int, float] = {}  # by branch, monotonic seconds
        self._deltas = DeltaQueue()

    @property
    def worker(self) -> WorkerId:
        """The worker that branch 0 began on."""
        return self.placed.result()

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
            self._metrics.branches_cancelled(1)
            self._cancel(self.request, branch)

    async def aclose(self) -> None:
        self._give_up()

    def _give_up(self) -> None:
        """Cancel every branch still running."""
        if self._open:
            self._metrics.branches_cancelled(len(self._open))
            self._open.clear()
            self._cancel(self.request, None)

    # What the dispatcher says

    def deliver(self, effect: Deliver, now: float) -> None:
        update: Any = effect.update
        cached, computed = effect.prompt
        worker = effect.shard.worker
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
            ),
            now,
        )

    def fail(self, branch: int, error: MalleeError, now: float) -> None:
        """End `branch` with `error`."""
        self._put(Delta(branch, (), "error", 0, 0, None, 0, error), now)

    def end(self) -> None:
        """End the iteration: nothing follows."""
        self._deltas.end()

    def _put(self, delta: Delta, now: float) -> None:
        if delta.branch not in self._open:
            return
        if not self._deltas.put(delta, now):
            log.warning("%s: its client does not read, it is given up", self.request)
            asyncio.get_running_loop().call_soon(self._give_up)
        self._measure(delta, now)
        if delta.finish is not None:
            self._open.discard(delta.branch)

    def _measure(self, delta: Delta, now: float) -> None:
        """Count the delta; one token's latency is measured from the branch's token before it."""
        metrics = self._metrics
        if delta.tokens:
            last = self._last_token.get(delta.branch)
            self._last_token[delta.branch] = now
            if last is None:
                metrics.first_token_s.observe(now - self._started)
            else:
                metrics.token_gap_s.observe(now - last)
            metrics.output_tokens.inc(len(delta.tokens))
        if delta.finish is not None:
            metrics.branch_ended(
                delta.finish,
                cached_tokens=delta.cached_tokens,
                prefill_tokens=delta.prefill_tokens,
                seconds=now - self._started,
            )
