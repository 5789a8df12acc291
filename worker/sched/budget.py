"""Budget of one step: the part that is left, and what prompts were granted of it."""

from collections.abc import Collection
from dataclasses import dataclass, field

from mallee.worker.sched.branch import Branch
from mallee.worker.sched.running import Grown


@dataclass(slots=True)
class StepBudget:
    """A step's tokens, rows and chunks as far as they are left, and what was granted of them to prompts."""

    step: int
    tokens: int
    rows: int
    chunks: int
    may_admit: bool  # whether waiting branches may join
    is_full: bool = False  # no more prompts: one can't be cut, or waits for room
    granted: dict[Branch, int] = field(default_factory=dict)  # tokens by prompt
    begins: bool = False  # a branch waits for a transfer from now on
    has_left_out: bool = False  # branches that run compute nothing, though chosen before

    def note(self, grown: Grown) -> None:
        """Those that gave way compute nothing in this step, and no branch joins any more.

        If room has to be waited for, no more prompts get any: it is for the one that waits.
        """
        if grown.preempted:
            self.drop(grown.preempted)
        if grown.must_wait:
            self.has_left_out = self.is_full = True

    def drop(self, preempted: Collection[Branch]) -> None:
        """`preempted` compute nothing in this step, and no branch joins any more."""
        if preempted:
            self.has_left_out = True
            self.may_admit = False
            for branch in preempted:
                self.granted.pop(branch, None)
