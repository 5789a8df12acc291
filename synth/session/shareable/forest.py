"""The forest of shared texts as tables.

A segment that `K` threads begin with is kept, by length and uses. Of the others there is a table of lengths
and one of uses, for those below no segment and for those below any, and they are attached anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mallee.synth.session.forest import NO_SEGMENT, Forest
from mallee.synth.session.shareable.tables import MINORS, Cells, K
from mallee.traces.numbers import Int32s, Ints


@dataclass(frozen=True, slots=True)
class ForestLaw:
    """Texts that threads of their own begin with."""

    num_threads: int  # that have a root of their own
    above: Int32s  # of kept segments, as in `Forest`; parents first
    blocks: Int32s
    uses: Ints
    renewal: float  # of all segments, by uses
    rare: (
        Cells  # uses and blocks of segments that few begin with: those below none, those below any
    )


def fit_forest_law(forest: Forest, which: Ints) -> ForestLaw:
    """Learn the texts that threads `which` begin with."""
    chosen = forest.chosen[which]
    uses = np.bincount(chosen[chosen != NO_SEGMENT], minlength=len(forest))
    for segment in range(len(forest) - 1, -1, -1):  # with a segment come those above
        if forest.above[segment] != NO_SEGMENT:
            uses[forest.above[segment]] += uses[segment]
    is_kept = uses >= K  # and so is what is above
    few = (uses >= 2) & ~is_kept
    is_inner = (forest.above != NO_SEGMENT).astype(np.int64)[few]
    place = np.append(np.cumsum(is_kept) - 1, NO_SEGMENT)
    return ForestLaw(
        num_threads=len(which),
        above=place[forest.above[is_kept]].astype(np.int32),
        blocks=forest.blocks[is_kept],
        uses=uses[is_kept],
        renewal=float((forest.renewal * uses).sum() / max(1, uses.sum())),
        rare=Cells.fit(is_inner * MINORS, np.stack([uses, forest.blocks], 1)[few].astype(float)),
    )


def draw_forest(laws: Sequence[ForestLaw], rng: np.random.Generator) -> Forest:
    """A forest of all laws' texts and of their threads, one law after another."""
    above: list[int] = []
    blocks: list[int] = []
    renewal: list[float] = []
    chosen: list[Ints] = []
    for law in laws:
        base = len(above)
        above += np.where(law.above < 0, NO_SEGMENT, law.above + base).tolist()
        blocks += law.blocks.tolist()
        # threads that go on alone after no segment, and after each: first all, then those below are taken
        alone = np.append(law.num_threads, law.uses)
        np.subtract.at(alone, law.above + 1, law.uses)
        for key, count in zip(law.rare.begins.tolist(), law.rare.counts.tolist(), strict=True):
            may_be = slice(1, None) if key else slice(0, 1)
            rare = law.rare.spread_out(key, count, rng)
            for uses, length in np.rint(rare).astype(np.int64).tolist():
                room = np.zeros(len(alone))
                room[may_be] = np.where(alone >= uses, alone, 0)[may_be]
                if not room.any():
                    continue
                parent = int(rng.choice(len(room), p=room / room.sum()))
                alone[parent] -= uses
                alone = np.append(alone, uses)
                above.append(parent - 1 + base if parent else NO_SEGMENT)
                blocks.append(length)
        renewal += [law.renewal] * (len(above) - base)
        segments = np.append(NO_SEGMENT, np.arange(base, len(above)))
        chosen.append(rng.permutation(np.repeat(segments, alone)))
    depth = np.zeros(len(above) + 1, np.int32)  # the last is that of no segment
    for i, parent in enumerate(above):
        depth[i] = blocks[i] + depth[parent]
    of_thread = np.concatenate(chosen).astype(np.int32)
    return Forest(
        above=np.array(above, np.int32),
        blocks=np.array(blocks, np.int32),
        renewal=np.array(renewal, np.float64),
        chosen=of_thread,
        depth=depth[of_thread],
        first=depth[of_thread],
    )
