"""Drafts for the decodes of a plan, and what is learnt from what became of them.

Takes what a plan leaves of its budget and of free blocks: nothing waits, is evicted or preempted for a
draft. Which tokens are drawn does not depend on it (`sampling.py`), only how many in a step.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from mallee.protocol.errors import ConfigError, DeviceMemoryExhausted
from mallee.worker.sched.branch import Branch, answer_of
from mallee.worker.sched.plan import Draft, Plan
from mallee.worker.speculation.drafters import Drafter, PromptLookup, SiblingLookup
from mallee.worker.speculation.worth import Acceptance, StepCosts

SpeculationName: TypeAlias = Literal["off", "prompt", "sibling", "model", "auto"]
_LOOKUPS: Final[dict[SpeculationName, tuple[Callable[[], Drafter], ...]]] = {
    "off": (),
    "prompt": (PromptLookup,),
    "sibling": (SiblingLookup,),
    "model": (),
    "auto": (SiblingLookup, PromptLookup),
}
_WITH_MODEL: Final = ("model", "auto")
_MIN_KEPT: Final = 64


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """The drafters, by name, and the most tokens of a draft. No setting changes an answer.

    `prompt` drafts from the branch's own text, `sibling` from what other branches of its prompt or capsule
    drew, `model` by a draft model; `auto` from sisters first, then from the own text, then by a draft
    model, if there is one.
    """

    drafters: SpeculationName = "off"
    num_tokens: int = 5

    def validate(self) -> "SpeculationConfig":
        """Itself. Raises ConfigError."""
        if self.drafters not in _LOOKUPS:
            raise ConfigError(f"speculation={self.drafters!r}: give one of {', '.join(_LOOKUPS)}")
        if self.num_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens={self.num_tokens}: give at least 1; speculation='off' drafts none"
            )
        return self


class SpeculationStats(NamedTuple):
    """Tokens drafted, and those of them that were drawn. Both only grow."""

    num_drafted: int
    num_accepted: int


class _Speculated:
    """A branch, as far as it was drafted for."""

    __slots__ = ("accepted", "last")

    def __init__(self, num_drafters: int) -> None:
        self.accepted = [Acceptance() for _ in range(num_drafters)]
        self.last = 0  # the drafter of its draft under way


class Speculator:
    """Chooses drafts. `trim` cuts one to what a branch may draw, `room` to what there are blocks for."""

    def __init__(
        self,
        config: SpeculationConfig,
        *,
        trim: Callable[[Branch, Sequence[int]], Draft],
        room: Callable[[Branch, int], int],
        model: Drafter | None = None,
    ) -> None:
        """Raises ConfigError if `config` wants a draft model and `model` is none, or the other way round."""
        name = config.validate().drafters
        if model is None and name == "model":
            raise ConfigError("speculation='model' needs a draft model; give one (draft_model)")
        if model is not None and name not in _WITH_MODEL:
            raise ConfigError(
                f"speculation={name!r} uses no draft model; leave it out, or choose one of"
                f" {', '.join(_WITH_MODEL)}"
            )
        self.drafters: tuple[Drafter, ...] = tuple(make() for make in _LOOKUPS[name])
        if model is not None:
            self.drafters += (model,)
        self._most = config.num_tokens
        self._trim = trim
        self._room = room
        self._costs = StepCosts()
        self._branches: dict[Branch, _Speculated] = {}  # ended ones too, until there are many
        self._max_branches = _MIN_KEPT
        self._num_drafted = self._num_accepted = 0

    def draft(self, plan: Plan) -> None:
        """Give `plan` drafts, as far as its budget goes: each decode those of the first drafter with any."""
        left = plan.tokens_left
        if left <= 0 or not plan.decodes:
            return
        num_rows = len(plan.decodes) + sum(len(chunk.tokens) for chunk in plan.chunks)
        without = dict.fromkeys(plan.decodes)
        for i, drafter in enumerate(self.drafters):
            lengths = self._lengths(i, without, num_rows, left)
            try:
                found = drafter.propose_all(lengths) if lengths else {}
            except DeviceMemoryExhausted:
                for branch in lengths:
                    self._state(branch).accepted[i].rest(branch.num_output)
                continue
            for branch, tokens in found.items():
                draft = self._fitting(branch, tokens[: lengths[branch]])
                if draft is not None:
                    plan.drafts[branch] = draft
                    left -= len(draft.tokens)
                    del without[branch]
                    self._state(branch).last = i

    def _lengths(
        self, i: int, branches: Collection[Branch], num_rows: int, left: int
    ) -> dict[Branch, int]:
        """The tokens that drafter `i` is to draft for each of `branches`, where it pays: `left` together."""
        lengths = {}
        for branch in branches:
            accepted, position = self._state(branch).accepted[i], branch.num_output
            most = min(self._most, left, branch.job.limits.max_tokens - position - 1)
            if most <= 0 or accepted.paused(position):
                continue
            seconds = self.drafters[i].seconds(branch, len(branches))
            break_even = self._costs.break_even(num_rows, seconds)
            if length := accepted.length(position, break_even, most):
                lengths[branch] = length
                left -= length
        return lengths

    def _fitting(self, branch: Branch, tokens: Sequence[int]) -> Draft | None:
        """The beginning of `tokens` that `branch` may draw and has room for, if there is any."""
        draft = self._trim(branch, tokens) if tokens else None
        if draft is None or not draft.tokens:
            return None
        num = self._room(branch, len(draft.tokens))
        return Draft(draft.tokens[:num], draft.matchers[:num]) if num else None

    def read(self, branches: Iterable[Branch]) -> None:
        """`branches` have drawn tokens."""
        for branch in branches:
            self._state(branch)
            for drafter in self.drafters:
                drafter.read(branch)

    def learn(self, plan: Plan, num_draws: Mapping[Branch, int], seconds: float) -> None:
        """`plan` was computed in so many seconds, and its branches drew so many tokens."""
        self.read(num_draws)
        num_drafted = 0
        for branch, draft in plan.drafts.items():
            state, num, num_accepted = (
                self._branches[branch],
                len(draft.tokens),
                num_draws[branch] - 1,
            )
            state.accepted[state.last].learn(num, num_accepted)
            answer = answer_of(branch)
            before = answer.untold_drafts or (0, 0)
            answer.untold_drafts = (before[0] + num, before[1] + num_accepted)
            num_drafted += num
            self._num_accepted += num_accepted
        self._num_drafted += num_drafted
        if not plan.chunks and not plan.ready:
            self._costs.learn(len(plan.decodes) + num_drafted, seconds)

    def rest(self, plan: Plan) -> None:
        """`plan` could not be computed with its drafts: for a while there are none for these branches."""
        for branch in plan.drafts:
            for acceptance in self._branches[branch].accepted:
                acceptance.rest(branch.num_output)

    def stats(self) -> SpeculationStats:
        return SpeculationStats(self._num_drafted, self._num_accepted)

    def _state(self, branch: Branch) -> _Speculated:
        state = self._branches.get(branch)
        if state is None:
            if len(self._branches) >= self._max_branches:
                self._forget_ended()
                self._max_branches = max(_MIN_KEPT, 2 * len(self._branches))
            state = self._branches[branch] = _Speculated(len(self.drafters))
        return state

    def _forget_ended(self) -> None:
        for branch in [branch for branch in self._branches if branch.is_over]:
            del self._branches[branch]
            for drafter in self.drafters:
                drafter.forget(branch)
