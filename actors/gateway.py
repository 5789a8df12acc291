"""The gateway: routes jobs, sends them to workers, turns their frames into answers.

One event loop owns everything here. Selection and booking are one synchronous call into the router;
NATS feeds the router but is never on the path of a request.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from mallee.actors.bus import Bus
from mallee.actors.feed import FleetFeed
from mallee.actors.metrics import GatewayMetrics
from mallee.actors.service import (
    BranchStream,
    CapsuleInfo,
    Delta,
    ForkJob,
    GenerateJob,
    Job,
    PrefillJob,
)
from mallee.actors.streams import RunningAnswer
from mallee.actors.transport import Link, Transport
from mallee.protocol.errors import MalleeError, UnknownCapsule, WorkerLost
from mallee.protocol.events import Lease
from mallee.protocol.hashing import NO_HASHES, Hashes, block_hashes
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import (
    Cancel,
    Command,
    Fork,
    Frame,
    Generate,
    Prefill,
    Release,
    Update,
    pack_tokens,
)
from mallee.protocol.model import ModelSpec
from mallee.router.records import Placement
from mallee.router.router import Router

log = logging.getLogger(__name__)

RELINK_S = 2.0  # a worker whose link broke is tried again no sooner


class _Peer(NamedTuple):
    """A worker's life and the link to it."""

    incarnation: Incarnation
    link: Link


@dataclass(slots=True)
class _Running:
    """What the gateway remembers of a request while it runs."""

    answer: RunningAnswer
    worker: WorkerId
    hashes: Hashes
    job: Job
    started: float  # monotonic seconds
    seen: bool = False  # whether the worker has said anything of it
    last_token: dict[int, float] = field(default_factory=dict)  # by branch, monotonic seconds


