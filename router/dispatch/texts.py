"""The texts of jobs: their hashes, the tokens that were drawn, and the jobs that go on from those.

The one thing in which a replay differs from a gateway: its tokens are names. `Texts` is what the
dispatcher needs of either.
"""

from array import array
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np
from msgspec import structs

from mallee.protocol.hashing import NO_HASHES, Hashes, Tokens, as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope
from mallee.protocol.messages import (
    Continuation,
    Grammar,
    Holder,
    Prefill,
    Share,
    Update,
    pack_tokens,
)
from mallee.protocol.model import BASE_WEIGHTS, ModelSpec, WeightVersion
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, Job, PrefillJob, TokenText
from mallee.router.dispatch.token_memory import CapsuleTokens, TokenMemory, TokenPath
from mallee.router.index.hashing import block_hashes

_COPY_TTL_S: Final = 60.0  # of a capsule that is computed to be forked once
MAX_SALTS: Final = 4096  # of scopes, as strings of a hundred bytes
NO_TOKENS: Final = as_tokens(())
_PROBE_TTL_S: Final = 1.0  # of the capsule that a probe leaves, if it is not released


class CapsuleText(NamedTuple):
    """The text of a capsule, to be computed anew."""

    tokens: TokenText
    hashes: Hashes
    scope: Scope
    grammar: Grammar | None
    ttl_s: float | None  # None: an answer left it
    is_own: bool = True  # this gateway made it
    continuation: Continuation | None = None  # the branch that left it

    def prefill(
        self,
        request: RequestId,
        share: Share,
        holders: tuple[Holder, ...] = (),
        lost: CapsuleId | None = None,
    ) -> Prefill:
        """The command that makes it, from KV of `holders` or anew: the `lost` one again, under its own id.

        Without that, one to be forked once and released.
        """
        return Prefill(
            request=request,
            tokens=self.tokens.tobytes(),
            salt=self.scope,
            ttl_s=_COPY_TTL_S if lost is None else self.ttl_s or 0.0,
            share=share,
            grammar=self.grammar,
            capsule=lost or "",
            replaceable=lost is not None and self.ttl_s is None,
            continuation=self.continuation,
            holders=holders,
        )


class AnswerLog(Protocol):
    """The tokens that the branches of one shard have drawn."""

    def take(self, update: Update) -> None:
        """Take in an update of one of its branches."""
        ...

    def note(self, capsule: CapsuleId, row: int, boundary: int, ttl_s: float | None) -> None:
        """`capsule` is the first `boundary` tokens of row `row`, if they are known."""
        ...

    def cut(self, capsule: CapsuleId, row: int, at: int, residue: Tokens) -> None:
        """`capsule` is the first `at` tokens of row `row`, if they are known, and `residue`."""
        ...

    def drop(self, capsule: CapsuleId) -> None:
        """`capsule`, which was noted, is not made here."""
        ...

    def tail(self, row: int, num: int) -> tuple[int, ...]:
        """The last `num` tokens that a row has drawn."""
        ...


class Texts(Protocol):
    """The texts of one gateway's jobs."""

    def hashes(self, job: Job) -> Hashes:
        """Chain hashes of the full blocks of the prompt; of a fork none."""
        ...

    def knows(self, capsule: CapsuleId) -> bool:
        """Whether `capsule_text` would find it."""
        ...

    def capsule_text(self, capsule: CapsuleId, at: int | None) -> CapsuleText | None:
        """The text of a capsule, or its first `at` tokens; None if that is not known."""
        ...

    def weights(self, capsule: CapsuleId) -> WeightVersion | None:
        """The weights that made a capsule; None if that is not known."""
        ...

    def log(self, job: Job, first_branch: int) -> AnswerLog | None:
        """A log for the answers of `job`, whose rows are the branches from `first_branch` on, or none."""
        ...

    def resumed(
        self, job: Job, row: int, num_drawn: int, log: AnswerLog | None
    ) -> GenerateJob | None:
        """The job of row `row` alone, with its whole text so far; None if that is not known.

        `num_drawn`: tokens that it drew since the shard began.
        """
        ...

    def probe(self, request: RequestId) -> Prefill:
        """The least that a worker can compute."""
        ...


class Serving(Protocol):
    """Tells the weights that serve."""

    @property
    def weights(self) -> WeightVersion: ...


