"""The requests that workers answer now: updates become deltas, and a booking ends with its answer."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from mallee.actors.gateway.answers import RunningAnswer
from mallee.actors.gateway.jobs import Job, Recompute, abandon_prefill
from mallee.actors.gateway.service import Delta
from mallee.actors.gateway.shards import Shard
from mallee.actors.gateway.token_memory import Recording, TokenMemory
from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.protocol.errors import MalleeError, UnknownCapsule, WorkerLost
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import ALL_BRANCHES, Cancel, Command, Frame, Release, Update
from mallee.router.router import Router

log = logging.getLogger(__name__)

TOUCH_S = 30.0  # between two renewals of a running request's booking


@dataclass(slots=True)
class Running:
    """One booking's answer. `job` is the part's own: with its rows alone."""

    answer: RunningAnswer
    worker: WorkerId
    hashes: Hashes
    job: Job
    started: float  # monotonic seconds
    first_branch: int  # of its rows in the whole job
    recompute: Recompute | None = None  # to be computed before `job` is sent
    recomputed: tuple[int, int] | None = None  # tokens cached and computed by that
    recording: Recording | None = None
    seen: bool = False  # whether the worker has said anything of it
    touched: float = 0.0  # last renewal of its booking, monotonic seconds
    last_token: dict[int, float] = field(default_factory=dict)  # by branch, monotonic seconds
    num_tokens: dict[int, int] = field(default_factory=dict)  # by branch, so far

    def abandon(self, branch: int | None) -> list[Command]:
        """The worker's commands after the reader gave up `branch`, or all that was left."""
        if self.recompute is not None:
            return abandon_prefill(self.recompute.request) if self.answer.is_over else []
        return self.job.abandon(self.answer.request, branch)

    def fork_of(self, recompute: Recompute) -> list[Command]:
        """The worker's commands once it has the capsule of `recompute`."""
        request = self.answer.request
        rows = set(range(recompute.job.num_branches))
        return [
            recompute.job.command(request, self.first_branch),
            *(Cancel(request, branch) for branch in sorted(rows - self.answer.open_branches)),
            Release(recompute.job.capsule),
        ]

    def checked(self, update: Update) -> Update:
        """`update`, or an error instead of an end before which tokens were lost on their way."""
        seen = self.num_tokens.get(update.branch, 0) + len(update.tokens)
        self.num_tokens[update.branch] = seen
        if update.finish is None:
            return update
        expected = self.job.num_drawn(update)
        if expected is None or seen == expected:
            return update
        error = WorkerLost(self.worker, f"{seen} of {expected} tokens arrived")
        log.error("%s, branch %d: %s", self.answer.request, update.branch, error)
        return structs.replace(update, finish="error", capsule=None, error=error.to_wire())

    def measure(self, delta: Delta, now: float, metrics: GatewayMetrics) -> None:
        """Count the delta; one token's latency is measured from the branch's token before it."""
        last = self.last_token.get(delta.branch)
        if delta.tokens:
            self.last_token[delta.branch] = now
            if last is None:
                metrics.first_token_s.observe(now - self.started)
            else:
                metrics.token_gap_s.observe(now - last)
        metrics.output_tokens.inc(len(delta.tokens))
        if delta.finish is not None:
            metrics.branch_ended(
                delta.finish,
                cached_tokens=delta.cached_tokens,
                prefill_tokens=delta.prefill_tokens,
                seconds=now - self.started,
            )