class GatewayService:
    """A `Service` over one router, one transport and one bus."""

    def __init__(
        self,
        gateway_id: str,
        *,
        bus: Bus,
        transport: Transport,
        router: Router,
        model: ModelSpec,
        fleet: str,
        metrics: GatewayMetrics,
        new_request_id: Callable[[], str],
        expected_workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` must be the router's. `new_request_id` never gives the same name twice.

        With fewer than `expected_workers` routable, `health` says degraded.
        """
        self._expected_workers = expected_workers
        self.gateway_id = gateway_id
        self._transport = transport
        self._router = router
        self._model = model
        self._metrics = metrics
        self._new_request_id = new_request_id
        self._clock = clock
        self._wall_clock = wall_clock
        self._peers: dict[WorkerId, _Peer] = {}
        self._running: dict[RequestId, _Running] = {}
        self._has_joined = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._feed = FleetFeed(
            bus,
            router,
            model=model,
            fleet=fleet,
            metrics=metrics,
            on_join=self._join,
            on_leave=self._lose,
            clock=clock,
        )

    # Life

    async def start_up(self) -> None:
        """Listen to the fleet. Workers join as their leases arrive."""
        await self._feed.start_up()

    async def wait_for_worker(self, timeout_s: float) -> bool:
        """Whether a worker has joined by then; requests before that would be refused."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_joined.wait()
        return self._has_joined.is_set()

    async def close(self) -> None:
        """End every answer, every link and every task."""
        await self._feed.close()
        for running in list(self._running.values()):
            self._fail(running, WorkerLost(running.worker, "the gateway is shutting down"))
        await asyncio.gather(*self._closing, *(peer.link.close() for peer in self._peers.values()))
        self._peers.clear()

    # Requests

    @property
    def model(self) -> ModelSpec:
        return self._model

    async def start(self, job: Job) -> BranchStream:
        """Route the job and send it off. Raises MalleeError before anything is sent."""
        request = RequestId(self._new_request_id())
        hashes, placement = self._route(request, job)
        peer = self._peers.get(placement.worker)
        if peer is None or peer.incarnation != placement.incarnation:
            self._router.free(request)
            raise WorkerLost(placement.worker, "it was restarted just now")
        branches = _num_branches(job)
        answer = RunningAnswer(
            request, placement.worker, branches, cancel_branch=self._cancel_branch
        )
        self._running[request] = _Running(answer, placement.worker, hashes, job, self._clock())
        self._metrics.routed(
            placement.worker, placement.overlap_blocks, placement.best_overlap_blocks
        )
        self._metrics.branches_started(branches)
        peer.link.send(_command(request, job))
        return answer

    def capsule(self, capsule: CapsuleId) -> CapsuleInfo:
        """Raises UnknownCapsule."""
        entry = self._router.capsule(capsule)
        created = self._wall_clock() - (self._clock() - entry.created)
        return CapsuleInfo(entry.capsule, entry.worker, entry.boundary, created)

    async def release_capsule(self, capsule: CapsuleId) -> None:
        """Raises UnknownCapsule."""
        entry = self._router.capsule(capsule)
        peer = self._peers.get(entry.worker)
        if peer is not None:
            peer.link.send(Release(capsule))
        self._router.forget_capsule(capsule)

    def _route(self, request: RequestId, job: Job) -> tuple[Hashes, Placement]:
        size = self._router.config.block_size
        if isinstance(job, ForkJob):
            boundary = self._router.capsule(job.capsule).boundary
            lengths = [len(suffix) for suffix in job.suffixes]
            return NO_HASHES, self._router.route(
                request,
                NO_HASHES,
                prompt_tokens=boundary + max(lengths),
                max_tokens=job.limits.max_tokens,
                rows=len(lengths),
                capsule=job.capsule,
                suffix_tokens=sum(lengths),
            )
        hashes = block_hashes(job.tokens, size, salt=self._model.salt(job.salt))
        placement = self._router.route(
            request,
            hashes,
            prompt_tokens=len(job.tokens),
            max_tokens=0 if isinstance(job, PrefillJob) else job.limits.max_tokens,
            rows=1 if isinstance(job, PrefillJob) else job.n,
        )
        return hashes, placement

    def _cancel_branch(self, request: RequestId, branch: int | None, n: int) -> None:
        """A reader gave up `branch`, or all that is left."""
        running = self._running.get(request)
        if running is None:
            return
        peer = self._peers.get(running.worker)
        if peer is not None:
            peer.link.send(Cancel(request, branch))
            if isinstance(running.job, PrefillJob):
                # The capsule may be made before the cancel arrives, and nobody would know of it.
                peer.link.send(Release(capsule_id(request)))
        self._metrics.branches_cancelled(n)
        if running.answer.is_over:
            self._close(request)

    # What workers say

    def _on_frame(self, worker: WorkerId, frame: Frame) -> None:
        for update in frame.updates:
            running = self._running.get(RequestId(update.request))
            if running is None or running.worker != worker:
                continue  # given up meanwhile
            if not running.seen and update.error is None:
                running.seen = True
                self._router.first_token(running.answer.request)
                self._router.observe_hit(running.answer.request, update.cached_tokens)
            if isinstance(running.job, ForkJob) and _is_unknown_capsule(update):
                self._router.forget_capsule(running.job.capsule)
            if update.capsule is not None:
                self._router.learn_capsule(
                    CapsuleId(update.capsule), worker, update.boundary, running.hashes
                )
            for delta in running.answer.feed(update):
                self._measure(running, delta)
            if running.answer.is_over:
                self._close(running.answer.request)

    def _measure(self, running: _Running, delta: Delta) -> None:
        """Count the delta; one token's latency is measured from the branch's token before it."""
        now = self._clock()
        last = running.last_token.get(delta.branch)
        if delta.tokens:
            running.last_token[delta.branch] = now
            if last is None:
                self._metrics.first_token(now - running.started)
            else:
                self._metrics.next_token(now - last)
        self._metrics.output_tokens(len(delta.tokens))
        if delta.finish is not None:
            self._metrics.branch_ended(
                delta.finish,
                cached_tokens=delta.cached_tokens,
                prefill_tokens=delta.prefill_tokens,
                seconds=now - running.started,
            )

    def _close(self, request: RequestId) -> None:
        self._router.free(request)
        self._running.pop(request, None)

    def _fail(self, running: _Running, error: MalleeError) -> None:
        for delta in running.answer.fail(error):
            self._measure(running, delta)
        self._close(running.answer.request)

    # Who is there

    def _join(self, lease: Lease) -> None:
        worker, incarnation = WorkerId(lease.worker), Incarnation(lease.incarnation)
        link = self._transport.link(
            worker,
            lease.address,
            lambda frame: self._on_frame(worker, frame),
            lambda reason: self._unlink(worker, incarnation, reason),
        )
        self._peers[worker] = _Peer(incarnation, link)
        self._has_joined.set()
        log.info("worker %s joined at %s", worker, lease.address)

    def _lose(self, worker: WorkerId, incarnation: Incarnation, reason: str) -> None:
        """This life of the worker is over: forget what it held, end its answers with an error."""
        self._router.lose_worker(worker, incarnation)
        self._drop_peer(worker, incarnation, reason)

    def _unlink(self, worker: WorkerId, incarnation: Incarnation, reason: str) -> None:
        """The link broke. Whether the worker lives, its next lease says: then it is met anew."""
        self._feed.forget(worker, incarnation, retry_s=RELINK_S)
        self._router.detach_worker(worker, incarnation)
        self._drop_peer(worker, incarnation, reason)

    def _drop_peer(self, worker: WorkerId, incarnation: Incarnation, reason: str) -> None:
        peer = self._peers.get(worker)
        if peer is None or peer.incarnation != incarnation:
            return
        del self._peers[worker]
        log.warning("worker %s lost: %s", worker, reason)
        task = asyncio.create_task(peer.link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        for running in list(self._running.values()):
            if running.worker == worker:
                self._fail(running, WorkerLost(worker, reason))

    # Reading

    def health(self) -> dict[str, object]:
        """`status` ok | degraded (no broker, or workers missing) | unavailable (no worker), and why."""
        stats = self._router.stats()
        is_whole = stats.is_broker_up and stats.num_workers >= self._expected_workers
        status = "ok" if is_whole else "degraded"
        if not stats.num_workers:
            status = "unavailable"
        return {
            "status": status,
            "gateway": self.gateway_id,
            "broker": "up" if stats.is_broker_up else "down",
            "workers": [
                {"worker": w.worker, "incarnation": str(w.incarnation), "rows": w.rows}
                for w in self._router.workers()
            ],
        }

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        self._metrics.observe(self._router.stats())
        return self._metrics.render()


def _num_branches(job: Job) -> int:
    if isinstance(job, ForkJob):
        return len(job.suffixes)
    return job.n if isinstance(job, GenerateJob) else 1


def _is_unknown_capsule(update: Update) -> bool:
    return update.error is not None and update.error[0] == UnknownCapsule.code


def _command(request: RequestId, job: Job) -> Command:
    match job:
        case PrefillJob():
            return Prefill(request, pack_tokens(job.tokens), job.salt, job.ttl_s)
        case GenerateJob():
            return Generate(
                request, pack_tokens(job.tokens), job.limits, job.sampling, job.n, job.salt
            )
        case ForkJob():
            suffixes = tuple(pack_tokens(suffix) for suffix in job.suffixes)
            return Fork(request, job.capsule, suffixes, job.limits, job.sampling)
