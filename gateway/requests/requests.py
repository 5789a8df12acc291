"""The requests of a gateway: how each begins, and the verbs for what runs."""

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mallee.gateway.capsules.capsules import CapsuleInfo, Capsules
from mallee.gateway.capsules.promises import PromiseObserver
from mallee.gateway.fleet.questions import ANSWER_S
from mallee.gateway.peers import Peers
from mallee.gateway.recording.recorder import Recorder, SessionTape
from mallee.gateway.requests.lives import Lives
from mallee.gateway.requests.meter import Meter
from mallee.gateway.requests.observers import Observer
from mallee.gateway.requests.request import RunningRequest, refuse
from mallee.gateway.sessions.sessions import GatewaySessions
from mallee.gateway.shell import GatewayContext, Shell
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import (
    CapsuleAbandoned,
    InvalidParameter,
    MalleeError,
    UnknownBranch,
    UnknownRequest,
)
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope, account_of
from mallee.protocol.messages import Capture
from mallee.router.dispatch.inboxes import Injection
from mallee.router.dispatch.jobs import ForkJob, Job
from mallee.router.dispatch.token_memory import TokenMemory
from mallee.router.dispatch.verdicts import RecentPrompts
from mallee.runtime.telemetry.logs import ids, session_digest

if TYPE_CHECKING:
    from mallee.gateway.requests.spans import RequestSpans

log = logging.getLogger(__name__)

TAIL_TOKENS: Final = 24  # of a branch under way that are shown
_CAPTURE: Final = "request.capture"
_decode_capture = Decoder(tuple[int, float], "a branch of which a capsule is taken")


class OpenBranch(NamedTuple):
    """A branch that has not ended. `tail` are the last tokens that it drew, `state` as in its life."""

    branch: int
    state: str
    num_tokens: int
    tail: tuple[int, ...]


class Subtree(NamedTuple):
    """Requests that went on from a capsule, or from one that such a request left, as one gateway has them."""

    requests: list[RequestId]
    ended: list[RequestId]  # of them, those that were not over
    left: list[CapsuleId]  # capsules that all of them left, which are still there