class RunningRequests:
    """The running requests of one gateway. Belongs to its event loop.

    `send(worker, command)` goes nowhere if the worker is lost. `on_room(worker)` is called when a
    worker may have room. `clock` is the router's.
    """

    def __init__(
        self,
        router: Router,
        memory: TokenMemory,
        metrics: GatewayMetrics,
        *,
        send: Callable[[WorkerId, Command], None],
        on_room: Callable[[WorkerId], None],
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._memory = memory
        self._metrics = metrics
        self._send = send
        self._on_room = on_room
        self._clock = clock
        self._running: dict[RequestId, Running] = {}
        self._recomputes: dict[RequestId, RequestId] = {}  # prefill -> the part that waits for it

    def __len__(self) -> int:
        return len(self._running)

    def has(self, worker: WorkerId) -> bool:
        """Whether `worker` answers a request."""
        return any(running.worker == worker for running in self._running.values())

    def begin(self, shard: Shard, hashes: Hashes, started: float) -> None:
        """Send a booked part to its worker."""
        part, job, answer = shard
        placement, request, first = part.placement, answer.request, part.rows.start
        running = Running(answer, placement.worker, hashes, job, started, first)
        self._running[request] = running
        running.recording = job.recording(self._memory)
        self._metrics.routed(
            placement.worker, placement.overlap_blocks, placement.best_overlap_blocks
        )
        self._metrics.in_flight.inc(len(part.rows))
        recompute = job.recompute(request, self._memory) if part.how == "recompute" else None
        if recompute is None:
            self._send(placement.worker, job.command(request, first))
        else:
            running.recompute, running.job = recompute, recompute.job
            self._recomputes[recompute.request] = request
            self._send(placement.worker, recompute.prefill)
        if part.how != "stay":
            log.info(
                "%s: %d rows %s on %s; %s",
                *(request, len(part.rows), part.how, placement.worker, part.prices),
            )

    def abandon(self, request: RequestId, branch: int | None, n: int) -> None:
        """The reader of `request` gave up `branch`, or the n that were left."""
        running = self._running.get(request)
        if running is None:
            return
        for command in running.abandon(branch):
            self._send(running.worker, command)
        self._metrics.branches_cancelled(n)
        if running.answer.is_over:
            self._close(request)

    def on_frame(self, worker: WorkerId, frame: Frame) -> None:
        """Take in a worker's updates."""
        for update in frame.updates:
            if update.request in self._recomputes:
                self._on_recomputed(worker, update)
                continue
            running = self._running.get(RequestId(update.request))
            if running is None or running.worker != worker:
                continue  # given up meanwhile
            update = running.checked(update)
            if running.recomputed is not None:
                update = Recompute.counted(update, running.recomputed)
            self._learn(running, update)
            self._deliver(running, update)

    def fail_worker(self, worker: WorkerId, reason: str) -> None:
        """End every answer of `worker` with an error."""
        for running in list(self._running.values()):
            if running.worker == worker:
                self._fail(running, WorkerLost(worker, reason))

    def close(self) -> None:
        """End every answer with an error."""
        for running in list(self._running.values()):
            self._fail(running, WorkerLost(running.worker, "the gateway is shutting down"))

    def check(self) -> None:
        """Raises AssertionError if a capsule is computed anew for a request that is over."""
        for prefill, request in self._recomputes.items():
            recompute = self._running[request].recompute
            assert recompute is not None, request
            assert recompute.request == prefill, (recompute.request, prefill)

    def _learn(self, running: Running, update: Update) -> None:
        """Correct the router and the token memory by the update."""
        request, worker = running.answer.request, running.worker
        if not running.seen and update.error is None:
            running.seen = True
            self._router.first_token(request)
            self._router.observe_hit(request, update.cached_tokens)
            self._on_room(worker)
        capsule = running.job.capsule
        if update.error is not None and update.error[0] == UnknownCapsule.code and capsule:
            self._router.forget_capsule(capsule)
        if update.capsule is not None:
            self._router.learn_capsule(
                CapsuleId(update.capsule), worker, update.boundary, running.hashes
            )
        if running.recording is not None:
            running.recording.on_update(update)

    def _on_recomputed(self, worker: WorkerId, update: Update) -> None:
        """Fork a capsule that was computed anew for a part, once it is there."""
        running = self._running[self._recomputes[RequestId(update.request)]]
        recompute, request = running.recompute, running.answer.request
        if running.worker != worker or recompute is None or update.finish is None:
            return
        running.recompute = None
        del self._recomputes[recompute.request]
        if update.capsule is None:
            self._deliver(running, structs.replace(update, request=request, branch=ALL_BRANCHES))
            return
        running.recomputed = (update.cached_tokens, update.prefill_tokens)
        for command in running.fork_of(recompute):
            self._send(worker, command)

    def _deliver(self, running: Running, update: Update) -> None:
        now = self._clock()
        if now - running.touched > TOUCH_S:
            running.touched = now
            self._router.touch(running.answer.request)
        for delta in running.answer.feed(update):
            running.measure(delta, now, self._metrics)
        if running.answer.is_over:
            self._close(running.answer.request)

    def _close(self, request: RequestId) -> None:
        self._router.free(request)
        running = self._running.pop(request, None)
        if running is not None:
            if running.recompute is not None:
                del self._recomputes[running.recompute.request]
            self._on_room(running.worker)

    def _fail(self, running: Running, error: MalleeError) -> None:
        for delta in running.answer.fail(error):
            running.measure(delta, self._clock(), self._metrics)
        self._close(running.answer.request)
