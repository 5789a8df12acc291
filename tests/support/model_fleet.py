"""A dispatcher over workers that draw tokens by a rule, and an oracle of the undisturbed answers.

A worker's next token is a pure function of the text before it, the seed and the position. What workers
say waits in a queue until it is delivered; commands wait until the worker's next step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import CapsuleAbandoned, CapsulesFull, MalleeError, UnknownCapsule
from mallee.protocol.events import Lease
from mallee.protocol.ids import CapsuleId, Incarnation, RequestId, WorkerId, branch_seed, capsule_id
from mallee.protocol.messages import (
    ALL_BRANCHES,
    MAX_HOLDERS,
    Cancel,
    Command,
    Fork,
    Frame,
    Generate,
    Holder,
    Limits,
    Prefill,
    Release,
    Sampling,
    Update,
    unpack_tokens,
)
from mallee.router.config import CostModel, RouterConfig, SpillModel
from mallee.router.dispatch.dispatcher import DispatchConfig, Dispatcher
from mallee.router.dispatch.effects import Deliver, Ended, Failed, LetGo, Placed, Refused, Send
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, Job, PrefillJob
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.router.dispatch.shards import RequestState
from mallee.router.dispatch.texts import TokenTexts
from mallee.router.dispatch.token_memory import TokenMemory
from mallee.router.router import Router

BLOCK = 4
VOCABULARY = 50
STOP = 7  # a token at which answers may end


def next_token(text: Sequence[int], sampling: Sampling, seed: int) -> int:
    """The token after `text`."""
    key = [*text] if not sampling.temperature else [*text, seed, len(text)]
    raw = np.array(key, dtype=np.uint64).tobytes()
    return xxhash.xxh3_64_intdigest(raw) % VOCABULARY


def is_end(token: int, num_drawn: int, limits: Limits) -> str | None:
    """The reason why a branch ends with `token`, its `num_drawn`-th; None if it goes on."""
    if token in limits.stop_token_ids and num_drawn > limits.min_tokens:
        return "stop"
    return "length" if num_drawn >= limits.max_tokens else None


def undisturbed(text: Sequence[int], limits: Limits, sampling: Sampling, seed: int) -> list[int]:
    """The answer to `text`."""
    whole = list(text)
    while True:
        whole.append(next_token(whole, sampling, seed))
        if is_end(whole[-1], len(whole) - len(text), limits):
            return whole[len(text) :]


@dataclass
class Row:
    """A running branch."""

    text: list[int]
    num_drawn: int
    seed: int
    limits: Limits
    sampling: Sampling
    capsule: CapsuleId
    cached: int
    computed: int
    num_told: int = 0  # tokens


@dataclass
class Making:
    """A capsule that is being computed, and the forks that wait for its tokens."""

    command: Prefill
    text: list[int]
    num_done: int = 0
    forks: list[Fork] = field(default_factory=list)


@dataclass(eq=False)
class ModelWorker:
    """One life of a worker. `max_kept` requested capsules at most.

    A prefill computes `chunk` tokens a step; 0: all of them in the step that takes it. `borrow` gives the
    text of a capsule that another worker lends, or None.
    """

    name: WorkerId
    life: Incarnation
    max_kept: int
    borrow: Callable[[Holder], list[int] | None]
    chunk: int = 0
    making: dict[CapsuleId, Making] = field(default_factory=dict)
    inbox: list[Command] = field(default_factory=list)
    outbox: list[Frame] = field(default_factory=list)
    rows: dict[str, dict[int, Row]] = field(default_factory=dict)
    capsules: dict[CapsuleId, list[int]] = field(default_factory=dict)
    kept: set[CapsuleId] = field(default_factory=set)  # those of prefills
    num_steps: int = 0
    is_hung: bool = False
    is_stopped: bool = False  # as if hung, and without heartbeats
    _news: list[Update] = field(default_factory=list)

    def step(self, split: Callable[[], int]) -> None:
        """Take what came, then draw `split()` tokens in each row; one frame tells of all."""
        if self.is_hung or self.is_stopped:
            return
        commands, self.inbox = self.inbox, []
        for command in commands:
            self._take(command)
        for capsule in list(self.making):
            self._compute(capsule)
        for request, rows in list(self.rows.items()):
            for branch, row in list(rows.items()):
                self._draw(request, branch, row, split())
        self.num_steps += 1
        if self._news:
            self.outbox.append(Frame(self.num_steps, tuple(self._news)))
            self._news = []

    def _draw(self, request: str, branch: int, row: Row, num: int) -> None:
        drawn: list[int] = []
        finish = None
        while len(drawn) < num and finish is None:
            token = next_token(row.text, row.sampling, row.seed)
            row.text.append(token)
            drawn.append(token)
            row.num_drawn += 1
            finish = is_end(token, row.num_drawn, row.limits)
        if finish is None:
            if drawn:
                self._tell(request, branch, tuple(drawn), None, row)
            return
        self.capsules[row.capsule] = row.text
        self._tell(request, branch, tuple(drawn), finish, row)
        self._end(request, branch)

    def _tell(
        self, request: str, branch: int, drawn: tuple[int, ...], finish: str | None, row: Row
    ) -> None:
        is_left = finish in ("stop", "length")
        left = (row.capsule, len(row.text)) if is_left else (None, 0)
        told = (request, branch, drawn, finish, row.cached, row.computed, *left)
        self._news.append(Update(*told, position=row.num_told))
        row.num_told += len(drawn)

    def _end(self, request: str, branch: int) -> None:
        rows = self.rows[request]
        del rows[branch]
        if not rows:
            del self.rows[request]

    def _take(self, command: Command) -> None:
        match command:
            case Generate(request=request):
                text = [int(token) for token in unpack_tokens(command.tokens)]
                assert command.drawn < command.limits.max_tokens
                assert command.n == 1 or not command.drawn
                self.rows[request] = {
                    i: self._row(command, i, text, 0 if i else len(text)) for i in range(command.n)
                }
            case Fork(request=request, capsule=capsule):
                making, found = (
                    each.get(CapsuleId(capsule)) for each in (self.making, self.capsules)
                )
                if isinstance(making, Making):
                    making.forks.append(command)
                elif isinstance(found, list):
                    self._fork(command, found)
                else:
                    self._refuse(request, UnknownCapsule(CapsuleId(capsule)))
            case Prefill(request=request):
                self._prefill(command)
            case Cancel(request=request, branch=branch):
                self._cancel(request, branch)
            case Release(capsule=capsule):
                self.drop(CapsuleId(capsule))

    def _fork(self, command: Fork, found: list[int]) -> None:
        begun = found if command.at is None else found[: command.at]
        self.rows[command.request] = {}
        for i, suffix in enumerate(command.suffixes):
            text = [*begun, *(int(token) for token in unpack_tokens(suffix))]
            self.rows[command.request][i] = self._row(command, i, text, len(text) - len(begun))

    def _row(self, command: Generate | Fork, i: int, text: list[int], computed: int) -> Row:
        seed = branch_seed(command.sampling.seed, command.first_branch + i)
        drawn = command.drawn if isinstance(command, Generate) else 0
        capsule = capsule_id(RequestId(command.request), i)
        more = (list(text), drawn, seed, command.limits, command.sampling, capsule)
        return Row(*more, len(text) - computed, computed)

    def _prefill(self, command: Prefill) -> None:
        capsule = CapsuleId(command.capsule or capsule_id(RequestId(command.request)))
        if not command.replaceable and len(self.kept) >= self.max_kept:
            self._refuse(command.request, CapsulesFull(1, 1, 1))
            return
        text = [int(token) for token in unpack_tokens(command.tokens)]
        assert capsule not in self.making, "it computes that already"
        self.making[capsule] = Making(command, text)
        if not self.chunk:
            self._made(command, text)

    def _compute(self, capsule: CapsuleId) -> None:
        """One step of a prefill: forks begin as their tokens are there."""
        making = self.making[capsule]
        making.num_done = min(len(making.text), making.num_done + self.chunk)
        is_whole = making.num_done == len(making.text)
        if is_whole:
            self._made(making.command, making.text)
        waiting, making.forks = making.forks, []
        for fork in waiting:
            if (fork.at or len(making.text)) <= making.num_done:
                self._fork(fork, making.text)
            else:
                making.forks.append(fork)

    def _made(self, command: Prefill, text: list[int]) -> None:
        capsule = CapsuleId(command.capsule or capsule_id(RequestId(command.request)))
        del self.making[capsule]
        num, lent = len(text), [self.borrow(each) for each in command.holders if each.capsule]
        self.capsules[capsule] = text
        if not command.replaceable:
            self.kept.add(capsule)
        cached = num if text in lent else 0
        told = (command.request, 0, (), "stop", cached, num - cached)
        self._news.append(Update(*told, capsule=capsule, boundary=num))

    def _cancel(self, request: str, branch: int | None) -> None:
        for capsule, making in list(self.making.items()):
            if making.command.request == request:
                self._news.append(Update(request, 0, finish="cancelled"))
                del self.making[capsule]
                for fork in making.forks:
                    for i in range(len(fork.suffixes)):
                        error = CapsuleAbandoned(capsule).to_wire()
                        self._news.append(Update(fork.request, i, finish="error", error=error))
            making.forks = [fork for fork in making.forks if fork.request != request]
        for i in list(self.rows.get(request, {})):
            if branch in (None, i):
                self._tell(request, i, (), "cancelled", self.rows[request][i])
                self._end(request, i)

    @property
    def computing(self) -> set[str]:
        """Requests for capsules that are computed, and for their tokens."""
        forks = {fork.request for making in self.making.values() for fork in making.forks}
        return forks | {making.command.request for making in self.making.values()}

    def _refuse(self, request: str, error: MalleeError) -> None:
        self._news.append(Update(request, ALL_BRANCHES, finish="error", error=error.to_wire()))

    def drop(self, capsule: CapsuleId) -> None:
        self.capsules.pop(capsule, None)
        self.kept.discard(capsule)


def address_of(worker: ModelWorker) -> str:
    return f"tcp:{worker.name}:{worker.life}"


@dataclass
class Asked:
    """A request, and what its client has."""

    job: Job
    texts: list[list[int]]  # of each branch, before its answer
    got: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)  # by branch: reason, or an error's code
    errors: dict[int, MalleeError] = field(default_factory=dict)
    capsules: dict[int, CapsuleId] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    workers: list[WorkerId] = field(default_factory=list)  # of its shards, in order
    is_over: bool = False

    @property
    def open(self) -> set[int]:
        return set(range(len(self.texts))) - self.ends.keys() - self.cancelled


class Rules(NamedTuple):
    """Of a fleet."""

    max_rows: int = 4
    max_kept: int = 6
    max_waiting: int = 64
    max_wait_s: float = 60.0
    max_moves: int = 16
    patience_s: float | None = 3.0
    lends: bool = False  # workers lend each other KV
    chunk: int = 0  # tokens of a prefill that a worker computes in a step; 0: all


class ModelFleet:
    """A dispatcher and its workers; every call is followed by all checks."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.now = 100.0
        self.workers: dict[WorkerId, ModelWorker] = {}
        self.leaving: set[WorkerId] = set()
        self.asked: dict[RequestId, Asked] = {}
        self.texts: dict[CapsuleId, list[int]] = {}
        self.is_requested: set[CapsuleId] = set()
        self._num_lives = 0
        self.commands: list[Command] = []  # all that were sent
        model = mock_spec(vocab_size=VOCABULARY)
        routing = RouterConfig(
            block_size=BLOCK,
            lease_s=1e9,
            booking_s=1e9,
            spill=SpillModel(1e-6, 1e-12, min_gain=0.0, min_gain_fitting=0.0),
            cost=CostModel(prefill_weight=1.0),
        )
        self.router = Router(routing, clock=lambda: self.now)
        self.memory = TokenMemory(1 << 20)
        self.dispatcher = Dispatcher(
            self.router,
            TokenTexts(self.memory, model, BLOCK),
            DispatchConfig(
                AdmissionConfig(
                    max_waiting=self.rules.max_waiting, max_wait_s=self.rules.max_wait_s
                ),
                max_moves=self.rules.max_moves,
                patience_s=self.rules.patience_s,
            ),
            clock=lambda: self.now,
        )

    # Workers

    def join(self, name: str) -> ModelWorker:
        self._num_lives += 1
        worker, life = WorkerId(name), Incarnation(self._num_lives)
        made = ModelWorker(worker, life, self.rules.max_kept, self.borrow, self.rules.chunk)
        self.workers[worker] = made
        self.lease(made)
        self.dispatcher.on_join(worker, life)
        self.carry_out()
        return made

    def lease(self, worker: ModelWorker) -> None:
        self.router.on_lease(
            Lease(
                *(worker.name, worker.life, address_of(worker), "mock", "mock", BLOCK, 4096),
                *(self.rules.max_rows, 1 << 20, 0),
                is_draining=worker.name in self.leaving,
                serves_kv=self.rules.lends,
            )
        )

    def borrow(self, holder: Holder) -> list[int] | None:
        """The text of a capsule that a live worker lends."""
        worker = self.workers.get(WorkerId(holder.worker))
        if worker is None or worker.life != holder.incarnation or worker.is_stopped:
            return None
        return worker.capsules.get(CapsuleId(holder.capsule))

    def die(self, worker: ModelWorker, *, is_death: bool = True) -> None:
        """Its process ends; without `is_death` as it had said that it would."""
        del self.workers[worker.name]
        self.leaving.discard(worker.name)
        self.router.lose_worker(worker.name, worker.life)
        self.dispatcher.on_lost(worker.name, "it died", is_death=is_death)
        self.carry_out()

    def drain(self, worker: ModelWorker) -> None:
        """It gets no more requests, and what runs goes on; it leaves when the dispatcher lets it go."""
        self.leaving.add(worker.name)
        self.lease(worker)
        self.dispatcher.on_draining(worker.name)
        self.carry_out()

    def evict(self, worker: ModelWorker, capsule: CapsuleId, *, is_told: bool) -> None:
        """The worker has room for it no more."""
        worker.drop(capsule)
        if is_told:
            self.router.forget_capsule(capsule)

    def step(self, worker: ModelWorker, split: Callable[[], int] = lambda: 1) -> None:
        worker.step(split)

    def deliver(self, worker: ModelWorker, num: int = 1 << 30) -> None:
        for _ in range(min(num, len(worker.outbox))):
            self.hear(worker.name, worker.outbox.pop(0))

    def hear(self, worker: WorkerId, frame: Frame) -> None:
        self.dispatcher.on_frame(worker, frame.step, frame.updates)
        self.carry_out()

    # Requests

    def submit(self, name: str, job: Job) -> Asked | None:
        """None if it is refused at once: `refusal` says why."""
        request = RequestId(name)
        asked = Asked(job, self._texts_of(job))
        self.asked[request] = asked
        if job.makes is not None:
            self.texts[job.makes] = asked.texts[0]
        self.refusal: MalleeError | None = None
        try:
            self.dispatcher.submit(request, job)
        except MalleeError as error:
            del self.asked[request]
            self.refusal = error
            self.carry_out()
            return None
        self.carry_out()
        return asked

    def _texts_of(self, job: Job) -> list[list[int]]:
        if isinstance(job, ForkJob):
            begun = self.texts[job.capsule][: job.at]
            return [[*begun, *map(int, suffix)] for suffix in job.suffixes]
        assert isinstance(job, GenerateJob | PrefillJob)
        return [list(map(int, job.tokens))] * job.num_branches

    def cancel(self, request: RequestId, branch: int | None) -> None:
        asked = self.asked[request]
        asked.cancelled |= asked.open if branch is None else asked.open & {branch}
        self.dispatcher.cancel(request, branch)
        self.carry_out()

    def wait(self, seconds: float) -> None:
        """Time passes; workers with something to do beat each second, unless they are stopped."""
        end = self.now + seconds
        while self.now < end:
            self._wait_until(min(end, self.now + 1.0))
            for worker in list(self.workers.values()):
                is_busy = worker.rows or worker.inbox or worker.making
                # What it said before would be delivered before.
                if is_busy and not worker.is_stopped and not worker.outbox:
                    self.hear(worker.name, Frame(worker.num_steps, ()))

    def _wait_until(self, end: float) -> None:
        """The dispatcher is called when it wants to be."""
        for _ in range(1000):
            at = self.dispatcher.next_time()
            if at is None or at > end:
                break
            self.now = max(self.now, at)
            self.dispatcher.on_time()
            if self.dispatcher._effects:
                self.carry_out()
        else:
            raise AssertionError("it wants to be called again and again")
        self.now = end
        self.carry_out()

    # Effects

    def carry_out(self) -> None:
        let_go = []
        for effect in self.dispatcher.effects():
            match effect:
                case Send(worker=worker, command=command):
                    self.commands.append(command)
                    self._check_holders(worker, command)
                    if (here := self.workers.get(worker)) is not None:
                        here.inbox.append(command)
                case Placed(request=request, placement=placement):
                    assert not self.asked[request].is_over
                    self.asked[request].workers.append(placement.worker)
                case Deliver():
                    self._deliver(self.asked[effect.request], effect)
                case Failed(request=request, branch=branch, error=error):
                    self._end(self.asked[request], branch, error.code)
                    self.asked[request].errors[branch] = error
                case Refused(request=request, error=error):
                    asked = self.asked[request]
                    for branch in asked.open:
                        self._end(asked, branch, error.code)
                        asked.errors[branch] = error
                case Ended(request=request):
                    asked = self.asked[request]
                    assert not asked.is_over, "it ended twice"
                    assert not asked.open, "a branch was forgotten"
                    asked.is_over = True
                case LetGo(worker=worker):
                    let_go.append(worker)
        self.check()
        for worker in let_go:
            if worker in self.leaving and not self.dispatcher.is_busy(worker):
                self.die(self.workers[worker], is_death=False)

    def _end(self, asked: Asked, branch: int, reason: str) -> None:
        assert not asked.is_over
        assert branch in asked.open, f"branch {branch} ended twice, or after it was cancelled"
        asked.ends[branch] = reason

    def _deliver(self, asked: Asked, effect: Deliver) -> None:
        update, branch = effect.update, effect.branch
        assert branch in asked.open, "news after the end"
        got = asked.got.setdefault(branch, [])
        got += update.tokens
        if update.capsule is not None:
            self.texts[update.capsule] = asked.texts[branch] + got
            asked.capsules[branch] = update.capsule
            if isinstance(asked.job, PrefillJob):
                assert asked.job.makes in (None, update.capsule), "it was promised another id"
                self.is_requested.add(update.capsule)
        if isinstance(asked.job, PrefillJob):
            assert not got
        else:
            whole = self.expected(asked, branch)
            assert got == whole[: len(got)], "not a prefix of the undisturbed answer"
            if update.finish is not None:
                assert got == whole, "the answer ended early"
        if update.finish is not None:
            assert update.capsule is not None
            assert update.boundary == len(self.texts[update.capsule])
            self._end(asked, branch, update.finish)

    def expected(self, asked: Asked, branch: int) -> list[int]:
        job = asked.job
        assert isinstance(job, GenerateJob | ForkJob)
        seed = branch_seed(job.sampling.seed, branch)
        return undisturbed(asked.texts[branch], job.limits, job.sampling, seed)

    # Checks

    def _check_holders(self, target: WorkerId, command: Command) -> None:
        """Holders are lives that can be asked now, and none is named that lends nothing."""
        holders = command.holders if isinstance(command, Prefill | Generate) else ()
        assert len(holders) <= MAX_HOLDERS
        for holder in holders:
            assert self.rules.lends
            assert holder.worker != target, "it would ask itself"
            worker = self.workers[WorkerId(holder.worker)]
            assert (worker.life, address_of(worker)) == (holder.incarnation, holder.address)

    def check(self) -> None:
        dispatcher = self.dispatcher
        dispatcher.check()
        self.memory.check()
        shards = {shard.name: shard for shard in dispatcher._shards.values()}
        stats = self.router.stats()
        assert stats.booked_requests == len(shards), "bookings without a shard, or the reverse"
        for name, shard in shards.items():
            worker = self.workers.get(shard.worker)
            assert worker is not None, f"{name} waits for a worker that is gone"
            assert worker.life == shard.incarnation
            names = {name} if shard.recompute is None else {shard.recompute.request}
            told = {each.request for frame in worker.outbox for each in frame.updates}
            known = {getattr(command, "request", "") for command in worker.inbox}
            there = told | known | worker.rows.keys() | worker.computing
            assert names & there, f"{name} is not on its worker"
        for state in dispatcher._requests.values():
            if not state.is_internal:
                assert self.asked[state.id].open == state.open
            self._check_waiting(state)

    def _check_waiting(self, state: RequestState) -> None:
        """Nothing waits for ever, nor for longer than it may."""
        dispatcher = self.dispatcher
        trials = dispatcher._quarantine.waiting()
        for dispatch in state.waiting:
            if dispatch in trials:
                assert dispatcher._quarantine.trials or dispatcher.next_time() is not None
                continue
            assert dispatch.queued_at is not None
            limits_s = [self.rules.max_wait_s]
            if not dispatch.is_moved and dispatch.job.terms.deadline_s is not None:
                limits_s.append(dispatch.job.terms.deadline_s)
            end = dispatch.queued_at + min(limits_s)
            at = dispatcher.next_time()
            assert at is not None, f"{state.id} waits for nothing"
            assert at <= end, f"{state.id} waits too long"

    def settle(self, split: Callable[[], int] = lambda: 1) -> None:
        """Let everything come to its end: nothing hangs, a worker is there, what is said arrives."""
        for worker in self.workers.values():
            worker.is_hung = worker.is_stopped = False
        if not set(self.workers) - self.leaving:
            self.join("w9")
        for _ in range(3000):
            for worker in list(self.workers.values()):
                self.step(worker, split)
                self.deliver(worker)
            self.wait(0.1)
            is_idle = not self.dispatcher.num_running and not self.dispatcher.is_rebuilding
            if is_idle and not any(
                worker.inbox or worker.outbox or worker.making for worker in self.workers.values()
            ):
                break
        else:
            raise AssertionError(f"{list(self.dispatcher._requests)} are left")
        self.is_clean()

    def is_clean(self) -> None:
        """Nothing is left anywhere."""
        dispatcher = self.dispatcher
        assert all(asked.is_over for asked in self.asked.values())
        assert not dispatcher._shards
        assert not set(dispatcher._rebuilds)
        assert not dispatcher._quarantine.waiting()
        assert not dispatcher._quarantine.trials
        assert not dispatcher._by_worker
        assert not len(dispatcher._suspects)
        assert not dispatcher._departures.capsules()
        assert not len(dispatcher._waiting)
        stats = self.router.stats()
        assert stats.booked_requests == stats.booked_rows == 0
        for worker in self.workers.values():
            assert not worker.rows, f"{worker.name} computes for nobody"
