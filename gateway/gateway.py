"""The gateway: a dispatcher's shell. Jobs come in, its effects are carried out over links and streams.

One event loop owns everything here. All decisions are the dispatcher's (`router.dispatch`), which a
replay drives in virtual time; NATS feeds the router but is never on the path of a request.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from msgspec import structs

from mallee.gateway.answers import Answer
from mallee.gateway.capsule_files.exports import Export, Exports
from mallee.gateway.capsule_files.imports import Import, Imports
from mallee.gateway.capsules import ANSWER_S, MOVE_S, CapsuleDesk
from mallee.gateway.explain import decisions_body, health_body, targets_body, workers_body
from mallee.gateway.judge import Judge
from mallee.gateway.lives import Lives
from mallee.gateway.metrics import GatewayMetrics, Tenant
from mallee.gateway.peers import Peers
from mallee.gateway.recording.recorder import Recorder, SessionTape
from mallee.gateway.service import CapsuleInfo, OpenBranch, Subtree
from mallee.gateway.sessions.lineage import Lineage
from mallee.gateway.sessions.sessions import GatewaySessions, SessionLimits
from mallee.gateway.shared.records import SharedRecords
from mallee.gateway.shared.texts import SharedTexts
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import (
    BadRequest,
    CapsuleAbandoned,
    CapsuleComputing,
    CapsuleLost,
    InvalidParameter,
    MalleeError,
    NotFound,
    Unavailable,
    UnknownBranch,
    UnknownCapsule,
    UnknownRequest,
    UnknownText,
    from_wire,
)
from mallee.protocol.gateways.capsule_texts import CapsuleState
from mallee.protocol.hashing import NO_HASHES, Hashes, Tokens
from mallee.protocol.ids import (
    COMMON,
    CapsuleId,
    RequestId,
    Scope,
    WorkerId,
    account_of,
    request_of,
)
from mallee.protocol.messages import (
    CapsuleReply,
    Capture,
    Cut,
    Delete,
    Demote,
    Frame,
    Holder,
    Inspect,
    Pin,
    Promote,
    Rewind,
    Share,
    traced,
)
from mallee.protocol.model import ModelSpec
from mallee.protocol.parcels import is_death
from mallee.router.dispatch.dispatcher import DispatchConfig, Dispatcher
from mallee.router.dispatch.effects import (
    Deliver,
    Ended,
    Failed,
    LetGo,
    NotInjected,
    Placed,
    Rebuilt,
    Refused,
    Send,
)
from mallee.router.dispatch.inboxes import Injection
from mallee.router.dispatch.jobs import Job
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.router.dispatch.texts import TokenTexts
from mallee.router.dispatch.token_memory import TokenMemory
from mallee.router.dispatch.verdicts import RecentPrompts
from mallee.router.index.capsules import CapsuleEntry
from mallee.router.index.hashing import compile_hashing
from mallee.router.router import Router
from mallee.runtime.bus.bus import Bus
from mallee.runtime.tasks import Tasks
from mallee.runtime.telemetry.logs import ids, session_digest, told
from mallee.runtime.transport.link import Transport

if TYPE_CHECKING:
    from mallee.runtime.telemetry.tracing.requests import RequestSpans

log = logging.getLogger(__name__)

PATIENCE_S = 3.0  # for which a busy worker may make no progress
MAX_MOVES = 16  # of one request's shards from worker to worker
INSPECT_S = 2.0  # for a worker to tell of a capsule; later it is shown without
PROMISE_S = 60.0  # for a worker to begin a capsule that is forked at another gateway than its own
PROMISE_CHECK_S = 0.1
TAIL_TOKENS = 24  # of a branch under way that are shown
_CAPTURE = "request.capture"
_decode_capture = Decoder(tuple[int, float], "a branch of which a capsule is taken")
_DISK: Final = 2  # of `Demote`


class RequestIds(Protocol):
    """Names of requests, by scope."""

    def new(self, scope: Scope, account: str = "") -> RequestId:
        """A name that was never given before; `account_of` tells the account from it."""
        ...

    def belongs(self, name: str, scope: Scope) -> bool:
        """Whether `name`, of a request or a capsule that it left, was made for `scope`."""
        ...


class CapsuleFiles(NamedTuple):
    """Capsules that come and go as files."""

    exports: Exports
    imports: Imports


class GatewayService:
    """A `Service` over one router, one transport and one bus.

    `Peers` are the workers: commands go there, frames and losses come back.
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
        ids: RequestIds,
        expected_workers: int = 1,
        admission: AdmissionConfig | None = None,
        token_memory_nbytes: int = 256 << 20,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        recorder: Recorder | None = None,
        files: CapsuleFiles | None = None,
        spans: "RequestSpans | None" = None,
        sessions: SessionLimits | None = None,
    ) -> None:
        """`clock` must be the router's; `wall_clock` dates capsules and sessions. Without a `recorder` no
        session is recorded, without `files` no capsule is exported or imported, without `spans` no request
        is traced.

        With fewer than `expected_workers` routable, `health` is degraded. Capsules whose tokens fit into
        `token_memory_nbytes` can be computed on other workers.
        """
        compile_hashing()
        self.gateway_id = gateway_id
        self.metrics_at = ""  # host and port of its own listener, until `start_up`
        self.tasks = Tasks(f"gateway {gateway_id}")
        self._router = router
        self._model = model
        self._fleet = fleet
        self._metrics = metrics
        self._expected_workers = expected_workers
        metrics.workers_expected.set(expected_workers)
        self._ids = ids
        self._clock = clock
        self._wall_clock = wall_clock
        self._memory = TokenMemory(token_memory_nbytes)
        self._dispatcher = Dispatcher(
            router,
            TokenTexts(
                self._memory, model, router.config.block_size, weights=lambda: router.weights
            ),
            DispatchConfig(
                admission or AdmissionConfig(), max_moves=MAX_MOVES, patience_s=patience_s
            ),
            clock=clock,
        )
        self._answers: dict[RequestId, Answer] = {}
        self._lineage = Lineage()
        self._injecting: dict[str, asyncio.Future[int]] = {}  # by injection
        self._desk = CapsuleDesk(lambda worker, command: self._peers.send(worker, command))
        self._lives = Lives()
        self._recent = RecentPrompts(router.config.block_size)
        self._files = files
        self._spans = spans
        self._recorder = recorder
        if recorder is not None:
            self.tasks.include(recorder.tasks)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0  # uvloop's handles don't tell it
        self._is_closed = False
        self._peers = Peers(
            bus,
            transport,
            router,
            model=model,
            fleet=fleet,
            metrics=metrics,
            on_frame=self._on_frame,
            on_join=self._on_join,
            on_drain=self._on_drain,
            on_change=self._on_change,
            on_loss=self._on_loss,
            is_busy=self._dispatcher.is_busy,
            clock=clock,
        )
        self.records = SharedRecords(
            bus,
            gateway=gateway_id,
            fleet=fleet,
            others=lambda: self._peers.other_gateways,
            belongs=ids.belongs,
        )
        self.records.share(_CAPTURE, self._tell_captured)
        self.tasks.include(self.records.tasks)
        self._texts = SharedTexts(
            self.records, self._memory, state=self._state, on_forgotten=self._on_forgotten
        )
        self._sessions = GatewaySessions(
            bus,
            gateway=gateway_id,
            fleet=fleet,
            records=self.records,
            new_name=ids.new,
            limits=sessions or SessionLimits(),
            block_size=router.config.block_size,
            hashes_of=self._hashes_of,
            release=self.release_capsule,
            give_up=self._give_up,
            clock=wall_clock,
        )
        self.tasks.include(self._sessions.tasks)
        metrics.show_router(
            router.stats, self._dispatcher.stats, self._peers.replica_stats, self.records.outcomes
        )

    # Life

    async def start_up(self) -> None:
        """Listen to the fleet and to other gateways. Workers join as their leases arrive."""
        if self._recorder is not None:
            await self._recorder.start_up()
        self._peers.tell_metrics(self.metrics_at)
        await self._peers.start_up()
        await self.records.start_up()
        await self._sessions.start_up()

    async def wait_for_worker(self, timeout_s: float) -> bool:
        """Whether a worker has joined by then; requests before that would be refused."""
        return await self._peers.wait_for_worker(timeout_s)

    async def close(self) -> None:
        """End every answer, every link and every task."""
        self._is_closed = True
        heir = self._peers.newest_gateway
        await self._peers.stop_listening()
        self._dispatcher.close(_closed())
        self._carry_out()
        self._desk.close(_closed())
        if heir is not None:  # not before: what is promised and not there goes with this gateway
            self._texts.leave_to(heir)
        if self._timer is not None:
            self._timer.cancel()
        await self.tasks.close()
        await self.records.close()
        await self._sessions.close_up()
        await self._peers.close()
        if self._recorder is not None:
            await self._recorder.close()

    def expect(self, num_workers: int) -> None:
        """With fewer routable workers than this, `health` is degraded."""
        self._expected_workers = num_workers
        self._metrics.workers_expected.set(num_workers)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a worker with room."""
        return self._dispatcher.num_waiting

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended a background task of the gateway, which should be replaced."""
        return self.tasks.failure or self._peers.failure

    # Requests

    @property
    def model(self) -> ModelSpec:
        return self._model

    @property
    def block_size(self) -> int:
        return self._router.config.block_size

    def new_name(self, scope: Scope, account: str = "") -> RequestId:
        return self._ids.new(scope, account)

    async def start(
        self, job: Job, prepare_s: float = 0.0, *, name: RequestId | None = None
    ) -> Answer:
        """Route the job and send it off, once a worker has room. Raises MalleeError before it is sent."""
        answer = await self.begin(job, prepare_s, name=name)
        await answer.opened()
        return answer

    async def begin(
        self, job: Job, prepare_s: float = 0.0, *, name: RequestId | None = None
    ) -> Answer:
        if self._is_closed:
            raise _closed()
        if job.capsule is not None:
            self._check_owner(job.capsule, job.scope)
            await self._learn_capsule(job.capsule, job.scope)
        session = await self._record_of(job) if job.terms.is_recorded else None
        if self._is_closed:
            raise _closed()
        request = name or self._ids.new(job.scope)
        self._metrics.prepare_s.observe(prepare_s)
        tenant = self._metrics.tenants.of(job.terms.owner)
        tenant.asked()
        judge = Judge(job, self._router.config.block_size, self._router.weights.label)
        answer = Answer(
            request,
            judge=judge,
            life=self._lives.begin(request, job.num_branches, prepare_s, self._clock()),
            cancel=self._cancel,
            cut=self._cut,
            shorten=self._shorten,
            started=self._clock(),
            metrics=self._metrics,
            tenant=tenant,
            is_fork=job.capsule is not None,
            clock=self._clock,
            trace=None if self._spans is None else self._spans.begin(request, job, prepare_s),
        )
        self._answers[request] = answer
        try:
            self._dispatcher.submit(request, job)
        except MalleeError as error:
            self._answers.pop(request).refuse(error, self._clock())
            answer.placed.exception()  # it is raised here
            self._count_refusal(error, tenant)
            raise
        judge.remember(request, self._recent)
        if job.capsule is not None:
            self._lineage.add(request, job.capsule)
        if job.terms.session:
            self._sessions.begin(request, job)
        if log.isEnabledFor(logging.DEBUG):
            named = session_digest(job.terms.tenant, job.terms.session)
            extra = ids(request=request, session=named)
            log.debug("%s begins with %d branches", request, job.num_branches, extra=extra)
        if session is not None:
            text = None if job.capsule is None else self._memory.get(job.capsule)
            answer.tape = session.begin(request, job, self._router.weights, text)
        self._carry_out()
        return answer

    async def _record_of(self, job: Job) -> SessionTape:
        """The record of the job's session, once the text of its capsule is here. Raises InvalidParameter."""
        session = self._recording().session(job.scope, job.terms.session, job.terms.owner)
        if job.capsule is not None and not session.knows(job.capsule):
            await self._texts.fetch(job.capsule, job.scope)
        return session

    def _recording(self) -> Recorder:
        if self._recorder is None:
            remedy = "this server records no sessions (recording.folder is not set); leave it out"
            raise InvalidParameter("mallee.record", True, remedy)
        return self._recorder

    async def read_record(self, session: str, scope: Scope) -> bytes:
        raw = await self._recording().read(scope, session)
        if not raw:
            raise NotFound("no session of that name is recorded here", param="session")
        return raw

    async def delete_record(self, session: str, scope: Scope) -> None:
        if not await self._recording().delete(scope, session):
            raise NotFound("no session of that name is recorded here", param="session")

    def _cancel(self, request: RequestId, branch: int | None) -> None:
        self._dispatcher.cancel(request, branch)
        self._carry_out()

    def _cut(self, request: RequestId, branch: int, at: int, residue: Tokens) -> CapsuleId | None:
        found = self._dispatcher.running(request, branch)
        capsule = self._dispatcher.cut(request, branch, at, residue)
        if capsule is not None:
            hashes = NO_HASHES if found is None else found[0].dispatch.hashes
            self._sessions.left(request, capsule, at + len(residue), hashes)
        self._carry_out()
        return capsule

    def _give_up(self, request: RequestId, error: MalleeError) -> None:
        """End a request from outside: its reader gets `error`."""
        answer = self._answers.get(request)
        if answer is None:
            return
        if answer.placed.done():
            answer.fail_all(error, self._clock(), self._router.weights.label)
        else:
            answer.refuse(error, self._clock())
        self._dispatcher.cancel(request)
        self._carry_out()

    def _hashes_of(self, capsule: CapsuleId) -> Hashes:
        """Of a capsule's full blocks, as far as they are known."""
        try:
            return self._router.capsule(capsule).hashes
        except UnknownCapsule:
            return NO_HASHES

    def _shorten(self, capsule: CapsuleId, at: int, residue: Tokens) -> None:
        """The client of an answer that is over saw less of it than its capsule has."""
        self._sessions.cut(request_of(capsule), capsule, at + len(residue))
        if (text := self._memory.get(capsule)) is not None and at <= text.path.length:
            self._memory.keep(capsule, text.cut(at, residue))
        try:
            entry = self._router.capsule(capsule)
        except UnknownCapsule:
            return
        branch = int(capsule.rpartition(".")[2])
        self._peers.send(entry.worker, Cut(request_of(capsule), branch, at, residue.tobytes()))
        hashes = entry.hashes[: at // self._router.config.block_size]
        self._router.learn_capsule(capsule, entry.worker, at + len(residue), hashes)

    @property
    def sessions(self) -> GatewaySessions:
        return self._sessions

    async def inject(
        self, request: RequestId, branch: int, tokens: Tokens, scope: Scope, *, replaces: bool
    ) -> int:
        if not self._ids.belongs(request, scope):
            raise UnknownBranch(request, branch)
        injection = Injection(self._ids.new(scope), tokens.tobytes(), replaces)
        self._dispatcher.inject(request, branch, injection)
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._injecting[injection.name] = place
        try:
            self._carry_out()
            return await place
        finally:
            del self._injecting[injection.name]

    def runs(self, request: RequestId, scope: Scope) -> bool:
        return request in self._answers and self._ids.belongs(request, scope)

    def open_branches(self, request: RequestId, scope: Scope) -> list[OpenBranch]:
        life = self._lives.get(request) if self._ids.belongs(request, scope) else None
        return [
            OpenBranch(
                i,
                branch.state,
                branch.num_tokens,
                self._dispatcher.tail(request, i, TAIL_TOKENS),
            )
            for i, branch in enumerate(() if life is None else life.branches)
            if branch.end is None
        ]

    def prune(
        self, request: RequestId, branches: Collection[int] | None, scope: Scope
    ) -> list[int]:
        answer = self._answers.get(request) if self._ids.belongs(request, scope) else None
        if answer is None or not answer.placed.done():
            raise UnknownRequest(request)
        wanted = range(answer.num_branches) if branches is None else branches
        return answer.prune(wanted, self._clock())

    def prune_below(
        self, capsule: CapsuleId, origins: Iterable[CapsuleId | RequestId], scope: Scope
    ) -> Subtree:
        self._check_owner(capsule, scope)
        own = [origin for origin in origins if self._ids.belongs(origin, scope)]
        below = sorted(self._lineage.below(own))
        ended, left = [], []
        for request in below:
            answer = self._answers.get(request)
            if answer is not None and answer.num_open:
                ended.append(request)
                if answer.placed.done():
                    answer.prune(range(answer.num_branches), self._clock())
                else:
                    self._give_up(request, CapsuleAbandoned(capsule))
            left += self._capsules_of(request, scope)
        return Subtree(below, ended, left)

    def _capsules_of(self, request: RequestId, scope: Scope) -> list[CapsuleId]:
        """The capsules that a request left, as far as they are known."""
        found = []
        for name in self._router.capsules(scope, request):
            if not name.startswith(request):
                break
            if name[len(request)] in ".-":
                found.append(name)
        return found

    def prioritize(
        self, request: RequestId, branches: Collection[int] | None, priority: float, scope: Scope
    ) -> list[int]:
        answer = self._answers.get(request) if self._ids.belongs(request, scope) else None
        if answer is None:
            raise UnknownRequest(request)
        wanted = range(answer.num_branches) if branches is None else branches
        changed = self._dispatcher.prioritize(request, wanted, priority)
        self._carry_out()
        return changed

    # Capsules

    async def tokens(self, capsule: CapsuleId, scope: Scope) -> Tokens:
        self._check_owner(capsule, scope)
        if (text := self._memory.get(capsule)) is None:
            await self._texts.fetch(capsule, scope)
            text = self._memory.get(capsule)
        if text is None:
            await self._find(capsule, scope)
            raise UnknownText(capsule)
        return text.path.tokens()

    async def inspect(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        info = await self._find(capsule, scope)
        if info.worker is None:
            return info
        question = Inspect(self._ids.new(scope), capsule)
        try:
            status = await self._desk.ask(info.worker, question, INSPECT_S)
        except Unavailable:
            return info
        except UnknownCapsule:
            if not info.is_computing:
                raise
            self._forget_promise(capsule)
            return await self._find(
                capsule, scope
            )  # its prefill has ended, or runs elsewhere by now
        is_computing = status.computed is not None
        return info._replace(status=status, boundary=status.boundary, is_computing=is_computing)

    def capsules(self, scope: Scope, after: str) -> Iterator[CapsuleInfo]:
        for name in self._router.capsules(scope, after):
            if self._ids.belongs(name, scope):
                yield self._info(self._router.capsule(name))

    async def capture(
        self, request: RequestId, branch: int, ttl_s: float, scope: Scope
    ) -> CapsuleInfo:
        belongs = self._ids.belongs(request, scope)
        found = self._dispatcher.running(request, branch) if belongs else None
        if found is None:
            if not belongs or request in self._answers:
                raise UnknownBranch(request, branch)
            return await self._captured_elsewhere(request, branch, ttl_s, scope)
        shard, row = found
        name, answer = self._ids.new(scope, account_of(request)), self._answers.get(request)
        question = Capture(name, shard.name, row, ttl_s)
        status = await self._desk.ask(shard.worker, question)
        capsule = CapsuleId(status.capsule)
        if answer is not None and answer.tape is not None:
            answer.tape.captured(branch, capsule, status.boundary)
        self._lineage.add_captured(name, request)
        self._dispatcher.note_capture(shard, row, capsule, status.boundary, ttl_s)
        self._sessions.left(request, capsule, status.boundary, shard.dispatch.hashes)
        return CapsuleInfo(
            capsule, shard.worker, status.boundary, self._wall_clock(), status=status
        )

    async def _captured_elsewhere(
        self, request: RequestId, branch: int, ttl_s: float, scope: Scope
    ) -> CapsuleInfo:
        given = encode((branch, ttl_s))
        raw = await self.records.fetch(_CAPTURE, request, scope, given=given, wait_s=ANSWER_S)
        if raw is None:
            raise UnknownBranch(request, branch)
        return await self.inspect(CapsuleId(raw.decode()), scope)

    async def _tell_captured(self, name: str, scope: Scope, given: bytes) -> bytes | None:
        """The capsule that was taken of a branch here, for another gateway."""
        request = RequestId(name)
        if request not in self._answers:
            return None
        branch, ttl_s = _decode_capture(given)
        return (await self.capture(request, branch, ttl_s, scope)).capsule.encode()

    async def rewind(self, capsule: CapsuleId, to: int, ttl_s: float, scope: Scope) -> CapsuleInfo:
        worker = await self._holder(capsule, scope)
        question = Rewind(self._ids.new(scope, account_of(capsule)), capsule, to, ttl_s)
        status = await self._desk.ask(worker, question)
        left = CapsuleId(status.capsule)
        self._lineage.add(request_of(left), capsule)
        if (text := self._memory.get(capsule)) is not None and to <= text.path.length:
            self._memory.keep(left, text.first(to)._replace(ttl_s=ttl_s, is_own=True))
        self._router.learn_capsule(left, worker, status.boundary, NO_HASHES, scope)
        self._sessions.derived(left, capsule, status.boundary)
        if self._recorder is not None:
            self._recorder.rewound(scope, capsule, left, status.boundary)
        return CapsuleInfo(left, worker, status.boundary, self._wall_clock(), status=status)

    async def pin(self, capsule: CapsuleId, ttl_s: float | None, scope: Scope) -> CapsuleInfo:
        worker = await self._holder(capsule, scope)
        question = Pin(self._ids.new(scope), capsule, ttl_s is not None, ttl_s or 0.0)
        status = await self._desk.ask(worker, question)
        if (text := self._memory.get(capsule)) is not None:
            self._memory.keep(capsule, text._replace(ttl_s=ttl_s))
        info = await self.capsule(capsule, scope)
        return info._replace(status=status, boundary=status.boundary)

    async def demote(self, capsule: CapsuleId, tier: int, scope: Scope) -> CapsuleInfo:
        worker = await self._holder(capsule, scope)
        return await self._moved(worker, Demote(self._ids.new(scope), capsule, tier), scope)

    async def promote(self, capsule: CapsuleId, share: Share, scope: Scope) -> CapsuleInfo:
        worker = await self._holder(capsule, scope)
        return await self._moved(worker, Promote(self._ids.new(scope), capsule, share), scope)

    async def _moved(
        self, worker: WorkerId, question: Demote | Promote, scope: Scope
    ) -> CapsuleInfo:
        """The capsule of `question` once `worker` says that it is there."""
        status = await self._desk.ask(worker, question, MOVE_S)
        info = await self.capsule(CapsuleId(question.capsule), scope)
        return info._replace(status=status, boundary=status.boundary)

    async def _holder(self, capsule: CapsuleId, scope: Scope) -> WorkerId:
        """The worker of a capsule. Raises as `capsule`; CapsuleComputing; CapsuleLost where it has none."""
        info = await self.capsule(capsule, scope)
        if info.is_computing:
            raise CapsuleComputing(capsule)
        if info.worker is None:
            raise CapsuleLost(capsule, "its worker is gone; its next fork computes it again")
        return info.worker

    async def capsule(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        info = await self._find(capsule, scope)
        if info.error is not None:
            raise info.error
        return info

    async def _find(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        """As `capsule`; one whose prefill has failed has its `error`."""
        self._check_owner(capsule, scope)
        try:
            entry = self._router.capsule(capsule)
        except UnknownCapsule:
            return await self._find_elsewhere(capsule, scope)
        if not entry.is_computing:
            self._texts.want(capsule, scope)
        return self._info(entry)

    async def _find_elsewhere(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        """A capsule that no worker has, as far as is known here."""
        own = self._dispatcher.promise(capsule)
        if own is not None:
            info = CapsuleInfo(capsule, own.worker, own.num_tokens, self._wall_time(own.since))
            return _promised(info, None if own.error is None else own.error.to_wire())
        try:
            return self._lost_info(capsule)
        except NotFound:  # its worker's event may be under way
            state = await self._texts.find(capsule, scope)
        if state is None:
            return self._lost_info(capsule)
        if state.worker and state.error is None:
            worker, tokens = WorkerId(state.worker), state.num_tokens
            more = (worker, tokens, NO_HASHES, scope)
            self._router.learn_capsule(capsule, *more, is_computing=state.is_promised)
            with suppress(UnknownCapsule):  # of a worker that isn't known here
                return self._info(self._router.capsule(capsule))
        if not state.is_promised:
            if not state.worker:
                self._router.note_lost(capsule)
            with suppress(NotFound):
                return self._lost_info(capsule)
            raise Unavailable("the capsule's worker is not known at this gateway yet; retry in 1 s")
        info = CapsuleInfo(capsule, None, state.num_tokens, self._wall_clock())
        return _promised(info, state.error)

    def _lost_info(self, capsule: CapsuleId) -> CapsuleInfo:
        """A capsule that is gone, and whose text is known here. Raises UnknownCapsule, CapsuleLost."""
        boundary = self._dispatcher.lost_capsule(capsule)
        is_stale = not self._dispatcher.is_fresh(capsule)
        return CapsuleInfo(capsule, None, boundary, self._wall_clock(), is_stale)

    def _info(self, entry: CapsuleEntry) -> CapsuleInfo:
        created, capsule = self._wall_time(entry.created), entry.capsule
        is_stale = not self._dispatcher.is_fresh(capsule)
        known = (entry.worker, entry.boundary, created, is_stale)
        return CapsuleInfo(capsule, *known, is_computing=entry.is_computing)

    def _wall_time(self, at: float) -> float:
        return self._wall_clock() - (self._clock() - at)

    # Capsules that other gateways know

    def _state(self, capsule: CapsuleId) -> CapsuleState | None:
        """A capsule as other gateways are told it: of one that is promised, by this gateway alone."""
        promise = self._dispatcher.promise(capsule)
        if promise is not None:
            error = None if promise.error is None else promise.error.to_wire()
            return CapsuleState(
                promise.num_tokens, promise.worker or "", is_promised=True, error=error
            )
        try:
            entry = self._router.capsule(capsule)
        except UnknownCapsule:
            text = self._memory.get(capsule) if self._router.was_lost(capsule) else None
            return None if text is None else CapsuleState(text.path.length)
        return None if entry.is_computing else CapsuleState(entry.boundary, entry.worker)

    def _forget_promise(self, capsule: CapsuleId) -> None:
        """The worker that was to compute `capsule` does not, or not any more."""
        with suppress(UnknownCapsule):
            if self._router.capsule(capsule).is_computing:
                self._router.forget_capsule(capsule)

    async def _learn_capsule(self, capsule: CapsuleId, scope: Scope) -> None:
        """Return when forks of `capsule` can be placed here, if another gateway made or promised it.

        Raises as `capsule`, and Unavailable.
        """
        if not self._dispatcher.lacks(capsule):
            return
        try:
            async with asyncio.timeout(PROMISE_S):
                while (await self.capsule(capsule, scope)).is_computing:
                    if not self._dispatcher.lacks(capsule):
                        return
                    await asyncio.sleep(PROMISE_CHECK_S)
                await self._texts.fetch(capsule, scope)  # its worker may be leaving
        except TimeoutError:
            raise Unavailable(
                f"no worker has begun to compute the capsule for {PROMISE_S:g} s; retry later"
            ) from None

    async def export(self, capsule: CapsuleId, scope: Scope) -> Export:
        worker = await self._holder(capsule, scope)
        self._dispatcher.check_fresh(capsule)
        view = self._router.worker(worker)
        if self._files is None or view is None or not view.lends_at:
            reason = "its worker lends its KV to no other process: it is mocked, or too old"
            raise InvalidParameter("capsule", capsule, reason)
        holder = Holder(worker, view.incarnation, view.lends_at, 0, capsule)
        return await self._files.exports.begin(
            holder, self._served(), self._router.config.block_size
        )

    @property
    def max_import_nbytes(self) -> int:
        return 0 if self._files is None else self._files.imports.max_nbytes

    async def begin_import(self) -> Import:
        if self._files is None or not self._files.imports.max_nbytes:
            raise BadRequest("this server imports no capsules: imports.max_gib is 0")
        return await self._files.imports.begin(self._served(), self._router.config.block_size)

    def _served(self) -> ModelSpec:
        """The model with the weights that serve now."""
        return structs.replace(self._model, weights=self._router.weights)

    async def release_capsule(self, capsule: CapsuleId, scope: Scope) -> None:
        info = await self._find(capsule, scope)
        self._texts.forget(capsule, scope)  # first: no gateway computes it again meanwhile
        if info.worker is not None:
            with suppress(UnknownCapsule):  # it went by itself: its event is under way
                await self._desk.ask(info.worker, Delete(self._ids.new(scope), capsule))
        self._router.forget_capsule(capsule)

    async def _secure(self, capsule: CapsuleId, source: WorkerId, worker: WorkerId) -> None:
        """Have a capsule that was durable on `source`, which drains, be so on `worker`, and there alone."""
        try:
            with suppress(UnknownCapsule):  # it was deleted meanwhile: so it must be there
                demote = Demote(self._ids.new(COMMON), capsule, _DISK)
                await self._desk.ask(worker, demote, MOVE_S)
            await self._desk.ask(source, Delete(self._ids.new(COMMON), capsule))
        except MalleeError as error:
            text = "capsule %s, durable on worker %s that drains, stays on its disk: %s"
            log.warning(text, capsule, source, told(error), extra=ids(worker=worker))
        finally:
            self._dispatcher.secured(source, capsule)
            self._carry_out()

    def is_kept(self, capsule: CapsuleId) -> bool:
        try:
            self._router.capsule(capsule)
        except UnknownCapsule:
            return False
        return True

    def _check_owner(self, capsule: CapsuleId, scope: Scope) -> None:
        """Before anything is looked up: the refusal must not tell, or take longer, if the capsule exists."""
        if not self._ids.belongs(capsule, scope):
            raise UnknownCapsule(capsule)

    def _on_forgotten(self, capsule: CapsuleId) -> None:
        """A client released `capsule`, here or at another gateway."""
        promise = self._dispatcher.promise(capsule)
        if promise is not None and promise.error is None:
            self._give_up(request_of(capsule), CapsuleAbandoned(capsule))
        self._dispatcher.forget_capsule(capsule)
        self._carry_out()

    # Workers

    def _on_frame(self, worker: WorkerId, frame: Frame) -> None:
        self._dispatcher.on_frame(worker, frame.step, frame.updates)
        self._carry_out()
        if frame.replies:
            self._take_replies(worker, frame.replies)

    def _take_replies(self, worker: WorkerId, replies: tuple[CapsuleReply, ...]) -> None:
        others = []
        for reply in replies:
            refused = reply.error is not None and self._dispatcher.on_inject_refused(
                worker, reply.request, from_wire(reply.error)
            )
            if not refused:
                others.append(reply)
        self._desk.take(tuple(others))
        self._carry_out()

    def _on_join(self, worker: WorkerId, incarnation: Any) -> None:
        self._dispatcher.on_join(worker, incarnation)
        self._carry_out()

    def _on_drain(self, worker: WorkerId) -> None:
        self._dispatcher.on_draining(worker)
        self._carry_out()

    def _on_change(self, worker: WorkerId) -> None:
        """It can be given requests, or no more."""
        self._dispatcher.on_room(worker)
        self._carry_out()

    def _on_loss(self, worker: WorkerId, reason: str) -> None:
        self._dispatcher.on_lost(worker, reason, is_death=is_death(reason))
        self._carry_out()
        self._desk.lost(worker, reason)

    # Effects

    def _carry_out(self) -> None:
        """Do what the dispatcher decided, in order."""
        now = self._clock()
        for effect in self._dispatcher.effects():
            match effect:
                case Deliver(request=request):
                    answer = self._answers[request]
                    if effect.update.injected:
                        self._took_in(effect.update.injected, answer.num_tokens(effect.branch))
                    answer.deliver(effect, now)
                    if (capsule := effect.update.capsule) is not None:
                        hashes = effect.shard.dispatch.hashes
                        boundary = effect.update.boundary
                        self._sessions.left(request, CapsuleId(capsule), boundary, hashes)
                case NotInjected(name=name, error=error):
                    self._took_in(name, error)
                case Send():
                    self._send(effect)
                case Placed():
                    self._on_placed(effect, now)
                case Failed(request=request, branch=branch, error=error):
                    self._log_failure(request, branch, error)
                    self._answers[request].fail(branch, error, now, self._router.weights.label)
                case Refused(request=request, error=error):
                    answer = self._answers[request]
                    self._count_refusal(error, answer.tenant)
                    answer.refuse(error, now)
                case Ended(request=request):
                    self._answers.pop(request).end()
                    self._sessions.ended(request)
                case Rebuilt(capsule=capsule, source=source, worker=worker):
                    self.tasks.spawn(
                        self._secure(capsule, source, worker), name="a durable capsule"
                    )
                case LetGo(worker=worker):
                    # Not at once: effects that follow may be for that worker.
                    asyncio.get_running_loop().call_soon(self._peers.let_go, worker)
        self._metrics.waiting.set(self._dispatcher.num_waiting)
        self._set_timer()

    def _took_in(self, name: str, place: int | MalleeError) -> None:
        """Tokens are in a branch, so many tokens into its answer, or won't be."""
        waiting = self._injecting.get(name)
        if waiting is None or waiting.done():
            return  # its client has gone
        if isinstance(place, int):
            waiting.set_result(place)
        else:
            waiting.set_exception(place)

    def _send(self, effect: Send) -> None:
        """Queue a command, by which its worker learns of the trace that it is part of."""
        command, shard = effect.command, effect.shard
        if self._spans is not None and shard is not None:
            answer = self._answers.get(shard.state.id)
            if answer is not None and answer.trace is not None:
                command = traced(command, answer.trace.parent_of(shard.name))
        self._peers.send(effect.worker, command)

    def _on_placed(self, effect: Placed, now: float) -> None:
        shard, placement = effect.shard, effect.placement
        answer = self._answers[effect.request]
        answer.place(shard, placement, now)
        if not shard.branches.start:
            elsewhere = placement.best_overlap_blocks > placement.overlap_blocks
            answer.judge.is_held_elsewhere = elsewhere
        self._metrics.routed(
            placement.worker, placement.overlap_blocks, placement.best_overlap_blocks
        )
        if shard.dispatch.is_moved:
            log.info(
                "%s goes on as %s on %s",
                effect.request,
                shard.name,
                placement.worker,
                extra=ids(request=effect.request, worker=placement.worker),
            )
        elif not shard.branches.start and shard.dispatch.queued_at is not None:
            self._metrics.admission_wait_s.observe(now - shard.dispatch.queued_at)
        if shard.how != "stay":
            prices = effect.prices
            log.info(
                "%s: %d rows %s on %s; %s",
                shard.name,
                len(shard.branches),
                shard.how,
                placement.worker,
                prices,
                extra=ids(request=effect.request, worker=placement.worker),
            )
        if not answer.placed.done():
            answer.placed.set_result(placement.worker)

    def _log_failure(self, request: RequestId, branch: int, error: MalleeError) -> None:
        extra = ids(request=request, branch=branch, worker=error.fields.get("worker"))
        log.warning("%s, branch %d: %s", request, branch, told(error), extra=extra)

    def _count_refusal(self, error: MalleeError, tenant: Tenant) -> None:
        if isinstance(error, Unavailable):
            self._metrics.refused(error.code, tenant)

    def _set_timer(self) -> None:
        """Call the dispatcher when it wants to be called."""
        at = self._dispatcher.next_time()
        if at is None or self._is_closed:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, at - self._clock())
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._on_time)
        self._timer_due = due

    def _on_time(self) -> None:
        self._timer = None
        self._dispatcher.on_time()
        self._carry_out()

    # Reading

    def decisions(self, request: RequestId | None, limit: int, candidates: int) -> dict[str, Any]:
        life = None if request is None else self._lives.get(request)
        return decisions_body(self._router, request, limit, candidates, life)

    def life(self, request: RequestId, scope: Scope, *, names_workers: bool) -> dict[str, Any]:
        is_own = self._ids.belongs(request, scope)
        life = self._lives.get(request) if is_own else None
        if life is None:
            raise UnknownRequest(request)
        return life.record(request, self._clock(), names_workers=names_workers)

    async def workers(self) -> dict[str, Any]:
        return workers_body(self._router, await self._peers.loads())

    async def drain_worker(self, worker: WorkerId) -> None:
        await self._peers.ask_drain(worker)

    async def change_weights(
        self, label: str, *, path: str | None, drain_s: float, wait_s: float
    ) -> dict[str, Any]:
        return await self._peers.weights.change(label, path=path, drain_s=drain_s, wait_s=wait_s)

    def weights(self) -> dict[str, Any]:
        return self._peers.weights.body()

    def health(self) -> dict[str, Any]:
        is_sound = self.failure is None
        return health_body(self._router, self.gateway_id, self._expected_workers, is_sound=is_sound)

    @property
    def is_serving(self) -> bool:
        """Whether requests can be served."""
        return self.health()["status"] in ("ok", "degraded")

    def metrics_targets(self) -> list[dict[str, Any]]:
        gateways = {self.gateway_id: self.metrics_at, **self._peers.others_metrics}
        workers = {worker.metrics_at for worker in self._router.all_workers()}
        return targets_body(self._fleet, gateways.values(), workers)

    def metrics(self, accept: str = "") -> bytes:
        placed = (answer for answer in self._answers.values() if answer.placed.done())
        self._metrics.in_flight.set(sum(answer.num_open for answer in placed))
        return self._metrics.render(accept)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of requests, answers or remembered prompts."""
        self._recent.check()
        self._dispatcher.check()
        self._sessions.trees.check()
        assert self._dispatcher.num_running == len(self._answers), "answers without a request"


def _promised(info: CapsuleInfo, error: tuple[str, str, dict[str, Any]] | None) -> CapsuleInfo:
    """A capsule that is not there yet, or with `error` won't be."""
    if error is not None:
        return info._replace(worker=None, error=from_wire(error))
    return info._replace(is_computing=True)


def _closed() -> Unavailable:
    return Unavailable("the gateway is shutting down; send the request again")
