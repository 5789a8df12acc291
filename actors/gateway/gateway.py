"""The gateway: routes jobs, sends them to workers, turns their frames into answers.

One event loop owns everything here. Selection and booking are one synchronous call into the router;
NATS feeds the router but is never on the path of a request.
"""

import time
from collections.abc import Callable
from typing import Any

from mallee.actors.bus.bus import Bus
from mallee.actors.gateway.admission import Admission, Admitted, PendingRequest
from mallee.actors.gateway.explain import decisions_body, health_body, workers_body
from mallee.actors.gateway.jobs import Job
from mallee.actors.gateway.peers import Peers
from mallee.actors.gateway.router_metrics import RouterCollector
from mallee.actors.gateway.running import RunningRequests
from mallee.actors.gateway.service import BranchStream, CapsuleInfo
from mallee.actors.gateway.shards import answer_of, cost_tokens, route_job
from mallee.actors.gateway.token_memory import TokenMemory
from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.actors.transport.link import Transport
from mallee.protocol.errors import WorkerLost
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import Release
from mallee.protocol.model import ModelSpec
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.router.index.hashing import compile_hashing
from mallee.router.router import Router


class GatewayService:
    """A `Service` over one router, one transport and one bus.

    A job waits in `Admission` until the router finds room for it. `RunningRequests` has its answer, and
    `Peers` the workers: commands go there, frames and losses come back.
    """

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
    ) -> None:
        """`clock` must be the router's. `new_request_id` never gives the same name twice.

        With fewer than `expected_workers` routable, `health` is degraded. Of capsules whose tokens
        fit into `token_memory_nbytes`, forks can be computed on other workers.
        """
        compile_hashing()
        self._expected_workers = expected_workers
        self.gateway_id = gateway_id
        self._router = router
        self._model = model
        self._metrics = metrics
        self._new_request_id = new_request_id
        self._clock = clock
        self._memory = TokenMemory(token_memory_nbytes)
        self._admission = Admission(
            admission or AdmissionConfig(),
            has_worker=lambda: router.has_workers,
            metrics=metrics,
            clock=clock,
        )
        # Each of the two calls the other, from `start_up` on.
        self._running = RunningRequests(
            router,
            self._memory,
            metrics,
            send=lambda worker, command: self._peers.send(worker, command),
            on_room=self._admission.poke,
            clock=clock,
        )
        self._peers = Peers(
            bus,
            transport,
            router,
            model=model,
            fleet=fleet,
            metrics=metrics,
            on_frame=self._running.on_frame,
            on_change=self._admission.poke,
            on_loss=self._lose,
            is_busy=self._running.has,
            clock=clock,
        )
        metrics.registry.register(RouterCollector(router.stats, self._peers.replica_stats))

    # Life

    async def start_up(self) -> None:
        """Listen to the fleet. Workers join as their leases arrive."""
        await self._peers.start_up()

    async def wait_for_worker(self, timeout_s: float) -> bool:
        """Whether a worker has joined by then; requests before that would be refused."""
        return await self._peers.wait_for_worker(timeout_s)

    async def close(self) -> None:
        """End every answer, every link and every task."""
        self._admission.close()
        await self._peers.stop_listening()
        self._running.close()
        await self._peers.close()

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended a background task of the gateway, which should be replaced."""
        return self._peers.failure

    def _lose(self, worker: WorkerId, reason: str) -> None:
        self._running.fail_worker(worker, reason)
        self._admission.poke(worker)  # requests that wait for it alone must end

    # Requests

    @property
    def model(self) -> ModelSpec:
        return self._model

    async def start(self, job: Job) -> BranchStream:
        """Route the job and send it off, once a worker has room. Raises MalleeError before it is sent."""
        request = RequestId(self._new_request_id())
        started = self._clock()
        only = None if job.capsule is None else self._router.capsule(job.capsule).worker
        hashes = job.hashes(self._model, self._router.config.block_size)
        pending = PendingRequest(
            request,
            job.terms,
            only,
            job.num_branches,
            cost_tokens(job, self._router.config, 0),
            lambda may_wait: self._place(request, job, hashes, started, may_wait=may_wait),
        )
        return await self._admission.admit(pending)

    def _place(
        self, request: RequestId, job: Job, hashes: Hashes, started: float, *, may_wait: bool
    ) -> Admitted[BranchStream]:
        """Route the job and send it off. If this raises, nothing is booked or sent."""
        parts = route_job(
            self._router, request, job, hashes, may_wait=may_wait, recomputable=self._memory
        )
        for _, part in parts:
            placement = part.placement
            if not self._peers.is_linked(placement.worker, placement.incarnation):
                for name, _ in parts:
                    self._router.free(name)
                raise WorkerLost(placement.worker, "it was restarted just now")
        answer, shards = answer_of(request, job, parts, self._running.abandon)
        for shard in shards:
            self._running.begin(shard, hashes, started)
        home = parts[0][1].placement
        return Admitted(answer, cost_tokens(job, self._router.config, home.overlap_blocks))

    def capsule(self, capsule: CapsuleId) -> CapsuleInfo:
        entry = self._router.capsule(capsule)
        created = time.time() - (self._clock() - entry.created)
        return CapsuleInfo(entry.capsule, entry.worker, entry.boundary, created)

    async def release_capsule(self, capsule: CapsuleId) -> None:
        entry = self._router.capsule(capsule)
        self._peers.send(entry.worker, Release(capsule))
        self._router.forget_capsule(capsule)
        self._memory.forget(capsule)

    # Reading

    def decisions(self, request: RequestId | None, limit: int, candidates: int) -> dict[str, Any]:
        return decisions_body(self._router, request, limit, candidates)

    def workers(self) -> dict[str, Any]:
        return workers_body(self._router)

    def health(self) -> dict[str, Any]:
        is_sound = self.failure is None
        return health_body(self._router, self.gateway_id, self._expected_workers, is_sound=is_sound)

    def metrics(self) -> bytes:
        self._metrics.workers.keep({worker.worker for worker in self._router.workers()})
        return self._metrics.render()
