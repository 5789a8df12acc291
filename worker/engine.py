"""The engine: commands in, one step at a time, frames and cache events out.

Owns the pool, the tree, the scheduler and the capsules of one worker; computes through a `Forward`.
Single-threaded, no I/O, no clock of its own: equal commands between equal steps give equal results.
"""

from collections.abc import Callable, Sequence

from mallee.protocol.errors import MalleeError
from mallee.protocol.events import EventBatch, Load, Snapshot, pack_hashes
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import (
    Cancel,
    Command,
    FinishReason,
    Fork,
    Generate,
    Prefill,
    Release,
)
from mallee.worker.admission import Admission
from mallee.worker.capsules import CapsuleRegistry
from mallee.worker.forward import BlockCopy, Draw, Forward, ForwardBatch, Logits, Row
from mallee.worker.jobs import WHOLE, Branch, Job
from mallee.worker.kv.audit import check_tree
from mallee.worker.kv.capsule import Capsule
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.tree import BranchTree
from mallee.worker.news import News
from mallee.worker.records import EngineConfig, EngineStats, StepResult
from mallee.worker.sched.scheduler import Plan, Scheduler
from mallee.worker.sched.sequence import Sequence as Seq


class Engine:
    """One worker's engine. `submit` between steps, `step` while `has_work`; all from one thread."""

    def __init__(
        self,
        forward: Forward,
        *,
        config: EngineConfig,
        clock: Callable[[], float],
        worker: WorkerId,
        incarnation: Incarnation,
    ) -> None:
        self.config = config
        self.worker = worker
        self.incarnation = incarnation
        self._forward = forward
        self._journal = Journal()
        pool = BlockPool(forward.num_blocks)
        self._tree = BranchTree(pool, forward.block_size, self._journal)
        self._capsules = CapsuleRegistry(
            self._tree, self._journal, clock=clock, max_replaceable=config.max_answer_capsules
        )
        self._scheduler = Scheduler(
            config.scheduler, self._tree, reclaim=self._capsules.replace_oldest
        )
        self._admission = Admission(forward.spec, forward.block_size, forward.num_blocks)
        self._jobs: dict[str, Job] = {}
        self._branches: dict[Seq, Branch] = {}
        self._news = News()
        self._next_ticket = 0
        self._next_seq = 0
        self._num_steps = 0
        self._num_prefill = self._num_cached = self._num_output = self._num_forks = 0

    # Commands

    def submit(self, command: Command, gateway: str) -> None:
        """Take a command. What is wrong with it comes back as an update with finish "error"."""
        try:
            match command:
                case Cancel():
                    self._cancel(command)
                case Release():
                    self._capsules.release(command.capsule)
                case Prefill() | Generate():
                    self._open(command, gateway)
                case Fork():
                    self._fork(command, gateway)
        except MalleeError as error:
            request = command.capsule if isinstance(command, Release) else command.request
            self._news.refuse(gateway, request, error)

    def drop_gateway(self, gateway: str) -> None:
        """The gateway is gone: its branches end now and nobody is told. Its capsules stay."""
        for job in [job for job in self._jobs.values() if job.gateway == gateway]:
            for branch in list(job.branches.values()):
                self._retire(branch)
        self._news.drop(gateway)

    def _open(self, command: Prefill | Generate, gateway: str) -> None:
        tokens = self._admission.prompt(command, self._jobs).tolist()
        num_branches = command.n if isinstance(command, Generate) else 1
        self._capsules.check_unused(command.request, num_branches)
        self._scheduler.check_room(num_branches)
        job = self._jobs[command.request] = Job(command, gateway)
        is_group = isinstance(command, Generate) and command.n > 1
        sequence = Seq(self._ticket(), tokens, salt=self._forward.spec.salt(command.salt))
        self._add(job, WHOLE if is_group else 0, sequence)

    def _fork(self, command: Fork, gateway: str) -> None:
        capsule = self._capsules.get(command.capsule)
        suffixes = self._admission.suffixes(command, capsule.boundary, self._jobs)
        self._capsules.check_unused(command.request, len(suffixes))
        self._scheduler.check_room(len(suffixes))
        job = self._jobs[command.request] = Job(command, gateway)
        self._grow(
            job,
            capsule.node,
            [[*capsule.pending, *suffix] for suffix in suffixes],
            capsule.logits,
        )

    def _grow(
        self, job: Job, node: Node, suffixes: Sequence[list[int]], logits: object | None
    ) -> None:
        """One branch of `job` per suffix, all at the end of `node`."""
        cached = node.end
        self._num_forks += len(suffixes)
        origins = self._tree.fork(node, len(suffixes))
        for index, (origin, tokens) in enumerate(zip(origins, suffixes, strict=True)):
            ready = None if tokens else logits
            sequence = Seq(self._ticket(), tokens, salt=node.salt, origin=origin, logits=ready)
            self._add(job, index, sequence, cached)

    def _add(self, job: Job, index: int, sequence: Seq, cached_tokens: int | None = None) -> None:
        branch = Branch(job, index, sequence, cached_tokens)
        job.branches[index] = branch
        self._branches[sequence] = branch
        self._num_cached += cached_tokens or 0
        self._scheduler.add(sequence)

    def _cancel(self, command: Cancel) -> None:
        job = self._jobs.get(command.request)
        if job is None:
            return  # it ended while the cancel was under way
        if command.branch is not None and WHOLE in job.branches:
            job.cancelled.add(command.branch)
            return
        for branch in list(job.branches.values()):
            if command.branch in (None, branch.index):
                self._end(branch, "cancelled")

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    # Steps

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report anything now."""
        return bool(
            self._scheduler.has_work
            or len(self._news)
            or len(self._journal)
            or self._capsules.is_expiry_due
        )

    def step(self) -> StepResult:
        """Plan, compute, commit, draw: every planned branch moves on by one chunk or one token."""
        self._capsules.expire()
        plan = self._scheduler.plan()
        for sequence, error in plan.failed:
            self._end(self._branches[sequence], "error", error=error)
        scored = [(self._branches[s], s.logits) for s in plan.ready] + self._compute(plan)
        self._draw([pair for pair in scored if not self._is_done_computing(*pair)])
        self._num_steps += 1
        return self._collect()

    def _compute(self, plan: Plan) -> list[tuple[Branch, Logits]]:
        """Run the plan's chunks; the branches that now have logits for their next token."""
        if not plan.chunks:
            return []
        rows = [
            Row(as_tokens(c.tokens), c.start, self._tree.table(_node(c.sequence)), c.is_last)
            for c in plan.chunks
        ]
        copies = [BlockCopy(*c.copy) for c in plan.chunks if c.copy is not None]
        logits = iter(self._forward.forward(ForwardBatch(copies, rows)))
        scored = []
        for chunk in plan.chunks:
            self._tree.commit(_node(chunk.sequence), chunk.tokens)
            branch = self._branches[chunk.sequence]
            if branch.num_output == 0 or len(chunk.tokens) > 1:
                self._num_prefill += len(chunk.tokens)
            if branch.cached_tokens is None:
                branch.cached_tokens = chunk.sequence.attached_tokens
                self._num_cached += branch.cached_tokens
            if chunk.is_last:
                scored.append((branch, next(logits)))
        return scored

    def _is_done_computing(self, branch: Branch, logits: Logits) -> bool:
        """Whether the branch ends here, as a capsule or as n branches, and draws no token itself."""
        branch.sequence.logits = None
        command = branch.job.command
        if isinstance(command, Prefill):
            self._end(branch, "stop", logits=logits)
        elif isinstance(command, Generate) and branch.index == WHOLE:
            self._spread(branch, command, logits)
        else:
            return False
        return True

    def _spread(self, whole: Branch, command: Generate, logits: Logits) -> None:
        """The prompt is computed: n branches go on from it, each with its own stream of draws."""
        job, node = whole.job, _node(whole.sequence)
        self._grow(job, node, [[] for _ in range(command.n)], self._forward.keep(logits))
        assert whole.cached_tokens is not None
        first = job.branches[0]
        self._num_cached -= node.end  # the first branch is the one that computed the prompt
        first.cached_tokens = whole.cached_tokens
        self._retire(whole)
        for index in job.cancelled & job.branches.keys():
            self._end(job.branches[index], "cancelled")

    def _draw(self, scored: Sequence[tuple[Branch, Logits]]) -> None:
        if not scored:
            return
        draws = [
            Draw(logits, branch.job.sampling, branch.seed, branch.sequence.length)
            for branch, logits in scored
        ]
        tokens = self._forward.sample(draws)
        for (branch, logits), token in zip(scored, tokens, strict=True):
            self._take(branch, token, logits)

    def _take(self, branch: Branch, token: int, logits: Logits) -> None:
        limits = branch.job.limits
        is_eos = token in self._forward.spec.eos_token_ids and not limits.ignore_eos
        if is_eos or token in limits.stop_token_ids:
            self._end(branch, "stop", logits=logits)
            return
        branch.sequence.tokens.append(token)
        branch.num_output += 1
        self._num_output += 1
        if branch.num_output >= limits.max_tokens:
            self._end(branch, "length", tokens=(token,))
        else:
            self._news.tell(branch, tokens=(token,))

    # Ends

    def _make_capsule(self, branch: Branch, logits: Logits) -> Capsule | None:
        """The state that `branch` ends in: kept if it was asked for, else left while there is room."""
        sequence, command = branch.sequence, branch.job.command
        node = _node(sequence)
        pending = tuple(sequence.pending(sequence.num_pending))
        self._tree.hold(node)
        capsule = Capsule(
            capsule_id(RequestId(command.request), branch.index),
            node,
            pending,
            None if pending else self._forward.keep(logits),
        )
        if isinstance(command, Prefill):
            self._capsules.keep(capsule, ttl_s=command.ttl_s)
            return capsule
        return capsule if self._capsules.leave(capsule) else None

    def _end(
        self,
        branch: Branch,
        finish: FinishReason,
        *,
        tokens: tuple[int, ...] = (),
        logits: Logits = None,
        error: MalleeError | None = None,
    ) -> None:
        left = self._make_capsule(branch, logits) if finish in ("stop", "length") else None
        self._news.tell(
            branch,
            tokens=tokens,
            finish=finish,
            capsule=left.id if left else None,
            boundary=left.boundary if left else 0,
            error=error,
        )
        self._retire(branch)

    def _retire(self, branch: Branch) -> None:
        """The branch leaves all tables; with its last branch the job goes too."""
        self._scheduler.finish(branch.sequence)
        del self._branches[branch.sequence]
        del branch.job.branches[branch.index]
        if not branch.job.branches:
            del self._jobs[branch.job.command.request]

    def _collect(self) -> StepResult:
        frames = self._news.drain(self._num_steps)
        events = self._journal.drain()
        if not events:
            return StepResult(frames, None)
        batch = EventBatch(self.worker, self.incarnation, self._next_seq, events)
        self._next_seq = batch.next_seq
        return StepResult(frames, batch)

    # Reading

    @property
    def next_seq(self) -> int:
        """The number of the next cache event."""
        return self._next_seq

    def snapshot(self) -> Snapshot:
        """All that this worker holds, as of the events published so far. Call between steps."""
        assert not len(self._journal), "events of the last step are not collected yet"
        return Snapshot(
            self.worker,
            self.incarnation,
            self._next_seq,
            pack_hashes(self._tree.held_hashes()),
            self._capsules.describe_all(),
        )

    def load(self) -> Load:
        """How busy it is. Call between steps."""
        queues = self._scheduler.stats()
        return Load(
            rows=queues.running,
            waiting=queues.waiting,
            active_blocks=self._tree.pool.num_blocks - self._tree.num_available,
            prefill_tokens=self._scheduler.prefill_tokens(),
        )

    def check(self) -> None:
        """Raise AssertionError on a broken invariant. O(everything); for tests and idle moments."""
        check_tree(self._tree)
        self._capsules.check()
        self._scheduler.check()
        live = [b for job in self._jobs.values() for b in job.branches.values()]
        assert {b.sequence for b in live} == set(self._branches), "branch tables disagree"
        assert all(job.branches for job in self._jobs.values()), "a job without branches"
        holds: dict[Node, int] = {}
        for branch in live:
            for node in (branch.sequence.node, branch.sequence.origin):
                if node is not None:
                    holds[node] = holds.get(node, 0) + 1
        for node, n in self._capsules.holds().items():
            holds[node] = holds.get(node, 0) + n
        assert holds == self._tree.holds(), "holders of the tree are not the branches and capsules"

    def stats(self) -> EngineStats:
        return EngineStats(
            self._tree.pool.stats(),
            self._tree.stats(),
            self._scheduler.stats(),
            self._capsules.stats(),
            len(self._jobs),
            self._num_steps,
            self._num_prefill,
            self._num_cached,
            self._num_output,
            self._num_forks,
        )


def _node(sequence: Seq) -> Node:
    assert sequence.node is not None, "only running branches have a node"
    return sequence.node
