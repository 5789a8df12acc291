"""Plans one engine step: continuous batching with chunked prefill, first come first served.

Each step gives every decoding branch one token, then prefill chunks in order of arrival, until the
token budget is used; waiting branches join when a row and blocks are free. Branches whose next logits
are already there (forks of a capsule) need no forward pass: a step that finds some draws their
first tokens and does nothing else, so that they do not wait behind a long chunk. Two such steps never
follow each other while others wait to compute. A branch whose next block is being computed for another
branch waits for it instead of computing a copy: n cold siblings cost one prefix.

When blocks run out, in this order: cached blocks are evicted (by the tree), replaceable capsules are
given up, the youngest running branch is preempted. A preempted branch goes back to its origin and
computes its own tokens again; as draws depend on (seed, position) alone, its answer does not change.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mallee.protocol.errors import PoolExhausted, QueueFull
from mallee.protocol.hashing import Hashes, block_hashes
from mallee.worker.kv.node import SlotCopy
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_step_tokens` bounds a step (decode rows count one each), `max_rows` the batch."""

    max_step_tokens: int = 512
    max_rows: int = 256
    max_waiting: int = 4096


class Chunk(NamedTuple):
    """Compute `tokens` of `sequence` from `start` on. `is_last`: nothing is pending after it."""

    sequence: Sequence
    tokens: list[int]
    start: int
    is_last: bool
    copy: SlotCopy | None


@dataclass(slots=True)
class Plan:
    """What to do in one step: chunks to compute, draws that need no pass, branches that can't go on."""

    chunks: list[Chunk] = field(default_factory=list)
    ready: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, PoolExhausted]] = field(default_factory=list)


MAX_LOOKED_AT = (
    256  # waiting branches whose tokens left to compute are counted; the others are like them
)


class SchedulerStats(NamedTuple):
    """Branches by state; the counters only grow."""

    waiting: int
    running: int
    num_preemptions: int


