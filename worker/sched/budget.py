"""Budget of one step: the part that is left, and what prompts were granted of it."""

from collections.abc import Collection
from dataclasses import dataclass, field

from mallee.worker.sched.branch import Branch, Fetch, Query


@dataclass(slots=True)
class StepBudget:
    """A step's tokens, rows and chunks as far as they are left, and what was granted of them to prompts."""

    step: int
    tokens: int
    rows: int
    chunks: int
    may_admit: bool  # whether waiting branches may join
    is_full: bool = False  # of prompts that can't be cut
    granted: dict[Branch, int] = field(default_factory=dict)  # tokens by prompt
    fetches: tuple[Fetch, ...] = ()
    queries: tuple[Query, ...] = ()
    has_preempted: bool = False

    def drop(self, preempted: Collection[Branch]) -> None:
        """`preempted` compute nothing in this step, and no branch joins any more."""
        if preempted:
            self.has_preempted = True
            self.may_admit = False
            for branch in preempted:
                self.granted.pop(branch, None)
