"""A request on this worker and its branches, on their way through the engine, and the queue they wait in.

The states of a branch:

GATED <-> WAITING -> READY ------> DECODE      any but the last two -> FINISHED, FAILED
             ^  `--> PREFILL ------^  |        FETCHING <-> PREFILL
             `----------<-------------'        preempted: READY, PREFILL, DECODE -> WAITING
                                               tokens were injected: DECODE -> PREFILL
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from mallee.protocol.errors import PoolExhausted
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId, RequestId, branch_seed, capsule_id
from mallee.protocol.messages import (
    ALL_BRANCHES,
    Continuation,
    Fork,
    Generate,
    Grammar,
    Holder,
    Limits,
    Prefill,
    Sampling,
)
from mallee.worker.forward import Constraint, Ids, Matcher, TokenHistory
from mallee.worker.kv.node import BlockCopy, Node
from mallee.worker.kv.paths import path_texts
from mallee.worker.kv.text import Notation, Text, joined
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.sessions import Session, Sessions, Tenant, Turns
from mallee.worker.transfer.values import Loan

NOT_LOOKED_UP = (-1, 0)
"""No version of the tree, no blocks: `Branch.found` before the first look."""

WHOLE = ALL_BRANCHES
"""Index of the one branch that computes a text for all branches of a job."""

GROUP = WHOLE - 1
"""GROUP - i is the index of a branch that computes a text for some of them, of which i is the first."""

JobCommand: TypeAlias = Prefill | Generate | Fork
"""The commands that begin branches."""

_NOTHING = Continuation(Sampling(), Limits(0))  # of a prefill, which draws nothing


class CapsuleState(NamedTuple):
    """A capsule's state beside its text and its KV; `logits` are opaque."""

    continuation: Continuation | None
    grammar: Grammar | None
    logits: object | None


class Lent(NamedTuple):
    """A loan of the KV of the first `num_tokens` of a job's text.

    `keys` are those of its blocks by place, under the salt of this job: `num_blocks` of the text, the last
    one partial if the tokens end inside it, then rows of windows that are read after it. `is_capsule`: it
    ends where the capsule's KV does.
    """

    loan: Loan
    keys: tuple[int, ...]
    num_blocks: int
    num_tokens: int
    is_capsule: bool = False
    is_foreign: bool = False  # as in `Peer`


class Pull:
    """Progress of one job with the holders of its text's KV, of which each is asked once.

    `lent` is the loan it has now; `state` what a holder told of the capsule that it is. `skips_local`: what
    lies below here did not come, or is dear.
    """

    __slots__ = ("_holders", "lent", "skips_local", "state")

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = list(holders)
        self.lent: Lent | None = None
        self.state: CapsuleState | None = None
        self.skips_local = False

    def next_capsule(self) -> Holder | None:
        """The next holder that names a capsule, while none has told its state."""
        if self.state is not None or self.lent is not None:
            return None
        found = next((i for i, holder in enumerate(self._holders) if holder.capsule), None)
        return None if found is None else self._holders.pop(found)

    def next_holder(self) -> Holder | None:
        """The next that names none, if the job has one."""
        while self._holders:
            holder = self._holders.pop(0)
            if not holder.capsule:
                return holder
        return None

    def give_up(self) -> None:
        """Nothing more is pulled."""
        self._holders, self.lent = [], None


