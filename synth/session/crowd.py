"""How many lines a step spawns: as learned, or as a user wants it."""

import numpy as np

from mallee.synth.core.threads import Bools, Int32s
from mallee.traces.trace import Ints


def with_width(
    donor: Ints, spawner: Int32s, which: Bools, width: int, rng: np.random.Generator
) -> Ints:
    """Lines to take, so that each step that spawns lines of `which` spawns `width` of them.

    `donor` are the source's lines that the lines begin as; `spawner` and `which` are by source line.
    Where lines are missing, other lines of the same spawner are taken again. A width of 0 takes none.
    """
    mine = np.flatnonzero((spawner[donor] >= 0) & which[donor])
    others = np.setdiff1d(np.arange(len(donor)), mine)
    parts = [others]
    for step in np.unique(spawner[donor[mine]]).tolist():
        siblings = mine[spawner[donor[mine]] == step]
        repeats = -(-width // len(siblings))
        parts.append(
            np.concatenate([rng.permutation(siblings) for _ in range(repeats)] or [siblings[:0]])[
                :width
            ]
        )
    return np.sort(np.concatenate(parts))
