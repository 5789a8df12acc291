"""Checks commands, and begins the requests that pass: their branches join the queue.

Everything that can be refused is refused before anything changes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import msgspec

from mallee.protocol.errors import ContextLengthExceeded, InvalidParameter, KVBudgetExceeded
from mallee.protocol.messages import (
    Continuation,
    Fork,
    Generate,
    Grammar,
    Limits,
    Prefill,
    Sampling,
    Share,
    check_branches,
    check_spans,
)
from mallee.protocol.model import ModelSpec
from mallee.worker import updates as debug_log
from mallee.worker.capsules.capsule import Capsule
from mallee.worker.capsules.moves import CapsuleMoves
from mallee.worker.capsules.registry import CapsuleRegistry
from mallee.worker.forward import Matcher
from mallee.worker.kv.text import Notation, Text, joined
from mallee.worker.kv.tree import BranchTree
from mallee.worker.requests import RequestTable
from mallee.worker.sampling import StepSampler
from mallee.worker.sched.branch import Branch, ForkPoint, Job, JobCommand, Texts
from mallee.worker.sched.scheduler import Scheduler


class Intake:
    """Turns commands into jobs of the requests, if model and pool allow them.

    Its methods raise MalleeError before any change.
    `headroom_tokens` must have room in the pool beside the longest text of a request.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tree: BranchTree,
        *,
        headroom_tokens: int,
        scheduler: Scheduler,
        sampler: StepSampler,
        capsules: CapsuleRegistry,
        moves: CapsuleMoves,
        requests: RequestTable,
    ) -> None:
        self._spec = spec
        self._salt = lru_cache(maxsize=256)(spec.salt)  # tenants are few
        self._tree = tree
        self._block_size = tree.block_size
        self._num_blocks = tree.pool.num_blocks
        self._notation = tree.notation
        self._headroom = headroom_tokens
        self._scheduler = scheduler
        self._sampler = sampler
        self._capsules = capsules
        self._moves = moves
        self._requests = requests
        self._last_share: Share | None = None
        self._last_sampling: Sampling | None = None

    def open(self, command: Prefill | Generate, gateway: str) -> None:
        """A prompt: one branch computes it for all that continue it."""
        tokens = self._prompt(command)
        num_branches = command.n if isinstance(command, Generate) else 1
        salt = self._salt(command.salt)
        if isinstance(command, Prefill) and command.capsule:  # it leaves nothing under its own name
            self._capsules.check_owner(command.capsule, salt)
        else:
            self._capsules.check_unused(command.request)
        self._scheduler.check_room(num_branches)
        grammar, begin = command.grammar, None
        matchers: tuple[Matcher, ...] = ()
        if grammar is not None:
            matchers = self._sampler.matchers(command, grammar, tokens)
            begin = len(tokens) - grammar.consumed
        if isinstance(command, Prefill) and not command.replaceable:
            self._capsules.promise(command.request, tokens, salt)
        job = Job(command, gateway, salt, matchers, grammar=grammar, grammar_begin=begin)
        start = ForkPoint(0, 0, self._notation.empty())
        self._requests.open(job, start, {tuple(range(num_branches)): tokens})

    def fork(self, command: Fork, gateway: str) -> None:
        """Branches that continue a capsule, or a prompt that will be one."""
        source = self._source(command.capsule)
        start = fork_point(command, source, self._tree)
        resumed = _resumed(command, source, start.boundary) if command.resumes else None
        limits = command.limits if resumed is None else resumed.limits
        num_drawn = 0 if resumed is None else resumed.drawn
        texts = self._texts(command, start, self._max_tokens(limits) - num_drawn)
        self._capsules.check_unused(command.request)
        self._scheduler.check_room(len(command.suffixes))
        grammar, begin = command.grammar, None
        matchers: tuple[Matcher, ...] = ()
        if resumed is not None or grammar is not None:
            if grammar is None or grammar.kind == "inherit" or resumed is not None:
                grammar = _grammar_of(source, start.boundary)
                begin = None if grammar is None else start.boundary - grammar.consumed
            matchers = self._matchers(command, source, start.boundary, grammar)
        if debug_log.is_on("forks"):
            num_branches = len(command.suffixes)
            debug_log.log_fork(command.request, num_branches, start.boundary, start.base)
        salt = source.salt if isinstance(source, Capsule) else source.job.salt
        if isinstance(source, Capsule) and source.node is None and start.base:
            producer = self._moves.restore(source, command.share)
            start = msgspec.structs.replace(start, producer=producer)
        job = Job(
            command,
            gateway,
            salt,
            matchers,
            resumed=resumed,
            grammar=grammar,
            grammar_begin=begin,
        )
        self._requests.open(job, start, texts)

    def grammar_of(self, command: Fork) -> Grammar | None:
        """The grammar whose state `fork` has to build again for `command`. From any thread."""
        if not command.resumes and (command.grammar is None or command.grammar.kind != "inherit"):
            return None
        source = self._capsules.peek(command.capsule)
        if source is None:
            return None
        at = source.boundary if command.at is None else command.at
        if at == source.boundary and source.matcher is not None:
            return None
        return source.grammar_at(at)

    def _matchers(
        self, command: Fork, source: Capsule | Branch, boundary: int, grammar: Grammar | None
    ) -> tuple[Matcher, ...]:
        """The grammar states that the branches begin with; `grammar` is the text's, if they go on in it."""
        if command.resumes and grammar is None:
            return ()
        is_own = command.resumes or (
            command.grammar is not None and command.grammar.kind == "inherit"
        )
        if not is_own:
            return self._sampler.fork_matchers(command, None)
        state = _grammar_state(source, boundary)
        if state is None and isinstance(source, Capsule) and grammar is not None:
            text = source.text(self._notation, boundary - grammar.consumed, boundary)
            state = self._sampler.state_after(grammar, text)
        if command.resumes:
            if state is None:
                raise InvalidParameter("capsule", command.capsule, "its text is complete")
            return (state,)
        return self._sampler.fork_matchers(command, state)

    def _source(self, capsule: str) -> Capsule | Branch:
        """The capsule, or the branch that computes it."""
        producer = self._requests.producer(capsule)
        return self._capsules.get(capsule) if producer is None else producer

    # Checks

    def _prompt(self, command: Prefill | Generate) -> Text:
        """The command's tokens. Raises InvalidParameter, ContextLengthExceeded, KVBudgetExceeded."""
        self._check_request(command)
        tokens = self._notation.read(command.tokens)
        if len(tokens) == 0:
            raise InvalidParameter("tokens", [], "give at least one token")
        command.validate(len(tokens))
        if isinstance(command, Prefill):
            self._check_length(len(tokens), 0, 0)
            return tokens
        check_branches("n", command.n)
        self._check_sampling(command.sampling)
        is_forked = command.n > 1 and len(tokens) % self._block_size > 0
        num_left = self._max_tokens(command.limits) - command.drawn
        self._check_length(len(tokens), num_left, is_forked)
        return tokens

    def _texts(self, command: Fork, start: ForkPoint, max_tokens: int) -> Texts:
        """Texts that the branches of `command` must compute. Raises as `_prompt` does."""
        self._check_request(command)
        check_branches("suffixes", len(command.suffixes))
        self._check_sampling(command.sampling)
        texts = grouped(start.rest, command.suffixes, self._notation)
        prompt = start.boundary
        if any(command.suffixes):
            prompt += max(map(len, texts.values())) - len(start.rest)
        self._check_length(prompt, max_tokens, start.boundary % self._block_size > 0)
        return texts

    def _check_request(self, command: JobCommand) -> None:
        if command.request in self._requests.jobs:
            raise InvalidParameter(
                "request", command.request, "this id is in use; ids are used once"
            )
        if command.share != self._last_share:  # many commands have the same
            self._last_share = command.share.validate()
        if command.retain:
            check_spans(command.retain)

    def _check_sampling(self, sampling: Sampling) -> None:
        if sampling == self._last_sampling:
            return
        sampling.validate(self._spec.vocab_size)
        self._last_sampling = sampling

    def _max_tokens(self, limits: Limits) -> int:
        """`max_tokens`, if all of `limits` can be kept to. Raises InvalidParameter."""
        limits.validate(self._spec.vocab_size)
        return limits.max_tokens

    def _check_length(self, prompt: int, max_tokens: int, num_copies: int) -> None:
        """`num_copies`: of blocks that a branch shares in part and must copy, beside its whole text."""
        if prompt + max_tokens > self._spec.max_model_len:
            raise ContextLengthExceeded(prompt, max_tokens, self._spec.max_model_len)
        # The last token's KV is never needed.
        longest = prompt + (max_tokens or 1) - 1 + self._headroom
        needed = -(-longest // self._block_size) + num_copies
        if needed > self._num_blocks:
            raise KVBudgetExceeded(
                prompt, max_tokens, self._headroom, needed, self._num_blocks, self._block_size
            )


def _resumed(command: Fork, source: Capsule | Branch, boundary: int) -> Continuation:
    """The branch that `command` goes on as. Raises InvalidParameter."""
    if len(command.suffixes) != 1 or any(command.suffixes):
        raise InvalidParameter(
            "suffixes", len(command.suffixes), "one branch goes on, and nothing is added; fork it"
        )
    if isinstance(source, Branch) or source.continuation is None:
        raise InvalidParameter(
            "capsule", command.capsule, "no branch left it, so none can go on; fork it"
        )
    resumed = source.continuation_at(boundary)
    if resumed is None:
        first = source.boundary - source.continuation.drawn
        raise InvalidParameter(
            "at", boundary, f"its answer is tokens {first} to {source.boundary}; fork it before"
        )
    limits, more = resumed.limits, command.limits.max_tokens
    if more:
        limits = msgspec.structs.replace(limits, max_tokens=resumed.drawn + more)
        return msgspec.structs.replace(resumed, limits=limits)
    if resumed.drawn >= limits.max_tokens:
        raise InvalidParameter(
            "max_tokens", 0, f"all of {limits.max_tokens} are drawn; say how many more"
        )
    return resumed


def _grammar_of(source: Capsule | Branch, boundary: int) -> Grammar | None:
    """The grammar that the first `boundary` tokens of `source` end in, with those that it took in."""
    if isinstance(source, Capsule):
        return source.grammar_at(boundary)
    return source.grammar if boundary == source.length else None


def _grammar_state(source: Capsule | Branch, boundary: int) -> Matcher | None:
    """The grammar's state after the first `boundary` tokens of `source`, if it is there."""
    if isinstance(source, Capsule):
        # Opaque to `worker.kv`.
        return cast(Matcher | None, source.matcher) if boundary == source.boundary else None
    at_end = source.constraint if boundary == source.length else None
    return None if at_end is None else at_end.share()


# The starts of forks: all of a capsule, its beginning, or one that is being computed.


def fork_point(command: Fork, source: Capsule | Branch, tree: BranchTree) -> ForkPoint:
    """The start of `command` on a capsule, or on the branch that computes it. Raises InvalidParameter."""
    at, notation, block_size = command.at, tree.notation, tree.block_size
    end = source.num_computed if isinstance(source, Capsule) else source.length
    boundary = end + len(source.pending) if isinstance(source, Capsule) else end
    if at is None:
        at = boundary
    elif not 1 <= at <= boundary:
        raise InvalidParameter("at", at, f"give 1 to {boundary}, the tokens of the capsule")
    has_logits = not isinstance(source, Capsule) or source.logits is not None or source.pending
    if at == boundary and (has_logits or all(command.suffixes)):
        if isinstance(source, Capsule):
            rest, node = notation.empty(), source.node if end else None
            rest.extend(source.pending)
            return ForkPoint(boundary, end, rest, node, None, source.logits)
        return ForkPoint(boundary, boundary, notation.empty(), None, source)
    # Without logits (inside the text, and after an answer that ended itself) a branch without suffix must
    # compute the last token again.
    last = at if all(command.suffixes) else at - 1
    base = last - last % block_size
    if isinstance(source, Branch):
        return ForkPoint(at, base, source.tokens[base:at], None, source if base else None)
    node = source.node
    base = min(base, end - end % block_size)
    if node is not None:
        base = tree.resume_point(node, base)
    return ForkPoint(at, base, source.text(notation, base, at), node if base else None)


def grouped(rest: Text, suffixes: Sequence[bytes], notation: Notation) -> Texts:
    """Texts that the branches must compute, by the indices of those that compute the same.

    Raises InvalidParameter, CodecError.
    """
    texts: dict[tuple[int, ...], Text] = {}
    if not (len(rest) or any(suffixes)):  # branches with nothing to compute share nothing
        for index in range(len(suffixes)):
            texts[(index,)] = notation.empty()
        return texts
    groups: dict[bytes | int, list[int]] = {}
    for index, raw in enumerate(suffixes):
        groups.setdefault(raw if raw or len(rest) else index, []).append(index)
    for key, members in groups.items():
        suffix = notation.read(key) if isinstance(key, bytes) and key else notation.empty()
        texts[tuple(members)] = joined(notation, rest, suffix)
    return texts
