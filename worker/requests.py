"""Requests and their live branches: how they begin, split, and end.

Only this module adds branches to the scheduler and ends them. Doesn't know steps or draws.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from mallee.protocol.errors import (
    CapsuleAbandoned,
    CapsulesFull,
    InvalidParameter,
    MalleeError,
    Superseded,
    UnknownBranch,
)
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id
from mallee.protocol.messages import (
    Cancel,
    CapsuleReply,
    CapsuleStatus,
    Capture,
    Cut,
    EndToken,
    FinishReason,
    Fork,
    Inject,
    Kept,
    Prefill,
    Prioritize,
    Retained,
    Share,
    TokenLogprobs,
)
from mallee.worker.capsules.capsule import Capsule, cut, lengthened
from mallee.worker.capsules.moves import CapsuleMoves, Restore
from mallee.worker.capsules.registry import CapsuleRegistry
from mallee.worker.forward import Logits
from mallee.worker.kv.node import Node
from mallee.worker.kv.text import Text, joined
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.usage import TreeUsage, tree_usage
from mallee.worker.retention import Retention
from mallee.worker.sched.branch import (
    WHOLE,
    Branch,
    CapsuleState,
    ForkPoint,
    Job,
    Texts,
    answer_of,
    node_of,
)
from mallee.worker.sched.scheduler import Scheduler
from mallee.worker.updates import End, UpdateSink

OWN: Final = ""
"""The gateway of jobs that the engine gives itself."""


class RequestTable:
    """The jobs of one engine by request."""

    def __init__(
        self,
        tree: BranchTree,
        scheduler: Scheduler,
        capsules: CapsuleRegistry,
        moves: CapsuleMoves,
        updates: UpdateSink,
        *,
        retention: Retention,
        block_nbytes: int,
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.num_cached = 0  # prompt tokens that were there already
        self.num_forks = 0  # branches that began at a node shared with others
        self._producers: dict[CapsuleId, Job] = {}  # of capsules that are being computed
        self._tree = tree
        self._scheduler = scheduler
        self._capsules = capsules
        self._moves = moves
        self._updates = updates
        self._retention = retention
        self._block_nbytes = block_nbytes
        # Captures that wait for a boundary, with their gateways; and tokens to be injected, by branch.
        self.captures: list[tuple[Capture, str]] = []
        self.inbox: dict[tuple[str, int], list[tuple[Inject, Text]]] = {}
        self._rebuilding: dict[Job, list[Restore]] = {}
        self._next_ticket = 0

    # Beginnings

    def open(self, job: Job, start: ForkPoint, texts: Texts) -> None:
        """`job` begins: its branches continue `start`."""
        self.jobs[job.command.request] = job
        if not job.draws and job.gateway != OWN:
            self._producers[job.capsule(0)] = job
        if start.boundary:
            self.num_forks += job.num_branches
        self._grow(job, start, texts)

    def _grow(self, job: Job, start: ForkPoint, texts: Texts) -> None:
        """Branches of `job` that continue `start`: one for the members of each group, with its text."""
        origin = None
        if start.node is not None:
            origin = self._tree.hold_prefix(start.node, start.base, len(texts))
        branches = []
        for ticket, (members, text) in enumerate(texts.items(), self._next_ticket):
            branch = Branch(job, members, ticket, text, start, origin)
            job.branches[branch.index] = branch
            branches.append(branch)
        self._next_ticket += len(branches)
        self.num_cached += start.base * len(branches)
        self._scheduler.add(branches)

    def producer(self, capsule: str) -> Branch | None:
        """The branch that computes `capsule` just now: the last one asked to, if several do."""
        job = self._producers.get(CapsuleId(capsule))
        return None if job is None else job.branches[0]

    def making(self, capsule: str) -> CapsuleStatus | None:
        """A capsule as far as it is computed; None: nothing computes it."""
        branch = self.producer(capsule)
        if branch is None:
            return None
        command = branch.job.command
        assert isinstance(command, Prefill), "nothing else makes a capsule for its own sake"
        return CapsuleStatus(
            capsule,
            branch.length,
            nbytes=0,
            shared_nbytes=0,
            is_pinned=not command.replaceable,
            ttl_s=command.ttl_s or None,
            computed=branch.length - branch.num_pending,
        )

    def cancel_making(self, capsule: str) -> None:
        """Compute `capsule` no more, if that is under way: the forks that wait for it end, too."""
        branch = self.producer(capsule)
        if branch is not None:
            self.end(branch, "cancelled")

    def spread(self, group: Branch, logits: Logits) -> None:
        """Split a group whose text is computed: its members go on from it, each with its own draws."""
        job, node = group.job, node_of(group)
        empty = self._tree.notation.empty
        start = ForkPoint(node.end, node.end, empty(), node, None, logits)
        if not isinstance(job.command, Fork):  # whose branches are counted
            self.num_forks += len(group.members)
        if job.pull is not None:
            job.pull.give_up()  # its prompt is computed
        self._grow(job, start, {(index,): empty() for index in group.members})
        first = job.branches[group.members[0]]
        self.num_cached -= node.end  # the first branch is the one that computed it
        first.cached_tokens = group.cached_tokens
        self._retire(group)
        for index in job.cancelled.intersection(group.members):
            self.end(job.branches[index], "cancelled")

    # Changes

    def cancel(self, command: Cancel) -> None:
        job = self.jobs.get(command.request)
        if job is None:
            return  # it ended while the cancel was under way
        for branch in job.concerned(command.branch):
            if command.branch in (None, branch.index):
                self.end(branch, "cancelled")
            else:
                job.cancelled |= {command.branch}
                if job.cancelled.issuperset(branch.members):
                    self.end(branch, "cancelled")

    def prioritize(self, command: Prioritize) -> None:
        Share(priority=command.priority).validate()
        job = self.jobs.get(command.request)
        if job is None:
            return  # it ended while the command was under way
        job.prioritize(command.priority, command.branch)
        for branch in job.concerned(command.branch):
            self._scheduler.prioritize(branch, job.priority_of(branch.members))

    def inject(self, command: Inject, gateway: str) -> None:
        """Have a branch go on after other tokens, from its next boundary on.

        Raises UnknownBranch, InvalidParameter.
        """
        job, index = self.jobs.get(command.of), command.branch
        if job is None or job.gateway != gateway or not job.draws:
            raise UnknownBranch(command.of, index)
        branch = next(iter(job.concerned(index)), None)
        if branch is None or index in job.cancelled:
            raise UnknownBranch(command.of, index)
        if job.matchers:
            remedy = "the branch draws under a grammar, which they may break; give it none"
            raise InvalidParameter("inject", command.of, remedy)
        before = self.inbox.get((command.of, index), [])
        inbox = [] if command.replaces else before
        tokens = self._tree.notation.read(command.tokens)
        taken = branch.num_output + sum(len(text) for _, text in inbox)
        room = job.limits.max_tokens - 1 - taken
        if not 1 <= len(tokens) <= room:
            raise _no_room(len(tokens), room)
        if command.replaces:
            for dropped, _ in before:
                self._refuse_inject(dropped, gateway, Superseded())
        self.inbox[command.of, index] = [*inbox, (command, tokens)]

    def take_inbox(self) -> None:
        """Have the branches that draw go on after what was injected: the next step computes it."""
        for key in list(self.inbox):
            name, index = key
            job = self.jobs.get(name)
            if job is None or not (found := job.concerned(index)):
                del self.inbox[key]  # its end was told
            elif found[0].phase == "decode":
                for command, tokens in self.inbox.pop(key):
                    self._take_in(found[0], command, tokens)

    def _take_in(self, branch: Branch, command: Inject, tokens: Text) -> None:
        job = branch.job
        room = job.limits.max_tokens - branch.num_output - 1
        if len(tokens) > room:
            self._refuse_inject(command, job.gateway, _no_room(len(tokens), room))
            return
        self._scheduler.inject(branch, tokens)
        branch.num_output += len(tokens)
        if (history := answer_of(branch).history) is not None:
            for token in tokens:
                history.add(token)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if job.sampling.logprobs >= 0:
            logprobs = ((0.0, ()),) * len(tokens)
        self._updates.emit(branch, tokens, logprobs, injected=command.request)

    def _refuse_inject(self, command: Inject, gateway: str, error: MalleeError) -> None:
        self._updates.reply(gateway, CapsuleReply(command.request, error=error.to_wire()))

    def drop(self, gateway: str) -> None:
        """All branches of `gateway` end now, without an update."""
        for job in [job for job in self.jobs.values() if job.gateway == gateway]:
            for branch in list(job.branches.values()):
                if not branch.is_over:  # else it ended with another one
                    self._retire(branch)
        self._updates.drop(gateway)
        self.captures = [each for each in self.captures if each[1] != gateway]

    # Capsules of branches

    def _make_capsule(self, branch: Branch, logits: Logits) -> tuple[Capsule | None, Kept]:
        """The state that `branch` ends in: kept if it was asked for, else left while there is room.

        `logits`, already kept, are of a branch that draws nothing.
        """
        command, node = branch.job.command, node_of(branch)
        ttl_s = None  # of a capsule that is kept
        if isinstance(command, Prefill):
            self._scheduler.complete(branch, logits)
            ttl_s = None if command.replaceable else command.ttl_s
        else:
            ttl_s, logits = command.keep_s, None  # a row would be in no budget: forks compute it
        if ttl_s is None and not self._capsules.keeps_answers:
            return None, ""
        self._tree.hold(node)
        if ttl_s is None:
            logits = None
        capsule = self._capsule(branch, branch.job.capsule(branch.index), node, logits)
        if ttl_s is None:
            self._capsules.leave(capsule)
            return capsule, ""
        try:
            if not isinstance(command, Prefill):  # whose room was promised
                self._capsules.check_room(capsule)
        except CapsulesFull:
            self._tree.release(node)
            return None, "refused"
        self._capsules.keep(capsule, ttl_s=ttl_s)
        return capsule, "kept"

    def _capsule(self, branch: Branch, name: CapsuleId, node: Node, logits: Logits) -> Capsule:
        """The state of `branch`, whose KV `node` has; the hold on it passes to the capsule."""
        command = branch.job.command
        pending = tuple(branch.tokens[node.end - branch.origin_len :])
        matcher = branch.constraint.share() if branch.constraint is not None else None
        came: Branch | Prefill | CapsuleState = branch
        if isinstance(command, Prefill):
            pull = branch.job.pull
            came = command if pull is None or pull.state is None else pull.state
            if came.grammar != command.grammar:
                matcher = None  # it is built again
        return Capsule(
            id=name,
            node=node,
            pending=pending,
            logits=logits,
            matcher=matcher,
            continuation=came.continuation,
            grammar=came.grammar,
        )

    def capture(self, command: Capture, gateway: str) -> Capsule | None:
        """The capsule of a running branch; None: it is taken later, and among `captures` till then.

        Raises UnknownBranch, CapsulesFull.
        """
        self._capsules.check_unused(command.request)
        job = self.jobs.get(command.of)
        if job is None or job.gateway != gateway or not job.draws:
            raise UnknownBranch(command.of, command.branch)
        branch = next(iter(job.concerned(command.branch)), None)
        if branch is None or command.branch in job.cancelled:
            raise UnknownBranch(command.of, command.branch)
        node = branch.node
        if branch.phase != "decode" or node is None or node.is_copying:
            self.captures.append((command, gateway))
            return None
        held = self._tree.hold_prefix(node, node.end)
        capsule = self._capsule(branch, capsule_id(RequestId(command.request)), held, None)
        try:
            self._capsules.check_room(capsule)
        except MalleeError:
            self._tree.release(held)
            raise
        branch.room = 0  # its node is not its own any more
        self._capsules.keep(capsule, ttl_s=command.ttl_s)
        return capsule

    def cut(self, command: Cut, gateway: str) -> None:
        """End a branch and leave the beginning of its text, and some more, as its capsule.

        Ignored where nothing of it is left.
        """
        residue = tuple(self._tree.notation.read(command.residue)) if command.residue else ()
        name = capsule_id(RequestId(command.request), command.branch)
        job = self.jobs.get(command.request)
        branch = None if job is None else job.branches.get(command.branch)
        if branch is None:
            self._capsules.cut(name, command.at, residue)
            return
        if branch.job.gateway != gateway:
            return
        keep_s = None
        if not isinstance(branch.job.command, Prefill):
            keep_s = branch.job.command.keep_s
        node = branch.node
        is_there = node is not None and not node.is_copying and command.at <= branch.length
        if is_there and (keep_s is not None or self._capsules.keeps_answers):
            node = node_of(branch)
            whole = self._capsule(branch, name, node, None)
            shorter = lengthened(cut(self._tree, whole, command.at), residue)
            self._capsules.keep_or_leave(shorter, keep_s)
        if is_there:
            self._retain(branch)
        self.end(branch, "cancelled")

    # Capsules that can't come back

    def take_unrestored(self) -> None:
        """Forks of a capsule that finds no room end; one whose KV is gone is computed again."""
        unrestored = self._moves.unrestored
        while unrestored:
            restore, error = unrestored.pop(0)
            if error is None:
                self._rebuild(restore)
                continue
            for branch in self._scheduler.abandoned(restore):
                self.end(branch, "error", error=error)
            restore.answer(error)

    def _rebuild(self, restore: Restore) -> None:
        """Have a prompt compute the text of `restore`; what waits for that waits for this."""
        name, key = restore.key
        request, kv, notation = f"rebuild:{name}:{key:x}", restore.kv, self._tree.notation
        job = self.jobs.get(request)
        if job is None:
            text = joined(notation, kv.tokens)
            command = Prefill(request, notation.dump(text), share=restore.share, capsule=name)
            job = Job(command, OWN, kv.salt)
            self.open(job, ForkPoint(0, 0, notation.empty()), {(0,): text})
        self._rebuilding.setdefault(job, []).append(restore)
        self._scheduler.replace_producer(restore, job.branches[0])

    def _rebuilt(
        self, branch: Branch, finish: FinishReason, logits: Logits, error: MalleeError | None
    ) -> None:
        """`branch` has computed the text of a capsule, or failed."""
        restores = self._rebuilding.pop(branch.job)
        if finish == "stop":
            logits = self._moves.restored(restores[0], node_of(branch), logits)
            self._scheduler.complete(branch, logits)
        self._retire(branch, error)
        for restore in restores:
            restore.answer(error)

    # Ends

    def end_arrived(self, branch: Branch, logits: Logits) -> None:
        """All of the capsule that `branch` is to be has come from another worker."""
        if isinstance(branch.job.command, Prefill):
            self.num_cached += branch.attached_tokens or 0
        self.end(branch, "stop", logits=logits)

    def end(
        self,
        branch: Branch,
        finish: FinishReason,
        *,
        tokens: Text | tuple[int, ...] = (),
        logits: Logits = None,
        error: MalleeError | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        end_token: EndToken | None = None,
    ) -> None:
        left: Capsule | None = None
        kept: Kept = ""
        retained: Retained | None = None
        if branch.job.gateway == OWN:
            self._rebuilt(branch, finish, logits, error)
            return
        if finish in ("stop", "length"):
            left, kept = self._make_capsule(branch, logits)
            retained = self._retain(branch)
        for index in (branch.index,) if branch.index >= WHOLE else branch.members:
            end = End(
                index,
                finish,
                capsule=left.id if left else None,
                boundary=0 if finish == "error" else branch.length,
                error=error,
                kept=kept,
                retained=retained,
                token=end_token,
            )
            self._updates.emit(branch, tokens, logprobs, end)
        self._retire(branch, error)

    def _retain(self, branch: Branch) -> Retained | None:
        """Retain what the request of `branch` wants of its text; None: nothing."""
        command = branch.job.command
        if not command.retain:
            return None
        path, tenant = self._tree.path_hashes(node_of(branch)).tolist(), command.share.tenant
        asked, num = self._retention.keep(
            path, command.retain, tenant, block_size=self._tree.block_size
        )
        return Retained(asked * self._block_nbytes, num * self._block_nbytes)

    def _retire(self, branch: Branch, error: MalleeError | None = None) -> None:
        """The branch leaves all tables; with its last branch the job goes too.

        Forks that waited for its tokens end with its `error`.
        """
        job, orphans = branch.job, self._scheduler.finish(branch, is_failed=error is not None)
        del job.branches[branch.index]
        if not job.branches:
            del self.jobs[job.command.request]
            if isinstance(job.command, Prefill):
                self._capsules.forgo(job.command.request)
                if self._producers.get(job.capsule(0)) is job:
                    del self._producers[job.capsule(0)]
        for orphan in orphans:
            self.end(orphan, "error", error=error or CapsuleAbandoned(job.capsule(branch.index)))

    # Reading

    def branches(self) -> Iterator[Branch]:
        """All that are live, by request."""
        for job in self.jobs.values():
            yield from job.branches.values()

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert not any(branch.is_over for branch in self.branches()), "a branch that is over"
        assert all(job.branches for job in self.jobs.values()), "a job without branches"
        assert all(name == job.command.request for name, job in self.jobs.items()), "misnamed"
        computing = set(self._producers.values())
        assert computing <= set(self.jobs.values()), "a capsule's producer is gone"


def _no_room(num_tokens: int, room: int) -> InvalidParameter:
    return InvalidParameter(
        "tokens",
        num_tokens,
        f"give 1 to {max(room, 0)}: max_tokens counts them, and one is to be drawn",
    )


def count_holds(branches: Iterable[Branch], capsules: Mapping[Node, int]) -> Counter[Node]:
    """The number of holds on each node, by branches and `capsules`."""
    holds = Counter(capsules)
    for branch in branches:
        holds.update(node for node in (branch.node, branch.origin) if node is not None)
    return holds


def memory_usage(
    tree: BranchTree, branches: Iterable[Branch], capsules: Mapping[Node, int]
) -> TreeUsage:
    """Statistics of how the blocks in use are shared. O(branches and capsules, times their depth)."""
    readers = Counter(capsules)
    ends = (branch.node or branch.origin for branch in branches)
    readers.update(node for node in ends if node is not None)
    return tree_usage(tree, readers)
