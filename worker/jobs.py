"""Requests as the engine sees them: a job and its live branches."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mallee.protocol.errors import InvalidParameter
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import ALL_BRANCHES, Fork, Generate, Limits, Prefill, Sampling
from mallee.worker.forward import Constraint, Ids, Matcher, TokenHistory
from mallee.worker.kv.capsules import Capsule
from mallee.worker.kv.node import Node
from mallee.worker.kv.paths import path_texts
from mallee.worker.kv.text import Notation, Text, joined
from mallee.worker.sched.branch import Sequence as Seq

WHOLE = ALL_BRANCHES
"""Index of the one branch that computes a text for all branches of a job."""

GROUP = WHOLE - 1
"""GROUP - i is the index of a branch that computes a text for some of them, of which i is the first."""

_NO_LIMITS, _NO_SAMPLING = Limits(0), Sampling()  # of a prefill, which draws nothing


class Job:
    """A request on this worker: its command and its live branches by index.

    `matchers`: the grammar state its branches begin with: one for all, one for each, or none.
    """

    __slots__ = (
        *("branches", "cancelled", "command", "draws", "gateway", "has_penalties", "indices"),
        *("is_plain", "limits", "matchers", "priorities", "sampling", "shared", "stop_ids"),
    )

    def __init__(
        self,
        command: Prefill | Generate | Fork,
        gateway: str,
        matchers: tuple[Matcher, ...] = (),
    ) -> None:
        self.command = command
        self.matchers = matchers
        self.draws = not isinstance(command, Prefill)
        self.indices = _indices(command)  # of all branches that it ever has
        self.limits = _NO_LIMITS if isinstance(command, Prefill) else command.limits
        self.sampling = _NO_SAMPLING if isinstance(command, Prefill) else command.sampling
        self.has_penalties = _has_penalties(self.sampling)
        # Whether its draws need nothing but logits, and nothing but tokens is told of them.
        self.is_plain = not (
            matchers or self.has_penalties or self.limits.min_tokens or self.sampling.logprobs >= 0
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
        """The index of this job's first branch in the request that it is a part of."""
        assert not isinstance(self.command, Prefill), "a prefill draws nothing"
        return self.command.first_branch

    def concerned(self, index: int | None) -> list["Branch"]:
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


class Branch(Seq):
    """One branch of a job: what the engine must know beside what the scheduler sees.

    With several `members` it computes a text that they share, and draws nothing itself.
    """

    __slots__ = (
        *("_seed", "cached_tokens", "constraint", "draws", "history", "index", "job"),
        *("num_output", "prompt_len"),
    )

    def __init__(
        self,
        job: Job,
        members: tuple[int, ...],
        ticket: int,
        tokens: Text,
        trunk: "ForkPoint",
        origin: Node | None,
    ) -> None:
        base, priorities = trunk.base, job.priorities
        Seq.__init__(
            self,
            ticket,
            tokens,
            trunk.salt,
            priorities[None] if len(priorities) == 1 else job.priority(members),
            origin,
            None if len(tokens) else trunk.logits,
            trunk.producer,
            base,
            members,
        )
        self.job = job
        index = self.index = members[0] if len(members) == 1 else _group_index(members, job)
        self.prompt_len = base + len(tokens)
        self.cached_tokens = base or None  # None until its first admission tells
        self.num_output = 0
        self.history: TokenHistory | None = None  # from the first draw on, if there are penalties
        self.constraint = job.constraint(index) if job.matchers else None
        self.draws = index >= 0 and job.draws
        self._seed: int | None = None

    @property
    def seed(self) -> int:
        """Of this branch's stream of draws."""
        if self._seed is None:  # most branches of a wide fork wait long for their first draw
            self._seed = branch_seed(self.job.sampling.seed, self.job.first_branch + self.index)
        return self._seed


def _group_index(members: tuple[int, ...], job: Job) -> int:
    return WHOLE if len(members) == len(job.indices) else GROUP - members[0]


def _indices(command: Prefill | Generate | Fork) -> range:
    match command:
        case Prefill():
            return range(1)
        case Generate():
            return range(command.n)
        case Fork():
            return range(len(command.suffixes))


def _has_penalties(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


# What the branches of a fork continue: all of a capsule, its beginning, or one that is being computed.

Texts = Mapping[tuple[int, ...], Text]
"""Texts that branches must compute, by the indices of those that compute the same."""


class ForkPoint(NamedTuple):
    """`boundary` tokens, of which the KV of the first `base` is shared and `rest` must run again.

    `node` has the first `base` tokens at its end or above; None if a `producer` computes them just now,
    or if `base` is 0. `logits` belong to the token after the boundary, if there is no rest.
    """

    boundary: int
    base: int
    rest: Text
    salt: str
    node: Node | None = None
    producer: Seq | None = None
    logits: object | None = None


def fork_point(
    command: Fork, source: Capsule | Seq, block_size: int, notation: Notation
) -> ForkPoint:
    """The trunk of `command` on a capsule, or on the branch that computes it. Raises InvalidParameter."""
    boundary = source.boundary if isinstance(source, Capsule) else source.length
    at = command.at
    if at is not None and not 1 <= at <= boundary:
        raise InvalidParameter("at", at, f"give 1 to {boundary}, the tokens of the capsule")
    if at is None:
        at = boundary
    has_logits = not isinstance(source, Capsule) or source.logits is not None or source.pending
    if at == boundary and (has_logits or all(command.suffixes)):
        if isinstance(source, Capsule):
            rest = joined(notation, source.pending)
            base = source.node.end
            return ForkPoint(
                boundary, base, rest, source.node.salt, source.node, None, source.logits
            )
        return ForkPoint(boundary, boundary, notation.empty(), source.salt, None, source)
    # Without logits (inside the text, and after an answer that ended itself) a branch without suffix must
    # compute the last token again.
    last = at if all(command.suffixes) else at - 1
    base = last - last % block_size
    if isinstance(source, Seq):
        return ForkPoint(
            at, base, source.tokens[base:at], source.salt, None, source if base else None
        )
    node = source.node
    base = min(base, node.end - node.end % block_size)
    rest = joined(notation, *path_texts(node, base, at), source.pending)[: at - base]
    return ForkPoint(at, base, rest, node.salt, node if base else None)


def grouped(
    rest: Text, suffixes: Sequence[Text], raws: Sequence[bytes], notation: Notation
) -> Texts:
    """Texts that the branches must compute, by the indices of those that compute the same.

    `raws`: the suffixes as the command has them.
    """
    if not len(rest):
        if not any(raws):  # who has nothing to compute shares nothing
            return {(i,): suffix for i, suffix in enumerate(suffixes)}
        if len(suffixes) == 1:
            return {(0,): suffixes[0]}
    groups: dict[bytes | int, list[int]] = {}
    for index, raw in enumerate(raws):
        groups.setdefault(raw if raw or len(rest) else index, []).append(index)
    return {
        tuple(members): joined(notation, rest, suffixes[members[0]]) for members in groups.values()
    }
