"""Chooses the branches of each step: continuous batching with chunked prompts, for trees of branches.

Two levels: sessions get computed tokens in proportion to their weights (`sessions.py`); inside one the
highest priority goes first, then the oldest (`policy.py`); none goes unserved for long (`branch.py`).
Prefixes that several branches need are computed once (`waiting.py`); a branch without room is preempted
down to the state it was forked from (`running.py`). `planner.py` puts a step together.
"""

from collections.abc import Collection
from typing import NamedTuple

from mallee.protocol.errors import QueueFull
from mallee.protocol.messages import Share
from mallee.worker.kv.node import Node
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.branch import Phase, Plan, Sequence
from mallee.worker.sched.planner import Planner
from mallee.worker.sched.policy import SchedulerConfig, policy_named, victims_named
from mallee.worker.sched.prefill import Prompts, Queues
from mallee.worker.sched.running import BlockBudget, Reclaimer, Running
from mallee.worker.sched.sessions import Sessions, SessionStats
from mallee.worker.sched.waiting import Waiting


class SchedulerStats(NamedTuple):
    """Branches by state (`gated` of `waiting` wait for others' tokens); the counter only grows."""

    waiting: int
    running: int
    num_preemptions: int
    gated: int
    sessions: SessionStats


class Scheduler:
    """Owns the queues.

    A step is `plan`, then what it says computed and committed in the tree, tokens appended to what drew;
    or `undo`, if that failed. In between branches may be added and finished.
    """

    def __init__(self, config: SchedulerConfig, tree: BranchTree, *, reclaimer: Reclaimer) -> None:
        self.config = config
        self._tree = tree
        self._policy = policy_named(config.policy)
        self._sessions = Sessions()
        self._waiting = Waiting(config, self._policy, self._sessions, tree)
        self._running = Running(self._policy, self._sessions, self._place)
        self._blocks = BlockBudget(
            config,
            self._policy,
            victims_named(config.victims),
            tree,
            waiting=self._waiting,
            running=self._running,
            reclaimer=reclaimer,
        )
        queues = Queues(self._sessions, self._waiting, self._running, self._blocks)
        prompts = Prompts(config, self._policy, tree, queues)
        self._planner = Planner(config, self._policy, queues, prompts)
        self._step = 0
        self._num_joint = 0  # members of all groups, less one of each
        self._last: Plan | None = None  # its work is not seen to yet

    def check_room(self, n: int) -> None:
        """Raises QueueFull if n more branches may not wait.

        A branch that computes a text for several counts as all of them, also while it runs.
        """
        num = self._waiting.num + self._num_joint + self._running.num_groups
        if num + n > self.config.max_waiting:
            raise QueueFull(num, self.config.max_waiting)

    def add(self, sequences: Collection[Sequence], share: Share) -> None:
        """`sequences`, siblings of one `share`, wait for their turn, or for their producer."""
        first = next(iter(sequences))
        key, weight = ("", ""), 1.0
        if self._policy.is_fair:
            key, weight = (first.salt, share.session), share.weight
        session = self._sessions.join(key, weight, len(sequences))
        for sequence in sequences:
            sequence.session = session
        self._num_joint += sum([len(s.members) for s in sequences]) - len(sequences)
        producer = first.producer
        if producer is None:
            self._waiting.extend(sequences, self._step)
            return
        for sequence in sequences:
            if producer.node is not None and producer.node.end >= sequence.origin_len:
                self._open(sequence, producer.node)
            else:
                self._waiting.hold(sequence, producer, sequence.origin_len)

    def prioritize(self, sequence: Sequence, priority: float) -> None:
        """From the next step on `sequence` has `priority`."""
        sequence.priority = priority
        if sequence.queue is not None:
            sequence.queue.push(sequence, self._policy.rank(sequence.claim))
        elif sequence.phase is Phase.GATED:
            self._waiting.lend(sequence)
        self._running.reorder()

    def complete(self, producer: Sequence, logits: object) -> None:
        """All tokens of `producer` are committed, `logits` are of the next one: its forks go on."""
        assert producer.node is not None
        for sequence in self._waiting.prefix_waits.passed(producer, None):
            is_whole = sequence.origin_len == producer.length and sequence.producer is producer
            if is_whole and not len(sequence.tokens):
                sequence.logits = logits
            self._open(sequence, producer.node)

    def finish(self, sequence: Sequence, *, is_failed: bool = False) -> list[Sequence]:
        """`sequence` is over: it leaves the queues and lets go of its nodes.

        Returns the branches that were to continue it and can't now; the caller must finish them too.
        """
        end = Phase.FAILED if is_failed else Phase.FINISHED
        waits = self._waiting.prefix_waits
        if sequence.is_running:
            self._running.remove(sequence, end)
        else:
            self._waiting.remove(sequence)
            sequence.move(end)
        waits.land(sequence)
        for gated in waits.dropped(sequence):
            self._open(gated, None)
        orphans = waits.stranded(sequence)
        self._num_joint -= len(sequence.members) - 1
        sequence.let_go(self._tree)
        self._sessions.leave(sequence.session)
        return orphans

    @property
    def has_work(self) -> bool:
        return bool(self._waiting.num or self._running.num)

    def plan(self) -> Plan:
        """The next step. Room for every chunk is reserved in the tree."""
        self._see_to_last()
        self._step += 1
        self._last = self._planner.plan(self._step)
        return self._last

    def multi_step_limit(self) -> int:
        """The number of next steps that are sure to be the same: all decodes run, nothing else happens.

        No block gets full before the last of them, and none is evicted for their sake. 0: not even one.
        """
        self._see_to_last()
        if self._waiting.num:
            return 0
        return self._planner.multi_step_limit()

    @property
    def decodes(self) -> list[Sequence]:
        """The branches that decode, in the order of a batch; to be read only."""
        return self._running.decodes()

    def multi_step(self, num_steps: int) -> list[Sequence]:
        """So many such steps at once: who decodes in each. Room for all their tokens is reserved."""
        decodes = self._planner.multi_step(self._step + num_steps)
        self._step += num_steps
        return decodes

    def undo(self, plan: Plan) -> None:
        """Nothing of `plan`, the last one, was committed or drawn: it is all still to be done.

        What was reserved stays reserved; the copies will be told again.
        """
        assert plan is self._last, "only the last plan can be undone"
        self._last = None
        self._blocks.forget_copies()
        for chunk in plan.chunks:
            if chunk.is_last and chunk.sequence.phase is Phase.PREFILL:
                self._running.want_more(chunk.sequence, self._step)

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
            self._sessions.stats(),
        )

    def prefill_tokens(self) -> int:
        """Prompt tokens still to be computed, of running and waiting branches.

        What the cache holds, or a running branch computes, is not counted for those that wait.
        """
        running = sum(s.num_pending for s in self._running.prefills if s.num_pending > 1)
        return running + self._waiting.prefill_tokens()

    def _see_to_last(self) -> None:
        """Follow up the last plan: what drew decodes, what waited for its tokens goes on."""
        plan, self._last = self._last, None
        if plan is None:
            return
        for sequence in plan.ready:
            if sequence.phase is Phase.READY and sequence.logits is None:
                self._running.decode(sequence)
        waits = self._waiting.prefix_waits
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.phase is not Phase.PREFILL:
                continue
            assert sequence.node is not None
            for gated in waits.passed(sequence, sequence.node.end):
                self._open(gated, sequence.node)
            if chunk.is_last:
                waits.land(sequence)
                for gated in waits.passed(sequence, None):
                    self._open(gated, sequence.node)
                self._running.decode(sequence)

    def _open(self, gated: Sequence, node: Node | None) -> None:
        """Queue `gated`; if it continues its producer, whose tokens `node` has, it begins there."""
        if gated.phase is Phase.GATED:
            gated.move(Phase.WAITING)
        if gated.producer is not None:
            assert node is not None
            gated.producer = None
            gated.origin = self._tree.hold_prefix(node, gated.origin_len)
        self._waiting.push(gated, self._step)

    def _place(self, node: Node) -> bytes:
        """Rows in order of their block tables: those that share a prefix stand side by side."""
        if not self.config.gang:
            return b""
        return self._tree.table(node).astype(">i4").tobytes()
