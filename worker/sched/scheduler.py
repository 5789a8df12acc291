"""Chooses the branches of each step: continuous batching with chunked prompts, for trees of branches.

Tenants, and the sessions of each, get computed tokens in proportion to their weights (`sessions.py`);
inside a session the highest priority goes first, then the oldest (`policy.py`); none goes unserved for
long (`branch.py`). Prefixes that several branches need are computed once (`waiting.py`); a branch without
room is preempted down to the state it was forked from (`running.py`). `planner.py` puts a step together.
"""

from collections.abc import Iterable
from typing import NamedTuple

from mallee.protocol.errors import QueueFull
from mallee.protocol.messages import Share
from mallee.worker.kv.node import Node, Spare
from mallee.worker.kv.text import Text
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Branch, Phase, Plan, Producer, node_of
from mallee.worker.sched.fetching import CapsuleReader, Fetching
from mallee.worker.sched.planner import Planner
from mallee.worker.sched.policy import POLICIES, SchedulerConfig
from mallee.worker.sched.prefill import Prompts, Queues
from mallee.worker.sched.running import BlockBudget, Reclaimer, Running
from mallee.worker.sched.sessions import Sessions
from mallee.worker.sched.waiting import Waiting
from mallee.worker.transfer.lower import LowerTiers


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
        """`reader` takes in what comes from `lower`."""
        self.config = config
        self._tree = tree
        self._policy = POLICIES[config.policy]
        self._sessions = Sessions()
        self._waiting = Waiting(config, self._policy, self._sessions, tree)
        self._running = Running(self._policy, self._sessions, self._place)
        self._blocks = BlockBudget(
            config,
            self._policy,
            tree,
            waiting=self._waiting,
            running=self._running,
            reclaimer=reclaimer,
        )
        queues = Queues(self._sessions, self._waiting, self._running, self._blocks)
        self.fetching: Fetching | None = None
        if lower is not None and reader is not None:
            self.fetching = Fetching(
                tree,
                lower,
                reader,
                self._fetched,
                waiting=self._waiting,
                running=self._running,
                room=self._blocks,
            )
        prompts = Prompts(config, self._policy, tree, queues, self.fetching)
        self._planner = Planner(config, self._policy, queues, prompts)
        self.is_stalled = (
            False  # until a block has moved, or a command comes, there is nothing to do
        )
        self._step = 0
        self._roomy: dict[Branch, Spare | None] = {}  # that got a block of `room_ahead`, in order
        self._num_refused = 0  # steps in which a capsule that comes back got no room, since one did
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
        share, salt = (job.command.share, job.salt) if self._policy.is_fair else (Share(), "")
        job.session = self._sessions.join(
            (salt, share.session),
            share.weight,
            len(branches),
            tenant=share.tenant,
            tenant_weight=share.tenant_weight,
        )
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
        if branch.queue is not None:
            branch.queue.push(branch, self._policy.rank(branch.claim))
        elif branch.phase == "gated":
            self._waiting.lend(branch)
        self._running.reorder()

    def inject(self, branch: Branch, tokens: Text) -> None:
        """`branch`, a decode, goes on after `tokens`, between two steps."""
        branch.tokens.extend(tokens)
        if branch.phase == "decode":  # else there were some before
            is_short = branch.num_pending <= self._waiting.max_short
            self._running.recompute(branch, self._step, is_short=is_short)

    def complete(self, producer: Branch, logits: object) -> None:
        """`producer` is done, `logits` are of the next token: its forks go on.

        What it has not committed of its tokens, those of a capsule that came as it was, they compute.
        """
        assert producer.node is not None
        node, size, notation = producer.node, self._tree.block_size, self._tree.notation
        for branch in self._waiting.prefix_waits.passed(producer, None):
            is_fork = branch.producer is producer
            if is_fork and branch.origin_len == producer.length and not len(branch.tokens):
                if logits is not None:
                    branch.logits = logits
                elif branch.logits is None and node.end == producer.length:
                    branch.begin_before(producer, (node.end - 1) // size * size, notation)
            if is_fork and branch.origin_len > node.end:
                branch.begin_before(producer, node.end, notation)
            self._open(branch, node)

    def room_for(self, node: Node, num_tokens: int) -> Node | None:
        """Room beside what runs for a capsule that comes back: see `BlockBudget.take`.

        While it is refused that for too long no branch is admitted.
        """
        found = self._blocks.take(node, num_tokens)
        self._num_refused = 0 if found is not None else self._num_refused + 1
        self._blocks.is_overdue = self._num_refused >= self.config.ageing_steps > 0
        return found

    def continue_from(self, producer: Producer, node: Node) -> None:
        """All tokens of `producer`, a capsule that came back, are in `node`: its forks go on."""
        for branch in self._waiting.prefix_waits.passed(producer, None):
            self._open(branch, node)

    def replace_producer(self, producer: Producer, other: Branch) -> None:
        """The forks of `producer`, a capsule that can't come back, wait for `other`, which computes it."""
        for branch in self._waiting.prefix_waits.passed(producer, None):
            branch.producer = other
            branch.move("waiting")
            self._waiting.hold(branch, other, branch.origin_len)

    def abandoned(self, producer: Producer) -> list[Branch]:
        """The forks of `producer`, which has no tokens for them: the caller must finish them."""
        return self._waiting.prefix_waits.stranded(producer)

    def finish(self, branch: Branch, *, is_failed: bool = False) -> list[Branch]:
        """`branch` is over: it leaves the queues and lets go of its nodes.

        Returns the branches that were to continue it and can't now; the caller must finish them too.
        """
        end: Phase = "failed" if is_failed else "finished"
        waits = self._waiting.prefix_waits
        if branch.is_running:
            self._running.remove(branch, end)
        else:
            self._waiting.remove(branch)
            branch.move(end)
        waits.land(branch)
        for gated in waits.dropped(branch):
            self._open(gated, None)
        orphans = waits.stranded(branch)
        self._num_joint -= len(branch.members) - 1
        branch.let_go(self._tree)
        self._sessions.leave(branch.job.session)
        return orphans

    @property
    def has_work(self) -> bool:
        return bool(self._waiting.num or self._running.num) and not self.is_stalled

    def plan(self) -> Plan:
        """The next step. Room for every chunk is reserved in the tree."""
        self._step += 1
        return self._planner.plan(self._step)

    def make_room_ahead(self) -> None:
        """Have cache leave for what the next steps may need."""
        self._blocks.make_room_ahead()

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

    def make_room(self, branch: Branch, num_tokens: int) -> int:
        """Room for a draft of `branch`, a decode of the last plan: for how many of so many tokens."""
        return self._blocks.stretch(branch, num_tokens)

    def drop_room(self, branch: Branch) -> None:
        """The draft of `branch` is committed as far as it is right: its other blocks are free again."""
        self._blocks.shrink(branch)

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
                if (spare := self._blocks.spare(branch)) is None:
                    continue
                self._roomy[branch] = spare
            elif not branch.room:
                continue  # it drew its first token, and waits for blocks that leave
            elif self._blocks.stretch(branch, num_drawn) < num_drawn:
                continue
            elif branch.room != before:
                self._roomy[branch] = None
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
                    self._blocks.shrink(branch)
                else:
                    self._blocks.give_back(spare)

    def follow(self, plan: Plan) -> None:
        """`plan` is carried out: what drew decodes from now on, what waited for its tokens goes on."""
        for branch in plan.ready:
            if branch.phase == "ready":
                self._running.decode(branch)
        waits = self._waiting.prefix_waits
        for chunk in plan.chunks:
            branch = chunk.branch
            if branch.phase != "prefill":
                continue
            node = node_of(branch)
            for gated in waits.passed(branch, node.end):
                self._open(gated, node)
            if chunk.is_last:
                waits.land(branch)
                for gated in waits.passed(branch, None):
                    self._open(gated, node)
                self._running.decode(branch)

    def _fetched(self, branch: Branch) -> None:
        """The blocks that `branch` fetched are committed."""
        node = node_of(branch)
        if not branch.num_pending:
            return  # it is over
        for gated in self._waiting.prefix_waits.passed(branch, node.end):
            self._open(gated, node)
        self._running.fetched(branch, self._step)

    def undo(self, plan: Plan) -> None:
        """Nothing of `plan`, the last one, was committed or drawn: it is all still to be done.

        What was reserved stays reserved; the copies will be told again.
        """
        self.drop_ahead()
        for branch in plan.drafts:
            self._blocks.shrink(branch)
        self._blocks.forget_copies()
        for chunk in plan.chunks:
            if chunk.is_last and chunk.branch.phase == "prefill":
                self._running.want_more(chunk.branch, self._step)

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        groups = [s for s in self._running if len(s.members) > 1]
        assert len(groups) == self._running.num_groups, "running groups counted wrong"
        self._sessions.check()
        self._waiting.check()
        self._running.check()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            self._waiting.num,
            self._running.num,
            self._blocks.num_preemptions,
            self._waiting.prefix_waits.num,
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
                gated.begin_at(base, node, self._tree)
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
