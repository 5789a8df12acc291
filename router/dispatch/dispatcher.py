"""The life of every request of one gateway: queued, placed, streamed, moved, ended exactly once.

A dispatcher decides and does nothing itself: what happens comes in by its methods, what is to be done
comes out of `effects`, in order. A live gateway carries that out over sockets, a replay in virtual time.
What waits is tried in `on_time` alone, so that all room that came in one moment is seen together.

    submit -> (waiting ->) placed -> frames -> ended
                 ^                     |
                 `---- moved <- worker lost, capsule gone

A request runs as one shard or several (`router.dispatch.shards`), each a request of its own to its
worker. If a worker is lost, each branch goes on elsewhere after the last token that its client was sent;
draws depend on seed and position alone, so the answer is that of an undisturbed run. Branches that had
drawn nothing are placed again together. A capsule that went with its worker is computed again from
the text that the gateways remember, under its own id; dispatches that need it meanwhile are held.

The capsule of a prefill may be forked before it is there (`Job.makes`). Its forks go to the worker that
computes it, which has them wait for their tokens; while it is on no worker, they are held as well.

Invariants, checked by `check`: each open branch of a request waits, or runs in one shard; bookings
are those of the shards; nothing waits for a worker that is gone, for a capsule that is not under way,
or without a deadline.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from msgspec import structs

from mallee.protocol.capabilities import needs, refusal
from mallee.protocol.errors import (
    CapsuleAbandoned,
    CapsuleLost,
    CapsulesFull,
    CapsuleStale,
    MalleeError,
    NoWorker,
    PoisonRequest,
    Saturated,
    UnknownBranch,
    UnknownCapsule,
    WeightsChanged,
    WorkerLost,
    from_wire,
)
from mallee.protocol.hashing import NO_HASHES, Tokens
from mallee.protocol.ids import (
    CapsuleId,
    Incarnation,
    RequestId,
    WorkerId,
    capsule_id,
    owner_of,
    request_of,
)
from mallee.protocol.messages import (
    ALL_BRANCHES,
    Cancel,
    Command,
    Cut,
    Fork,
    Holder,
    Inject,
    Prioritize,
    Release,
)
from mallee.router.dispatch.effects import (
    Deliver,
    Effect,
    Ended,
    Failed,
    LetGo,
    Missing,
    NotInjected,
    Placed,
    Rebuilt,
    Refused,
    Send,
)
from mallee.router.dispatch.inboxes import Inboxes, Injection
from mallee.router.dispatch.jobs import ForkJob, Job, PrefillJob, abandon_prefill
from mallee.router.dispatch.queue import HELD, AdmissionConfig
from mallee.router.dispatch.recovery.capsules import Capsules
from mallee.router.dispatch.recovery.departures import Departures
from mallee.router.dispatch.recovery.pending import BrokenPromises, Promise, Rebuilds, not_kept
from mallee.router.dispatch.recovery.quarantine import Quarantine
from mallee.router.dispatch.recovery.suspects import Suspects
from mallee.router.dispatch.shards import Dispatch, Recompute, RequestState, Shard, runs
from mallee.router.dispatch.texts import Texts
from mallee.router.dispatch.waiting import RECHECK_S, Waiting
from mallee.router.placement.fanouts import Part
from mallee.router.placement.placer import Placement
from mallee.router.router import Router

MAX_SHARDS: Final = 64  # of one dispatch
TOUCH_S: Final = 30.0  # between two renewals of a running request's booking
_CAPSULE_GONE: Final = (UnknownCapsule.code, CapsuleAbandoned.code)


MoveReason: TypeAlias = Literal["death", "stall", "departure", "capsule", "room"]
"""Of a branch to another worker: its own died, made no progress or left; or its capsule was gone, or found
no room."""


class DispatchStats(NamedTuple):
    """Counts since birth."""

    moved: dict[MoveReason, int]  # branches
    num_rebuilt: int  # capsules


class DispatchConfig(NamedTuple):
    """Rules that differ between gateways.

    `max_moves`: of one branch from worker to worker. `patience_s`: for which a busy worker may make no
    progress; None: workers never hang. `can_convict`: a request that two workers died of is refused; else
    suspects are tried for ever. `asks_first`: if a worker lacks a capsule, it is computed again once the
    shell has confirmed that no client released it.
    """

    admission: AdmissionConfig = AdmissionConfig()
    max_moves: int = 1 << 30
    recheck_s: float | None = RECHECK_S
    patience_s: float | None = None
    can_convict: bool = True
    asks_first: bool = False


class Dispatcher:
    """The requests of one gateway. `clock` is the router's.

    The shell tells the router of leases, events and losses; a loss it tells the router first.
    """

    def __init__(
        self,
        router: Router,
        texts: Texts,
        config: DispatchConfig,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._texts = texts
        self._config = config
        self._clock = clock
        self._requests: dict[RequestId, RequestState] = {}
        self._shards: dict[str, Shard] = {}  # by the names of their requests to workers
        self._by_worker: dict[WorkerId, dict[RequestId, Shard]] = {}
        self._lives: dict[WorkerId, Incarnation] = {}  # that can be sent to
        self._waiting = Waiting(
            config.admission,
            place=self._place_waiting,
            placed=self._left_queue,
            failed=self._fail_dispatch,
            has_workers=lambda: router.has_workers,
            has_room=lambda: router.has_room,
            clock=clock,
            recheck_s=config.recheck_s,
            outbox=router.outbox,
        )
        self.room = self._waiting.elsewhere  # told of the other gateways
        self._claims = self.room.claims  # mostly none
        self._tickets = self._waiting.queue.tickets  # mostly none
        self._suspects = Suspects(config.patience_s)
        self._quarantine = Quarantine(can_convict=config.can_convict)
        self._departures = Departures()
        self._rebuilds = Rebuilds()
        self._doubted = set[CapsuleId]()  # of those under way: the shell looks if they are wanted
        self._broken = BrokenPromises()
        self._capsules = Capsules(router, texts, self._departures.by_worker)
        self._inboxes = Inboxes()
        self._effects: list[Effect] = []
        self._has_had_workers = False
        self.num_moved = self.num_rebuilt = 0
        self._moved: Counter[MoveReason] = Counter()

    # Requests

    def submit(self, request: RequestId, job: Job) -> None:
        """Place a new request, or let it wait. Raises MalleeError if it is refused: nothing is kept."""
        self._submit(RequestState(request, job, self._clock()))

    def _submit(self, state: RequestState) -> None:
        request, job = state.id, state.job
        assert request not in self._requests, f"{request} is here already"
        hashes, weights = self._texts.hashes(job), self._router.weights
        branches = range(len(state.open))
        dispatch = Dispatch(state, job, branches, hashes, num_moves=0, weights=weights)
        self._requests[request] = state
        if job.makes is not None:
            self._rebuilds.begin(job.makes)
        try:
            self._admit(dispatch)
        except MalleeError:
            del self._requests[request]
            if job.makes is not None:
                self._rebuilds.end(job.makes)
            raise
        if job.makes is not None and (log := self._texts.log(job, 0)) is not None:
            ttl_s = job.ttl_s if isinstance(job, PrefillJob) else None
            log.note(job.makes, 0, job.prompt_tokens, ttl_s)

    def cancel(self, request: RequestId, branch: int | None = None) -> None:
        """The client gave up `branch`, or all that was left. Ignored if that is over."""
        state = self._requests.get(request)
        if state is None or (branch is not None and branch not in state.open):
            return
        given_up = set(state.open) if branch is None else {branch}
        state.open -= given_up
        self._drop_inboxes(state, given_up)
        for shard in list(state.shards.values()):
            self._cancel_rows(shard, {b - shard.branches.start for b in given_up} & shard.open)
        for dispatch in list(state.waiting):
            if not dispatch.is_wanted:
                self._forget(dispatch)
        if not state.open:
            self._end(state)

    def running(self, request: RequestId, branch: int) -> tuple[Shard, int] | None:
        """The shard of an open branch, and its row there; None: it is over, or waits."""
        state = self._requests.get(request)
        if state is None or branch not in state.open:
            return None
        for shard in state.shards.values():
            row = branch - shard.branches.start
            if row in shard.open:
                return shard, row
        return None

    def tail(self, request: RequestId, branch: int, num: int) -> tuple[int, ...]:
        """The last `num` tokens that an open branch has drawn where it runs now, if they are known."""
        found = self.running(request, branch)
        if found is None or found[0].log is None:
            return ()
        return found[0].log.tail(found[1], num)

    def inject(self, request: RequestId, branch: int, injection: Injection) -> None:
        """Have a branch go on after other tokens, from its next boundary on, wherever that is.

        The update that has them names it, or NotInjected says why there is none. Raises UnknownBranch,
        QueueFull.
        """
        state = self._requests.get(request)
        if state is None or branch not in state.open:
            raise UnknownBranch(request, branch)
        self._inboxes.put(request, branch, injection)
        found = self.running(request, branch)
        if found is not None and found[0].recompute is None:
            self._send_injection(*found, injection)

    def on_inject_refused(self, worker: WorkerId, name: str, error: MalleeError) -> bool:
        """`worker` won't have tokens in a branch; False: `name` is no injection that waits."""
        owner = self._inboxes.owner(name)
        if owner is None:
            return False
        found = self.running(*owner)
        if found is not None and found[0].worker == worker:  # else it may be taken in elsewhere
            self._inboxes.settle(name)
            self._effects.append(NotInjected(name, error))
        return True

    def _send_injection(self, shard: Shard, row: int, injection: Injection) -> None:
        name, tokens, replaces = injection
        self._send(shard, Inject(name, shard.name, row, tokens, replaces))

    def prioritize(self, request: RequestId, branches: Iterable[int], priority: float) -> list[int]:
        """Give branches that are not over another priority, wherever they run from now on; returns them.

        Raises NotSupported.
        """
        if "priorities" in self._router.lacks:
            raise refusal(frozenset(("priorities",)))
        state = self._requests.get(request)
        concerned = [] if state is None else sorted(state.open.intersection(branches))
        for branch in concerned:
            assert state is not None
            state.priorities[branch] = priority
            found = self.running(request, branch)
            if found is not None and found[0].recompute is None:
                self._send(found[0], Prioritize(found[0].name, priority, found[1]))
        return concerned

    def _send_changes(self, shard: Shard) -> None:
        """Send what clients changed of the rows of a shard, which has just been sent itself."""
        for branch, priority in shard.state.priorities.items():
            row = branch - shard.branches.start
            if row in shard.open:
                self._send(shard, Prioritize(shard.name, priority, row))
        if self._inboxes.waiting:
            for row in sorted(shard.open):
                for injection in self._inboxes.of(shard.state.id, shard.branch_of(row)):
                    self._send_injection(shard, row, injection)

    def _drop_inboxes(self, state: RequestState, branches: Iterable[int]) -> None:
        """These branches are over."""
        for branch in branches:
            for name in self._inboxes.drop(state.id, branch):
                self._effects.append(NotInjected(name, UnknownBranch(state.id, branch)))

    def cut(self, request: RequestId, branch: int, at: int, residue: Tokens) -> CapsuleId | None:
        """The client was sent the first `at` tokens of an open branch and `residue`, and no more: end it.

        Returns the capsule of that text; None if there is none.
        """
        found = self.running(request, branch)
        if found is None:
            capsule = self._cut_waiting(request, branch, at, residue)
            self.cancel(request, branch)
            return capsule
        shard, row = found
        capsule = capsule_id(shard.name, row)
        if shard.log is not None:
            shard.log.cut(capsule, row, at, residue)
        raw = residue.tobytes()
        self._send(shard, Cut(shard.name, row, at, raw))
        self._learn(shard, capsule, at + len(residue))
        self._end_row(shard, row)
        return capsule

    def _cut_waiting(
        self, request: RequestId, branch: int, at: int, residue: Tokens
    ) -> CapsuleId | None:
        """The capsule of a branch that waits for another worker: a text, which its forks compute."""
        state = self._requests.get(request)
        waiting = () if state is None or branch not in state.open else state.waiting
        dispatch = next((each for each in waiting if branch in each.branches), None)
        if state is None or dispatch is None:
            return None
        log = self._texts.log(dispatch.job, dispatch.branches.start)
        capsule = capsule_id(state.name(0), branch)
        state.num_shards += 1
        if log is not None:
            log.cut(capsule, branch - dispatch.branches.start, at, residue)
        return capsule

    def note_capture(
        self, shard: Shard, row: int, capsule: CapsuleId, boundary: int, ttl_s: float
    ) -> None:
        """`capsule` was taken of a row of `shard`, which may be over by now."""
        if shard.log is not None:
            shard.log.note(capsule, row, boundary, ttl_s)
        self._learn(shard, capsule, boundary)

    def _cancel_rows(self, shard: Shard, rows: set[int]) -> None:
        if not rows:
            return
        shard.open -= rows
        is_over = not shard.open
        if shard.recompute is not None:
            if is_over:
                self._send_all(shard, abandon_prefill(shard.recompute.request))
        else:
            self._send_all(shard, shard.job.abandon(shard.name, rows, is_all=is_over))
        if is_over:
            self._close(shard)

    def is_busy(self, worker: WorkerId) -> bool:
        """Whether a shard runs on `worker`."""
        return bool(self._by_worker.get(worker))

    # Placing

    def _admit(self, dispatch: Dispatch) -> None:
        """Place it now, or let it wait. Raises MalleeError; then nothing of it is booked or waits."""
        if self._router.lacks:
            self._check_able(dispatch)
        is_held = not self._resolve(dispatch)
        is_next = not (self._tickets or self._claims) or dispatch.is_moved
        is_next = is_next or self._waiting.is_free(dispatch.lane)
        if is_next and not is_held:
            try:
                self._place(dispatch, True)
            except (Saturated, WorkerLost):
                pass
            except NoWorker:
                # For a while: workers are being replaced, or come back.
                if self._router.has_workers or not self._has_had_workers:
                    raise
            else:
                return
        self._waiting.add(dispatch, self._cost(dispatch, 0))
        dispatch.state.waiting.append(dispatch)
        if is_held:
            self._hold(dispatch)

    def _check_able(self, dispatch: Dispatch) -> None:
        """Raises NotSupported if the engines can't do it; WorkerLost if they can't go on with it."""
        missing = needs(dispatch.job).intersection(self._router.lacks)
        if missing and dispatch.lost_with is not None:
            reason = f"engines of its kind lack {min(missing)!r}, to go on with it"
            raise WorkerLost(dispatch.lost_with, reason)
        if missing:
            raise refusal(missing)

    def _resolve(self, dispatch: Dispatch) -> bool:
        """Find its capsule's worker, or its text. False: it is to be held until the capsule is there again.

        Raises UnknownCapsule, CapsuleLost, CapsuleStale, WeightsChanged, and what a prefill has failed by.
        """
        job = dispatch.job
        if dispatch.weights != self._router.weights:
            self._follow_weights(dispatch)
        if job.capsule is None:
            return True
        assert isinstance(job, ForkJob), "no other job has a capsule"
        if not self._is_forkable(job.capsule):
            dispatch.lane = HELD
            return False
        dispatch.lane = self._capsules.worker_of(job.capsule)
        if dispatch.lane is not None:
            dispatch.text, dispatch.hashes = None, NO_HASHES
            return True
        if job.capsule in self._rebuilds:
            dispatch.lane = HELD
            return False
        if dispatch.text is None:
            if (broken := self._broken.get(job.capsule)) is not None:
                broken.check_whole()
            dispatch.text = self._capsules.text_for(job)
            dispatch.hashes = dispatch.text.hashes
        return True

    def _follow_weights(self, dispatch: Dispatch) -> None:
        """Have a dispatch go on with the weights that serve now. Raises CapsuleStale, WeightsChanged."""
        job, serving = dispatch.job, self._router.weights
        if job.drawn:
            raise WeightsChanged(dispatch.weights.label, serving.label)
        if isinstance(job, PrefillJob) and job.rebuilt is not None:
            raise CapsuleStale(job.rebuilt, dispatch.weights.label, serving.label)
        dispatch.hashes, dispatch.weights = self._texts.hashes(job), serving

    def _hold(self, dispatch: Dispatch) -> None:
        """Have a dispatch in the lane HELD tried again when its capsule is there."""
        assert dispatch.job.capsule is not None, "it waits for no capsule"
        self._rebuilds.hold(dispatch.job.capsule, dispatch)
        self._quarantine.end(dispatch)  # what it waits for may be behind it there

    def lost_capsule(self, capsule: CapsuleId) -> int:
        """The number of tokens of a capsule that is gone and can be computed again.

        Raises UnknownCapsule, CapsuleLost, LookupIncomplete.
        """
        return self._capsules.num_tokens(capsule)

    def is_fresh(self, capsule: CapsuleId) -> bool:
        """Whether `capsule` can be forked: not if other weights made it than those that serve."""
        return self._capsules.is_fresh(capsule)

    def check_fresh(self, capsule: CapsuleId) -> None:
        """Raises CapsuleStale if `capsule` was made by other weights than those that serve."""
        self._capsules.check_fresh(capsule)

    def _readmit(self, dispatch: Dispatch) -> None:
        """As `_admit`, for a request that has begun: an error ends its branches."""
        if not dispatch.is_wanted:
            return
        try:
            self._admit(dispatch)
        except MalleeError as error:
            self._fail_dispatch(dispatch, error)

    def _left_queue(self, dispatch: Dispatch) -> None:
        dispatch.state.waiting.remove(dispatch)

    def _cost(self, dispatch: Dispatch, overlap_blocks: int) -> float:
        """Tokens to compute where `overlap_blocks` of its prompt are and, as expected, to generate."""
        job, config = dispatch.job, self._router.config
        generated = job.num_branches * config.cost.steps(job.max_tokens)
        return job.uncached_tokens(overlap_blocks * config.block_size) + generated

    def _place_waiting(self, dispatch: Dispatch, may_wait: bool) -> float | None:
        """As `_place`, by what is known of its capsule now. Returns its cost; None: it is held."""
        if not self._resolve(dispatch):
            self._hold(dispatch)
            return None
        return self._cost(dispatch, self._place(dispatch, may_wait))

    def _place(self, dispatch: Dispatch, may_wait: bool) -> int:
        """Book a dispatch, whose capsule is resolved, and send it off.

        Returns the blocks of its prompt that were there. If this raises, nothing was booked.
        """
        job, state = dispatch.job, dispatch.state
        if job.capsule is None and len(dispatch.branches) == 1:
            name = state.name(0)
            source, why = dispatch.source
            placement = self._router.route(
                name,
                dispatch.hashes,
                prompt_tokens=job.prompt_tokens,
                max_tokens=job.max_tokens - job.drawn,
                may_wait=may_wait,
                affinity=job.affinity,
                source=source,
                why=why,
            )
            self._check_linked([placement], state)
            state.num_shards += 1
            self._begin(dispatch, name, placement, range(1), "stay", None)
            home = placement
        else:
            parts = self._route_many(dispatch, may_wait)
            self._check_linked([part.placement for part in parts], state)
            state.num_shards += len(parts)
            num_loans = sum(_borrows_capsule(part) for part in parts)
            for k, part in enumerate(parts):
                name = state.name(k - len(parts))
                how = part.how if dispatch.text is None else "recompute"
                self._begin(dispatch, name, part.placement, part.rows, how, part, num_loans)
            home = parts[0].placement
        if self._tickets or self._waiting.queue.trying:
            self._waiting.note(home.worker)
        return home.overlap_blocks

    def _route_many(self, dispatch: Dispatch, may_wait: bool) -> Sequence[Part]:
        job, state, capsule = dispatch.job, dispatch.state, dispatch.capsule
        source, why = dispatch.source
        if dispatch.text is not None:
            prompt_tokens = len(dispatch.text.tokens)
        elif capsule is not None:
            prompt_tokens = self._router.capsule(capsule).boundary
        else:
            prompt_tokens = job.prompt_tokens
        return self._router.route_fanout(
            [state.name(k) for k in range(min(job.num_branches, MAX_SHARDS))],
            dispatch.hashes,
            prompt_tokens=prompt_tokens,
            max_tokens=job.max_tokens,
            suffix_tokens=job.suffix_lengths,
            capsule=capsule,
            can_recompute=self._capsules.can_compute(job),
            may_wait=may_wait,
            affinity=job.affinity,
            source=source,
            why=why,
        )

    def _check_linked(self, placements: Sequence[Placement], state: RequestState) -> None:
        """Raises WorkerLost, with nothing booked, if a worker can't be sent to (yet, or any more)."""
        for placement in placements:
            if self._lives.get(placement.worker) != placement.incarnation:
                for k in range(len(placements)):
                    self._router.free(state.name(k))
                raise WorkerLost(placement.worker, "it was restarted just now")

    def _begin(
        self,
        dispatch: Dispatch,
        name: RequestId,
        placement: Placement,
        rows: range,
        how: str,
        part: Part | None,
        num_loans: int = 0,
    ) -> None:
        """Send booked rows to their worker, whose capsule `num_loans` others borrow for other rows."""
        state, worker = dispatch.state, placement.worker
        shard = Shard(dispatch, name, rows, worker, placement.incarnation, how)
        shard.log = self._texts.log(shard.job, shard.branches.start)
        if state.home is None:
            state.home = worker
        self._shards[name] = state.shards[name] = shard
        self._by_worker.setdefault(worker, {})[name] = shard
        self._suspects.watch(worker, self._clock())
        prices = None if part is None else part.prices
        holders = () if placement.pull is None else placement.pull.holders
        self._tell(state, Placed(state.id, shard, placement, prices))
        if how == "stay" or shard.job.capsule is None:
            command = shard.job.command(name, shard.branches.start, holders)
            if num_loans and isinstance(command, Fork) and command.at is None:
                command = structs.replace(command, loans=num_loans)
            self._send(shard, command)
        else:
            self._recompute(shard, holders, is_first=not rows.start)
        if shard.recompute is None and (state.priorities or self._inboxes.waiting):
            self._send_changes(shard)
        if shard.job.makes is not None:
            self._promise(shard, shard.job.makes)
        if dispatch.num_moves or len(state.open) < len(dispatch.branches):
            gone = {row for row in shard.open if shard.branch_of(row) not in state.open}
            self._cancel_rows(shard, gone)

    # Capsules that are promised

    def promise(self, capsule: CapsuleId) -> Promise | None:
        """A capsule that a prefill of this gateway will make, or could not make; None: it is none."""
        state = self._promising(capsule)
        if state is None:
            return self._broken.get(capsule)
        worker = next((shard.worker for shard in state.shards.values()), None)
        return Promise(state.job.prompt_tokens, worker, state.arrival)

    def lacks(self, capsule: CapsuleId) -> bool:
        """Whether no worker that stays has `capsule`, and none makes it for this gateway.

        Raises CapsuleStale.
        """
        if self.promise(capsule) is not None or capsule in self._rebuilds:
            return False
        return self._capsules.worker_of(capsule) is None

    def _promising(self, capsule: CapsuleId) -> RequestState | None:
        """The request that computes `capsule` for the first time."""
        state = self._requests.get(request_of(capsule))
        return state if state is not None and state.job.makes == capsule else None

    def _promise(self, shard: Shard, capsule: CapsuleId) -> None:
        """Have forks of the capsule that `shard` makes follow it to its worker."""
        self._learn(shard, capsule, shard.job.prompt_tokens, is_computing=True)
        self._let_go(capsule)

    def _is_forkable(self, capsule: CapsuleId) -> bool:
        """False: `capsule` is promised, and no worker that stays computes it yet."""
        state = self._promising(capsule)
        if state is None:
            return True
        for shard in state.shards.values():
            if shard.worker not in self._departures.by_worker:
                # Again: a full directory forgets it.
                self._learn(shard, capsule, shard.job.prompt_tokens, is_computing=True)
                return True
        self._rebuilds.begin(capsule)
        return False

    def _recall(self, shard: Shard, capsule: CapsuleId) -> None:
        """A shard is over that has not made the capsule that it promised; another one may."""
        self._router.forget_capsule(capsule)
        if shard.state.open:
            self._rebuilds.begin(capsule)

    def _break(self, state: RequestState, error: MalleeError) -> None:
        """Have the capsule that a request promised, if it did, answer with `error` from now on."""
        if state.job.makes is not None and not state.is_made:
            promise = Promise(state.job.prompt_tokens, error=error)
            self._broken.add(state.job.makes, promise)

    def _end_promise(self, state: RequestState, capsule: CapsuleId) -> None:
        """A prefill is over: what was held for its capsule goes on, or fails as it did."""
        if state.is_made:
            self._let_go(capsule)
            return
        if (log := self._texts.log(state.job, 0)) is not None:
            log.drop(capsule)
        broken = self._broken.get(capsule)
        error = CapsuleAbandoned(capsule) if broken is None else broken.error
        assert error is not None, "it is broken by an error"
        self._fail_held(capsule, error)

    def _fail_held(self, capsule: CapsuleId, error: MalleeError) -> None:
        """End what is held for a capsule that will not be there."""
        self._doubted.discard(capsule)
        for dispatch in self._rebuilds.end(capsule):
            self._waiting.cancel(dispatch)
            self._fail_dispatch(dispatch, error)

    # Capsules that are computed again

    def _recompute(self, shard: Shard, holders: tuple[Holder, ...], *, is_first: bool) -> None:
        """Have the shard's worker make the capsule that it forks: a copy, or the lost one itself."""
        dispatch, job = shard.dispatch, shard.job
        assert isinstance(job, ForkJob), "no other job has a capsule"
        text = dispatch.text or self._texts.capsule_text(job.capsule, job.at)
        assert text is not None, "only capsules whose tokens are known are computed elsewhere"
        request = RequestId(f"{shard.name}-r")
        is_lost = dispatch.text is not None and is_first and job.at is None
        if is_lost:
            assert job.capsule not in self._rebuilds, "it is under way already"
            self._rebuilds.begin(job.capsule)
            self.num_rebuilt += 1
        capsule = job.capsule if is_lost else capsule_id(request)
        fork = replace(job, capsule=capsule, at=None)
        shard.recompute = Recompute(request, capsule, fork, lost=is_lost)
        self._shards[request] = shard
        share = job.terms.share
        if job.at is not None:  # no capsule has exactly this text, but its blocks
            holders = tuple(each.first(job.at) for each in holders)
        self._send(shard, text.prefill(request, share, holders, capsule if is_lost else None))

    def _on_recomputed(self, shard: Shard, update: Any) -> None:
        """Fork a capsule that was computed for a shard, once it is there."""
        recompute = shard.recompute
        if recompute is None or update.finish is None:
            return
        shard.recompute = None
        del self._shards[recompute.request]
        if update.error is not None or update.capsule is None:
            self._not_recomputed(shard, recompute, update)
            return
        shard.prompt = (update.cached_tokens, update.prefill_tokens)
        self._router.observe_hit(shard.name, update.cached_tokens)
        original, shard.job = shard.job, recompute.job
        self._send(shard, recompute.job.command(shard.name, shard.branches.start))
        for row in sorted(set(range(len(shard.branches))) - shard.open):
            self._send(shard, Cancel(shard.name, row))
        self._send_changes(shard)
        if recompute.lost:
            self._learn(shard, recompute.capsule, update.boundary)
            assert original.capsule is not None
            self._let_go(original.capsule)
        else:
            self._send(shard, Release(recompute.capsule))

    def _not_recomputed(self, shard: Shard, recompute: Recompute, update: Any) -> None:
        if update.error is not None and update.error[0] == CapsulesFull.code:
            # no worker can keep it: each row goes with its whole text
            self._move(shard, "room")
        elif update.error is not None:
            self._fail_shard(shard, from_wire(update.error))
        else:
            self._fail_shard(shard, CapsuleAbandoned(recompute.capsule))
        if recompute.lost:
            self._let_go(recompute.capsule)

    def confirm(self, capsule: CapsuleId, error: MalleeError | None) -> None:
        """The answer to `Missing`: it may be computed again, or with an `error` not."""
        if capsule in self._doubted:
            if error is None:
                self._let_go(capsule)
            else:
                self._fail_held(capsule, error)

    def _let_go(self, capsule: CapsuleId) -> None:
        """Try again what was held for `capsule`."""
        self._doubted.discard(capsule)
        for dispatch in self._rebuilds.end(capsule):
            self._waiting.cancel(dispatch)
            dispatch.state.waiting.remove(dispatch)
            self._readmit_safely(dispatch)

    # Frames

    def on_frame(self, worker: WorkerId, step: int, updates: Sequence[Any]) -> None:
        """Take in a frame of `worker`, which has done so many steps; without updates it is a sign of life."""
        self._suspects.heard(worker, step, self._clock(), has_updates=bool(updates))
        if updates:
            self.on_updates(worker, updates)

    def on_updates(self, worker: WorkerId, updates: Iterable[Any]) -> None:
        """Take in a worker's updates; those of shards that are over, or moved, are dropped."""
        now = self._clock()
        for update in updates:
            shard = self._shards.get(update.request)
            if shard is None or shard.worker != worker:
                if self._suspects.answer(worker, update):
                    self._clear(worker, update.request)
                continue
            if update.request != shard.name:
                self._on_recomputed(shard, update)
            elif update.error is not None:
                self._on_error(shard, update)
            elif update.branch in shard.open:
                self._on_update(shard, update, now)

    def _on_update(self, shard: Shard, update: Any, now: float) -> None:
        state, name, row = shard.state, shard.name, update.branch
        if update.position != shard.counts[row] and update.position >= 0:
            update = self._in_place(shard, update)
            if update is None:
                return
        if not shard.is_seen:
            shard.is_seen = True
            self._seen(shard, update, now)
        elif now - shard.touched > TOUCH_S:
            shard.touched = now
            self._router.touch(name)
        shard.counts[row] += update.num_tokens
        if update.finish is not None and (error := shard.hole(update)) is not None:
            self._fail_row(shard, row, error)
            return
        if shard.log is not None:
            shard.log.take(update)
        if update.capsule is not None:
            self._learn(shard, CapsuleId(update.capsule), update.boundary)
            state.is_made = update.capsule == state.job.makes
        elif update.finish in ("stop", "length"):
            self._break(state, not_kept())
        branch = shard.branches.start + row
        prompt = state.prompts.get(branch)
        if prompt is None:  # what a branch has cost is told as its first worker told it
            prompt = (update.cached_tokens, update.prefill_tokens)
            if shard.prompt is not None and not row:  # with the capsule that it forks
                prompt = (shard.prompt[0], shard.prompt[1] + update.prefill_tokens)
            state.prompts[branch] = prompt
        if update.injected:
            self._inboxes.settle(update.injected)
        if not state.is_internal:
            self._effects.append(Deliver(state.id, branch, shard, update, prompt))
        if update.finish is not None:
            self._end_row(shard, row)

    def _in_place(self, shard: Shard, update: Any) -> Any | None:
        """The news in an update that does not begin where its branch is, if there is any.

        Tokens that were told before are dropped; if some are missing, the branch ends.
        """
        row, had = update.branch, shard.counts[update.branch]
        if update.position < had:
            return update.after(had)
        if update.finish is None:
            is_all = shard.open == {row}
            self._send_all(shard, shard.job.abandon(shard.name, (row,), is_all=is_all))
        reason = f"{had} of {update.position} tokens arrived"
        self._fail_row(shard, row, WorkerLost(shard.worker, reason))
        return None

    def _seen(self, shard: Shard, update: Any, now: float) -> None:
        """Note the first sign of a shard: its prompt is computed, and nothing in it killed the worker."""
        self._router.first_token(shard.name)
        if shard.how == "stay":
            self._router.observe_hit(shard.name, update.cached_tokens)
        shard.touched = now
        shard.state.blame = 0
        if self._quarantine.trials:
            self._acquit(shard.dispatch)

    def _learn(
        self, shard: Shard, capsule: CapsuleId, boundary: int, *, is_computing: bool = False
    ) -> None:
        scope, hashes = owner_of(shard.job.scope), shard.dispatch.hashes
        self._router.learn_capsule(
            capsule, shard.worker, boundary, hashes, scope, is_computing=is_computing
        )

    def _on_error(self, shard: Shard, update: Any) -> None:
        """A worker ended a shard, or a row of it, with an error."""
        code, capsule = update.error[0], shard.job.capsule
        if code in _CAPSULE_GONE and capsule is not None:
            self._router.forget_capsule(capsule)
            if self._capsules.text(capsule) is not None:
                if self._config.asks_first and capsule not in self._rebuilds:
                    self._rebuilds.begin(capsule)
                    self._doubted.add(capsule)
                    self._effects.append(Missing(capsule, owner_of(shard.job.scope)))
                self._move(shard, "capsule")
                return
        error = from_wire(update.error)
        if update.branch == ALL_BRANCHES:
            self._fail_shard(shard, error)
        elif update.branch in shard.open:
            self._fail_row(shard, update.branch, error)

    # Workers

    def on_join(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """This life of `worker` can be sent to from now on."""
        self._lives[worker] = incarnation
        self._has_had_workers = True
        self._waiting.wake(None)

    def on_room(self, worker: WorkerId | None = None) -> None:
        """`worker`, or any of them, may have room, or have left: try what waits for it."""
        if worker is None:
            self._waiting.wake_all()
        else:
            self._waiting.wake(worker)

    def on_heard(self) -> None:
        """Other gateways said what they booked and freed: try what waits, if it has the turn."""
        self._waiting.on_heard()

    def on_lost(self, worker: WorkerId, reason: str, *, is_death: bool = True) -> None:
        """Nothing more comes from `worker`: what ran there goes on elsewhere.

        After a death, requests of which it had said nothing are tried one by one: one may have killed it.
        """
        self._lives.pop(worker, None)
        self._suspects.forget(worker)
        begun_no_more = self._departures.forget(worker)
        self._move_all(worker, reason, "death" if is_death else "departure")
        for capsule in begun_no_more:
            self._let_go(capsule)

    def _move_all(self, worker: WorkerId, reason: str, why: MoveReason) -> None:
        lost = list(self._by_worker.pop(worker, {}).values())
        if why != "departure":
            self._quarantine.blame(lost, self._clock())
        for shard in lost:
            self._move(shard, why, reason)
        self._waiting.wake(worker)

    def _move(self, shard: Shard, why: MoveReason, reason: str = "") -> None:
        """Place what a shard left undone again.

        If no worker has room for their capsule, forks go with their whole text.
        """
        state = shard.state
        rows = sorted(shard.open)
        self._close(shard)
        num_moves = shard.dispatch.num_moves + 1
        self.num_moved += 1
        if self._quarantine.is_poison(state):
            self._fail_rows(shard, rows, PoisonRequest(state.blame, reason))
            return
        if num_moves > self._config.max_moves:
            self._fail_rows(shard, rows, WorkerLost(shard.worker, reason))
            return
        if not state.is_internal:
            self._moved[why] += len(rows)
        fresh: list[int] = []
        for row in rows:
            if shard.counts[row] or shard.job.drawn or why == "room":
                self._resume(shard, row)
            else:
                fresh.append(row)
        for run in runs(fresh):
            self._readmit_safely(shard.rest(run))

    def _resume(self, shard: Shard, row: int) -> None:
        """Have one branch go on after its last token, on any worker."""
        state, branch = shard.state, shard.branch_of(row)
        job = self._texts.resumed(shard.job, row, shard.counts[row], shard.log)
        if job is None:
            reason = "its text so far is not known any more"
            capsule = shard.dispatch.job.capsule
            lost = (
                WorkerLost(shard.worker, reason)
                if capsule is None
                else CapsuleLost(capsule, reason)
            )
            self._fail_rows(shard, [row], lost)
            return
        hashes, num_moves = self._texts.hashes(job), shard.dispatch.num_moves + 1
        dispatch = Dispatch(
            state,
            job,
            range(branch, branch + 1),
            hashes,
            num_moves=num_moves,
            weights=shard.weights,
            lost_with=shard.worker,
        )
        self._readmit_safely(dispatch)

    # Workers that make no progress

    def _suspect_worker(self, worker: WorkerId) -> None:
        """Move what runs on a worker that hangs; it gets nothing more until it has answered a probe."""
        incarnation = self._lives[worker]
        self._router.suspend(worker, incarnation)
        if not self._router.has_workers:  # it may be slow; there is nowhere else to go
            self._router.resume(worker, incarnation)
            return
        shards = list(self._by_worker.get(worker, {}).values())
        for shard in shards:
            self._send(shard, Cancel(shard.recompute.request if shard.recompute else shard.name))
        probe = self._suspects.add(worker, incarnation)
        if probe is not None:
            self._effects.append(Send(worker, self._texts.probe(probe), None))
        self._move_all(worker, "it makes no progress", "stall")

    def _clear(self, worker: WorkerId, probe: str) -> None:
        """A suspect worker answered its probe: requests may go there again."""
        self._effects.append(Send(worker, Release(capsule_id(RequestId(probe))), None))
        self._router.resume(worker, self._lives[worker])
        if not self.is_busy(worker):
            self._suspects.unwatch(worker)
        self._waiting.wake(None)

    # Workers that drain

    def on_draining(self, worker: WorkerId) -> None:
        """`worker` takes nothing new: have the capsules that are kept there made again elsewhere.

        `LetGo` follows when that is done and nothing runs there any more, unless it is lost before.
        """
        if worker in self._departures.by_worker or worker not in self._lives:
            return
        here = self._router.capsules_of(worker)
        known = [
            c for c in here if self._texts.knows(c) and not self._router.capsule(c).is_computing
        ]
        self._departures.begin(worker, known)
        for capsule in known:
            self._rebuilds.begin(capsule)
        self._rebuild(worker)
        self._waiting.wake(worker)

    def _rebuild(self, worker: WorkerId) -> None:
        """Begin to make more of a draining worker's capsules again."""
        while (capsule := self._departures.next(worker)) is not None:
            text = self._texts.capsule_text(capsule, None)
            # One that an answer left is made again when it is forked; another gateway makes its own.
            is_own = text is not None and text.ttl_s is not None and text.is_own
            if not is_own or not self._capsules.is_fresh(capsule):
                self._let_go(capsule)
                continue
            assert text is not None
            assert text.ttl_s is not None
            is_durable = self._capsules.is_durable(capsule)
            request = self._departures.start(worker, capsule, is_durable=is_durable)
            if request is None:
                continue
            self.num_rebuilt += 1
            job = PrefillJob(
                text.tokens,
                text.scope,
                text.ttl_s,
                rebuilt=capsule,
                grammar=text.grammar,
                continuation=text.continuation,
            )
            try:
                self._submit(RequestState(request, job, self._clock(), is_internal=True))
            except MalleeError:
                self._departures.end(request)
                self._let_go(capsule)
        self._check_departed(worker)

    def _rebuilt(self, request: RequestId) -> None:
        """A capsule is on another worker now, or could not be made again."""
        worker, capsule = self._departures.end(request)
        is_fresh = self._capsules.is_fresh(capsule)
        holder = self._capsules.worker_of(capsule) if is_fresh else None
        if holder is not None and self._departures.must_secure(worker, capsule):
            self._effects.append(Rebuilt(capsule, worker, holder))
        self._let_go(capsule)
        self._rebuild(worker)

    def secured(self, worker: WorkerId, capsule: CapsuleId) -> None:
        """A durable capsule of `worker`, which drains, is durable where it was made again, or can't be."""
        self._departures.secured(worker, capsule)
        self._check_departed(worker)

    @property
    def is_rebuilding(self) -> bool:
        """Whether capsules of draining workers are being made again."""
        return bool(self._departures.num_requests)

    def forget_capsule(self, capsule: CapsuleId) -> None:
        """Make `capsule` again no more: its client released it. Its text must be forgotten before."""
        self._broken.forget(capsule)
        for request in self._departures.requests_for(capsule):
            self.cancel(request)

    def _check_departed(self, worker: WorkerId) -> None:
        if self._departures.is_done(worker) and not self.is_busy(worker):
            self._effects.append(LetGo(worker))

    # A request that may kill workers

    def _readmit_safely(self, dispatch: Dispatch) -> None:
        """Readmit it, but alone if a worker has died of it or of one beside it."""
        if not dispatch.state.blame:
            self._readmit(dispatch)
            return
        self._quarantine.add(dispatch)
        dispatch.state.waiting.append(dispatch)
        self._try_suspects()

    def _try_suspects(self) -> None:
        while (dispatch := self._quarantine.next(self._clock())) is not None:
            dispatch.state.waiting.remove(dispatch)
            self._readmit(dispatch)
            if not dispatch.is_under_way:
                self._quarantine.end(dispatch)

    def _acquit(self, dispatch: Dispatch) -> None:
        """It has drawn a token, or is over: if it was on trial, the next one may go."""
        if self._quarantine.end(dispatch):
            self._try_suspects()

    # Ends

    def close(self, error: MalleeError) -> None:
        """End every request with `error`."""
        left = self._departures.clear()
        for state in list(self._requests.values()):
            if state.id not in self._requests:
                continue  # it has failed with the capsule that it waited for
            for shard in list(state.shards.values()):
                self._close(shard)
            self._fail_branches(state, sorted(state.open), error)
        for capsule in (*left, *self._doubted):
            self._rebuilds.end(capsule)
        self._doubted.clear()

    def _end_row(self, shard: Shard, row: int) -> None:
        """A branch is over, and its client knows."""
        state = shard.state
        branch = shard.branch_of(row)
        shard.open.discard(row)
        state.open.discard(branch)
        if self._inboxes.waiting:
            self._drop_inboxes(state, (branch,))
        if not shard.open:
            self._close(shard)
        if not state.open:
            self._end(state)

    def _fail_shard(self, shard: Shard, error: MalleeError) -> None:
        rows = sorted(shard.open)
        self._close(shard)
        self._fail_rows(shard, rows, error)

    def _fail_row(self, shard: Shard, row: int, error: MalleeError) -> None:
        shard.open.discard(row)
        if not shard.open:
            self._close(shard)
        self._fail_rows(shard, [row], error)

    def _fail_rows(self, shard: Shard, rows: Sequence[int], error: MalleeError) -> None:
        self._fail_branches(shard.state, [shard.branch_of(row) for row in rows], error)

    def _fail_dispatch(self, dispatch: Dispatch, error: MalleeError) -> None:
        """End the branches of a dispatch that is placed no more."""
        state = dispatch.state
        if dispatch in state.waiting:
            state.waiting.remove(dispatch)
            self._rebuilds.discard(dispatch)
        self._fail_branches(state, dispatch.branches, error)
        self._acquit(dispatch)

    def _fail_branches(
        self, state: RequestState, branches: Iterable[int], error: MalleeError
    ) -> None:
        self._break(state, error)
        if state.home is None:  # it waited as a whole
            self._drop_inboxes(state, state.open)
            state.open.clear()
            self._tell(state, Refused(state.id, error))
        for branch in branches:
            if branch in state.open:
                state.open.discard(branch)
                self._drop_inboxes(state, (branch,))
                self._tell(state, Failed(state.id, branch, error))
        if not state.open:
            self._end(state)

    def _close(self, shard: Shard) -> None:
        """Forget a shard that is over, and free its booking."""
        name, state = shard.name, shard.state
        if state.shards.pop(name, None) is None:
            return
        self._router.free(name)
        del self._shards[name]
        if shard.job.makes is not None and not state.is_made:
            self._recall(shard, shard.job.makes)
        here = self._by_worker.get(shard.worker)
        if here is not None:
            here.pop(name, None)
            if not here:
                del self._by_worker[shard.worker]
                self._suspects.unwatch(shard.worker)
                if self._departures.by_worker:
                    self._check_departed(shard.worker)
        if (recompute := shard.recompute) is not None:
            shard.recompute = None
            del self._shards[recompute.request]
            if recompute.lost:
                self._let_go(recompute.capsule)
        if self._tickets:
            self._waiting.wake(shard.worker)
        if self._quarantine.trials:
            self._acquit(shard.dispatch)

    def _end(self, state: RequestState) -> None:
        """Forget a request none of whose branches is open."""
        if self._requests.pop(state.id, None) is None:
            return
        for dispatch in list(state.waiting):
            self._forget(dispatch)
        self._tell(state, Ended(state.id))
        if state.job.makes is not None:
            self._end_promise(state, state.job.makes)
        if state.is_internal:
            self._rebuilt(state.id)

    def _forget(self, dispatch: Dispatch) -> None:
        """Have a dispatch wait no more; ignored if it does not."""
        if dispatch not in dispatch.state.waiting:
            return  # the end of another one has just let it go
        dispatch.state.waiting.remove(dispatch)
        self._waiting.cancel(dispatch)
        self._quarantine.discard(dispatch)
        self._rebuilds.discard(dispatch)
        self._acquit(dispatch)

    # The shell

    def effects(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    def on_time(self) -> None:
        """Do what is due."""
        self._try_suspects()
        self._waiting.on_time()
        for worker in self._suspects.stalled(self._clock(), self._quarantine.workers()):
            self._suspect_worker(worker)

    def next_time(self) -> float | None:
        """The time to call `on_time` next; None: not before something else happens."""
        first = self._suspects.next_time()
        if self._tickets or self._quarantine.lost:
            for at in (self._waiting.next_time(), self._quarantine.next_time()):
                if at is not None and (first is None or at < first):
                    first = at
        return first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests of clients that are not over, those that wait among them."""
        return len(self._requests) - self._departures.num_requests

    def stats(self) -> DispatchStats:
        return DispatchStats(dict(self._moved), self.num_rebuilt)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant. O(everything)."""
        self._waiting.check()
        self._check_waits()
        assert self._inboxes.requests() <= set(self._requests), "tokens for what is over"
        for state in self._requests.values():
            assert state.open, f"{state.id} has ended and is kept"
            covered = [b for d in state.waiting for b in d.branches if b in state.open]
            covered += [s.branch_of(row) for s in state.shards.values() for row in s.open]
            assert sorted(covered) == sorted(state.open), f"branches of {state.id}"
        for name, shard in self._shards.items():
            assert shard.state.shards.get(shard.name) is shard, f"{name} belongs to no request"
            assert shard.open, f"{name} has no row left"
            assert self._by_worker[shard.worker][shard.name] is shard, f"{name} is misfiled"

    def _check_waits(self) -> None:
        """Each waiting dispatch is in a lane, with a deadline, or in quarantine."""
        in_lanes = {d for d in self._waiting.queue.tickets if isinstance(d, Dispatch)}
        held = self._rebuilds.held()
        assert held == {d for d in in_lanes if d.lane == HELD}, "held, or waiting for room"
        waiting = {d for state in self._requests.values() for d in state.waiting}
        assert waiting == in_lanes | self._quarantine.waiting(), "a dispatch waits nowhere"
        assert not in_lanes & self._quarantine.waiting(), "a dispatch waits twice"
        made = {
            s.recompute.capsule for s in self._shards.values() if s.recompute and s.recompute.lost
        }
        promised, unplaced = self._promised()
        under_way = set(self._rebuilds)
        assert made | self._departures.capsules() | unplaced <= under_way, "capsules not under way"
        wanted = made | self._departures.capsules() | promised | self._doubted
        assert self._doubted <= under_way <= wanted, "held for nothing"
        assert all(each.is_under_way for each in self._quarantine.trials), "a trial is over"

    def _promised(self) -> tuple[set[CapsuleId], set[CapsuleId]]:
        """The capsules that are promised, and those of them that are on no worker."""
        states = [state for state in self._requests.values() if state.job.makes is not None]
        makes = {state: state.job.makes for state in states if state.job.makes is not None}
        return set(makes.values()), {c for state, c in makes.items() if not state.shards}

    def _tell(self, state: RequestState, effect: Effect) -> None:
        """Tell the client, if the request is one's."""
        if not state.is_internal:
            self._effects.append(effect)

    def _send(self, shard: Shard, command: Command) -> None:
        self._effects.append(Send(shard.worker, command, shard))

    def _send_all(self, shard: Shard, commands: Iterable[Command]) -> None:
        for command in commands:
            self._send(shard, command)


def _borrows_capsule(part: Part) -> bool:
    """Whether the rows of `part` go on from a copy of their capsule that its worker lends."""
    pull = part.placement.pull
    return pull is not None and any(holder.capsule for holder in pull.holders)
