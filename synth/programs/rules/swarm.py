"""Swarms: one context that many branches continue at once.

A swarm forks the context `width` times and goes on when all branches have ended, from the one that ended
first. Who ends first is told by the lengths of answers, which is what decides in real swarms at equal speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from mallee.synth.programs.rules.drafts import Draft, Rule, Texts

_TOOL_WAIT_S: Final = 1.0  # before a join; mean


@dataclass(frozen=True, slots=True)
class Swarm(Rule):
    """Rules of swarms."""

    name = "swarms"
    width: int = 8  # forks
    texts: Texts = field(default_factory=Texts)

    def draft(self, rng: np.random.Generator) -> Sequence[Draft]:
        """One swarm."""
        outputs = self.texts.outputs(rng, self.width)
        branches = [Draft(self.texts.step, output, "branch", parent=0) for output in outputs]
        join = Draft(
            tokens=self.texts.task,
            output_tokens=self.texts.outputs(rng, 1)[0],
            cls="join",
            parent=1 + outputs.index(min(outputs)),
            waits=tuple(range(1, 1 + self.width)),
            tool_wait_s=float(rng.exponential(_TOOL_WAIT_S)),
        )
        return [Draft(self.texts.task, 0, "root"), *branches, join]