class Scheduler:
    """Owns the queues. `reclaim` gives up something worth blocks and returns False if nothing is left."""

    def __init__(
        self, config: SchedulerConfig, tree: BranchTree, *, reclaim: Callable[[], bool]
    ) -> None:
        self.config = config
        self._tree = tree
        self._reclaim = reclaim
        self._waiting: list[Sequence] = []  # by ticket
        self._running: list[Sequence] = []  # by ticket
        self._planned: set[Sequence] = set()
        self._in_flight: dict[int, Sequence] = {}  # chain hash -> running branch that computes it
        self._drew_only = False
        self._num_preemptions = 0

    def check_room(self, n: int) -> None:
        """Raises QueueFull if n more branches may not wait."""
        if len(self._waiting) + n > self.config.max_waiting:
            raise QueueFull(len(self._waiting), self.config.max_waiting)

    def add(self, sequence: Sequence) -> None:
        """`sequence` waits for its turn."""
        if self._waiting and self._waiting[-1].ticket > sequence.ticket:
            insort(self._waiting, sequence, key=_ticket)
        else:
            self._waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """`sequence` is over: it leaves the queues and lets go of its nodes. O(queue length)."""
        queue = self._running if sequence.phase is Phase.RUNNING else self._waiting
        queue.remove(sequence)
        self._land(sequence)
        sequence.move(Phase.FINISHED)
        sequence.let_go(self._tree)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def plan(self) -> Plan:
        """The next step. Room for every chunk is reserved in the tree."""
        plan = Plan()
        self._planned = set()
        self._admit_ready(plan)
        must_compute = any(s.logits is None for s in (*self._running, *self._waiting))
        if plan.ready and not (self._drew_only and must_compute):
            self._drew_only = True
            return plan
        self._drew_only = False
        budget = self.config.max_step_tokens
        for is_decode in (True, False):
            for sequence in list(self._running):
                if sequence.logits is None and (sequence.num_pending == 1) is is_decode:
                    budget -= self._place(plan, sequence, budget)
        self._admit_prefills(plan, budget)
        return plan

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        for queue, phase in ((self._waiting, Phase.WAITING), (self._running, Phase.RUNNING)):
            tickets = [s.ticket for s in queue]
            assert tickets == sorted(tickets), f"{phase} branches out of order"
            assert all(s.phase is phase for s in queue), f"a branch in {phase} is not"
            assert all((s.node is not None) is (phase is Phase.RUNNING) for s in queue), "node"
        assert len(self._running) <= self.config.max_rows, "more rows than allowed"
        assert set(self._in_flight.values()) <= set(self._running), "in flight without running"

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._waiting), len(self._running), self._num_preemptions)

    def prefill_tokens(self) -> int:
        """Prompt tokens still to be computed, of running and waiting branches.

        What the cache holds, or a running branch computes, is not counted for those that wait. O(running
        branches + MAX_LOOKED_AT).
        """
        looked_at = self._waiting[:MAX_LOOKED_AT]
        waiting = sum(map(self._num_missing, looked_at))
        if looked_at:
            waiting = waiting * len(self._waiting) // len(looked_at)
        return waiting + sum(s.num_pending for s in self._running if s.num_pending > 1)

    def _num_missing(self, sequence: Sequence) -> int:
        """Tokens that a waiting `sequence` would have to compute itself; 0 if its logits are there."""
        if sequence.logits is not None:
            return 0
        if sequence.origin is not None:
            return sequence.num_pending
        hashes = self._prompt_hashes(sequence)
        found = self._tree.find(hashes)
        while found < len(hashes) and int(hashes[found]) in self._in_flight:
            found += 1
        return len(sequence.tokens) - found * self._tree.block_size

    # Admission

    def _admit_ready(self, plan: Plan) -> None:
        free_rows = self.config.max_rows - len(self._running)
        if any(s.logits is None for s in self._waiting):
            free_rows = max(0, free_rows - 1)  # one is kept for the oldest that has to compute
        for sequence in [s for s in self._waiting if s.logits is not None][:free_rows]:
            self._admit(sequence)
        plan.ready = [s for s in self._running if s.logits is not None]

    def _admit_prefills(self, plan: Plan, budget: int) -> None:
        for sequence in list(self._waiting):
            if budget <= 0 or len(self._running) >= self.config.max_rows:
                return
            if self._is_coming(sequence):
                continue
            if self._running and not self._fits(sequence):
                return
            self._admit(sequence)
            budget -= self._place(plan, sequence, budget)

    def _is_coming(self, sequence: Sequence) -> bool:
        """Whether a running branch computes the first block that `sequence` would have to compute.

        It runs, so it moves on or leaves the running ones: nobody waits for ever.
        """
        if sequence.origin is not None or not self._in_flight:
            return False
        hashes = self._prompt_hashes(sequence)
        held = self._tree.find(hashes)
        return held < len(hashes) and int(hashes[held]) in self._in_flight

    def _prompt_hashes(self, sequence: Sequence) -> Hashes:
        """Of the full blocks that `sequence` can share: one token must run for its logits."""
        size = self._tree.block_size
        usable = (len(sequence.tokens) - 1) // size
        if len(sequence.hashes) != usable:
            sequence.hashes = block_hashes(
                sequence.tokens[: usable * size], size, salt=sequence.salt
            )
        return sequence.hashes

    def _fits(self, sequence: Sequence) -> bool:
        """Whether all pending tokens have room beside those that run, with 1 % of blocks to spare."""
        spare = max(1, self._tree.pool.num_blocks // 100)
        needed = -(-sequence.num_pending // self._tree.block_size) + 1 + spare
        while needed > self._tree.num_available:
            if not self._reclaim():
                return False
        return True

    def _admit(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        if sequence.origin is not None:
            sequence.node = sequence.origin
            self._tree.hold(sequence.node)
        else:
            hashes = self._prompt_hashes(sequence)
            sequence.node = self._tree.attach(hashes, sequence.salt)
            for value in hashes[sequence.node.end // self._tree.block_size :].tolist():
                self._in_flight.setdefault(value, sequence)
        if sequence.num_admissions == 0:
            sequence.attached_tokens = sequence.node.end
        sequence.num_admissions += 1
        sequence.move(Phase.RUNNING)
        insort(self._running, sequence, key=_ticket)

    # Room

    def _place(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Plan the next chunk of `sequence` within `budget`; returns the tokens it takes."""
        if sequence.phase is not Phase.RUNNING or budget <= 0:
            return 0  # preempted meanwhile, or its turn comes next step
        n = min(sequence.num_pending, budget)
        while True:
            assert sequence.node is not None
            try:
                sequence.node, copy = self._tree.reserve(sequence.node, n)
                break
            except PoolExhausted as error:
                if self._reclaim():
                    continue
                victim = self._victim(sequence)
                if victim is not None:
                    self._preempt(victim)
                elif len(self._running) > 1:
                    self._preempt(sequence)
                    return 0
                else:
                    plan.failed.append((sequence, error))
                    return 0
        self._planned.add(sequence)
        tokens = sequence.pending(n)
        is_last = n == sequence.num_pending
        plan.chunks.append(Chunk(sequence, tokens, sequence.node.end, is_last, copy))
        return n

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The youngest running branch, younger than `sequence`, that this step does not need."""
        for candidate in reversed(self._running):
            if candidate.ticket <= sequence.ticket:
                return None
            if candidate not in self._planned and candidate.logits is None:
                return candidate
        return None

    def _preempt(self, victim: Sequence) -> None:
        assert victim.node is not None
        self._running.remove(victim)
        self._land(victim)
        self._tree.release(victim.node)
        victim.node = None
        victim.move(Phase.WAITING)
        insort(self._waiting, victim, key=_ticket)
        self._num_preemptions += 1

    def _land(self, sequence: Sequence) -> None:
        """`sequence` computes nothing for others any more."""
        for value in sequence.hashes.tolist():
            if self._in_flight.get(value) is sequence:
                del self._in_flight[value]


def _ticket(sequence: Sequence) -> int:
    return sequence.ticket