class Job:
    """A request on this worker: its command and its live branches by index.

    `matchers`: the grammar state its branches begin with: one for all, one for each, or none.
    `limits` are those of the tokens still to draw: without the `num_drawn` last ones of its text, which
    its branch drew before (on another worker, or up to a capsule). `start` is the first branch as it begins.
    `grammar`, if its text began before this job: the source, and where it begins, `grammar_begin`.
    """

    __slots__ = (
        *("branches", "cancelled", "command", "draws", "gateway", "grammar", "pull"),
        "grammar_begin",
        *("has_penalties", "indices", "is_plain", "limits", "matchers", "num_drawn"),
        *("priorities", "salt", "sampling", "session", "shared", "start", "stop_ids"),
    )

    def __init__(
        self,
        command: JobCommand,
        gateway: str,
        salt: str,
        matchers: tuple[Matcher, ...] = (),
        *,
        resumed: Continuation | None = None,
        grammar: Grammar | None = None,
        grammar_begin: int | None = None,
    ) -> None:
        """`resumed`: the branch that it goes on as, instead of one of the command's own."""
        self.command = command
        # Of the one branch that computes its prompt; None: nothing of it is with other workers.
        self.pull: Pull | None = None
        if isinstance(command, Prefill | Generate) and command.holders:
            self.pull = Pull(command.holders)
        self.salt = salt  # of the hashes of its blocks
        self.session: Session  # from `Scheduler.add` on
        self.matchers = matchers
        self.draws = not isinstance(command, Prefill)
        self.indices = _indices(command)  # of all branches that it ever has
        self.start = resumed or _start(command)
        self.num_drawn = self.start.drawn
        self.limits = _limits_after(self.num_drawn, self.start.limits)
        self.sampling = self.start.sampling
        self.grammar = grammar
        self.grammar_begin = grammar_begin  # None: where the answers begin
        self.has_penalties = _has_penalties(self.sampling)
        # Whether its draws need nothing but logits, and their updates carry nothing but tokens.
        self.is_plain = not (
            matchers
            or self.has_penalties
            or self.limits.min_tokens
            or self.limits.reasoning is not None
            or self.sampling.logprobs >= 0
        )
        # Beside the model's own. A set: clients may give as many as they like.
        self.stop_ids = frozenset(self.limits.stop_token_ids)
        self.shared: dict[Node | None, Ids] = {}  # distinct tokens of what its branches continue
        self.gateway = gateway
        self.branches: dict[int, Branch] = {}
        self.cancelled: set[int] = set()  # cancelled while a text was still computed for several
        # Of branches whose priority was changed alone; None: of all others.
        self.priorities: dict[int | None, float] = {None: command.share.priority}

    @property
    def first_branch(self) -> int:
        """The number of this job's first branch in the request that it is a part of."""
        return self.start.branch

    def capsule(self, index: int) -> CapsuleId:
        """The id of the state that branch `index` leaves."""
        given = ""
        if isinstance(self.command, Prefill):
            given = self.command.capsule
        return CapsuleId(given) if given else capsule_id(RequestId(self.command.request), index)

    def concerned(self, index: int | None) -> "list[Branch]":
        """Live branches that are branch `index` or compute a text for it; None: all there are.

        O(1) for one that draws already, however many there are beside it.
        """
        if index is None:
            return list(self.branches.values())
        own = self.branches.get(index)
        if own is not None:
            return [own]
        return [b for b in self.branches.values() if b.index < 0 and index in b.members]

    def priority(self, members: tuple[int, ...]) -> float:
        """The highest of these branches, now."""
        of_all = self.priorities[None]
        return max(self.priorities.get(index, of_all) for index in members)

    def prioritize(self, priority: float, index: int | None) -> None:
        """Branch `index`, or every branch, has `priority` from now on."""
        if index is None:
            self.priorities.clear()
        self.priorities[index] = priority

    def constraint(self, index: int) -> Constraint | None:
        """The grammar state that branch `index` begins with, if it draws under a grammar."""
        if not self.matchers or index < 0:
            return None
        return Constraint(self.matchers[index if len(self.matchers) > 1 else 0])


class Producer(Protocol):
    """The tokens that others continue: of a branch that computes them, or of a capsule that comes back."""

    @property
    def node(self) -> Node | None:
        """Ends with those that are there."""
        ...


class ForkPoint(NamedTuple):
    """`boundary` tokens, of which the KV of the first `base` is shared and `rest` must run again.

    `node` has the first `base` tokens at its end or above; None if they are those of a `producer`,
    or if `base` is 0. `logits` belong to the token after the boundary, if there is no rest.
    """

    boundary: int
    base: int
    rest: Text
    node: Node | None = None
    producer: Producer | None = None
    logits: object | None = None


