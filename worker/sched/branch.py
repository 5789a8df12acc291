"""A request on this worker and its branches, on their way through the engine.

The states of a branch:

GATED <-> WAITING -> READY ------> DECODE      any but the last two -> FINISHED, FAILED
             ^  `--> PREFILL ------^  |        FETCHING <-> PREFILL
             `----------<-------------'        preempted: READY, PREFILL, DECODE -> WAITING
                                               tokens were injected: DECODE -> PREFILL
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

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
    TokenLogprobs,
)
from mallee.worker.forward import Constraint, Matcher
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import path_texts
from mallee.worker.kv.sides.group import Places
from mallee.worker.kv.text import Notation, Text, joined
from mallee.worker.kv.tree import BranchTree
from mallee.worker.sched.answer import Answer, DrawRules
from mallee.worker.sched.sessions import Account
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
    `scores`: log-probabilities of its prompt's tokens from the second on, as far as they are known, if they
    are wanted; `is_scoring` until they all are.
    """

    __slots__ = (
        *("_rules", "branches", "cancelled", "command", "draws"),
        *("gateway", "grammar", "grammar_begin", "limits", "matchers", "num_branches"),
        *("is_scoring", "priorities", "priority", "pull", "salt", "sampling", "scores", "session"),
        "start",
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
        if not isinstance(command, Fork) and command.holders:
            self.pull = Pull(command.holders)
        self.salt = salt  # of the hashes of its blocks
        self.session: Account  # from `Scheduler.add` on
        self.matchers = matchers
        self.draws, self.is_scoring = True, False
        self.scores: list[TokenLogprobs] = []
        match command:
            case Fork():
                self.num_branches = len(command.suffixes)
                start = Continuation(command.sampling, command.limits, command.first_branch)
            case Generate():
                self.num_branches, drawn = command.n, command.drawn
                start = Continuation(command.sampling, command.limits, command.first_branch, drawn)
                self.is_scoring = command.prompt_logprobs >= 0
            case Prefill():
                self.num_branches, self.draws, start = 1, False, _NOTHING
        self.start = start = resumed or start
        self.sampling = start.sampling
        self.limits = _limits_after(start.drawn, start.limits) if start.drawn else start.limits
        self.grammar = grammar
        self.grammar_begin = grammar_begin  # None: where the answers begin
        self.gateway = gateway
        self.branches: dict[int, Branch] = {}
        self.cancelled: frozenset[int] = frozenset()  # while a text was still computed for several
        self.priority = command.share.priority
        self.priorities: dict[int, float] | None = None  # of branches whose own was changed
        self._rules: DrawRules | None = None

    @property
    def num_drawn(self) -> int:
        return self.start.drawn

    @property
    def places(self) -> tuple[int, ...]:
        """Those of its text that its client named."""
        return () if isinstance(self.command, Fork) else self.command.places

    @property
    def rules(self) -> DrawRules:
        """See `DrawRules`."""
        if self._rules is None:
            has_grammar = bool(self.matchers)
            self._rules = DrawRules(self.sampling, self.limits, has_grammar=has_grammar)
        return self._rules

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

    def priority_of(self, members: tuple[int, ...]) -> float:
        """The highest of these branches, now."""
        if self.priorities is None:
            return self.priority
        return max(self.priorities.get(index, self.priority) for index in members)

    def prioritize(self, priority: float, index: int | None) -> None:
        """Branch `index`, or every branch, has `priority` from now on."""
        if index is None:
            self.priority, self.priorities = priority, None
        else:
            self.priorities = {**(self.priorities or {}), index: priority}


class Producer(Protocol):
    """The tokens that others continue: of a branch that computes them, or of a capsule that comes back."""

    @property
    def node(self) -> Node | None:
        """Ends with those that are there."""
        ...


class ForkPoint(msgspec.Struct, frozen=True):
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
        *("cached_tokens", "hashes", "index", "job", "logits", "members", "num_output", "origin"),
        *("origin_len", "phase", "priority", "producer", "ticket", "tokens", "waits_for"),
        *("is_short", "last_step"),
        *("attached_tokens", "found", "may_fetch", "node", "place", "places", "room"),
        "answer",
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
        self.origin_len = base = start.base
        self.producer = start.producer
        self.logits = None if len(tokens) else start.logits
        self.priority = job.priority if job.priorities is None else job.priority_of(members)
        self.phase: Phase = "waiting"
        self.waits_for: Branch | None = None  # the branch that computes for it, while it is gated
        self.hashes = NO_HASHES  # of the full blocks it can share, once the scheduler needs them
        self.cached_tokens = base or None  # None until its first chunk is computed
        self.num_output = 0
        self.answer: Answer | None = None  # from the first draw on
        # Of the queues, from the first on.
        self.last_step: int  # when it was last served, or began to wait
        self.is_short: bool  # it had little to compute when it began to wait
        # Of its KV: what is found in the cache, and what it has while it runs.
        self.found: tuple[int, int]  # a version of the tree, and the leading `hashes` in it
        self.attached_tokens: int | None = None  # found in the cache at its first admission
        self.node: Node | None = None
        self.may_fetch: bool  # blocks that it needs may lie below the device
        self.room: int  # its own node has room up to this position; 0: it has no node of its own
        self.place: tuple[bytes, int]  # order inside a batch
        self.places: Places  # of a model with side groups

    def begin_answer(self) -> Answer:
        """The state of its draws, from now on."""
        job, index, constraint = self.job, self.index, None
        if job.matchers and index >= 0:
            constraint = Constraint(job.matchers[index if len(job.matchers) > 1 else 0])
        seed = branch_seed(job.sampling.seed, job.start.branch + index)
        self.answer = Answer(job.rules, seed, constraint)
        return self.answer

    @property
    def constraint(self) -> Constraint | None:
        """The state of its grammar, if it draws under one."""
        return answer_of(self).constraint if self.job.matchers else None

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

    def pending(self, n: int) -> Text:
        """The next n tokens to compute."""
        assert self.node is not None, "only a running branch has a next chunk"
        start = self.node.end - self.origin_len
        return self.tokens[start : start + n]

    def move(self, phase: Phase) -> None:
        """Raises AssertionError if the state machine has no such arrow."""
        assert phase in _NEXT[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def begin_at(self, base: int, *more: Text, notation: Notation) -> None:
        """Its origin has `base` tokens; `more`, which follow in its text, it computes itself."""
        self.tokens = joined(notation, *more, self.tokens)
        self.origin_len = base
        if self.attached_tokens is None:
            self.cached_tokens = base or None

    def let_origin_go(self, tree: BranchTree) -> None:
        """It begins at the root from now on, with what is found in the cache; it is not in a queue."""
        origin = self.origin
        assert origin is not None, "no origin to let go"
        self.begin_at(0, *path_texts(origin, 0, self.origin_len), notation=tree.notation)
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
        self.producer = None


def _group_index(members: tuple[int, ...], job: Job) -> int:
    return WHOLE if len(members) == job.num_branches else GROUP - members[0]


def _limits_after(num_drawn: int, limits: Limits) -> Limits:
    """The rest of `limits` after so many tokens."""
    return msgspec.structs.replace(
        limits,
        max_tokens=limits.max_tokens - num_drawn,
        min_tokens=max(0, limits.min_tokens - num_drawn),
    )


def node_of(branch: Branch) -> Node:
    """The node that holds the KV of a branch that runs."""
    assert branch.node is not None, "only running branches have a node"
    return branch.node


def answer_of(branch: Branch) -> Answer:
    """The state of a branch's draws."""
    return branch.answer or branch.begin_answer()
