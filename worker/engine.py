"""The engine: commands in, one step at a time, frames and cache events out.

Owns the pool, the tree, the scheduler and the capsules of one worker; computes through a `Forward`.
Single-threaded, no I/O, no clock of its own: equal commands between equal steps give equal results.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np

from mallee.protocol.errors import (
    CorruptKV,
    DeviceMemoryExhausted,
    MalleeError,
)
from mallee.protocol.events import EventBatch, Load, Snapshot, pack_hashes
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    Cancel,
    CapsuleReply,
    CapsuleStatus,
    Capture,
    Command,
    Cut,
    Delete,
    Demote,
    Fork,
    Generate,
    Grammar,
    Inject,
    Inspect,
    Pin,
    Prefill,
    Prioritize,
    Promote,
    Release,
    Rewind,
)
from mallee.protocol.model import ModelSpec
from mallee.worker import updates as debug_log
from mallee.worker.admission import Intake
from mallee.worker.ahead import AheadPasses, AheadStats
from mallee.worker.capsule_commands import CapsuleCommands, PeerCapsules
from mallee.worker.capsules.capsule import Capsule
from mallee.worker.capsules.moves import CapsuleMoves
from mallee.worker.capsules.registry import CapsuleLimits, CapsuleRegistry
from mallee.worker.forward import (
    DeviceForward,
    Drawing,
    Forward,
    Logits,
    LogprobQuery,
    Structures,
)
from mallee.worker.gaps import HostGap, WorkGaps
from mallee.worker.kv.audit import Leak, check_tree, find_leaks
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.text import Text
from mallee.worker.kv.usage import TreeUsage
from mallee.worker.kv.watch import KVMemory
from mallee.worker.passes import ForwardPasses, Passes, StepWatch
from mallee.worker.records import (
    EngineConfig,
    EngineStats,
    StepResult,
    engine_use,
    make_retention,
    make_tree,
    state_use,
)
from mallee.worker.requests import RequestTable, count_holds, memory_usage
from mallee.worker.sampling import Drafted, Sampled, Scored, StepSampler
from mallee.worker.sched.branch import Branch, node_of
from mallee.worker.sched.plan import Plan
from mallee.worker.sched.scheduler import Scheduler
from mallee.worker.speculation.drafters import Drafter
from mallee.worker.speculation.speculator import SpeculationStats, Speculator
from mallee.worker.transfer.disk import DiskStore
from mallee.worker.transfer.loans import Loans
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.values import DISK, HOST, Ask, Loan

MakeTiers: TypeAlias = Callable[[Journal, KVMemory], LowerTiers]
"""Makes the tiers below a device whose blocks are that memory."""


class Engine:
    """One worker's engine. `submit` between steps, `step` while `has_work`; all from one thread."""

    def __init__(
        self,
        forward: Forward,
        *,
        device: DeviceForward | None = None,
        config: EngineConfig,
        clock: Callable[[], float],
        worker: WorkerId,
        incarnation: Incarnation,
        structures: Structures[Any] | None = None,
        passes: Passes | None = None,
        report_fault: Callable[[CorruptKV], None] = lambda error: None,
        below: MakeTiers | None = None,
        watch: StepWatch | None = None,
        draft_model: Drafter | None = None,
        gaps: WorkGaps | None = None,
    ) -> None:
        """Without `structures` no answer can be constrained by a grammar, without `below` nothing lies
        below the device: its end closes it.

        `device` is `forward` again, if it computes beside the host: passes are launched ahead there.
        The mocker has `passes` of its own. `watch` is told of the phases of each step.
        `report_fault` gets what checks of the KV memory find, before anything is done about it.
        `draft_model` drafts, if the settings want one to. `gaps`: of the work of `forward`, for statistics.
        """
        self.config = config
        self.worker = worker
        self.incarnation = incarnation
        self._forward = forward
        self._journal = Journal()
        config.scheduler.validate(forward.spec.max_model_len)
        self._ahead: AheadPasses | None = None
        if device is not None and config.may_launch_ahead:
            self._ahead = AheadPasses(device)
        self._passes: Passes = passes or self._ahead or ForwardPasses(forward)
        self._clock = clock
        self._watch = watch
        self._gaps = gaps
        self._lower = below(self._journal, forward.memory) if below is not None else None
        retention = make_retention(config, forward.num_blocks, clock=clock)
        self._tree = make_tree(
            config,
            forward,
            self._journal,
            self._passes.notation,
            report_fault,
            retention=retention,
            lower=self._lower,
        )
        limits = CapsuleLimits(
            max_replaceable=config.max_answer_capsules,
            max_kept_blocks=int(config.max_kept_share * self._tree.pool.num_blocks),
            max_parked_nbytes=config.max_below_nbytes,
            row_blocks=-(-forward.row_nbytes // self.kv_bytes(1)),
            row_nbytes=forward.row_nbytes,
            state_nbytes=forward.spec.state_nbytes,
        )
        self._capsules = CapsuleRegistry(
            self._tree, self._journal, limits, clock=clock, lower=self._lower
        )
        peer_capsules = PeerCapsules(self._tree, forward)
        self._scheduler = Scheduler(
            config.scheduler,
            self._tree,
            reclaimer=self._capsules,
            lower=self._lower,
            reader=peer_capsules,
        )
        self._fetching = self._scheduler.fetching
        self._moves = CapsuleMoves(
            self._tree, self._capsules, self._lower, forward, self._scheduler
        )
        self._sampler = StepSampler(
            forward,
            structures,
            overlaps=config.overlap,
            device=None if self._ahead is None else device,
        )
        self._speculator: Speculator | None = None
        if config.speculation.drafters != "off" or draft_model is not None:
            trim, room = self._sampler.trim, self._scheduler.blocks.stretch_for_draft
            self._speculator = Speculator(
                config.speculation, trim=trim, room=room, model=draft_model
            )
        self._updates = self._passes.updates
        self._requests = RequestTable(
            self._tree,
            self._scheduler,
            self._capsules,
            self._moves,
            self._updates,
            retention=retention,
            block_nbytes=self.kv_bytes(1),
        )
        self._intake = Intake(
            forward.spec,
            self._tree,
            headroom_tokens=config.scheduler.headroom_tokens,
            scheduler=self._scheduler,
            sampler=self._sampler,
            capsules=self._capsules,
            moves=self._moves,
            requests=self._requests,
        )
        self._next_seq = 0
        self._loans = Loans(
            self._tree,
            self._lower,
            forward.memory,
            self._moves.lent,
            worker=worker,
            incarnation=incarnation,
            identity=peer_capsules.identity,
            clock=clock,
        )
        self._capsule_commands = CapsuleCommands(
            self._tree,
            self._capsules,
            self._moves,
            self._loans,
            requests=self._requests,
            updates=self._updates,
            block_nbytes=self.kv_bytes(1),
        )
        if self._lower is not None:
            records = self._lower.records()
            self._lower.announce([key for raw in records for key in self._moves.adopt(raw)])
        self._num_steps = 0
        self._num_prefill = self._num_output = 0

    # Commands

    def submit(self, command: Command, gateway: str) -> MalleeError | None:
        """Take a command. A refusal comes back as an update with finish "error".

        Returned is a refusal that no update tells: the command names a request that runs for this
        gateway, and the update would end that one.
        """
        self._scheduler.is_stalled = False
        try:
            match command:
                case Fork():  # first, as they come by the thousand
                    self._intake.fork(command, gateway)
                    if command.loans and self._capsules.peek(command.capsule) is not None:
                        self._loans.make_ready(command.capsule, command.loans)
                case Cancel():
                    self._requests.cancel(command)
                case Release():
                    self._capsules.release(command.capsule)
                case Prefill() | Generate():
                    self._intake.open(command, gateway)
                case Inject():
                    self._inject(command, gateway)
                case Prioritize():
                    self._requests.prioritize(command)
                case Cut():
                    self._requests.cut(command, gateway)
                case Capture() | Rewind() | Pin() | Inspect() | Demote() | Promote() | Delete():
                    self._capsule_commands.submit(command, gateway)
                    return None
        except MalleeError as error:
            request = command.capsule if isinstance(command, Release) else command.request
            job = self._requests.jobs.get(request)
            if job is not None and job.gateway == gateway:
                return error
            self._updates.refuse(gateway, request, error)
        return None

    def _inject(self, command: Inject, gateway: str) -> None:
        try:
            self._requests.inject(command, gateway)
        except MalleeError as error:
            self._updates.reply(gateway, CapsuleReply(command.request, error=error.to_wire()))

    def lend(self, ask: Ask, answer: Callable[[Loan | MalleeError], None]) -> None:
        """See `CapsuleCommands.lend`."""
        self._scheduler.is_stalled = False
        self._capsule_commands.lend(ask, answer)

    def take_loan(self, ask: Ask) -> Loan | None:
        """The loan that is asked for, if it was made ahead (`Fork.loans`). From any thread.

        Raises IncompatibleCapsule, WorkerLost.
        """
        return self._loans.take(ask)

    def status(self, capsule: Capsule) -> CapsuleStatus:
        """`capsule`, which is here, as it is now."""
        return self._capsule_commands.status(capsule)

    def _grammar_to_compile(self, command: Command) -> Grammar | None:
        if isinstance(command, Fork):
            return self._intake.grammar_of(command) or command.grammar
        return command.grammar if isinstance(command, Prefill | Generate) else None

    def is_prepared(self, command: Command) -> bool:
        """Whether `submit` has no grammar to compile for `command`. From any thread."""
        grammar = self._grammar_to_compile(command)
        return grammar is None or self._sampler.is_prepared(grammar)

    def prepare(self, command: Command) -> None:
        """Do ahead what `submit` would have to do first, from any thread: compile its grammar.

        Raises what the compiler raises on its own account; what is wrong with a grammar `submit` tells.
        """
        if (grammar := self._grammar_to_compile(command)) is not None:
            self._sampler.prepare(grammar)

    def drop_gateway(self, gateway: str) -> None:
        """The gateway is gone: its branches end now, without an update. Its capsules stay."""
        self._scheduler.is_stalled = False
        self._requests.drop(gateway)

    # Steps

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report anything now."""
        return bool(
            self._scheduler.has_work
            or len(self._updates)
            or len(self._journal)
            or self._capsules.is_expiry_due
            or (self._moves.waiting and not self._scheduler.is_stalled)
            or self._has_moved
            or (self._loans.open and self._loans.has_ended)
        )

    @property
    def _has_moved(self) -> bool:
        """Whether a step would take in the end of a move, or end a loan."""
        lower, fetching = self._lower, self._fetching
        return (lower is not None and bool(lower.under_way) and lower.has_ended) or (
            fetching is not None and bool(fetching.loans) and fetching.has_loan_to_end
        )

    @property
    def is_steady(self) -> bool:
        """Whether the next step is sure to be one token for each of `decodes` and nothing else.

        As long as they have blocks and don't end, that holds for each step until a command, a capsule's time
        to live, or the end of a move. False with drafts, and while someone watches single steps.
        """
        return (
            self._scheduler.is_steady
            and not (len(self._updates) or len(self._journal) or self._requests.inbox)
            and not self._moves.waiting
            and not (self._capsules.is_expiry_due or self._has_moved)
            and self._speculator is None
            and self._tree.pool.watch is None
            and not debug_log.is_on("steps")
        )

    @property
    def has_tiers(self) -> bool:
        """Whether blocks may lie below the device."""
        return self._lower is not None and not self._lower.is_empty

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` made, from any thread, whenever `has_work` may have become true by itself."""
        self._loans.wake = call
        if self._lower is not None:
            self._lower.notify(call)

    @property
    def next_expiry(self) -> float:
        """No capsule's time to live is over before then, on the engine's clock."""
        return self._capsules.next_expiry

    def advance(self, drawn: Sequence[Text]) -> StepResult:
        """Take in what `decodes` drew in as many steady steps: the same number of tokens for each.

        The same as those steps, computed elsewhere; only their updates come together. No draw is looked at:
        the caller knows that none but the last ends an answer, by its length.
        """
        num_steps = len(drawn[0])
        self._scheduler.decoded(num_steps)
        self._num_steps += num_steps
        self._num_output += num_steps * len(drawn)
        emit, reports_progress = self._updates.emit, self._updates.reports_progress
        branches = self._scheduler.decodes
        for branch, tokens in zip(branches, drawn, strict=True):
            begin = len(branch.tokens) - 1  # the last one was drawn, but not computed
            branch.tokens.extend(tokens)
            self._tree.commit(node_of(branch), branch.tokens[begin:-1], branch.hashes)
            branch.num_output += num_steps
        for branch, tokens in zip(branches, drawn, strict=True):
            if branch.num_output >= branch.job.limits.max_tokens:
                self._requests.end(branch, "length", tokens=tokens)
            elif reports_progress:
                emit(branch, tokens=tokens)
        return self._collect()

    def step(self) -> StepResult:
        """Plan, compute, draw, commit: every planned branch moves on by one chunk or one token.

        If the forward or a drafter raises, so does this, with nothing drawn, committed or told: the caller
        gives the engine up, or calls again, and all answers are as if it had not raised. What the plan did
        stands: sessions are charged, for the next plan too, branches gave way, fetches and restores began,
        and branches without room ended, which the next step tells. CorruptKV is final, and so is what a
        transfer raises that is no MalleeError. Where the device had too little memory for the step, its
        newest branch ends with that error, and the others go on; after one with drafts nothing ends, and the
        next has none. Where it had too little for a copy to or from a tier, nothing ends: what did not come
        is computed, and what could not go is told.
        """
        watch = self._watch
        if watch is not None:
            watch.begun()
        if self._capsules.next_expiry <= self._clock():
            self._capsules.expire()
        self._take_moved()
        if not self._requests.jobs:
            return self._rest()
        if self._requests.inbox:
            self._requests.take_inbox()
        plan = self._scheduler.plan()
        if self._lower is not None and self._lower.evicts_beside:
            self._scheduler.blocks.make_room_ahead()
        if self._lower is not None:
            self._scheduler.is_stalled = bool(self._lower.under_way) and plan.is_empty
        if self._speculator is not None:
            self._draft(self._speculator, plan)
        if debug_log.is_on("steps"):
            debug_log.log_step(self._num_steps, plan, self._scheduler.stats())
        if watch is not None:
            watch.planned(plan)
        for branch, error in plan.failed:
            self._requests.end(branch, "error", error=error)
        is_timed = self._lower is not None or self._speculator is not None
        began = self._clock() if is_timed else 0.0
        try:
            done, drawn = self._compute(plan)
        except DeviceMemoryExhausted as error:
            self._scheduler.undo(plan)
            if (newest := plan.newest) is None:
                raise
            if self._speculator is not None and plan.drafts:  # it may have had enough without them
                self._speculator.rest(plan)
            else:
                self._requests.end(newest, "error", error=error)
            return self._end_step()
        except BaseException:  # whatever it is, nothing is committed yet
            self._scheduler.undo(plan)
            raise
        if self._lower is not None and plan.chunks and not plan.decodes:
            num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
            self._lower.prices.computed(num_tokens, self._clock() - began)
        if self._speculator is None:
            self._commit(plan)
        else:
            num_draws: Counter[Branch] = Counter()
            for each in drawn:
                num_draws[each.branch] += each.num_draws
            self._speculator.learn(plan, num_draws, self._clock() - began)
            self._commit(plan, num_draws)
        for branch, logits in done:
            if isinstance(branch.job.command, Prefill):
                self._requests.end(branch, "stop", logits=logits)
            else:
                self._requests.spread(branch, logits)
        if self._ahead is not None:  # before what ends leaves a capsule
            self._scheduler.drop_ahead([each.branch for each in drawn if each.finish is not None])
        self._report(drawn)
        if self._ahead is not None:
            self._scheduler.drop_ahead()
        self._scheduler.follow(plan)
        if self._lower is not None:
            is_decoding = bool(self._scheduler.decodes)
            if self._lower.gives_way != is_decoding:
                self._lower.give_way(is_decoding)
        result = self._end_step()
        if watch is not None:
            watch.ended()
        return result

    def _rest(self) -> StepResult:
        """The end of a step without requests: of moves, replies and events alone."""
        plan, watch = Plan([], [], [], [], []), self._watch
        self._scheduler.is_stalled = self._lower is not None and bool(self._lower.under_way)
        if watch is not None:
            watch.planned(plan)
        self._passes.run(plan)
        if watch is not None:
            watch.launched()
            watch.collected()
        result = self._end_step()
        if watch is not None:
            watch.ended()
        return result

    def _take_moved(self) -> None:
        """Take in moves, loans and capsules that have come to an end, and begin what waits for room."""
        if self._loans.open:
            self._loans.take_ended()
        if self._lower is not None and self._lower.under_way:
            self._lower.take_ended()
            for name in self._lower.take_lost():
                self._capsules.lose_record(name)
        if self._fetching is not None and (arrived := self._fetching.arrived):
            self._fetching.arrived = []
            for branch, logits in arrived:
                self._requests.end_arrived(branch, logits)
        if self._moves.waiting:
            self._moves.begin_restores()
        if self._moves.unrestored:
            self._requests.take_unrestored()

    def _draft(self, speculator: Speculator, plan: Plan) -> None:
        """Give `plan` drafts. What raises leaves of the step what the plan did (`step`)."""
        try:
            speculator.draft(plan)
        except BaseException:
            self._scheduler.undo(plan)
            raise

    def _end_step(self) -> StepResult:
        if self._requests.captures:
            self._capsule_commands.submit_captures()
        if self._fetching is not None and self._fetching.loans:
            self._fetching.end_loans()
        self._num_steps += 1
        if self._tree.pool.watch is not None:
            self._tree.pool.watch.end_step()
        result = self._collect()
        if self._gaps is not None and not self.has_work:
            self._gaps.rest()
        return result

    def adopt(self, other: DiskStore, end: Callable[[Sequence[MalleeError]], None]) -> None:
        """Take in the capsules on `other`, the disk of a worker that is gone, and close it.

        `end` gets the reasons for those that stay there.
        """
        assert self._lower is not None, "a disk, without tiers"
        self._lower.adopt(other, self._moves.adopt, end)

    def _compute(self, plan: Plan) -> tuple[list[Scored], list[Sampled]]:
        """Run the plan: the branches that end here, with kept logits, and what the others drew.

        Changes branches that drew, and nothing before all have.
        """
        computed = [chunk.branch for chunk in plan.chunks if chunk.is_last]
        if self._sampler.has_matchers:
            branches = (*plan.ready, *plan.decodes, *computed)
            self._sampler.expect(branches, plan.drafts.values())
        logits = self._passes.run(plan)
        if any(chunk.branch.job.is_scoring for chunk in plan.chunks):
            logits = self._score(plan, logits)
        drafted = None
        if plan.drafts:
            logits, drafted = _apart(plan, logits)
        if self._watch is not None:
            self._watch.launched()
        done: list[Scored] = []
        drawing: list[Scored] = [(branch, branch.logits) for branch in plan.ready]
        num = len(plan.decodes)
        drawing += zip(plan.decodes, logits[:num], strict=True)
        for branch, each in zip(computed, logits[num:], strict=True):
            if branch.draws:
                drawing.append((branch, each))
            else:
                done.append((branch, self._forward.keep(each)))
        meanwhile = None
        if self._ahead is not None:
            meanwhile = partial(self._launch_ahead, self._ahead, plan)
        drawn = self._sampler.draw(drawing, drafted, meanwhile, self._passes.accept)
        if self._watch is not None:
            self._watch.collected()
        return done, drawn

    def _score(self, plan: Plan, logits: Sequence[Logits]) -> list[Logits]:
        """Take the log-probabilities of prompts that want them; the logits of all else."""
        at = len(plan.decodes) + sum(len(draft.tokens) for draft in plan.drafts.values())
        left = [*logits[:at]]
        for chunk in plan.chunks:
            job, own = chunk.branch.job, logits[at : at + chunk.num_logits]
            at += len(own)
            if chunk.is_last:
                left.append(own[-1])
            if not job.is_scoring:
                continue
            command, tokens = job.command, chunk.branch.tokens
            assert isinstance(command, Generate), "forks have no prompt"
            known = len(job.scores) - chunk.start  # a part may be computed again
            following = tokens[len(job.scores) + 1 : chunk.start + len(own) + 1]
            job.scores += self._forward.logprobs(
                [
                    LogprobQuery(each, token, command.prompt_logprobs)
                    for each, token in zip(own[known:], following, strict=False)
                ]
            )
            job.is_scoring = not chunk.is_last
        return left

    def _launch_ahead(
        self, ahead: AheadPasses, plan: Plan, drawing: Drawing, drawn: Sequence[Branch]
    ) -> None:
        """Launch the next pass of those that draw in `plan`, if it is likely to be of decodes alone."""
        if not ahead.may_launch():
            return
        going = self._scheduler.room_ahead(plan)
        places = {branch: i for i, branch in enumerate(drawn)}
        if draws := {branch: places[branch] for branch in going if branch in places}:
            ahead.launch(drawing, draws, going)

    def _commit(self, plan: Plan, num_draws: Mapping[Branch, int] | None = None) -> None:
        """Commit the tokens of `plan`, which are computed: of drafts those that were drawn.

        Each of the `num_draws` of a branch is of the logits after one more token.
        """
        commit = self._tree.commit
        for s in plan.decodes:
            node = s.node
            assert node is not None, "a decode that does not run"
            begin = node.end - s.origin_len
            if num_draws is None or s not in plan.drafts:
                commit(node, (s.tokens[begin],), s.hashes)
            else:
                tokens = s.tokens[begin : begin + num_draws[s]]
                commit(node, tokens, s.hashes, "answer")
                self._scheduler.blocks.shrink(s)
        for branch in plan.ready:
            branch.logits = None
        for chunk in plan.chunks:
            branch, attached = chunk.branch, chunk.branch.attached_tokens
            assert attached is not None, "computed, but never admitted"
            end = chunk.start + len(chunk.tokens)
            reason = branch.places.get(end) if self._tree.sides else None
            commit(node_of(branch), chunk.tokens, branch.hashes, reason)
            self._num_prefill += len(chunk.tokens)
            if branch.cached_tokens is None or (
                chunk.start < branch.prompt_len and attached > branch.cached_tokens
            ):
                self._requests.num_cached += attached - (branch.cached_tokens or 0)
                branch.cached_tokens = attached

    def _report(self, drawn: Sequence[Sampled]) -> None:
        emit = self._updates.emit
        for sampled in drawn:
            self._num_output += len(sampled.tokens) + (sampled.end is not None)
            if sampled.finish is None:
                emit(sampled.branch, sampled.tokens, sampled.logprobs)
            else:
                self._requests.end(
                    sampled.branch,
                    sampled.finish,
                    tokens=sampled.tokens,
                    logits=sampled.logits,
                    error=sampled.error,
                    logprobs=sampled.logprobs,
                    end_token=sampled.end,
                )

    def _collect(self) -> StepResult:
        frames = self._updates.drain(self._num_steps)
        if not len(self._journal):
            return StepResult(frames, None, self._num_steps)
        events = self._journal.drain()
        batch = EventBatch(self.worker, self.incarnation, self._next_seq, events)
        self._next_seq = batch.next_seq
        return StepResult(frames, batch, self._num_steps)

    # Reading

    @property
    def decodes(self) -> Sequence[Branch]:
        """The branches that draw a token in every step, in the order of a batch."""
        return self._scheduler.decodes

    @property
    def num_free_blocks(self) -> int:
        """Blocks with nothing in them."""
        return self._tree.num_free

    @property
    def branches(self) -> list[Branch]:
        """The branches that are not over, by arrival; to be read only."""
        return sorted(self._requests.branches(), key=attrgetter("ticket"))

    def held_blocks(self, hashes: Hashes) -> int:
        """The number of leading blocks of `hashes` that are held."""
        return self._tree.find(hashes)

    @property
    def next_seq(self) -> int:
        """The number of the next cache event."""
        return self._next_seq

    def snapshot(self) -> Snapshot:
        """All that this worker holds, as of the events published so far. Call between steps."""
        assert not len(self._journal), "events of the last step are not collected yet"
        below = (b"", b"")
        if self._lower is not None:
            host, disk = (np.array(self._lower.keys(tier), np.uint64) for tier in (HOST, DISK))
            below = (pack_hashes(host), pack_hashes(disk))
        return Snapshot(
            self.worker,
            self.incarnation,
            self._next_seq,
            pack_hashes(self._tree.held_hashes()),
            self._capsules.describe_all(),
            *below,
            windows=tuple(map(pack_hashes, self._tree.held_in_sides())),
        )

    @property
    def spec(self) -> ModelSpec:
        """The model as clients can use it: no context that this pool couldn't hold.

        A block is left out: a fork inside one holds it beside a copy of it.
        """
        spec, size = self._forward.spec, self._tree.block_size
        room = max(1, self._tree.pool.num_blocks - 1) * size
        room = max(1, room - self.config.scheduler.headroom_tokens)
        if spec.max_model_len <= room:
            return spec
        return msgspec.structs.replace(spec, max_model_len=room)

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of KV memory that a sequence of `num_tokens` takes up: whole blocks."""
        size = self._tree.block_size
        return -(-num_tokens // size) * size * self._forward.spec.kv_bytes_per_token

    def load(self) -> Load:
        """The engine's load. Call between steps."""
        queues, use = self._scheduler.stats(), engine_use(self.stats(), self.kv_bytes(1))
        return Load(
            rows=queues.running,
            waiting=queues.waiting,
            active_blocks=self._tree.pool.num_blocks - self._tree.num_available,
            prefill_tokens=self._scheduler.prefill_tokens(),
            use=use,
            fetch=self._lower.fetch_prices() if self._lower is not None else None,
            block_nbytes=0 if use.tiers is None else use.tiers.block_nbytes,
            side_blocks=self.spec.side_rows(self.spec.max_model_len, self._tree.block_size),
        )

    def close(self) -> None:
        """End what runs beside the engine's thread. The engine can't be used afterwards."""
        self._sampler.close()
        self._loans.close()
        if self._fetching is not None:
            self._fetching.close()
        if self._lower is not None:
            self._lower.close()

    def check(self) -> None:
        """Raise AssertionError on a broken invariant. O(everything); for tests and idle moments."""
        check_tree(self._tree)
        self._capsules.check()
        self._scheduler.check()
        self._requests.check()
        assert not self.audit(), f"leaks: {self.audit()}"
        assert self._holds() == self._tree.holds(), "the tree lacks holders"
        if self._lower is not None:
            self._lower.check()

    def audit(self) -> list[Leak]:
        """Leaked blocks, and why. Empty, or there is a bug."""
        return find_leaks(self._tree, self._holds())

    def _holds(self) -> Counter[Node]:
        """The number of holds on each node, by branches, capsules, loans and fetches."""
        holds = count_holds(self._requests.branches(), self._capsules.holds())
        holds += self._loans.holds() + self._moves.holds()
        return holds if self._fetching is None else holds + self._fetching.holds()

    def usage(self) -> TreeUsage:
        """Statistics of how the blocks in use are shared. O(branches and capsules, times their depth)."""
        return memory_usage(self._tree, self._requests.branches(), self._capsules.holds())

    def _constraint_states(self) -> int:
        """Branches that drew the same share a state, and so do capsules with what they were taken of."""
        if not self._sampler.has_matchers:
            return 0
        constraints = (b.constraint for b in self._requests.branches())
        states = {c.matcher for c in constraints if c is not None}
        return len(states.union(self._capsules.matchers()))

    def stats(self) -> EngineStats:
        """O(branches and capsules, times their depth)."""
        watch = self._tree.pool.watch
        drafted = SpeculationStats(0, 0) if self._speculator is None else self._speculator.stats()
        return EngineStats(
            pool=self._tree.pool.stats(),
            tree=self._tree.stats(),
            sched=self._scheduler.stats(),
            capsules=self._capsules.stats(),
            tiers=self._lower.stats() if self._lower is not None else None,
            lending=self._loans.stats(),
            watch=watch.stats() if watch is not None else None,
            jobs=len(self._requests.jobs),
            num_steps=self._num_steps,
            num_prefill_tokens=self._num_prefill,
            num_cached_tokens=self._requests.num_cached,
            num_output_tokens=self._num_output,
            num_forks=self._requests.num_forks,
            memory=self.usage(),
            constraint_states=self._constraint_states(),
            speculation=drafted,
            ahead=self._ahead.stats() if self._ahead is not None else AheadStats(0, 0),
            host_gap=self._gaps.stats() if self._gaps is not None else HostGap(0, 0.0),
            states=state_use(self._tree, self._forward.spec),
        )


def _apart(plan: Plan, logits: Sequence[Logits]) -> tuple[list[Logits], dict[Branch, Drafted]]:
    """The logits after each row's own token, and those after the tokens of drafts."""
    first: list[Logits] = []
    drafted: dict[Branch, Drafted] = {}
    begin = 0
    for branch in plan.decodes:
        first.append(logits[begin])
        begin += 1
        if (draft := plan.drafts.get(branch)) is not None:
            drafted[branch] = Drafted(draft, logits[begin : begin + len(draft.tokens)])
            begin += len(draft.tokens)
    return [*first, *logits[begin:]], drafted
