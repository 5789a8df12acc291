"""A learned source: its steps, shared texts and begins, without anything that generates."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from mallee.synth.core.arrivals import Starts, Turnstile
from mallee.synth.core.jitter import Ranks
from mallee.synth.session.forest import Forest
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Floats


class Samples(NamedTuple):
    """Lengths and times of the source's steps, by rank."""

    fresh: Ranks
    output: Ranks
    gap_s: Ranks


@dataclass(frozen=True)
class Learned:
    """A learned source. See `fit.fit_session`.

    `cut_off` is None where the source's sessions all ended (none begins in its last tenth): its requests are
    then generated session by session to the end. Else it is, for the last step of each thread, the chance
    that the source's end cut the thread off, and as long a piece of endless traffic is generated.
    """

    name: str
    block_size: int
    rule: Literal["floor", "ceil"]
    classes: tuple[str, ...]
    steps: Steps
    forest: Forest
    starts: Starts
    turnstile: Turnstile | None
    cut_off: Floats | None
    has_ids: bool
    has_edges: bool
    has_sessions: bool

    @cached_property
    def ranks(self) -> Samples:
        """Samples that generated steps are drawn near to."""
        return Samples(
            Ranks(self.steps.fresh.astype(np.float64)),
            Ranks(self.steps.output.astype(np.float64)),
            Ranks(self.steps.gap_s),
        )
