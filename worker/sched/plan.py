"""Values of one step: its plan, and the budget that is left while it is planned."""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from mallee.protocol.errors import PoolExhausted
from mallee.worker.forward import Matcher
from mallee.worker.kv.node import BlockCopy
from mallee.worker.kv.text import Text
from mallee.worker.sched.branch import Branch


class Chunk(NamedTuple):
    """Compute `tokens` of `branch` from `start` on. `is_last`: nothing is pending after it."""

    branch: Branch
    tokens: Text
    start: int
    is_last: bool

    @property
    def num_logits(self) -> int:
        """Of its last tokens, so many have logits that are looked at."""
        return len(self.tokens) if self.branch.job.is_scoring else int(self.is_last)


class Draft(NamedTuple):
    """Tokens that a branch may draw next, and the state of its grammar after each of them, if it has one."""

    tokens: tuple[int, ...]
    matchers: tuple[Matcher, ...] = ()


@dataclass(slots=True)
class Plan:
    """The work of one step.

    `decodes` compute the one token that they drew last; `chunks` are pieces of prompts; `ready` draw
    without a pass; `failed` can't go on. `copies` come before everything. `begins`: some wait for transfers
    from now on. `tokens_left` of the step's are granted to none: decodes may compute `drafts` for them.
    """

    decodes: list[Branch]
    chunks: list[Chunk]
    ready: list[Branch]
    copies: list[BlockCopy]
    failed: list[tuple[Branch, PoolExhausted]]
    begins: bool = False
    tokens_left: int = 0
    drafts: dict[Branch, Draft] = field(default_factory=dict)

    @property
    def newest(self) -> Branch | None:
        """The branch that came last, of those with a chunk if there are any; None if nothing is computed."""
        branches = [chunk.branch for chunk in self.chunks] or self.decodes or self.ready
        return max(branches, key=attrgetter("ticket"), default=None)

    @property
    def draws_only(self) -> bool:
        """Whether branches draw that need no pass, and nothing else gets a block or computes."""
        return bool(self.ready) and not (self.decodes or self.chunks or self.begins)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, and nothing begins."""
        return not (self.decodes or self.chunks or self.ready or self.failed or self.begins)


@dataclass(slots=True)
class StepBudget:
    """A step's tokens, rows and chunks as far as they are left, and what was found while it is planned.

    `copies` are needed before branches compute; those of `failed` can't go on; those of `leaving` wait for
    blocks that are on their way down.
    """

    step: int
    tokens: int = 0
    rows: int = 0
    chunks: int = 0
    may_admit: bool = False  # whether waiting branches may join
    is_full: bool = False  # no more prompts: one can't be cut, or waits for room
    granted: dict[Branch, int] = field(default_factory=dict)  # tokens by prompt
    begins: bool = False  # a branch waits for a transfer from now on
    has_left_out: bool = False  # branches that run compute nothing, though chosen before
    copies: dict[Branch, BlockCopy] = field(default_factory=dict)
    failed: dict[Branch, PoolExhausted] = field(default_factory=dict)
    leaving: set[Branch] = field(default_factory=set)

    def can_grant(self, branch: Branch) -> bool:
        """Whether `branch`, a prompt, may be given a part of what is left."""
        if self.is_full or (branch.phase == "waiting" and not self.may_admit):
            return False
        return branch in self.granted or (self.rows > 0 and self.chunks > 0)

    def preempted(self, branch: Branch) -> None:
        """`branch` gave way: it computes nothing in this step, and no branch joins any more."""
        self.has_left_out, self.may_admit = True, False
        self.granted.pop(branch, None)
        self.copies.pop(branch, None)
        self.failed.pop(branch, None)

    def wait_for_room(self, branch: Branch) -> None:
        """`branch` has room once blocks have left: no more prompts get any, it is for that one."""
        self.has_left_out = self.is_full = True
        self.leaving.add(branch)
