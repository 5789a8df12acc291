"""Chooses the branches of each step: continuous batching with chunked prompts, for trees of branches.

Tenants, and the sessions of each, get computed tokens in proportion to their weights (`sessions.py`);
inside a session the highest priority goes first, then the oldest (`policy.py`, `queue.py`); none goes
unserved for long. Prefixes that several branches need are computed once (`gates.py`); a branch without
room is preempted down to the state it was forked from (`running.py`). `planner.py` puts a step together.
"""

from collections.abc import Iterable
from typing import NamedTuple

from mallee.protocol.errors import QueueFull
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.messages import Share
from mallee.worker.kv.node import Node, Spare
from mallee.worker.kv.paths import path_texts
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Branch, Phase, Producer, node_of
from mallee.worker.sched.fetching import CapsuleReader, Fetching
from mallee.worker.sched.plan import Plan
from mallee.worker.sched.planner import Planner
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.sched.running import BlockBudget, Reclaimer, Running
from mallee.worker.sched.sessions import Sessions
from mallee.worker.sched.waiting import Waiting
from mallee.worker.transfer.lower import LowerTiers

_COMMON = (Share(), "")
"""The share and the salt of all branches under an order that is not fair."""


class SchedulerStats(NamedTuple):
    """Branches by state (`gated` of `waiting` wait for others' tokens); the counter only grows."""

    waiting: int
    running: int
    num_preemptions: int
    gated: int