class TokenTexts:
    """The `Texts` of a live gateway: real tokens, those of capsules in a bounded memory."""

    def __init__(
        self,
        memory: TokenMemory,
        model: ModelSpec,
        block_size: int,
        *,
        serving: Serving | None = None,
    ) -> None:
        """`serving` has the weights that serve now, by which hashes are salted; by default the model's."""
        self.memory = memory
        self._model = model
        self._block_size = block_size
        self._serving: Serving = model if serving is None else serving
        self._salt = lru_cache(MAX_SALTS)(model.salt)

    def hashes(self, job: Job) -> Hashes:
        if isinstance(job, ForkJob):
            return NO_HASHES
        return self._hashes(tokens_of(job.tokens), job.salt)

    def knows(self, capsule: CapsuleId) -> bool:
        return capsule in self.memory

    def capsule_text(self, capsule: CapsuleId, at: int | None) -> CapsuleText | None:
        entry = self.memory.get(capsule)
        if entry is None or (at is not None and at > entry.path.length):
            return None
        if at is not None and at < entry.path.length:
            entry = entry.first(at)._replace(ttl_s=entry.ttl_s)
        path, grammar, ttl_s, _, is_own, left = entry
        tokens = path.tokens()
        hashes = self._hashes(tokens, path.scope)
        return CapsuleText(
            tokens=tokens,
            hashes=hashes,
            scope=path.scope,
            grammar=grammar,
            ttl_s=ttl_s,
            is_own=is_own,
            continuation=left,
        )

    def weights(self, capsule: CapsuleId) -> WeightVersion | None:
        entry = self.memory.get(capsule)
        return None if entry is None else entry.weights

    def log(self, job: Job, first_branch: int) -> "TokenLog":
        return TokenLog(self.memory, job, first_branch, self._serving.weights)

    def resumed(
        self, job: Job, row: int, num_drawn: int, log: AnswerLog | None
    ) -> GenerateJob | None:
        assert isinstance(log, TokenLog), "every shard has a log here"
        return log.resumed(row, num_drawn)

    def probe(self, request: RequestId) -> Prefill:
        # Of a tenant of its own: a block that is there already would prove nothing.
        return Prefill(request, pack_tokens([0]), f"probe/{request}", _PROBE_TTL_S)

    def _hashes(self, tokens: Tokens, scope: Scope) -> Hashes:
        weights = self._serving.weights
        if self._model.weights != weights:
            self._model = structs.replace(self._model, weights=weights)
            self._salt = lru_cache(MAX_SALTS)(self._model.salt)
        return block_hashes(tokens, self._block_size, salt=self._salt(scope))


