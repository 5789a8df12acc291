"""Token jobs: what a client asks of the gateway, how a job is divided, and the commands that workers get.

All kinds of jobs have the same methods: only this module distinguishes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

import msgspec

from mallee.actors.gateway.token_memory import Recording, TokenMemory, TokenPath
from mallee.protocol.hashing import NO_HASHES, Hashes, Tokens
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id
from mallee.protocol.messages import (
    Cancel,
    Command,
    Fork,
    Generate,
    Grammar,
    Limits,
    Prefill,
    Release,
    Sampling,
    Share,
    Update,
    pack_tokens,
)
from mallee.protocol.model import ModelSpec
from mallee.router.index.hashing import block_hashes

RECOMPUTED_TTL_S: Final = 60.0  # of a capsule that is computed to be forked once


class QueueTerms(NamedTuple):
    """The order in which a job waits if no worker has room, and its share of its worker.

    `tenant` and `session` are the client's text: not for logs.
    """

    tenant: str = ""
    priority: int = 0  # among its tenant's jobs, and on a worker in its session: higher first
    deadline_s: float | None = None  # to be taken by a worker within, from now
    session: str = ""  # of the tenant
    weight: float = 1.0  # of the session among those that a worker computes for

    @property
    def share(self) -> Share:
        """The job's share of its worker: sessions of different tenants are never one."""
        session = ""
        if self.tenant or self.session:
            # No two pairs are written alike.
            session = f"{len(self.tenant)}:{self.tenant}{self.session}"
        return Share(session, self.weight, float(self.priority))


NO_TERMS: Final = QueueTerms()


class Job(ABC):
    """A prompt, or a capsule, and the branches that continue it."""

    __slots__ = ()

    capsule: CapsuleId | None
    """The capsule that the branches continue, if it is one."""
    terms: QueueTerms
    limits: Limits

    @property
    def num_branches(self) -> int:
        return len(self.suffix_lengths)

    @property
    def max_tokens(self) -> int:
        """Tokens to generate in each branch, at most."""
        return self.limits.max_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the shared prompt; of a fork 0, as its capsule counts them."""
        return 0

    @property
    @abstractmethod
    def suffix_lengths(self) -> list[int]:
        """Tokens that each branch adds to the shared prompt before its answer."""

    @abstractmethod
    def hashes(self, model: ModelSpec, block_size: int) -> Hashes:
        """Chain hashes of the prompt's full blocks; of a fork none."""

    @abstractmethod
    def uncached_tokens(self, held_tokens: int) -> int:
        """Tokens to compute before the first is generated, where `held_tokens` of the prompt are."""

    @abstractmethod
    def boundary(self, update: Update) -> int:
        """The tokens before a branch's first drawn one, by an update of that branch."""

    def num_drawn(self, last: Update) -> int | None:
        """Tokens that a branch has drawn, by its last update; None if that doesn't tell."""
        if last.finish == "length":
            return self.max_tokens
        has_capsule = last.finish == "stop" and last.capsule is not None
        return last.boundary - self.boundary(last) if has_capsule else None

    @abstractmethod
    def can_leave(self, recomputable: Container[CapsuleId]) -> bool:
        """Whether branches may run on a worker that holds nothing of the prompt."""

    @abstractmethod
    def part(self, rows: range) -> Self:
        """The job of these branches alone."""

    @abstractmethod
    def command(self, request: RequestId, first_branch: int = 0) -> Command:
        """The worker's command. Branches draw as those from `first_branch` on of an undivided job."""

    def abandon(self, request: RequestId, branch: int | None) -> list[Command]:
        """The commands that end `branch`, or all that are left, after its reader gave it up."""
        return [Cancel(request, branch)]

    @abstractmethod
    def recording(self, memory: TokenMemory) -> Recording | None:
        """Learns the tokens of the capsules that the job leaves; None if they can't be known."""

    def recompute(self, request: RequestId, memory: TokenMemory) -> "Recompute | None":
        """The way to run a fork, `request`, on a worker that lacks its capsule; None for other jobs."""
        return None


class _PromptJob(Job):
    """A job that begins with tokens of its own."""

    __slots__ = ()

    capsule = None
    tokens: Tokens
    salt: str

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens)

    def hashes(self, model: ModelSpec, block_size: int) -> Hashes:
        return block_hashes(self.tokens, block_size, salt=model.salt(self.salt))

    def uncached_tokens(self, held_tokens: int) -> int:
        return max(1, len(self.tokens) - held_tokens)

    def boundary(self, update: Update) -> int:
        return len(self.tokens)

    def can_leave(self, recomputable: Container[CapsuleId]) -> bool:
        return True

    def recording(self, memory: TokenMemory) -> Recording | None:
        if not memory.max_nbytes:
            return None
        return Recording(memory, TokenPath(None, self.tokens, self.salt))


