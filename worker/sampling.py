"""Scored branches become draws, and draws become what happens to the branches.

Grammar masks of a step's branches depend on tokens drawn before it: they are computed on a thread of
their own while the model runs (`expect`), and looked at when there are logits to draw from (`draw`).

Drafts are verified by drawing. A draw depends on its own `Draw` alone, so the token after each of a
draft's is drawn as if the draft were right; then it is right as far as the draws repeat it, and the first
that differs is the token that plain decoding draws, greedy or sampled.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from mallee.protocol.errors import GrammarFailed, InvalidParameter, MalleeError
from mallee.protocol.messages import (
    EndToken,
    FinishReason,
    Fork,
    Generate,
    Grammar,
    Prefill,
    ReasoningBudget,
    TokenLogprobs,
    unpack_tokens,
)
from mallee.worker.forward import (
    DeviceForward,
    Draw,
    Drawing,
    Forward,
    Ids,
    Logits,
    LogprobQuery,
    Matcher,
    Structures,
    TokenHistory,
    Words,
    distinct,
    num_words,
)
from mallee.worker.kv.paths import path_tokens
from mallee.worker.kv.text import Text
from mallee.worker.sched.branch import Branch, answer_of
from mallee.worker.sched.plan import Draft

Scored = tuple[Branch, Logits]
NO_DRAFT = Draft(())


class Drafted(NamedTuple):
    """A branch's draft, and the logits after each of its tokens."""

    draft: Draft
    logits: Sequence[Logits]


Meanwhile: TypeAlias = Callable[[Drawing, Sequence[Branch]], None]
"""Gets draws under way, and the branches that the first of them are of, in order."""

Accept: TypeAlias = Callable[[Mapping[Branch, int]], None]
"""Gets the number of draws of each branch with a draft: the tokens of its row that its text goes on from."""

_Drawn = tuple[Logits, int]


class Sampled(msgspec.Struct, frozen=True):
    """The result of a branch's draws: its new tokens, and `finish` if it ends there."""

    branch: Branch
    logits: Logits
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: MalleeError | None = None
    num_draws: int = 1
    end: EndToken | None = None


class _Masks(NamedTuple):
    """Sets being filled, one row for each distinct matcher."""

    rows: dict[Matcher, int]
    sets: Words
    done: Future[None] | None  # None: filled already

    def of(self, branch: Branch, before: Draft = NO_DRAFT) -> Words | None:
        """The tokens that `branch` may draw, after the draft `before`; None if it may draw anything."""
        if branch.constraint is None:
            return None
        matcher = before.matchers[-1] if before.matchers else branch.constraint.matcher
        row = self.rows.get(matcher)
        assert row is not None, "a constrained branch was not expected"
        allowed: Words = self.sets[row]
        return allowed