class TokenLog:
    """Follows a shard: the tokens that its branches draw, and those of the capsules that they leave."""

    def __init__(
        self,
        memory: TokenMemory,
        job: Job,
        first_branch: int,
        weights: WeightVersion = BASE_WEIGHTS,
    ) -> None:
        self._memory = memory
        self._weights = weights
        self._job = job
        self._first_branch = first_branch
        self._start: Continuation | None = None  # of a fork that resumes: as its capsule left it
        self._path: TokenPath | None = None
        self._grammar: Grammar | None = None  # of the capsule, for a fork that goes on in it
        self._drawn: dict[int, array[int]] = {}  # by row, 4 bytes a token
        inherits = isinstance(job, ForkJob) and job.is_inheriting
        self._is_free = job.grammar is None and not inherits  # in no grammar
        self._find_path()

    def _find_path(self) -> TokenPath | None:
        """The tokens that the branches continue; those of a capsule may come to be known later."""
        job = self._job
        if self._path is not None:
            return self._path
        if not isinstance(job, ForkJob):
            self._path = TokenPath(None, tokens_of(job.tokens), job.salt)
            return self._path
        entry = self._memory.get(job.capsule)
        if entry is not None and (job.at is None or job.at <= entry.path.length):
            start = entry if job.at is None else entry.first(job.at)
            self._path, self._grammar = start.path, start.grammar
            self._start = start.continuation if job.resumes else None
        return self._path

    def take(self, update: Update) -> None:
        """Take in `update`; the tokens of a capsule that it names are kept, if all of them were seen."""
        drawn = self._drawn.get(update.branch)
        if drawn is None:
            drawn = self._drawn[update.branch] = array("I")
        drawn.extend(update.tokens)
        if update.capsule is not None:
            job, ttl_s = self._job, None
            if isinstance(job, PrefillJob):
                ttl_s = job.ttl_s
            elif update.kept:
                ttl_s = job.keep_s
            self.note(CapsuleId(update.capsule), update.branch, update.boundary, ttl_s)

    def note(self, capsule: CapsuleId, row: int, boundary: int, ttl_s: float | None) -> None:
        entry = self._entry(row, boundary, ttl_s)
        if entry is not None:
            self._memory.keep(capsule, entry)

    def cut(self, capsule: CapsuleId, row: int, at: int, residue: Tokens) -> None:
        entry = self._entry(row, at)
        if entry is not None:
            self._memory.keep(capsule, entry.cut(at, residue))

    def drop(self, capsule: CapsuleId) -> None:
        self._memory.drop(capsule)

    def tail(self, row: int, num: int) -> tuple[int, ...]:
        drawn = self._drawn.get(row)
        return () if drawn is None else tuple(drawn[-num:])

    def _entry(self, row: int, boundary: int, ttl_s: float | None = None) -> CapsuleTokens | None:
        """The first `boundary` tokens of a row; None if they are not known here."""
        path = self._path or self._find_path()
        if not self._memory.max_nbytes or path is None:
            return None
        tail, num_suffix = as_tokens(self._drawn.get(row, ())), 0
        if self._job.capsule is not None and (num_suffix := len(suffix := self._suffix(row))):
            tail = np.concatenate((suffix, tail))
        num_new = boundary - path.length
        if num_new < 0:  # before the branch went on here
            grammar, left = self._grammar_after(0, 0), self._left(row, 0)
            start = CapsuleTokens(path, grammar, None, self._weights, continuation=left)
            return start.first(boundary)._replace(ttl_s=ttl_s)
        if num_new > len(tail):
            return None
        if num_new:
            path = TokenPath(path, np.array(tail[:num_new], dtype="<u4"), path.scope)
        num_drawn = max(0, num_new - num_suffix)
        grammar = None if self._is_free else self._grammar_after(num_suffix, num_drawn)
        left = self._left(row, num_drawn)
        return CapsuleTokens(path, grammar, ttl_s, self._weights, continuation=left)

    def _left(self, row: int, num_drawn: int) -> Continuation | None:
        """Row `row` after so many tokens, to be gone on as; None if that is not known."""
        job = self._job
        if isinstance(job, PrefillJob):
            return job.continuation
        if isinstance(job, ForkJob) and job.resumes:
            if self._start is None:
                return None
            limits, more, drawn = self._start.limits, job.limits.max_tokens, self._start.drawn
            if more:
                limits = structs.replace(limits, max_tokens=drawn + more)
            return structs.replace(self._start, limits=limits, drawn=drawn + num_drawn)
        stream = job.stream if isinstance(job, GenerateJob) else 0
        branch = stream + self._first_branch + row
        return Continuation(job.sampling, job.limits, branch, job.drawn + num_drawn)

    def resumed(self, row: int, num_drawn: int) -> GenerateJob | None:
        """The job of row `row` alone, after the `num_drawn` tokens that it drew; None without its text."""
        job, path = self._job, self._find_path()
        if isinstance(job, PrefillJob) or path is None:
            return None
        suffix, drawn = self._suffix(row), as_tokens(self._drawn.get(row, ()))
        assert len(drawn) == num_drawn, f"{len(drawn)} tokens were logged, {num_drawn} counted"
        grammar, left = self._grammar_after(len(suffix), num_drawn), self._left(row, num_drawn)
        if left is None or (grammar is None and job.grammar is not None):
            return None  # it went on as a capsule's branch, or in its grammar: not known here
        tokens = np.concatenate((path.tokens(), suffix, drawn))
        return GenerateJob(
            tokens=tokens,
            limits=left.limits,
            sampling=left.sampling,
            n=1,
            scope=path.scope,
            terms=job.terms,
            grammar=grammar,
            drawn=left.drawn,
            keep_s=job.keep_s,
            stream=left.branch - self._first_branch - row,
            retain=job.retain,
            places=job.places if isinstance(job, GenerateJob) else (),
        )

    def _suffix(self, row: int) -> Tokens:
        job = self._job
        return tokens_of(job.suffixes[row]) if isinstance(job, ForkJob) else NO_TOKENS

    def _grammar_after(self, num_suffix: int, num_drawn: int) -> Grammar | None:
        """The grammar that a row's text is in, after so many tokens of it; None: in none that is known."""
        job = self._job
        if isinstance(job, PrefillJob):
            return job.grammar
        grammar = job.grammar
        if isinstance(job, ForkJob) and job.is_inheriting:
            grammar, num_drawn = self._grammar, num_suffix + num_drawn
        if grammar is None:
            return None
        return structs.replace(grammar, consumed=grammar.consumed + num_drawn)


def tokens_of(text: TokenText) -> Tokens:
    """The tokens of a live gateway's text."""
    assert isinstance(text, np.ndarray), "a gateway's texts are arrays of tokens"
    return text
