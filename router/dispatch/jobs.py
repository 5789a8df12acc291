"""Token jobs: what a client asks of a gateway, how a job is divided, and the commands that workers get.

All kinds of jobs have the same methods: only this module distinguishes them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, TypeAlias

from mallee.protocol.ids import (
    COMMON,
    CapsuleId,
    RequestId,
    Scope,
    capsule_id,
    private_part,
)
from mallee.protocol.messages import (
    MAX_HOLDERS,
    Cancel,
    Command,
    Continuation,
    Fork,
    Generate,
    Grammar,
    Holder,
    Limits,
    Prefill,
    Release,
    RetainSpan,
    Sampling,
    Share,
)


class TokenText(Protocol):
    """Tokens of a prompt or a suffix: an array of them, or in a replay a name that stands for them."""

    def __len__(self) -> int: ...

    def tobytes(self) -> bytes:
        """The tokens as commands carry them."""
        ...


class QueueTerms(NamedTuple):
    """The order in which a job waits if no worker has room, and its share of its worker.

    `tenant` and `session` are the client's text: not for logs.
    """

    tenant: str = ""
    priority: int = 0  # among its tenant's jobs, and on a worker in its session: higher first
    deadline_s: float | None = None  # to be taken by a worker within, from now
    session: str = ""  # of the tenant
    weight: float = 1.0  # of the session among its tenant's that a worker computes for
    tenant_weight: float = 1.0  # of the tenant among those that a worker computes for
    owner: str = ""  # the tenant, if an API key says so: its salts are one customer's
    is_recorded: bool = False  # in the record of its session
    parent_session: str = ""  # the session that its session branched off from
    ends_session: bool = False  # its session closes with it

    @property
    def share(self) -> Share:
        """The job's share of its worker: a tenant's sessions share its weight."""
        return _share(
            self.session, self.weight, float(self.priority), self.tenant, self.tenant_weight
        )


_share = lru_cache(maxsize=4096)(Share)


NO_TERMS: Final = QueueTerms()


class Messages(NamedTuple):
    """Digests of the messages that a prompt was rendered from. `has_system`: the first is a system's.

    `changed`: the line at its head by which that differs from an earlier one; a client's text. `places`: the
    tokens up to each that its client marked.
    """

    digests: tuple[int, ...] = ()
    has_system: bool = False
    changed: str = ""
    places: tuple[int, ...] = ()


NO_MESSAGES: Final = Messages()


class _Job:
    """A prompt, or a capsule, and the branches that continue it: the parts that most kinds have in common.

    Each kind also has its `operation` (OpenTelemetry's word for it, where it has one), the `prompt_tokens` of
    all its branches, the `suffix_lengths` that they add, the `uncached_tokens` where so many are held, the
    `part` that is some branches alone, and its `command`, whose branches draw as those from `first_branch` on
    of an undivided job; `holders` have KV of its prompt.
    """

    __slots__ = ()

    makes: CapsuleId | None = None
    """The capsule that it makes, if its client has the id before: wherever it runs, it is that one."""
    drawn: int = 0
    """Tokens at the end of the prompt that its one branch drew before, on another worker."""
    affinity: int = 0
    """A digest of its owner and its prompt cache key; 0: it has none."""
    limits: Limits
    scope: Scope
    """The owner of the request, and of the capsules that it leaves."""

    @property
    def max_tokens(self) -> int:
        """Tokens to generate in each branch, at most."""
        return self.limits.max_tokens

    def abandon(self, request: RequestId, rows: Collection[int], *, is_all: bool) -> list[Command]:
        """The commands that end `rows`, which their reader gave up; `is_all`: they are all that are left.

        A row may end before its cancel arrives: the capsule that it left, whose id nobody has, is released.
        """
        cancels = [Cancel(request)] if is_all else [Cancel(request, row) for row in sorted(rows)]
        return [*cancels, *(Release(capsule_id(request, row)) for row in sorted(rows))]


class _PromptJob(_Job):
    """A job that begins with tokens of its own."""

    __slots__ = ()

    capsule = None
    tokens: TokenText

    @property
    def salt(self) -> Scope:
        """The scope that salts the blocks of its text."""
        return self.scope

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens)

    def uncached_tokens(self, held_tokens: int) -> int:
        return max(1, len(self.tokens) - held_tokens)


@dataclass(frozen=True, slots=True)
class GenerateJob(_PromptJob):
    """Continue `tokens` n times (one prefill, n branches).

    With `drawn`, the last so many tokens are the answer so far of its one branch.
    """

    tokens: TokenText
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    scope: Scope = COMMON
    terms: QueueTerms = NO_TERMS
    grammar: Grammar | None = None
    drawn: int = 0
    messages: Messages = NO_MESSAGES
    keep_s: float | None = None  # its answers' capsules are to be pinned for so long without use
    stream: int = 0  # of draws: the number of its first branch in the request that it was
    retain: tuple[RetainSpan, ...] = ()
    affinity: int = 0
    places: tuple[int, ...] = ()  # where others may go on from its prompt
    prompt_logprobs: int = -1  # as `Generate.prompt_logprobs`

    @property
    def operation(self) -> str:
        return "chat" if self.messages.digests else "text_completion"

    @property
    def suffix_lengths(self) -> list[int]:
        return [0] * self.n

    @property
    def num_branches(self) -> int:
        return self.n

    def part(self, rows: range) -> "GenerateJob":
        return self if len(rows) == self.n else replace(self, n=len(rows))

    def command(
        self, request: RequestId, first_branch: int = 0, holders: tuple[Holder, ...] = ()
    ) -> Command:
        return Generate(
            request=request,
            tokens=self.tokens.tobytes(),
            limits=self.limits,
            sampling=self.sampling,
            n=self.n,
            salt=self.scope,
            first_branch=self.stream + first_branch,
            share=self.terms.share,
            grammar=self.grammar,
            drawn=self.drawn,
            keep_s=self.keep_s,
            retain=self.retain,
            holders=holders,
            places=self.places,
            prompt_logprobs=-1 if self.drawn else self.prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class PrefillJob(_PromptJob):
    """Compute `tokens` once and keep the state as a capsule; ttl_s 0 means until deleted.

    With `rebuilt`, it is that capsule again, on another worker; with `makes` it is promised under that id,
    which names its request. With a `nonce` no other request finds its blocks, nor it theirs: KV of `holders`
    that are no workers may be forged.
    """

    limits = Limits(0)
    sampling = Sampling()
    operation = "prefill"
    num_branches = 1
    tokens: TokenText
    scope: Scope = COMMON
    ttl_s: float = 0.0
    terms: QueueTerms = NO_TERMS
    rebuilt: CapsuleId | None = None
    messages: Messages = NO_MESSAGES
    grammar: Grammar | None = None  # of the text of one that is rebuilt
    continuation: Continuation | None = None  # the branch that left it
    retain: tuple[RetainSpan, ...] = ()
    affinity: int = 0
    holders: tuple[Holder, ...] = ()
    nonce: str = ""
    makes: CapsuleId | None = None
    places: tuple[int, ...] = ()  # as of a `GenerateJob`

    @property
    def salt(self) -> Scope:
        return private_part(self.scope, self.nonce) if self.nonce else self.scope

    @property
    def suffix_lengths(self) -> list[int]:
        return [0]

    def part(self, rows: range) -> "PrefillJob":
        return self

    def command(
        self, request: RequestId, first_branch: int = 0, holders: tuple[Holder, ...] = ()
    ) -> Command:
        return Prefill(
            request=request,
            tokens=self.tokens.tobytes(),
            salt=self.salt,
            ttl_s=self.ttl_s,
            share=self.terms.share,
            grammar=self.grammar,
            capsule=self.rebuilt or self.makes or "",
            continuation=self.continuation,
            retain=self.retain,
            holders=(*self.holders, *holders)[:MAX_HOLDERS],
            places=self.places,
        )

    def abandon(self, request: RequestId, rows: Collection[int], *, is_all: bool) -> list[Command]:
        return abandon_prefill(request, self.rebuilt or self.makes)


@dataclass(frozen=True, slots=True)
class ForkJob(_Job):
    """Continue a capsule once per suffix (an empty suffix samples the capsule's own next token).

    With `at`, continue its first `at` tokens instead of all. With `resumes`, the one branch goes on as the
    one that the capsule was taken from; of `limits` only `max_tokens` counts, as tokens still to draw (0:
    those that are left).
    """

    prompt_tokens = 0  # its capsule counts them
    capsule: CapsuleId
    suffixes: Sequence[TokenText]
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    terms: QueueTerms = NO_TERMS
    grammar: Grammar | None = None
    at: int | None = None
    scope: Scope = COMMON
    resumes: bool = False
    keep_s: float | None = None
    retain: tuple[RetainSpan, ...] = ()

    @property
    def operation(self) -> str:
        return "restore" if self.resumes else "fork"

    @property
    def suffix_lengths(self) -> list[int]:
        return [len(suffix) for suffix in self.suffixes]

    @property
    def num_branches(self) -> int:
        return len(self.suffixes)

    def uncached_tokens(self, held_tokens: int) -> int:
        return sum(self.suffix_lengths)

    @property
    def is_inheriting(self) -> bool:
        """Whether the branches go on inside the grammar of the capsule's text, if it is in one."""
        return self.resumes or (self.grammar is not None and self.grammar.kind == "inherit")

    def part(self, rows: range) -> "ForkJob":
        if len(rows) == len(self.suffixes):
            return self
        return replace(self, suffixes=[self.suffixes[row] for row in rows])

    def command(
        self, request: RequestId, first_branch: int = 0, holders: tuple[Holder, ...] = ()
    ) -> Command:
        assert not holders, "its prompt is the capsule, which is there"
        return Fork(
            request=request,
            capsule=self.capsule,
            suffixes=tuple(suffix.tobytes() for suffix in self.suffixes),
            limits=self.limits,
            sampling=self.sampling,
            first_branch=first_branch,
            share=self.terms.share,
            grammar=self.grammar,
            at=self.at,
            resumes=self.resumes,
            keep_s=self.keep_s,
            retain=self.retain,
        )


Job: TypeAlias = GenerateJob | PrefillJob | ForkJob


def abandon_prefill(request: RequestId, capsule: CapsuleId | None = None) -> list[Command]:
    """The commands that leave no capsule of `request`: it may be made before the cancel arrives."""
    return [Cancel(request), Release(capsule or capsule_id(request))]
