"""What each step of a plan adds, gets and waits for: near what the source did, as the knobs have it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mallee.synth.core.jitter import Ranks
from mallee.synth.core.knobs import Knobs
from mallee.traces.numbers import Floats, Int32s, Ints

if TYPE_CHECKING:
    from mallee.synth.session.model import SessionModel


class Samples(NamedTuple):
    """The source's marks, by rank."""

    fresh: Ranks
    output: Ranks
    gap_s: Ranks


@dataclass(frozen=True, slots=True)
class Marks:
    """By index of a plan's steps."""

    fresh: Ints
    output: Ints
    gap_s: Floats  # not yet divided by the knob `speedup`
    think_s: Floats
    branches: Int32s


def draw_marks(
    model: "SessionModel", picked: Int32s, knobs: Knobs, rng: np.random.Generator
) -> Marks:
    """Marks of the source's steps `picked`."""
    steps, ranks = model.steps, model.ranks
    old = steps.fresh[picked]
    near = _stretched(model, ranks.fresh.near(picked, rng), picked, knobs.prompt_len)
    fresh = np.where(old > 0, np.maximum(1, np.rint(near).astype(np.int64)), old)
    output = ranks.output.near(picked, rng) * knobs.osl
    near_s = ranks.gap_s.near(picked, rng)
    # what waits for one another stays in step, and so do those that were spawned together
    is_tied = steps.is_held[picked] | (steps.parent_step[picked] >= 0)
    gap_s = np.where(is_tied, steps.gap_s[picked], near_s)
    think_s = np.minimum(steps.think_s[picked], np.where(model.has_edges, np.inf, gap_s))
    gap_s = np.where(
        steps.gap_s[picked] > 0,
        np.maximum(gap_s, 0.0),
        0.0,
    )
    return Marks(
        fresh,
        np.maximum(1, np.rint(output)).astype(np.int64),
        gap_s,
        think_s / knobs.speedup,
        steps.branches[picked],
    )


def _stretched(model: "SessionModel", fresh: Floats, picked: Int32s, factor: float) -> Floats:
    """Text that calls add, `factor` times as long.

    What is kept is counted in whole blocks back from the end of the context before. Its partial block
    counts as fresh though it was there: only the rest is new. See `walk.walk_lengths`.
    """
    if factor == 1.0:
        return fresh
    steps = model.steps
    kept, dropped = steps.kept[picked], steps.dropped[picked]
    goes_on = (steps.position[picked] > 0) & (kept > 0) & (dropped >= 0) & (dropped <= kept)
    before = steps.context[picked] - steps.added[picked]
    rest = np.where(goes_on, before % model.block_size, 0)
    longer: Floats = rest + factor * (fresh - rest)
    return longer