class Scheduler:
    """Owns the queues.

    A step is `plan`, then what it says computed and committed in the tree, tokens appended to what drew;
    or `undo`, if that failed. In between branches may be added and finished.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tree: BranchTree,
        *,
        reclaimer: Reclaimer,
        lower: LowerTiers | None = None,
        reader: CapsuleReader | None = None,
    ) -> None:
        """`reader` reads capsules that others lend."""
        self.config = config
        self._tree = tree
        self._sessions = Sessions()
        self._waiting = Waiting(config, self._sessions.root, tree)
        self._gates = self._waiting.gates
        self._running = Running(config.order, self._waiting, self._place)
        self.blocks = BlockBudget(
            config, tree, self._waiting, running=self._running, reclaimer=reclaimer
        )
        self.fetching: Fetching | None = None
        if lower is not None and reader is not None:
            self.fetching = Fetching(
                tree,
                lower,
                reader,
                self._fetched,
                waiting=self._waiting,
                running=self._running,
                room=self.blocks,
            )
        self._planner = Planner(
            config,
            tree,
            sessions=self._sessions,
            waiting=self._waiting,
            running=self._running,
            room=self.blocks,
            fetching=self.fetching,
        )
        # Until a block has moved, or a command comes, there is nothing to do.
        self.is_stalled = False
        self._step = 0
        self._roomy: dict[Branch, Spare | None] = {}  # that got a block of `room_ahead`, in order
        self._num_joint = 0  # members of all groups, less one of each

    def check_room(self, n: int) -> None:
        """Raises QueueFull if n more branches may not wait.

        A branch that computes a text for several counts as all of them, also while it runs.
        """
        num = self._waiting.num + self._num_joint + self._running.num_groups
        if num + n > self.config.max_waiting:
            raise QueueFull(num, self.config.max_waiting)

    def add(self, branches: list[Branch]) -> None:
        """`branches`, new ones of one job, wait for their turn, or for their producer."""
        job, producer = branches[0].job, branches[0].producer
        share, salt = (job.command.share, job.salt) if self.config.order.is_fair else _COMMON
        job.session = self._sessions.join(
            (salt, share.session),
            share.weight,
            len(branches),
            tenant=share.tenant,
            tenant_weight=share.tenant_weight,
        )
        if len(branches) < job.num_branches:
            self._num_joint += sum([len(branch.members) for branch in branches]) - len(branches)
        if producer is None:
            self._waiting.extend(branches, self._step)
            return
        for branch in branches:
            if producer.node is not None and producer.node.end >= branch.origin_len:
                self._open(branch, producer.node)
            else:
                self._waiting.hold(branch, producer, branch.origin_len)

    def prioritize(self, branch: Branch, priority: float) -> None:
        """From the next step on `branch` has `priority`."""
        branch.priority = priority
        if branch.phase == "gated":
            self._waiting.claim_for(branch, [branch])
        elif self._waiting.is_queued(branch):
            self._waiting.queue_of(branch).rerank(branch)
        self._running.reorder()

    def inject(self, branch: Branch, tokens: Text) -> None:
        """`branch`, a decode, goes on after `tokens`, between two steps."""
        branch.tokens.extend(tokens)
        if self._tree.sides:
            begin = node_of(branch).end
            branch.places = self._tree.places(NO_HASHES, begin, branch.length)
        if branch.phase == "decode":  # else there were some before
            is_short = branch.num_pending <= self.config.max_step_tokens
            self._running.recompute(branch, self._step, is_short=is_short)

    def complete(self, producer: Branch, logits: object) -> None:
        """`producer` is done, `logits` are of the next token: its forks go on.

        What it has not committed of its tokens, those of a capsule that came as it was, they compute.
        """
        node, size, begin = node_of(producer), self._tree.block_size, producer.origin_len
        for branch in self._gates.passed(producer):
            if branch.producer is producer:
                base = min(branch.origin_len, node.end)
                if branch.origin_len == producer.length and not len(branch.tokens):
                    if logits is not None:
                        branch.logits = logits
                    elif branch.logits is None and node.end == producer.length:
                        base = (node.end - 1) // size * size
                if base < branch.origin_len:
                    own = producer.tokens[base - begin : branch.origin_len - begin]
                    branch.begin_at(base, own, notation=self._tree.notation)
            self._open(branch, node)

    def room_for(self, node: Node, num_tokens: int) -> Node | None:
        """Room beside what runs for a capsule that comes back: see `BlockBudget.take`."""
        return self.blocks.take(node, num_tokens)

    def keep_waiting(self, num_steps: int) -> None:
        """A capsule has waited for room for so many steps: if that is too long, no branch is admitted."""
        self.blocks.is_overdue = num_steps >= self.config.ageing_steps > 0

    def await_tokens_of(self, producer: Producer) -> bool:
        """Whether any branch waits for tokens of `producer`."""
        return self._gates.is_awaited(producer)

    def continue_from(self, producer: Producer, node: Node) -> None:
        """All tokens of `producer`, a capsule that came back, are in `node`: its forks go on."""
        for branch in self._gates.passed(producer):
            self._open(branch, node)

    def replace_producer(self, producer: Producer, other: Branch) -> None:
        """The forks of `producer`, a capsule that can't come back, wait for `other`, which computes it."""
        for branch in self._gates.passed(producer):
            branch.producer = other
            branch.move("waiting")
            self._waiting.hold(branch, other, branch.origin_len)

    def abandoned(self, producer: Producer) -> list[Branch]:
        """The forks of `producer`, which has no tokens for them: the caller must finish them."""
        return self._gates.stranded(producer)

    def finish(self, branch: Branch, *, is_failed: bool = False) -> list[Branch]:
        """`branch` is over: it leaves the queues and lets go of its nodes.

        Returns the branches that were to continue it and can't now; the caller must finish them too.
        """
        end: Phase = "failed" if is_failed else "finished"
        gates = self._gates
        if branch.is_running:
            self._running.remove(branch, end)
        else:
            self._waiting.remove(branch)
            branch.move(end)
        gates.land(branch)
        for gated in gates.dropped(branch):
            self._open(gated, None)
        orphans = gates.stranded(branch)
        self._num_joint -= len(branch.members) - 1
        branch.let_go(self._tree)
        self._sessions.leave(branch.job.session)
        return orphans

    @property
    def has_work(self) -> bool:
        return bool(self._running.num or self._waiting.num) and not self.is_stalled

    def plan(self) -> Plan:
        """The next step. Room for every chunk is reserved in the tree."""
        self._step += 1
        return self._planner.plan(self._step)

    @property
    def decodes(self) -> list[Branch]:
        """The branches that decode, in the order of a batch; to be read only."""
        return self._running.decodes()

    @property
    def is_steady(self) -> bool:
        """Whether the next step is sure to be its decodes and nothing else, if they have room."""
        return not self._waiting.num and self._planner.is_steady

    def decoded(self, num_steps: int) -> None:
        """So many steady steps were taken elsewhere: reserve the blocks of the tokens they compute."""
        self._step += num_steps
        self._planner.decoded(self._step)

    def room_ahead(self, plan: Plan) -> dict[Branch, Spare | None]:
        """The branches that decode after `plan`, the last one, in the order of a batch, and a slot for each.

        None if the next plan may compute more than their tokens, some has no room, or some may be preempted
        for others. Slots are taken of free blocks alone, until `drop_ahead`: in the node of the branch, or in
        a block to come, if it has none of its own yet.
        """
        running, decodes = self._running, self._running.decodes()
        drawing = [*plan.ready, *(chunk.branch for chunk in plan.chunks), *plan.decodes]
        num_decodes = len(decodes) if plan.draws_only else len(plan.decodes)
        if num_decodes < len(decodes) or any(not chunk.is_last for chunk in plan.chunks):
            return {}
        if num_decodes + len(plan.chunks) + len(plan.ready) != running.num:
            return {}
        going = [s for s in drawing if s.draws and s.num_output + 1 < s.job.limits.max_tokens]
        if plan.draws_only:
            going += decodes
        is_alike = len(going) == len(plan.decodes) == running.num
        if not is_alike:
            if self._waiting.num or len(going) > self._planner.max_decodes:
                return {}  # those that wait take the places of those that end
            going.sort(key=self._place_ahead)
        found: dict[Branch, Spare | None] = {}
        for branch in going:
            spare, before = None, branch.room
            num_drawn = 0 if plan.draws_only else 1  # decodes draw nothing in such a step
            if branch.phase == "ready":
                if (spare := self.blocks.spare(branch)) is None:
                    continue
                self._roomy[branch] = spare
            elif not branch.room:
                continue  # it drew its first token, and waits for blocks that leave
            else:
                has_room = self.blocks.stretch_ahead(branch, num_drawn)
                if branch.room != before:
                    self._roomy[branch] = None
                if not has_room and self._tree.has_states:  # may last, as capsules hold slots:
                    return {}  # a pass of the others beside one of its own would take longer
                if not has_room:
                    continue
            found[branch] = spare
        return found

    def drop_ahead(self, over: Iterable[Branch] | None = None) -> None:
        """Blocks of `room_ahead` are free again: those of `over`, or all.

        Until then their owners are neither shared nor let go. What is planned next takes the same ones again,
        if nothing else was given back since: the last one that is given back is taken first.
        """
        if self._roomy:
            given = self._roomy if over is None else over
            for branch in reversed([s for s in given if s in self._roomy]):
                spare = self._roomy.pop(branch)
                if spare is None:
                    self.blocks.shrink(branch)
                else:
                    self.blocks.give_back(spare)

    def follow(self, plan: Plan) -> None:
        """`plan` is carried out: what drew decodes from now on, what waited for its tokens goes on."""
        for branch in plan.ready:
            if branch.phase == "ready":
                self._running.decode(branch)
        for branch, _, _, is_last in plan.chunks:
            if branch.phase != "prefill":
                continue
            self._let_through(branch, is_done=is_last)
            if is_last:
                self._running.decode(branch)
            else:
                self._running.want_more(branch, self._step)

    def _fetched(self, branch: Branch) -> None:
        """The blocks that `branch` fetched are committed."""
        if not branch.num_pending:
            return  # it is over
        self._let_through(branch, is_done=False)
        self._running.fetched(branch, self._step)

    def _let_through(self, branch: Branch, *, is_done: bool) -> None:
        """More tokens of `branch`, or all, are committed: what waited for them goes on."""
        node, gates = node_of(branch), self._gates
        num_left = len(branch.hashes) - node.end // self._tree.block_size
        gates.land(branch, 0 if is_done else max(0, num_left))
        for gated in gates.passed(branch, None if is_done else node.end):
            self._open(gated, node)

    def undo(self, plan: Plan) -> None:
        """Nothing of `plan`, the last one, was committed or drawn: it is all still to be done.

        What was reserved stays reserved; the copies will be told again.
        """
        self.drop_ahead()
        for branch in plan.drafts:
            self.blocks.shrink(branch)
        self.blocks.forget_copies()
        for chunk in plan.chunks:
            if chunk.branch.phase == "prefill":
                self._running.want_more(chunk.branch, self._step)

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        self._sessions.check()
        self._waiting.check()
        self._running.check()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            self._waiting.num,
            self._running.num,
            self.blocks.num_preemptions,
            self._gates.num,
        )

    def prefill_tokens(self) -> int:
        """Prompt tokens still to be computed, of running and waiting branches.

        What the cache holds, or a running branch computes, is not counted for those that wait.
        """
        running = sum(s.num_pending for s in self._running.prefills if s.num_pending > 1)
        return running + self._waiting.prefill_tokens()

    def _open(self, gated: Branch, node: Node | None) -> None:
        """Queue `gated`; if it continues its producer, whose tokens `node` has, it begins there."""
        if gated.phase == "gated":
            gated.move("waiting")
        if gated.producer is not None:
            assert node is not None
            gated.producer = None
            base = self._tree.resume_point(node, gated.origin_len)
            if base < gated.origin_len:
                more = path_texts(node, base, gated.origin_len)
                gated.begin_at(base, *more, notation=self._tree.notation)
            if base:
                gated.origin = self._tree.hold_prefix(node, base)
        self._waiting.push(gated, self._step)

    def _place_ahead(self, branch: Branch) -> tuple[bytes, int]:
        """The place of `branch` once it decodes."""
        if branch.phase == "decode":
            return branch.place
        return self._place(node_of(branch)), branch.ticket

    def _place(self, node: Node) -> bytes:
        """Rows in order of their block tables: those that share a prefix stand side by side."""
        if not self.config.gang:
            return b""
        return self._tree.table(node).astype(">i4").tobytes()