Texts: TypeAlias = Mapping[tuple[int, ...], Text]
"""Texts that branches must compute, by the indices of those that compute the same."""


Phase: TypeAlias = Literal[
    "gated", "waiting", "ready", "fetching", "prefill", "decode", "finished", "failed"
]
"""A branch's place on its way.

Gated: it waits for tokens that another branch computes. Ready: admitted, and its next token can be
drawn without a pass. Fetching: admitted, and its next blocks are on their way from a lower tier.
"""

_RUNNING: tuple[Phase, ...] = ("ready", "fetching", "prefill", "decode")
_ENDS: tuple[Phase, ...] = ("finished", "failed")
_NEXT: dict[Phase, tuple[Phase, ...]] = {
    "gated": ("waiting", *_ENDS),
    "waiting": ("gated", "ready", "prefill", *_ENDS),
    "ready": ("waiting", "decode", *_ENDS),
    "fetching": ("prefill", *_ENDS),
    "prefill": ("waiting", "fetching", "decode", *_ENDS),
    "decode": ("waiting", "prefill", *_ENDS),
    "finished": (),
    "failed": (),
}


class Branch:
    """One branch of a job: tokens after `origin`, and the node that holds their KV.

    `origin` is the node it was forked from (None: it starts at the root and may attach to any cached
    prefix), `origin_len` its length. `tokens` are all tokens after the origin, prompt first. The
    branch holds `origin` and, while running, `node`. `logits` (opaque) are set while a next token can
    be drawn without a pass. `members` are the indices of the job's branches that wait for its tokens:
    with several of them it computes a text that they share, and draws nothing itself.

    With a `producer` the branch continues the first `origin_len` tokens of that, which are not all there
    yet: it is gated, and gets its origin when they are.
    """

    # Many wait for long, by the thousand: what is needed later is set later.
    __slots__ = (
        *("_seed", "attached_tokens", "cached_tokens", "constraint", "entry", "found", "hashes"),
        *("history", "index", "is_short", "job", "last_step", "logits", "may_fetch", "members"),
        *("has_reasoned", "node"),
        *("num_output", "origin", "origin_len", "payer", "phase", "place", "priority", "producer"),
        *("queue", "rank", "room", "sponsor", "ticket", "tokens", "untold_drafts", "waits_for"),
    )

    def __init__(
        self,
        job: Job,
        members: tuple[int, ...],
        ticket: int,
        tokens: Text,
        start: ForkPoint,
        origin: Node | None,
    ) -> None:
        self.job = job
        self.members = members
        self.index = members[0] if len(members) == 1 else _group_index(members, job)
        self.ticket = ticket  # arrival order; ties are decided by it
        self.tokens = tokens
        self.origin = origin
        self.origin_len = start.base
        self.producer = start.producer
        self.logits = None if len(tokens) else start.logits
        priorities = job.priorities
        self.priority = priorities[None] if len(priorities) == 1 else job.priority(members)
        self.phase: Phase = "waiting"
        self.node: Node | None = None
        self.queue: FairQueue | None = None  # the queue it is in
        self.entry = 0  # the number of its entry there; entries with others are out of date
        self.sponsor: Branch | None = None  # waits for its tokens and has the better claim
        self.waits_for: Branch | None = None  # the branch that computes for it, while it is gated
        self.hashes = NO_HASHES  # of the full blocks it can share, once the scheduler needs them
        self.found: tuple[int, int]  # a version of the tree, and the leading `hashes` in it
        self.cached_tokens = start.base or None  # None until its first chunk is computed
        self.attached_tokens: int | None = None  # found in the cache at its first admission
        self.num_output = 0
        self.untold_drafts: tuple[int, int] | None = None  # as `Update.drafts`, for the next one
        self.has_reasoned = False  # its reasoning has ended, or there is none: no budget counts
        self.history: TokenHistory | None = None  # from the first draw on, if there are penalties
        self.constraint = job.constraint(self.index) if job.matchers else None
        self._seed: int | None = None
        # From the first queue on.
        self.payer: Session  # of the claim under which it is queued: charged for its grants
        self.rank: float  # of that claim
        self.last_step: int  # when it was last served, or began to wait
        self.is_short: bool  # it had little to compute when it began to wait
        # From the first admission on.
        self.may_fetch: bool  # blocks that it needs may lie below the device
        self.room: int  # its own node has room up to this position; 0: it has no node of its own
        self.place: tuple[bytes, int]  # order inside a batch

    @property
    def seed(self) -> int:
        """The seed of this branch's stream of draws."""
        if self._seed is None:  # most branches of a wide fork wait long for their first draw
            self._seed = branch_seed(self.job.sampling.seed, self.job.first_branch + self.index)
        return self._seed

    @property
    def draws(self) -> bool:
        """Whether it draws tokens when its prompt is computed."""
        return self.index >= 0 and self.job.draws

    @property
    def prompt_len(self) -> int:
        """Tokens that it began with."""
        return self.origin_len + len(self.tokens) - self.num_output

    @property
    def length(self) -> int:
        """Tokens of the whole branch, computed or not."""
        return self.origin_len + len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed yet."""
        done = self.node.end if self.node is not None else self.origin_len
        return self.length - done

    @property
    def continuation(self) -> Continuation:
        """The branch as it is now, to be gone on as."""
        start = self.job.start
        drawn = start.drawn + self.num_output
        return Continuation(start.sampling, start.limits, start.branch + self.index, drawn)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that its text is in, with the tokens of it so far."""
        job = self.job
        if job.grammar is None:
            return None
        begin = self.prompt_len if job.grammar_begin is None else job.grammar_begin
        return msgspec.structs.replace(job.grammar, consumed=self.length - begin)

    @property
    def is_running(self) -> bool:
        return self.phase in _RUNNING

    @property
    def is_over(self) -> bool:
        return self.phase in _ENDS

    @property
    def claim(self) -> "Branch":
        """The branch by whose session and priority it is served: itself, or its sponsor."""
        return self.sponsor or self

    def pending(self, n: int) -> Text:
        """The next n tokens to compute."""
        assert self.node is not None, "only a running branch has a next chunk"
        start = self.node.end - self.origin_len
        return self.tokens[start : start + n]

    def move(self, phase: Phase) -> None:
        """Raises AssertionError if the state machine has no such arrow."""
        assert phase in _NEXT[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def begin_at(self, base: int, node: Node, tree: BranchTree) -> None:
        """Its origin is the first `base` tokens of the path of `node`; what follows it computes itself."""
        more = path_texts(node, base, self.origin_len)
        self.tokens = joined(tree.notation, *more, self.tokens)
        self.origin_len = base
        if self.attached_tokens is None:
            self.cached_tokens = base or None

    def begin_before(self, producer: "Branch", base: int, notation: Notation) -> None:
        """It continues the first `base` tokens of `producer`, and computes the others again itself."""
        begin, end = base - producer.origin_len, self.origin_len - producer.origin_len
        self.tokens = joined(notation, producer.tokens[begin:end], self.tokens)
        self.origin_len = base
        if self.attached_tokens is None:
            self.cached_tokens = base or None

    def let_origin_go(self, tree: BranchTree) -> None:
        """It begins at the root from now on, with what is found in the cache; it is not in a queue."""
        origin = self.origin
        assert origin is not None, "no origin to let go"
        self.begin_at(0, origin, tree)
        self.origin = self.logits = None
        tree.release(origin)

    def let_go(self, tree: BranchTree) -> None:
        """Release what the branch holds in the tree."""
        if self.node is not None:
            tree.release(self.node)
            self.node = None
        if self.origin is not None:
            tree.release(self.origin)
            self.origin = None
        self.logits = None
        self.producer = self.sponsor = self.waits_for = None


def _group_index(members: tuple[int, ...], job: Job) -> int:
    return WHOLE if len(members) == len(job.indices) else GROUP - members[0]


def _indices(command: JobCommand) -> range:
    match command:
        case Prefill():
            return range(1)
        case Generate():
            return range(command.n)
        case Fork():
            return range(len(command.suffixes))


def _start(command: JobCommand) -> Continuation:
    """The first branch of `command`, as it begins."""
    match command:
        case Prefill():
            return _NOTHING
        case Generate():
            drawn = command.drawn
            return Continuation(command.sampling, command.limits, command.first_branch, drawn)
        case Fork():
            return Continuation(command.sampling, command.limits, command.first_branch)


def _limits_after(num_drawn: int, limits: Limits) -> Limits:
    """The rest of `limits` after so many tokens."""
    if not num_drawn:
        return limits
    return msgspec.structs.replace(
        limits,
        max_tokens=limits.max_tokens - num_drawn,
        min_tokens=max(0, limits.min_tokens - num_drawn),
    )


def _has_penalties(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def node_of(branch: Branch) -> Node:
    """The node that holds the KV of a branch that runs."""
    assert branch.node is not None, "only running branches have a node"
    return branch.node


# A queue of branches in fair order: sessions by tag, the branches of one by rank, then by arrival.
#
# Heaps with entries that may be out of date. A branch that left its queue, or changed its rank, is found
# stale when its entry comes up; sessions are kept alike (`Turns`). So nothing is searched: O(log n) a change.
# Beside that, the queue knows the branch that has gone unserved for longest.

QueueEntry: TypeAlias = "tuple[float, int, Branch, int]"
_MIN_LIMIT = 64


class FairQueue:
    """Branches that want to be served; `queue` of each is this one."""

    __slots__ = ("_ages", "_by_age", "_by_session", "_turns", "num")

    def __init__(self, sessions: Sessions) -> None:
        self._by_session: dict[Session, list[QueueEntry]] = {}
        self._turns = Turns(sessions)
        self._by_age: deque[Branch] = deque()
        self._ages: deque[int] = deque()  # the step of each entry there
        self.num = 0

    def extend(self, branches: list[Branch], rank: float, step: int) -> None:
        """Queue new branches of one job, by arrival, under one `rank`; they begin to wait in `step`."""
        session = branches[0].job.session
        for branch in branches:
            branch.queue = self
            branch.payer = session
            branch.rank = rank
            branch.last_step = step
            branch.entry = 1
        heap = self._heap(session)
        entries = [(rank, branch.ticket, branch, 1) for branch in branches]
        if heap:
            for entry in entries:
                heapq.heappush(heap, entry)
        else:
            heap.extend(entries)  # in order already
        self._by_age.extend(branches)
        self._ages.extend([step] * len(branches))
        self.num += len(branches)

    def push(self, branch: Branch, rank: float) -> None:
        """Queue `branch` under `rank`, or change the rank that it is queued under."""
        session = (branch.sponsor or branch).job.session  # `claim`, without the call
        if branch.queue is not self:
            assert branch.queue is None, f"branch {branch.ticket} is in two queues"
            branch.queue = self
            self.num += 1
        elif branch.rank == rank and branch.payer is session:
            return
        branch.rank, branch.payer = rank, session
        branch.entry += 1
        entry = (rank, branch.ticket, branch, branch.entry)
        heapq.heappush(self._heap(session), entry)

    def _heap(self, session: Session) -> list[QueueEntry]:
        """The entries of `session`, most of them up to date."""
        heap = self._by_session.get(session)
        if heap is None:
            heap = self._by_session[session] = []
            self._turns.push(session)
        elif len(heap) > 2 * session.num_members + _MIN_LIMIT:
            heap[:] = [entry for entry in heap if self._is_true(entry)]
            heapq.heapify(heap)
        return heap

    def serve(self, branch: Branch, step: int) -> None:
        """`branch`, which is queued here, is served in `step`, or begins to wait in it."""
        branch.last_step = step
        if len(self._ages) > 2 * self.num + _MIN_LIMIT:
            aged = [e for e in zip(self._by_age, self._ages, strict=True) if self._is_age(*e)]
            self._by_age = deque(branch for branch, _ in aged)
            self._ages = deque(step for _, step in aged)
        self._by_age.append(branch)
        self._ages.append(step)

    def remove(self, branch: Branch) -> None:
        """`branch` leaves the queue."""
        assert branch.queue is self, f"branch {branch.ticket} stands elsewhere"
        branch.queue = None
        branch.entry += 1
        self.num -= 1
        if self.num == 0:  # also forgets tags that may be set back now
            self._by_session.clear()
            self._turns.clear()
            self._by_age.clear()
            self._ages.clear()

    def first(self) -> Branch | None:
        """The branch that is to be served next."""
        while (session := self._turns.first()) is not None:
            if (branch := self._first_in(session)) is not None:
                return branch
        return None

    def _first_in(self, session: Session) -> Branch | None:
        """The first branch of `session`, which is the first of its tenant; it is dropped if it has none."""
        heap = self._by_session[session]
        while heap and not self._is_true(heap[0]):
            heapq.heappop(heap)
        if heap:
            return heap[0][2]
        del self._by_session[session]
        self._turns.drop_first_of(session.tenant)
        return None

    def oldest(self) -> Branch | None:
        """The branch that has not been served for longest."""
        by_age, ages = self._by_age, self._ages
        while by_age and not self._is_age(by_age[0], ages[0]):
            by_age.popleft()
            ages.popleft()
        return by_age[0] if by_age else None

    def lowest_tag(self) -> float | None:
        """The least tag of the tenants with branches here."""
        first = self.first()
        return None if first is None else first.payer.tenant.tag

    def first_of(self, tenant: Tenant) -> Branch | None:
        """The branch of `tenant` that is to be served next."""
        while (session := self._turns.first_of(tenant)) is not None:
            if (branch := self._first_in(session)) is not None:
                return branch
        return None

    def __iter__(self) -> Iterator[Branch]:
        """All branches, each once, in no particular order."""
        seen: set[Branch] = set()
        for heap in self._by_session.values():
            for entry in heap:
                if self._is_true(entry) and entry[2] not in seen:
                    seen.add(entry[2])
                    yield entry[2]

    def check(self) -> None:
        """Raise AssertionError on a broken invariant."""
        assert sum(1 for _ in self) == self.num, "the queue counts wrong"
        self._turns.check(set(self._by_session))

    def _is_true(self, entry: QueueEntry) -> bool:
        return entry[2].entry == entry[3]

    def _is_age(self, branch: Branch, step: int) -> bool:
        return branch.queue is self and branch.last_step == step


# What one step does, as values.


class Chunk(NamedTuple):
    """Compute `tokens` of `branch` from `start` on. `is_last`: nothing is pending after it."""

    branch: Branch
    tokens: Text
    start: int
    is_last: bool


class Draft(NamedTuple):
    """Tokens that a branch may draw next, and the state of its grammar after each of them, if it has one."""

    tokens: tuple[int, ...]
    matchers: tuple[Matcher, ...] = ()


@dataclass(slots=True)
class Plan:
    """The work of one step.

    `decodes` compute the one token that they drew last; `chunks` are pieces of prompts; `ready` draw
    without a pass; `failed` can't go on. `copies` come before everything. `begins`: some wait for transfers
    from now on. `tokens_left` of the step's are granted to none: decodes may compute `drafts` for them.
    """

    decodes: list[Branch]
    chunks: list[Chunk]
    ready: list[Branch]
    copies: list[BlockCopy]
    failed: list[tuple[Branch, PoolExhausted]]
    begins: bool = False
    tokens_left: int = 0
    drafts: dict[Branch, Draft] = field(default_factory=dict)

    @property
    def newest(self) -> Branch | None:
        """The branch that came last, of those with a chunk if there are any; None if nothing is computed."""
        branches = [chunk.branch for chunk in self.chunks] or self.decodes or self.ready
        return max(branches, key=attrgetter("ticket"), default=None)

    @property
    def draws_only(self) -> bool:
        """Whether branches draw that need no pass, and nothing else gets a block or computes."""
        return bool(self.ready) and not (self.decodes or self.chunks or self.begins)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, and nothing begins."""
        return not (self.decodes or self.chunks or self.ready or self.failed or self.begins)