class StepSampler:
    """Draws tokens for branches. `overlaps`: masks are computed while the model runs.

    With a `device`, which is `forward`, draws are launched, and something may be done meanwhile.
    """

    def __init__(
        self,
        forward: Forward,
        structures: Structures[Any] | None,
        *,
        overlaps: bool = True,
        device: DeviceForward | None = None,
    ) -> None:
        self._forward = forward
        self._device = device
        self._structures = structures
        self._overlaps = overlaps
        self._eos = frozenset(forward.spec.eos_token_ids)
        self.has_matchers = False  # whether there ever was a grammar: before, it costs nothing
        self._masks: _Masks | None = None
        self._filler: ThreadPoolExecutor | None = None

    # Grammars

    def matchers(
        self, command: Prefill | Generate, grammar: Grammar, tokens: Text
    ) -> tuple[Matcher, ...]:
        """The state of `grammar`, the command's, that the branches of a prompt begin with: one for all.

        Raises InvalidParameter: a grammar that can't be compiled, or can't have taken in the end of
        `tokens`, the command's, or can't go on after it.
        """
        if grammar.kind == "inherit":
            raise InvalidParameter(
                "grammar", "inherit", "only a fork has a capsule to inherit from"
            )
        start = self._compile(grammar)
        if not grammar.consumed:
            return (start,)
        self._filled()  # of a step that failed: its matchers must be free before they are used again
        matcher = _after(start, tokens[len(tokens) - grammar.consumed :], "tokens")
        if isinstance(command, Generate) and matcher.is_stopped:
            raise InvalidParameter(
                "grammar.consumed", grammar.consumed, "the text that ends with them is complete"
            )
        return (matcher,)

    def fork_matchers(self, command: Fork, state: Matcher | None) -> tuple[Matcher, ...]:
        """The grammar states that a fork's branches begin with: one for all, one for each, or none.

        `state` is that of the capsule where they leave it, if it is inside a text there. Raises
        InvalidParameter: a grammar that can't be compiled, or nothing to inherit.
        """
        grammar = command.grammar
        if grammar is None:
            return ()
        if grammar.consumed:
            raise InvalidParameter(
                "grammar.consumed", grammar.consumed, "give 0: a fork has its capsule's text"
            )
        if grammar.kind != "inherit":
            return (self._compile(grammar),)
        self._filled()  # as above
        return _inherited(command, state)

    def state_after(self, grammar: Grammar, tokens: Iterable[int]) -> Matcher | None:
        """The state of a text after `tokens`; None if nothing can follow. Raises InvalidParameter."""
        self._filled()  # as above
        matcher = _after(self._compile(grammar), tokens, "tokens")
        return None if matcher.is_stopped else matcher

    def _compile(self, grammar: Grammar) -> Matcher:
        """The state before the first token. Raises InvalidParameter."""
        if self._structures is None:
            raise InvalidParameter(
                "grammar", grammar.kind, "this worker constrains no answers; leave it out"
            )
        self.has_matchers = True
        try:
            matcher: Matcher = self._structures.compile(
                msgspec.structs.replace(grammar, consumed=0)
            )
        except MalleeError:
            raise
        except BaseException as error:  # a foreign compiler's, also a panic of Rust
            raise InvalidParameter(
                "grammar", grammar.source, f"its compiler broke: {type(error).__name__}"
            ) from error
        return matcher

    def is_prepared(self, grammar: Grammar) -> bool:
        """Whether `matchers` has nothing to compile. From any thread."""
        if self._structures is None or grammar.kind == "inherit":
            return True
        return self._structures.knows(msgspec.structs.replace(grammar, consumed=0))

    def prepare(self, grammar: Grammar) -> None:
        """Compile ahead what `matchers` will ask for. From any thread; never raises MalleeError."""
        if self._structures is not None and not self.is_prepared(grammar):
            with suppress(InvalidParameter):  # `matchers` will say so
                self._structures.compile(msgspec.structs.replace(grammar, consumed=0))

    def trim(self, branch: Branch, tokens: Sequence[int]) -> Draft:
        """The beginning of `tokens` after which `branch` would go on to draw."""
        job, constraint, ends = branch.job, branch.constraint, branch.job.rules.stop_ids
        if constraint is not None or not job.limits.ignore_eos:
            ends |= self._eos
        kept = []
        matchers: list[Matcher] = []
        if constraint is not None:
            self._filled()  # of a step that failed, as above
        for token in tokens:
            if token in ends or token >= self._forward.spec.vocab_size:
                break
            if constraint is not None:
                matcher = (matchers[-1] if matchers else constraint.matcher).fork()
                matcher.advance(token)
                if matcher.is_stopped:  # as it also is if it refuses the token
                    break
                matchers.append(matcher)
            kept.append(token)
        return Draft(tuple(kept), tuple(matchers))

    def expect(self, branches: Iterable[Branch], drafts: Iterable[Draft] = ()) -> None:
        """These will have logits to draw from when the forward pass is done, also after their drafts."""
        self._filled()  # of a step that failed, as above
        constraints = [b.constraint for b in branches if b.constraint is not None and b.draws]
        if not constraints:
            return
        assert self._structures is not None, "a constrained branch without structures"
        rows: dict[Matcher, int] = {}
        for constraint in constraints:
            rows.setdefault(constraint.matcher, len(rows))
        for draft in drafts:
            for matcher in draft.matchers:
                rows[matcher] = len(rows)
        sets = np.zeros((len(rows), num_words(self._forward.spec.vocab_size)), dtype=np.int32)
        if not self._overlaps:
            self._structures.fill(list(rows), sets)
            self._masks = _Masks(rows, sets, None)
            return
        if self._filler is None:
            self._filler = ThreadPoolExecutor(1, thread_name_prefix="masks")
        done = self._filler.submit(self._structures.fill, list(rows), sets)
        self._masks = _Masks(rows, sets, done)

    def close(self) -> None:
        """End the thread that fills masks, and what the compiler keeps."""
        if self._filler is not None:
            self._filler.shutdown(wait=False)
        if self._structures is not None:
            self._structures.close()

    # Draws

    def draw(
        self,
        scored: Sequence[Scored],
        drafted: Mapping[Branch, Drafted] | None = None,
        meanwhile: Meanwhile | None = None,
        accept: Accept | None = None,
    ) -> list[Sampled]:
        """One token for each branch, and what became of it. All branches with a grammar were expected.

        Of those in `drafted` also the tokens after it, as far as drafts are right. Nothing is changed before
        the forward has drawn all of them, and `accept` has taken what becomes of drafts. `meanwhile` is
        called while a device draws.
        """
        masks = self._filled()
        taken: list[Sampled] = []
        if masks is not None:
            taken, scored = _sorted_out(scored, masks)
        if not scored:
            if accept is not None and drafted is not None:
                accept(dict.fromkeys(drafted, 1))
            return taken
        draws: list[Draw] = []
        are_plain = True
        for branch, logits in scored:
            answer = branch.answer or branch.begin_answer()
            if answer.rules.is_plain:
                position = branch.origin_len + len(branch.tokens)
                draws.append(Draw(logits, answer.rules.sampling, answer.seed, position))
            else:
                are_plain = False
                draws.append(self._draw(branch, logits, masks))
        later = {} if drafted is None else self._draw_later(scored, drafted, masks)
        for own in later.values():
            draws += own
        if self._device is None:
            tokens = self._forward.sample(draws)
        else:
            assert drafted is None, "drafts are drawn on the host"
            drawing = self._device.launch_draws(draws)
            if meanwhile is not None:
                meanwhile(drawing, [branch for branch, _ in scored])
            tokens = drawing.collect()
        further: dict[Branch, list[_Drawn]] = {}
        if drafted is not None:
            further = _verified(drafted, later, scored, tokens)
        if are_plain:
            reports: Iterator[TokenLogprobs] = iter(())
        elif self._device is None:
            reports = self._logprobs(scored, tokens, further)
        else:
            reports = iter(drawing.logprobs())
        if accept is not None and drafted is not None:
            accept({branch: 1 + len(further.get(branch, ())) for branch in drafted})
        take = self._take
        for (branch, logits), token in zip(scored, tokens, strict=False):
            wants_report = not are_plain and branch.job.sampling.logprobs >= 0
            taken.append(take(branch, logits, token, (next(reports),) if wants_report else ()))
            if branch in further:
                self._take_further(taken, further[branch], reports)
        return taken

    # Drafts

    def _draw_later(
        self, scored: Sequence[Scored], drafted: Mapping[Branch, Drafted], masks: _Masks | None
    ) -> dict[Branch, list[Draw]]:
        """The draws after each token of the branches' drafts, if it is drawn.

        Up to a place where the grammar lets nothing follow: the branch finds that out in the next step.
        """
        found: dict[Branch, list[Draw]] = {}
        for branch, _ in scored:
            if branch not in drafted:
                continue
            draft, rows = drafted[branch]
            draws = found[branch] = []
            for i, logits in enumerate(rows, 1):
                before = Draft(draft.tokens[:i], draft.matchers[:i])
                if masks is not None and before.matchers:
                    allowed = masks.of(branch, before)
                    if before.matchers[-1].error or allowed is None or not allowed.any():
                        break
                draws.append(self._draw(branch, logits, masks, before))
        return found

    def _take_further(
        self, taken: list[Sampled], drawn: Sequence[_Drawn], reports: Iterator[TokenLogprobs]
    ) -> None:
        """Take what the last branch of `taken` drew after its first token, unless it ended with that.

        `reports` has the log-probabilities of all of it, if they are wanted.
        """
        for logits, token in drawn:
            last = taken[-1]
            logprobs = (next(reports),) if last.branch.job.sampling.logprobs >= 0 else ()
            if last.finish is not None:
                continue
            new = self._take(last.branch, logits, token, logprobs)
            if new.error is not None:  # the tokens before it are told by an update of their own
                taken.append(new)
                continue
            taken[-1] = Sampled(
                last.branch,
                logits,
                last.tokens + new.tokens,
                new.finish,
                last.logprobs + new.logprobs,
                num_draws=last.num_draws + 1,
                end=new.end,
            )

    # Draws, inside

    def _logprobs(
        self,
        scored: Sequence[Scored],
        tokens: Sequence[int],
        further: Mapping[Branch, Sequence[_Drawn]],
    ) -> Iterator[TokenLogprobs]:
        """Those of the branches that want some: of each its first token, then the further ones."""
        queries: list[LogprobQuery] = []
        for (branch, logits), token in zip(scored, tokens, strict=False):
            num_top = branch.job.sampling.logprobs
            if num_top >= 0:
                queries.append(LogprobQuery(logits, token, num_top))
                queries += [LogprobQuery(*drawn, num_top) for drawn in further.get(branch, ())]
        return iter(self._forward.logprobs(queries) if queries else ())

    def _filled(self) -> _Masks | None:
        masks, self._masks = self._masks, None
        if masks is not None and masks.done is not None:
            masks.done.result()
        return masks

    def _draw(
        self, branch: Branch, logits: Logits, masks: _Masks | None, before: Draft = NO_DRAFT
    ) -> Draw:
        """The draw after `before`, as if that were drawn."""
        job, answer, num = branch.job, answer_of(branch), len(before.tokens)
        if answer.rules.has_penalties and answer.history is None:
            answer.history = self._history(branch)
        history = answer.history
        if num and history is not None:
            history = history.after(before.tokens)
        banned: tuple[int, ...] = ()
        if branch.num_output + num < job.limits.min_tokens:
            ends = self._eos | answer.rules.stop_ids
            banned = tuple(token for token in ends if 0 <= token < self._forward.spec.vocab_size)
        allowed = None if masks is None else masks.of(branch, before)
        assert allowed is not None or branch.constraint is None, "a grammar without its masks"
        if job.limits.reasoning is not None and not answer.has_reasoned:
            allowed = self._paced(branch, job.limits.reasoning, before, allowed)
        position = branch.length + num
        return Draw(
            logits=logits,
            sampling=job.sampling,
            seed=answer.seed,
            position=position,
            history=history,
            allowed=allowed,
            banned=banned,
        )

    def _paced(
        self, branch: Branch, budget: ReasoningBudget, before: Draft, allowed: Words | None
    ) -> Words | None:
        """`allowed`, or the end of the reasoning alone, if that has taken all its tokens.

        Looks at what the branch drew only once so much is drawn: O(that), as long as the reasoning goes on.
        """
        num_drawn = branch.job.num_drawn + branch.num_output
        if num_drawn + len(before.tokens) < budget.max_tokens:
            return allowed
        drawn = _drawn_tokens(branch, num_drawn)
        num = _num_reasoned(drawn, budget)
        answer_of(branch).has_reasoned = num is None and len(drawn) > 1
        if before.tokens:
            num = _num_reasoned([*drawn, *before.tokens], budget)
        if num is None or num < budget.max_tokens:
            return allowed
        close = np.zeros(num_words(self._forward.spec.vocab_size), np.int32)
        close.view(np.uint32)[budget.close // 32] = 1 << (budget.close % 32)
        if allowed is not None and not (allowed & close).any():
            return allowed  # the grammar's text can't end here
        return close

    def _take(
        self, branch: Branch, logits: Logits, token: int, logprobs: tuple[TokenLogprobs, ...]
    ) -> Sampled:
        job, answer = branch.job, branch.answer or branch.begin_answer()
        constraint = answer.constraint
        is_eos = token in self._eos and (constraint is not None or not job.limits.ignore_eos)
        if is_eos or token in answer.rules.stop_ids:
            end = (token, logprobs[0] if logprobs else None)
            return Sampled(branch, logits, (), "stop", end=end)
        if constraint is not None:
            constraint.advance(token)
            if constraint.matcher.error:
                error = GrammarFailed(constraint.matcher.error)
                return Sampled(branch, logits, finish="error", error=error)
        branch.tokens.append(token)
        branch.num_output += 1
        finish: FinishReason | None = None
        if branch.num_output >= job.limits.max_tokens:
            finish = "length"
        if answer.history is not None:
            answer.history.add(token)
        if constraint is not None and constraint.matcher.is_stopped:
            finish = "stop"
        return Sampled(branch, logits, (token,), finish, logprobs)

    # Penalties

    def _history(self, branch: Branch) -> TokenHistory:
        """The history of a branch that is about to draw its first token."""
        job, num_own = branch.job, len(branch.tokens) - branch.job.num_drawn
        assert branch.num_output == 0, "a history begins before the first draw"
        above: list[
            int
        ] = []  # of those that it had drawn, the ones that it shares with its capsule
        if num_own < 0:
            assert branch.origin is not None, "it drew more tokens than it has"
            above, num_own = path_tokens(branch.origin)[: branch.origin_len], 0
        drawn = [*above, *branch.tokens[num_own:]][-job.num_drawn :] if job.num_drawn else []
        if job.sampling.repetition_penalty == 1.0:
            history = TokenHistory(distinct(()))
        elif above:
            num_prompt = branch.length - job.num_drawn
            history = TokenHistory(distinct(above[:num_prompt]))
        else:
            history = TokenHistory(self._prompt_ids(branch, num_own))
        for token in drawn:
            history.add(token)  # drawn before: on another worker, or up to a capsule
        return history

    def _prompt_ids(self, branch: Branch, num_own: int) -> Ids:
        """The distinct tokens of the origin of `branch` and of its first `num_own` own tokens."""
        job, origin = branch.job, branch.origin
        shared = job.rules.shared.get(origin)
        if shared is None:
            shared = distinct(() if origin is None else path_tokens(origin))
            job.rules.shared[origin] = shared
        return np.union1d(shared, distinct(branch.tokens[:num_own])) if num_own else shared


def _drawn_tokens(branch: Branch, num: int) -> list[int]:
    """The last `num` tokens of `branch`: those that it drew, here and before."""
    own, above = list(branch.tokens[max(0, len(branch.tokens) - num) :]), num - len(branch.tokens)
    if above <= 0:
        return own
    assert branch.origin is not None, "it drew more tokens than it has"
    shared = path_tokens(branch.origin)[: branch.origin_len]
    return [*shared[len(shared) - above :], *own]


def _num_reasoned(drawn: Sequence[int], budget: ReasoningBudget) -> int | None:
    """Tokens of the reasoning that the answer `drawn` ends in; None: it is in none.

    White space may come before its mark: one token at most.
    """
    if budget.close in drawn:
        return None
    if budget.open is None:
        return len(drawn)
    return len(drawn) - drawn.index(budget.open) - 1 if budget.open in drawn[:2] else None


def _verified(
    drafts: Mapping[Branch, Drafted],
    later: Mapping[Branch, Sequence[Draw]],
    scored: Sequence[Scored],
    tokens: Sequence[int],
) -> dict[Branch, list[_Drawn]]:
    """The draws that follow the first ones, which are of `scored`: those up to which drafts are right."""
    first = {branch: token for (branch, _), token in zip(scored, tokens, strict=False)}
    found: dict[Branch, list[_Drawn]] = {}
    begin = len(scored)
    for branch, draws in later.items():
        drawn = found[branch] = []
        token = first[branch]
        own = tokens[begin : begin + len(draws)]
        begin += len(draws)
        for draw, drafted, after in zip(draws, drafts[branch].draft.tokens, own, strict=False):
            if token != drafted:
                break
            drawn.append((draw.logits, after))
            token = after
    return found


def _inherited(command: Fork, start: Matcher | None) -> tuple[Matcher, ...]:
    """`start`, the capsule's state, for each suffix, advanced by it. Raises InvalidParameter."""
    if start is None:
        raise InvalidParameter(
            "grammar",
            "inherit",
            "the capsule is not inside a constrained text there (that is kept at its end alone);"
            " name a grammar, or leave it out",
        )
    if not any(command.suffixes):
        return (start,)
    return tuple(
        _after(start, unpack_tokens(suffix).tolist(), f"suffixes[{i}]") if suffix else start
        for i, suffix in enumerate(command.suffixes)
    )


def _after(start: Matcher, tokens: Iterable[int], param: str) -> Matcher:
    """The state of `start` after `tokens`, given as `param`. Raises InvalidParameter if they can't follow."""
    matcher = start.fork()
    for token in tokens:
        matcher.advance(token)
        if matcher.error:
            raise InvalidParameter(param, token, "the grammar allows no such token here")
    return matcher


def _sorted_out(scored: Sequence[Scored], masks: _Masks) -> tuple[list[Sampled], list[Scored]]:
    """Branches that can't go on under their grammar, and all the others."""
    ended: list[Sampled] = []
    others: list[Scored] = []
    for branch, logits in scored:
        allowed = masks.of(branch)
        reason = ""
        if branch.constraint is not None and allowed is not None:
            reason = branch.constraint.matcher.error
            if not reason and not allowed.any():
                reason = "no token can follow"
        if reason:
            ended.append(Sampled(branch, logits, (), "error", (), GrammarFailed(reason)))
        else:
            others.append((branch, logits))
    return ended, others
