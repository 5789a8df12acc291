"""The verdict on one request's prompt: what it has in common with earlier ones, and what was there of it."""

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


class Judge:
    """Compares when the request is accepted, judges by the first news of its branch 0."""

    __slots__ = ("_asked", "_block_size", "_job", "_likeness", "is_held_elsewhere")

    def __init__(self, job: Job, block_size: int, weights: str) -> None:
        self._job = job
        self._block_size = block_size
        self._asked: Asked | None = None
        if isinstance(job, GenerateJob | PrefillJob):
            tokens = tokens_of(job.tokens)
            self._asked = Asked(tokens, job.salt, job.terms.owner, job.messages, weights)
        self._likeness: Likeness | None = None
        self.is_held_elsewhere = False  # by a worker with more of the prompt than the chosen one

    def remember(self, request: RequestId, recent: RecentPrompts) -> None:
        """Compare the prompt with earlier ones; from now on it is one of them."""
        if self._asked is not None:
            self._likeness = recent.take(request, self._asked)

    def verdict(self, first: Deliver) -> Verdict:
        cached, computed = first.prompt
        if self._asked is not None:
            return judge_prompt(
                self._asked,
                self._likeness,
                cached_tokens=cached,
                block_size=self._block_size,
                held_elsewhere=self.is_held_elsewhere,
            )
        job = self._job
        assert isinstance(job, ForkJob), "no other job has no prompt"
        return judge_fork(
            job.num_branches,
            is_cut=job.at is not None,
            is_recomputed=first.shard.how != "stay",
            cached_tokens=cached,
            missed_tokens=max(0, computed - len(job.suffixes[0])),
        )
