"""The gateway: routes jobs, sends them to workers, turns their frames into answers.

One event loop owns everything here. Selection and booking are one synchronous call into the router;
NATS feeds the router but is never on the path of a request.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import structs

from mallee.actors.bus.bus import Bus
from mallee.actors.gateway.admission import Admission, Ask, Placed
from mallee.actors.gateway.answers import RunningAnswer
from mallee.actors.gateway.bookings import BookingFeed
from mallee.actors.gateway.explain import decisions_body, workers_body
from mallee.actors.gateway.feed import FleetFeed
from mallee.actors.gateway.router_metrics import RouterCollector
from mallee.actors.gateway.running import Running, recording
from mallee.actors.gateway.service import BranchStream, CapsuleInfo, ForkJob, Job
from mallee.actors.gateway.shards import (
    Recompute,
    answer_of,
    cost_tokens,
    num_branches,
    part_command,
    route_job,
)
from mallee.actors.gateway.token_memory import TokenMemory
from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.actors.transport.transport import Link, Transport
from mallee.protocol.errors import MalleeError, UnknownCapsule, WorkerLost
from mallee.protocol.events import Lease
from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId
from mallee.protocol.messages import ALL_BRANCHES, Frame, Release, Update
from mallee.protocol.model import ModelSpec
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.router.index.hashing import block_hashes, compile_hashing
from mallee.router.placement.fanouts import Part
from mallee.router.router import Router

log = logging.getLogger(__name__)

TOUCH_S = 30.0  # how often a running request's booking is renewed
RELINK_S = 2.0  # a worker whose link broke is tried again no sooner


class _Peer(NamedTuple):
    """A worker's life and the link to it."""

    incarnation: Incarnation
    link: Link


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
        admission: AdmissionConfig | None = None,
        token_memory_nbytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` must be the router's. `new_request_id` never gives the same name twice.

        With fewer than `expected_workers` routable, `health` says degraded. Of capsules whose tokens
        fit into `token_memory_nbytes`, forks can be computed on other workers.
        """
        compile_hashing()
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
        self._running: dict[RequestId, Running] = {}
        self._recomputes: dict[RequestId, RequestId] = {}  # prefill -> the part that waits for it
        self._memory = TokenMemory(token_memory_nbytes)
        self._has_joined = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._admission = Admission(
            admission or AdmissionConfig(),
            has_worker=lambda: router.has_workers,
            metrics=metrics,
            clock=clock,
        )
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
        self._bookings: BookingFeed | None = None
        if router.outbox is not None:
            self._bookings = BookingFeed(
                bus, router, router.outbox, pump=self._feed.pump, fleet=fleet, clock=clock
            )
        replicas = None if self._bookings is None else self._bookings.stats
        metrics.registry.register(RouterCollector(router.stats, replicas))

    # Life

    async def start_up(self) -> None:
        """Listen to the fleet. Workers join as their leases arrive."""
        await self._feed.start_up()
        if self._bookings is not None:
            await self._bookings.start_up()

    async def wait_for_worker(self, timeout_s: float) -> bool:
        """Whether a worker has joined by then; requests before that would be refused."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_joined.wait()
        return self._has_joined.is_set()

    async def close(self) -> None:
        """End every answer, every link and every task."""
        self._admission.close()
        await self._feed.close()
        for running in list(self._running.values()):
            self._fail(running, WorkerLost(running.worker, "the gateway is shutting down"))
        if self._bookings is not None:
            await self._bookings.close()  # after the last booking was freed
        await asyncio.gather(*self._closing, *(peer.link.close() for peer in self._peers.values()))
        self._peers.clear()

    # Requests

    @property
    def model(self) -> ModelSpec:
        return self._model

    async def start(self, job: Job) -> BranchStream:
        """Route the job and send it off, once a worker has room. Raises MalleeError before it is sent."""
        request = RequestId(self._new_request_id())
        started = self._clock()
        only, hashes = None, NO_HASHES
        if isinstance(job, ForkJob):
            only = self._router.capsule(job.capsule).worker
        else:
            hashes = block_hashes(
                job.tokens, self._router.config.block_size, salt=self._model.salt(job.salt)
            )
        ask = Ask(
            request,
            job.terms,
            only,
            num_branches(job),
            cost_tokens(job, self._router.config, 0),
            lambda may_wait: self._place(request, job, hashes, started, may_wait),
        )
        return await self._admission.admit(ask)

    def _place(
        self, request: RequestId, job: Job, hashes: Hashes, started: float, may_wait: bool
    ) -> Placed[BranchStream]:
        """Route the job and send it off. What this raises leaves nothing booked or sent."""
        parts = route_job(
            self._router, request, job, hashes, may_wait=may_wait, recomputable=self._memory
        )
        for _, part in parts:
            peer = self._peers.get(part.placement.worker)
            if peer is None or peer.incarnation != part.placement.incarnation:
                for name, _ in parts:
                    self._router.free(name)
                raise WorkerLost(part.placement.worker, "it was restarted just now")
        answer, shares = answer_of(request, job, parts, self._cancel_branch)
        for share in shares:
            self._send(share.answer, share.part, share.job, hashes, started)
        home = parts[0][1].placement
        return Placed(answer, cost_tokens(job, self._router.config, home.overlap_blocks))

    def _send(
        self, answer: RunningAnswer, part: Part, job: Job, hashes: Hashes, started: float
    ) -> None:
        """The part is under way; `job` is its share of the whole job."""
        placement, request, first = part.placement, answer.request, part.rows.start
        running = Running(answer, placement.worker, hashes, job, started, first)
        self._running[request] = running
        path = self._memory.path(job.capsule) if isinstance(job, ForkJob) else None
        if path is not None and isinstance(job, ForkJob) and job.at is not None:
            path = path.first(job.at)
        running.recording = recording(self._memory, job, path)
        self._metrics.routed(
            placement.worker, placement.overlap_blocks, placement.best_overlap_blocks
        )
        self._metrics.branches_started(len(part.rows))
        link = self._peers[placement.worker].link
        if isinstance(job, ForkJob) and part.how == "recompute":
            assert path is not None, "only capsules whose tokens are known are computed elsewhere"
            running.recompute = Recompute.of(request, job, path.known())
            running.job = running.recompute.job
            self._recomputes[running.recompute.request] = request
            link.send(running.recompute.prefill)
        else:
            link.send(part_command(request, job, first))
        if part.how != "stay":
            log.info(
                "%s: %d rows %s on %s; %s",
                *(request, len(part.rows), part.how, placement.worker, part.prices),
            )

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
        self._memory.forget(capsule)

    def _cancel_branch(self, request: RequestId, branch: int | None, n: int) -> None:
        """A reader gave up `branch`, or all that is left."""
        running = self._running.get(request)
        if running is None:
            return
        peer = self._peers.get(running.worker)
        if peer is not None:
            for told in running.given_up(branch):
                peer.link.send(told)
        self._metrics.branches_cancelled(n)
        if running.answer.is_over:
            self._close(request)

    # What workers say

    def _on_frame(self, worker: WorkerId, frame: Frame) -> None:
        for update in frame.updates:
            if update.request in self._recomputes:
                self._on_recomputed(worker, update)
                continue
            running = self._running.get(RequestId(update.request))
            if running is None or running.worker != worker:
                continue  # given up meanwhile
            if running.recomputed is not None:
                update = Recompute.counted(update, running.recomputed)
            if not running.seen and update.error is None:
                running.seen = True
                self._router.first_token(running.answer.request)
                self._router.observe_hit(running.answer.request, update.cached_tokens)
                self._admission.poke(worker)
            if isinstance(running.job, ForkJob) and _is_unknown_capsule(update):
                self._router.forget_capsule(running.job.capsule)
            if update.capsule is not None:
                self._router.learn_capsule(
                    CapsuleId(update.capsule), worker, update.boundary, running.hashes
                )
            if running.recording is not None:
                running.recording.hear(update)
            self._take(running, update)

    def _on_recomputed(self, worker: WorkerId, update: Update) -> None:
        """News of a capsule that is computed anew for the fork of a part: fork it once it is there."""
        running = self._running[self._recomputes[RequestId(update.request)]]
        recompute, request = running.recompute, running.answer.request
        if running.worker != worker or recompute is None or update.finish is None:
            return
        running.recompute = None
        del self._recomputes[recompute.request]
        if update.capsule is None:
            self._take(running, structs.replace(update, request=request, branch=ALL_BRANCHES))
            return
        running.recomputed = (update.cached_tokens, update.prefill_tokens)
        for told in running.fork_of(recompute):
            self._peers[worker].link.send(told)

    def _take(self, running: Running, update: Update) -> None:
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
            self._admission.poke(running.worker)

    def _fail(self, running: Running, error: MalleeError) -> None:
        for delta in running.answer.fail(error):
            running.measure(delta, self._clock(), self._metrics)
        self._close(running.answer.request)

    # Who is there

    def _join(self, lease: Lease) -> None:
        worker, incarnation = WorkerId(lease.worker), Incarnation(lease.incarnation)
        link = self._transport.link(
            worker,
            incarnation,
            lease.address,
            lambda frame: self._on_frame(worker, frame),
            lambda reason: self._unlink(worker, incarnation, reason),
        )
        self._peers[worker] = _Peer(incarnation, link)
        if self._bookings is not None:
            self._bookings.worker_joined(worker, incarnation)
        self._has_joined.set()
        self._admission.poke(worker)
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
        self._admission.poke(worker)  # who waits for it alone has to know

    # Reading

    def decisions(self, request: RequestId | None, limit: int, candidates: int) -> dict[str, Any]:
        return decisions_body(self._router, request, limit, candidates)

    def workers(self) -> dict[str, Any]:
        return workers_body(self._router)

    def health(self) -> dict[str, Any]:
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
        self._metrics.workers.keep({worker.worker for worker in self._router.workers()})
        return self._metrics.render()


def _is_unknown_capsule(update: Update) -> bool:
    return update.error is not None and update.error[0] == UnknownCapsule.code
