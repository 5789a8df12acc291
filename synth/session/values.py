"""The lengths and times of a plan's steps: near the source's, as the knobs have them."""

from typing import NamedTuple

import numpy as np

from mallee.synth.core.knobs import Knobs
from mallee.synth.session.learned import Learned
from mallee.traces.numbers import Floats, Int32s, Ints


class Values(NamedTuple):
    """By index of a plan's steps."""

    fresh: Ints
    output: Ints
    gap_s: Floats  # not yet divided by the knob `speedup`
    think_s: Floats


def draw_values(source: Learned, picked: Int32s, knobs: Knobs, rng: np.random.Generator) -> Values:
    """Values of the source's steps `picked`."""
    steps, ranks = source.steps, source.ranks
    old = steps.fresh[picked]
    near = _stretched(source, ranks.fresh.near(picked, rng), picked, knobs.prompt_len)
    fresh = np.where(old > 0, np.maximum(1, np.rint(near).astype(np.int64)), old)
    output = np.rint(ranks.output.near(picked, rng) * knobs.osl)
    near_s = ranks.gap_s.near(picked, rng)
    # steps that wait for one another stay in step, and so do those that were spawned together
    is_tied = steps.is_held[picked] | (steps.parent_step[picked] >= 0)
    gap_s = np.where(is_tied, steps.gap_s[picked], near_s)
    think_s = np.minimum(steps.think_s[picked], np.where(source.has_edges, np.inf, gap_s))
    gap_s = np.where(steps.gap_s[picked] > 0, np.maximum(gap_s, 0.0), 0.0)
    outputs = np.maximum(1, output).astype(np.int64)
    return Values(fresh, outputs, gap_s, think_s / knobs.speedup)


def _stretched(source: Learned, fresh: Floats, picked: Int32s, factor: float) -> Floats:
    """Text that calls add, `factor` times as long.

    Kept blocks are counted back from the end of the context before. Its partial block counts as fresh though
    it was there: only the rest is new. See `walk.walk_lengths`.
    """
    if factor == 1.0:
        return fresh
    steps = source.steps
    kept, dropped = steps.kept[picked], steps.dropped[picked]
    goes_on = (steps.position[picked] > 0) & (kept > 0) & (dropped >= 0) & (dropped <= kept)
    before = steps.context[picked] - steps.added[picked]
    rest = np.where(goes_on, before % source.block_size, 0)
    longer: Floats = rest + factor * (fresh - rest)
    return longer