@dataclass(frozen=True, slots=True)
class GenerateJob(_PromptJob):
    """Continue `tokens` n times (one prefill, n branches)."""

    tokens: Tokens
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    salt: str = ""
    terms: QueueTerms = NO_TERMS
    grammar: Grammar | None = None

    @property
    def suffix_lengths(self) -> list[int]:
        return [0] * self.n

    def part(self, rows: range) -> "GenerateJob":
        return replace(self, n=len(rows))

    def command(self, request: RequestId, first_branch: int = 0) -> Command:
        return Generate(
            request,
            pack_tokens(self.tokens),
            self.limits,
            self.sampling,
            self.n,
            self.salt,
            first_branch,
            self.terms.share,
            self.grammar,
        )


@dataclass(frozen=True, slots=True)
class PrefillJob(_PromptJob):
    """Compute `tokens` once and keep the state as a capsule; ttl_s 0 means until deleted."""

    limits = Limits(0)
    tokens: Tokens
    salt: str = ""
    ttl_s: float = 0.0
    terms: QueueTerms = NO_TERMS

    @property
    def suffix_lengths(self) -> list[int]:
        return [0]

    def part(self, rows: range) -> "PrefillJob":
        return self

    def command(self, request: RequestId, first_branch: int = 0) -> Command:
        share = self.terms.share
        return Prefill(request, pack_tokens(self.tokens), self.salt, self.ttl_s, share)

    def abandon(self, request: RequestId, branch: int | None) -> list[Command]:
        return abandon_prefill(request)


@dataclass(frozen=True, slots=True)
class ForkJob(Job):
    """Continue a capsule once per suffix (an empty suffix samples the capsule's own next token).

    With `at`, continue its first `at` tokens instead of all.
    """

    capsule: CapsuleId
    suffixes: Sequence[Tokens]
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    terms: QueueTerms = NO_TERMS
    grammar: Grammar | None = None
    at: int | None = None

    @property
    def suffix_lengths(self) -> list[int]:
        return [len(suffix) for suffix in self.suffixes]

    def hashes(self, model: ModelSpec, block_size: int) -> Hashes:
        return NO_HASHES

    def uncached_tokens(self, held_tokens: int) -> int:
        return sum(self.suffix_lengths)

    def boundary(self, update: Update) -> int:
        return update.cached_tokens + update.prefill_tokens

    def can_leave(self, recomputable: Container[CapsuleId]) -> bool:
        # The position of a text in its grammar is the capsule's alone.
        inherits = self.grammar is not None and self.grammar.kind == "inherit"
        return not inherits and self.capsule in recomputable

    def part(self, rows: range) -> "ForkJob":
        return replace(self, suffixes=[self.suffixes[row] for row in rows])

    def command(self, request: RequestId, first_branch: int = 0) -> Command:
        return Fork(
            request,
            self.capsule,
            tuple(pack_tokens(suffix) for suffix in self.suffixes),
            self.limits,
            self.sampling,
            first_branch,
            self.terms.share,
            self.grammar,
            self.at,
        )

    def recording(self, memory: TokenMemory) -> Recording | None:
        path = self._path(memory)
        return None if path is None else Recording(memory, path, self.suffixes)

    def recompute(self, request: RequestId, memory: TokenMemory) -> "Recompute | None":
        path = self._path(memory)
        assert path is not None, "only capsules whose tokens are known are computed elsewhere"
        # The fork follows at once; if this gateway is gone by then, the capsule expires.
        own, share = RequestId(f"{request}-r"), self.terms.share
        prefill = Prefill(own, pack_tokens(path.tokens()), path.salt, RECOMPUTED_TTL_S, share)
        return Recompute(prefill, replace(self, capsule=capsule_id(own), at=None))

    def _path(self, memory: TokenMemory) -> TokenPath | None:
        """The tokens that the branches continue, if they are known."""
        path = memory.path(self.capsule)
        return path if path is None or self.at is None else path.first(self.at)


class Recompute(NamedTuple):
    """A capsule that a worker computes anew, to be forked there once it is done and then released."""

    prefill: Prefill
    job: ForkJob  # forks the new capsule

    @property
    def request(self) -> RequestId:
        return RequestId(self.prefill.request)

    @staticmethod
    def counted(update: Update, recomputed: tuple[int, int]) -> Update:
        """`update` of the fork, with the tokens (cached, computed) of its capsule on its first branch."""
        if update.branch:
            return update
        cached, computed = recomputed
        return msgspec.structs.replace(
            update, cached_tokens=cached, prefill_tokens=update.prefill_tokens + computed
        )


def abandon_prefill(request: RequestId) -> list[Command]:
    """The commands that leave no capsule of `request`: it may be made before the cancel arrives."""
    return [Cancel(request), Release(capsule_id(request))]
