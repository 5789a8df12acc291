"""The verdict on one request's prompt: what it has in common with earlier ones, and what was there of it."""

from typing import NamedTuple

from mallee.protocol.ids import RequestId
from mallee.router.dispatch.effects import Deliver
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, Job, PrefillJob
from mallee.router.dispatch.texts import tokens_of
from mallee.router.dispatch.verdicts import (
    Asked,
    Likeness,
    RecentPrompts,
    Verdict,
    judge_fork,
    judge_prompt,
)


class Comparison(NamedTuple):
    """An accepted request's prompt beside the most like one before it."""

    job: Job
    asked: Asked | None  # None: a fork has no prompt
    likeness: Likeness | None
    block_size: int

    @classmethod
    def of(
        cls, request: RequestId, job: Job, recent: RecentPrompts, block_size: int, weights: str
    ) -> "Comparison":
        """Compare the prompt with those of `recent`; from now on it is one of them."""
        if not isinstance(job, GenerateJob | PrefillJob):
            return cls(job, None, None, block_size)
        asked = Asked(tokens_of(job.tokens), job.salt, job.terms.owner, job.messages, weights)
        return cls(job, asked, recent.take(request, asked), block_size)

    def verdict(self, first: Deliver, *, is_held_elsewhere: bool) -> Verdict:
        """Judge by the first update of branch 0. `is_held_elsewhere`: another worker had more of it."""
        cached, computed = first.prompt
        if self.asked is not None:
            return judge_prompt(
                self.asked,
                self.likeness,
                cached_tokens=cached,
                block_size=self.block_size,
                held_elsewhere=is_held_elsewhere,
            )
        job = self.job
        assert isinstance(job, ForkJob), "no other job has no prompt"
        return judge_fork(
            job.num_branches,
            is_cut=job.at is not None,
            is_recomputed=first.shard.how != "stay",
            cached_tokens=cached,
            missed_tokens=max(0, computed - len(job.suffixes[0])),
        )
