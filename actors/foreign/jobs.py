"""Requests of one engine that is not ours, and their branches."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mallee.actors.foreign.asking import is_exact
from mallee.actors.foreign.texts import CapsuleText
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id
from mallee.protocol.messages import Grammar, Limits, Sampling, Update


@dataclass(eq=False, slots=True)
class Job:
    """A request for branches. `leaves`: the capsule of a prefill; else each branch leaves its own."""

    request: RequestId
    gateway: str
    salt: str
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    grammar: Grammar | None = None
    drawn: int = 0  # tokens at the end of its prompt, elsewhere
    num_scores: int = -1  # likeliest tokens to tell in each place of the prompt; -1: none
    ttl_s: float | None = None  # of capsules that are kept
    leaves: CapsuleId | None = None
    made: asyncio.Future[bool] | None = None  # the capsule that it makes, or waits for
    branches: "dict[int, Branch]" = field(default_factory=dict)

    @property
    def is_resampled(self) -> bool:
        return self.drawn > 0 and not is_exact(self.sampling)

    def capsule(self, index: int) -> CapsuleId:
        return self.leaves or capsule_id(self.request, index)


@dataclass(eq=False, slots=True)
class Branch:
    """One branch, that runs or waits for others with its prompt."""

    job: Job
    index: int
    prompt: Tokens
    tokens: list[int] = field(default_factory=list)  # drawn here
    cached: int | None = None  # tokens of the prompt; None: it has drawn nothing
    task: asyncio.Task[None] | None = None

    def text(self, name: CapsuleId, ttl_s: float | None) -> CapsuleText:
        """All of it, prompt and answer, as a capsule."""
        tokens = np.concatenate((self.prompt, np.array(self.tokens, dtype="<u4")))
        drawn = None if self.job.leaves else self.job.drawn + len(self.tokens)
        return CapsuleText(name, tokens, self.job.salt, drawn, ttl_s)

    def update(self, **more: Any) -> Update:
        return Update(
            request=self.job.request,
            branch=self.index,
            cached_tokens=self.cached or 0,
            prefill_tokens=0 if self.cached is None else len(self.prompt) - self.cached,
            resampled=self.job.is_resampled,
            **more,
        )
