"""Which of several draws of a shareable model comes nearest to its source.

Draws differ by chance, most where there are few sessions. Choosing among a few tells next to nothing of the
source (three bits) and takes the worst draws away.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from mallee.synth.session.model import SessionModel
from mallee.traces.numbers import Floats, Ints

_TRIES: Final = 8


def closest_seed(source: SessionModel, draw: Callable[[int], SessionModel]) -> int:
    """The seed, of the first few, whose draw is nearest in lengths, times, sums and roots."""
    ours = _samples(source)
    found = [(_distance(ours, _samples(draw(seed))), seed) for seed in range(_TRIES)]
    return min(found)[1]


def _samples(model: SessionModel) -> list[Floats | Ints]:
    """Of each step, of each line, and how many roots there are."""
    steps, forest = model.steps, model.forest
    is_root = (steps.kept == 0) & ~((steps.position == 0) & (forest.depth[steps.thread] > 0))
    return [
        steps.context,
        steps.fresh,
        steps.output,
        steps.gap_s,
        np.bincount(steps.thread),
        np.bincount(steps.thread, steps.gap_s),
        np.ones(int(is_root.sum()) + int((forest.above < 0).sum())),
    ]


def _distance(ours: list[Floats | Ints], theirs: list[Floats | Ints]) -> float:
    """Distances of distributions, and of sums as parts of them, added up."""
    total = 0.0
    for one, other in zip(ours, theirs, strict=True):
        values = np.concatenate([one, other])
        below = [np.searchsorted(np.sort(each), values, side="right") for each in (one, other)]
        apart = below[0] / max(1, len(one)) - below[1] / max(1, len(other))
        total += float(np.abs(apart).max(initial=0.0))
        total += abs(float(other.sum()) / max(float(one.sum()), 1e-9) - 1.0)
    return total
