"""Ends the branches of one request where its budget or its conditions say."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from msgspec import structs

from mallee.api.branches.budgets import Bound, Budgets, Spending
from mallee.api.branches.conditions import BranchConditions
from mallee.api.branches.scoring import Scored, Scoring
from mallee.api.callbacks.callbacks import Callbacks
from mallee.api.jobs import Plan
from mallee.gateway.requests.deltas import Delta
from mallee.protocol.errors import InvalidParameter, MalleeError
from mallee.protocol.ids import RequestId
from mallee.protocol.messages import FinishReason

log = logging.getLogger(__name__)

_FINISHED: Final = ("stop", "length")  # by itself
_ENDS: Final[dict[str, FinishReason]] = {
    "regex": "condition",
    "logprob": "condition",
    "done": "condition",
    "score": "condition",
    "tokens": "budget",
    "wall_s": "budget",
}


class Ending(NamedTuple):
    """A choice that is to go no further; by `error`, if there is one."""

    choice: int
    finish: FinishReason
    error: MalleeError | None = None


class Watch:
    """Follows the deltas of all choices. `close` gives back what is left of the budget. Idempotent."""

    def __init__(
        self,
        plan: Plan,
        budgets: Budgets,
        spending: Spending | None,
        token_bytes: Callable[[int], bytes],
        scoring: Scoring | None = None,
    ) -> None:
        self._budgets = budgets
        self._scoring = scoring
        self._spending = spending
        self._token_bytes = token_bytes
        self._conditions = plan.conditions
        self._branches = (
            [BranchConditions(plan.conditions) for _ in range(plan.num_choices)]
            if plan.conditions is not None
            else []
        )
        self._open = dict.fromkeys(range(plan.num_choices))
        self._num_done = 0
        self._counts = [0] * plan.num_choices  # tokens so far
        self._stop_ids = plan.stop_token_ids
        self.reasons: dict[int, str] = {}  # by choices that were ended here

    @classmethod
    async def begin(
        cls,
        plan: Plan,
        budgets: Budgets,
        bound: Bound | None,
        token_bytes: Callable[[int], bytes],
        *,
        callbacks: Callbacks,
    ) -> "Watch":
        """Raises as `Budgets.begin`."""
        spending, conditions = None, plan.conditions
        if bound is not None:
            spending = await budgets.begin(bound, plan.budget, plan.num_choices)
        scoring = None
        if conditions is not None and conditions.score is not None:
            scope = plan.jobs[0].scope
            scoring = Scoring(conditions.score, plan.num_choices, callbacks, scope)
        return cls(plan, budgets, spending, token_bytes, scoring)

    def started(self, request: RequestId) -> None:
        """`request` runs a part of the plan, the next one; the answer has the name of the first."""
        if self._scoring is not None:
            self._scoring.request = self._scoring.request or request

    def within(self, plan: Plan) -> Plan:
        """The plan, whose jobs wait no longer for a worker than there is time."""
        rest_s = self.rest_s
        if rest_s is None:
            return plan
        known = plan.jobs[0].terms  # of all
        deadline_s = rest_s if known.deadline_s is None else min(known.deadline_s, rest_s)
        terms = known._replace(deadline_s=deadline_s)
        jobs = tuple(replace(job, terms=terms) for job in plan.jobs)
        return structs.replace(plan, jobs=jobs)

    @property
    def rest_s(self) -> float | None:
        """Seconds until all choices are to end; None: no time was set."""
        if self._spending is None or self._spending.due == inf:
            return None
        return max(0.0, self._spending.due - self._budgets.clock())

    @property
    def has_verdicts(self) -> bool:
        """Whether choices are to end by their scores."""
        return self._scoring is not None and self._scoring.has_verdicts

    def on_verdict(self, call: Callable[[], None]) -> None:
        """Have `call` called when there are verdicts."""
        if self._scoring is not None:
            self._scoring.on_verdict = call

    def score(
        self, index: int, text: str, reasoning: str, *, num_tokens: int, is_last: bool
    ) -> Scored | None:
        """Take the new text of a choice that has `num_tokens` now. Of its last, where choices are scored,
        the scores come back.
        """
        if self._scoring is None:
            return None
        if is_last:
            return self._scoring.end(index)
        self._scoring.add(index, text, reasoning, num_tokens)
        return None

    def lacks(self, delta: Delta) -> bool:
        """Whether `secure` is to be awaited before `delta` is taken: it would end by what others may have."""
        return self._spending is not None and self._spending.rest("tokens") <= len(delta.tokens)

    async def secure(self, delta: Delta) -> None:
        """Get the tokens of `delta` and one more of the budget, as far as they are there."""
        if self._spending is None or not self.lacks(delta):
            return
        try:
            await self._budgets.secure(self._spending, len(delta.tokens) + 1)
        except MalleeError as error:
            log.info("branches end where their budget is: %s", error)

    def take(self, index: int, delta: Delta) -> Delta:
        """`delta` of an open choice as its client gets it: its first tokens and why, if it ends here."""
        try:
            num, reason = self._cut(index, delta)
        except InvalidParameter as error:
            delta = self._first(index, delta, 0, "error")._replace(error=error)
            self._ended(index, "regex")
        else:
            if reason:
                delta = self._first(index, delta, num, _ENDS[reason])
                self._ended(index, reason)
                self._num_done += reason == "regex"
            elif delta.finish is not None:
                self._open.pop(index, None)
                self._num_done += delta.finish in _FINISHED
        self._counts[index] += len(delta.tokens)
        if self._spending is not None:
            self._spending.spend("tokens", len(delta.tokens))
        if not self._open:
            self.close()
        return delta

    def _cut(self, index: int, delta: Delta) -> tuple[int, str]:
        """The number of tokens that its client gets, and why no more; empty: all, and it goes on."""
        most, reason = len(delta.tokens), ""
        if self._branches:
            branch = self._branches[index]
            for i, token in enumerate(delta.tokens):
                raw = b"" if token in self._stop_ids else self._token_bytes(token)
                logprob = delta.logprobs[i][0] if delta.logprobs else None
                if met := branch.take(raw, logprob):
                    most, reason = i + 1, met
                    break
        if self._spending is not None:
            rest = self._spending.rest("tokens")
            if rest < most or (rest == most and delta.finish is None and not reason):
                most, reason = int(rest), "tokens"
        return most, reason

    def due(self) -> Iterator[Ending]:
        """The open choices that are to end now, each once."""
        conditions, spending = self._conditions, self._spending
        done = conditions.done if conditions is not None else None
        reason = ""
        if done is not None and self._num_done >= done:
            reason = "done"
        elif spending is not None and spending.rest("tokens") < 1:
            reason = "tokens"
        elif self.rest_s == 0.0:
            reason = "wall_s"
        for index in list(self._open) if reason else ():
            self._ended(index, reason)
            yield Ending(index, _ENDS[reason])
        for index, error in self._scoring.take() if self._scoring is not None else ():
            if index in self._open:
                self._ended(index, "score")
                yield Ending(index, "error" if error is not None else _ENDS["score"], error)
        if not self._open:
            self.close()

    def stopped(self, index: int) -> None:
        """A choice ended at a stop string."""
        if index in self._open:
            del self._open[index]
            self._num_done += 1
            if not self._open:
                self.close()

    def _ended(self, index: int, reason: str) -> None:
        self.reasons[index] = reason
        self._open.pop(index, None)

    def _first(self, index: int, delta: Delta, num: int, finish: FinishReason) -> Delta:
        """The first `num` tokens of `delta`, and that they are the last."""
        left = delta.first(num, self._counts[index])
        return left._replace(finish=finish, capsule=None, boundary=0)

    def close(self) -> None:
        self._open.clear()
        if self._scoring is not None:
            self._scoring.close()
        if self._spending is not None:
            self._spending.close()
            self._spending = None