class Requests:
    """Begins requests, and acts on those that run. Belongs to one event loop."""

    def __init__(
        self,
        context: GatewayContext,
        shell: Shell,
        capsules: Capsules,
        sessions: GatewaySessions,
        peers: Peers,
        memory: TokenMemory,
        *,
        recorder: "Recorder | None",
        spans: "RequestSpans | None",
    ) -> None:
        """Without a `recorder` no session is recorded, without `spans` no request is traced."""
        self._context = context
        self._shell = shell
        self._dispatcher = shell.dispatcher
        self._running = shell.running
        self._capsules = capsules
        self._sessions = sessions
        self._peers = peers
        self._memory = memory
        self._recorder = recorder
        self._spans = spans
        self._lives = Lives()
        self._recent = RecentPrompts(context.router.config.block_size)
        peers.share(_CAPTURE, self._answer_capture)

    # Begin

    def new_name(self, scope: Scope, account: str = "") -> RequestId:
        """A name for a request to come, which its answer's id is made from before it starts.

        `account`, if one bounds it, can be told from the name, and from those of its capsules.
        """
        return self._context.ids.new(scope, account)

    async def start(
        self,
        job: Job,
        prepare_s: float = 0.0,
        *,
        name: RequestId | None = None,
        observers: Sequence[Observer] = (),
    ) -> RunningRequest:
        """Route the job and send it off; it waits where there is no room, as its terms say.

        It took `prepare_s` to read and tokenize it. `name`: of `new_name`, if it was named before.
        `observers` see it beside the gateway's own. Raises MalleeError before anything is sent.
        """
        request = await self.begin(job, prepare_s, name=name, observers=observers)
        await request.opened()
        return request

    async def begin(
        self,
        job: Job,
        prepare_s: float = 0.0,
        *,
        name: RequestId | None = None,
        observers: Sequence[Observer] = (),
    ) -> RunningRequest:
        """As `start`, but without a wait for a worker: the request may not be `opened` yet.

        The capsule that `job` `makes` can be forked from now on.
        """
        began = self._context.clock()
        self._shell.check_open()
        if job.capsule is not None:
            is_kept = isinstance(job, ForkJob) and job.keep_s is not None
            await self._capsules.learn(job.capsule, job.scope, is_kept=is_kept)
        session = await self._record_of(job) if job.terms.is_recorded else None
        self._shell.check_open()
        name = name or self._context.ids.new(job.scope)
        request = self._submit(name, job, session, observers, began=began, prepare_s=prepare_s)
        self._shell.carry_out()
        return request

    def _submit(
        self,
        name: RequestId,
        job: Job,
        session: SessionTape | None,
        others: Sequence[Observer],
        *,
        began: float,
        prepare_s: float,
    ) -> RunningRequest:
        """Have the dispatcher place the job, or let it wait. Raises MalleeError."""
        context = self._context
        metrics, weights = context.metrics, context.router.weights
        metrics.prepare_s.observe(prepare_s)
        tenant = metrics.tenants.of(job.terms.owner)
        tenant.asked()
        life = self._lives.begin(name, job.num_branches, prepare_s, began)
        trace = None if self._spans is None else self._spans.begin(name, job, prepare_s)
        is_fork, exemplar = job.capsule is not None, None if trace is None else trace.exemplar
        meter = Meter(metrics, tenant, began, is_fork=is_fork, exemplar=exemplar)
        observers: list[Observer] = [meter, *others]
        if trace is not None:
            observers.append(trace)
        if job.makes is not None:
            observers.append(PromiseObserver(self._capsules.changes, job.makes))
        try:
            self._dispatcher.submit(name, job)
        except MalleeError as error:
            refuse(life, observers, error, context.clock() - began)
            raise
        if job.capsule is not None:
            self._capsules.lineage.add(name, job.capsule)
        if job.terms.session:
            observers.append(self._sessions.begin(name, job))
        if session is not None:
            text = None if job.capsule is None else self._memory.get(job.capsule)
            observers.append(session.begin(name, job, weights, text))
        if log.isEnabledFor(logging.DEBUG):
            extra = ids(request=name, session=session_digest(job.terms.tenant, job.terms.session))
            log.debug("%s begins with %d branches", name, job.num_branches, extra=extra)
        request = self._running[name] = RunningRequest(
            name,
            owner=self,
            life=life,
            comparison=self._recent.compare(name, job, weights.label),
            observers=observers,
            trace=trace,
            clock=context.clock,
        )
        return request

    async def _record_of(self, job: Job) -> SessionTape:
        """The record of the job's session, once the text of its capsule is here. Raises InvalidParameter."""
        session = self.recorder.session(job.scope, job.terms.session, job.terms.owner)
        if job.capsule is not None and not session.knows(job.capsule):
            await self._capsules.remember(job.capsule, job.scope)
        return session

    @property
    def recorder(self) -> Recorder:
        """The records of sessions. Raises InvalidParameter: nothing is recorded here."""
        if self._recorder is None:
            remedy = "this server records no sessions (recording.folder is not set); leave it out"
            raise InvalidParameter("mallee.record", True, remedy)
        return self._recorder

    # What clients want of their own requests: `request.Owner`

    def cancel(self, request: RequestId, branch: int | None) -> None:
        self._dispatcher.cancel(request, branch)
        self._shell.carry_out()

    def cut(self, request: RequestId, branch: int, at: int, residue: Tokens) -> CapsuleId | None:
        return self._dispatcher.cut(request, branch, at, residue)

    def carry_out(self) -> None:
        self._shell.carry_out()

    def shorten(self, capsule: CapsuleId, at: int, residue: Tokens) -> None:
        self._capsules.shorten(capsule, at, residue)

    # Verbs

    async def inject(
        self, request: RequestId, branch: int, tokens: Tokens, scope: Scope, *, replaces: bool
    ) -> int:
        """Have a running branch go on after `tokens`, and wait until they are in its text.

        Returns the number of tokens of its answer before them. `replaces`: earlier ones that still wait are
        dropped. Raises UnknownBranch, InvalidParameter, QueueFull, Superseded.
        """
        if not self._context.ids.belongs(request, scope):
            raise UnknownBranch(request, branch)
        injection = Injection(self._context.ids.new(scope), tokens.tobytes(), replaces)
        return await self._shell.inject(request, branch, injection)

    async def capture(
        self, request: RequestId, branch: int, ttl_s: float, scope: Scope
    ) -> CapsuleInfo:
        """Take a capsule of a running branch at its next boundary; it goes on as if nothing had happened.

        Raises UnknownBranch, CapsulesFull, Unavailable.
        """
        running = self._own(request, scope)
        found = None if running is None else self._dispatcher.running(request, branch)
        if running is None or found is None:
            if running is not None or not self._context.ids.belongs(request, scope):
                raise UnknownBranch(request, branch)
            return await self._capture_elsewhere(request, branch, ttl_s, scope)
        shard, row = found
        name = self._context.ids.new(scope, account_of(request))
        question = Capture(name, shard.name, row, ttl_s)
        status = await self._shell.questions.ask(shard.worker, question)
        capsule = CapsuleId(status.capsule)
        self._capsules.lineage.add_captured(name, request)
        self._dispatcher.note_capture(shard, row, capsule, status.boundary, ttl_s)
        running.captured(branch, capsule, status.boundary)
        now = self._context.wall_clock()
        return CapsuleInfo(capsule, shard.worker, status.boundary, now, status=status)

    async def _capture_elsewhere(
        self, request: RequestId, branch: int, ttl_s: float, scope: Scope
    ) -> CapsuleInfo:
        given = encode((branch, ttl_s))
        raw = await self._peers.ask_maker(_CAPTURE, request, scope, given=given, wait_s=ANSWER_S)
        if raw is None:
            raise UnknownBranch(request, branch)
        return await self._capsules.inspect(CapsuleId(raw.decode()), scope)

    async def _answer_capture(self, name: str, scope: Scope, given: bytes) -> bytes | None:
        """The capsule that was taken of a branch here, for another gateway."""
        request = RequestId(name)
        if request not in self._running:
            return None
        branch, ttl_s = _decode_capture(given)
        return (await self.capture(request, branch, ttl_s, scope)).capsule.encode()

    def prune(
        self, request: RequestId, branches: Collection[int] | None, scope: Scope
    ) -> list[int]:
        """Cancel branches of a request, or all; returns those that ran. Raises UnknownRequest."""
        running = self._own(request, scope)
        if running is None or not running.placed.done():
            raise UnknownRequest(request)
        return running.prune(range(running.num_branches) if branches is None else branches)

    def prune_below(
        self, capsule: CapsuleId, origins: Iterable[CapsuleId | RequestId], scope: Scope
    ) -> Subtree:
        """Cancel what of the subtree of `capsule` began here below `origins`, which belong to it.

        Those are capsules, and requests for the capsules that they left. Raises UnknownCapsule for a
        capsule of another scope; origins of another one have nothing below them.
        """
        self._capsules.check_owner(capsule, scope)
        own = [origin for origin in origins if self._context.ids.belongs(origin, scope)]
        below = sorted(self._capsules.lineage.below(own))
        ended, left = [], []
        for request in below:
            running = self._running.get(request)
            if running is not None and running.num_open:
                ended.append(request)
                if running.placed.done():
                    running.prune(range(running.num_branches))
                else:
                    self._shell.give_up(request, CapsuleAbandoned(capsule))
            left += self._capsules.left_by(request, scope)
        return Subtree(below, ended, left)

    def prioritize(
        self, request: RequestId, branches: Collection[int] | None, priority: float, scope: Scope
    ) -> list[int]:
        """Change the priority of branches, or all, from their workers' next step on.

        Returns those that are not over. Raises UnknownRequest.
        """
        running = self._own(request, scope)
        if running is None:
            raise UnknownRequest(request)
        wanted = range(running.num_branches) if branches is None else branches
        changed = self._dispatcher.prioritize(request, wanted, priority)
        self._shell.carry_out()
        return changed

    # Reading

    def runs(self, request: RequestId, scope: Scope) -> bool:
        """Whether a request of that scope runs at this gateway."""
        return self._own(request, scope) is not None

    def open_branches(self, request: RequestId, scope: Scope) -> list[OpenBranch]:
        """The branches of a request of this gateway that have not ended."""
        life = self._lives.get(request) if self._context.ids.belongs(request, scope) else None
        return [
            OpenBranch(
                branch.index,
                branch.state,
                branch.num_tokens,
                self._dispatcher.tail(request, branch.index, TAIL_TOKENS),
            )
            for branch in (() if life is None else life.branches)
            if branch.end is None
        ]

    def life(self, request: RequestId, scope: Scope, *, names_workers: bool) -> dict[str, Any]:
        """The course of a request of `scope`: `RequestLife.record`. Raises UnknownRequest."""
        is_own = self._context.ids.belongs(request, scope)
        life = self._lives.get(request) if is_own else None
        if life is None:
            raise UnknownRequest(request)
        return life.record(request, self._context.clock(), names_workers=names_workers)

    def course(self, request: RequestId) -> dict[str, Any] | None:
        """As `life`, of any scope, for the operator: `RequestLife.body`."""
        life = self._lives.get(request)
        return None if life is None else life.body()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a worker with room."""
        return self._dispatcher.num_waiting

    @property
    def num_in_flight(self) -> int:
        """Branches that workers have."""
        return sum(each.num_open for each in self._running.values() if each.placed.done())

    def check(self) -> None:
        """Raises AssertionError on a broken invariant of requests, or of remembered prompts."""
        self._recent.check()
        self._dispatcher.check()
        assert self._dispatcher.num_running == len(self._running), "running without a dispatcher"

    def _own(self, request: RequestId, scope: Scope) -> RunningRequest | None:
        """The running request of that name, if it is of that scope."""
        return self._running.get(request) if self._context.ids.belongs(request, scope) else None
