"""The forest of shared texts as tables.

A segment that `K` threads begin with is kept, by length and uses. Of the others there is a table of lengths
and one of uses for those below no segment and one for those below any, and they are attached anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mallee.synth.session.forest import NO_SEGMENT, Forest
from mallee.synth.session.shareable.tables import K, TableBuilder, Tables
from mallee.traces.numbers import Int32s, Ints


@dataclass(frozen=True, slots=True)
class ForestLaw:
    """Tables are numbers; -1: of too few to tell."""

    above: Int32s  # of kept segments, as in `Forest`; parents first
    blocks: Int32s
    uses: Ints
    others: Ints  # segments that few begin with: roots, and those below another
    other_blocks: Ints  # tables of these two
    other_uses: Ints
    renewal: float  # of all segments, by uses


def fit_forest_law(forest: Forest, which: Ints, builder: TableBuilder) -> ForestLaw:
    """Learn the texts that threads `which` begin with."""
    chosen = forest.chosen[which]
    direct = np.bincount(chosen[chosen != NO_SEGMENT], minlength=len(forest)).astype(np.int64)
    uses = _with_those_below(forest.above, direct)
    is_kept = uses >= K  # and so is what is above
    few = (uses >= 2) & ~is_kept
    sides = [few & (forest.above == NO_SEGMENT), few & (forest.above != NO_SEGMENT)]
    place = np.append(np.cumsum(is_kept) - 1, NO_SEGMENT)
    return ForestLaw(
        above=place[forest.above[is_kept]].astype(np.int32),
        blocks=forest.blocks[is_kept],
        uses=uses[is_kept],
        others=np.array([each.sum() for each in sides]),
        other_blocks=np.array([builder.add_if(forest.blocks[each]) for each in sides]),
        other_uses=np.array([builder.add_if(uses[each]) for each in sides]),
        renewal=float((forest.renewal * uses).sum() / max(1, uses.sum())),
    )


def draw_forest(
    laws: Sequence[tuple[ForestLaw, int]], tables: Tables, rng: np.random.Generator
) -> Forest:
    """A forest of all laws' texts; of each law so many threads begin with its own, one law after another."""
    above: list[int] = []
    blocks: list[int] = []
    left: list[int] = []  # threads that go on with no other segment
    renewal: list[float] = []
    chosen: list[Ints] = []
    for law, num_threads in laws:
        base = len(above)
        above += np.where(law.above < 0, NO_SEGMENT, law.above + base).tolist()
        blocks += law.blocks.tolist()
        below = np.bincount(law.above[law.above >= 0], law.uses[law.above >= 0], len(law.uses))
        left += (law.uses - below).astype(np.int64).tolist()
        alone = num_threads - int(law.uses[law.above == NO_SEGMENT].sum())
        for side in np.flatnonzero(law.other_uses >= 0).tolist():
            count = int(law.others[side])
            drawn = tables.spread_out(int(law.other_uses[side]), count, rng)
            lengths = tables.spread_out(int(law.other_blocks[side]), count, rng)
            for want, length in zip(drawn.round().tolist(), lengths.round().tolist(), strict=True):
                room = np.array(left[base:] if side else [alone]).clip(0)
                room[room < max(2, want)] = 0
                if not room.any():
                    continue
                parent = base + int(rng.choice(len(room), p=room / room.sum())) if side else -1
                if side:
                    left[parent] -= max(2, int(want))
                else:
                    alone -= max(2, int(want))
                left.append(max(2, int(want)))
                above.append(parent)
                blocks.append(max(1, int(length)))
        renewal += [law.renewal] * (len(above) - base)
        segments = np.append(np.arange(base, len(above)), NO_SEGMENT)
        places = np.repeat(segments, np.clip([*left[base:], alone], 0, None))
        chosen.append(rng.permutation(places)[:num_threads])
    depth = np.zeros(len(above) + 1, np.int32)  # the last is that of no segment
    for i, parent in enumerate(above):
        depth[i] = blocks[i] + depth[parent]
    of_thread = np.concatenate(chosen).astype(np.int32)
    ups = np.array(above, np.int32)
    return Forest(
        above=ups,
        blocks=np.array(blocks, np.int32),
        uses=_with_those_below(ups, np.array(left, np.int64)),
        renewal=np.array(renewal, np.float64),
        chosen=of_thread,
        depth=depth[of_thread],
        first=depth[of_thread],
    )


def _with_those_below(above: Int32s, direct: Ints) -> Ints:
    """Uses of each segment by threads that begin with it, or with one below it."""
    uses = direct.copy()
    for segment in range(len(above) - 1, -1, -1):
        if above[segment] >= 0:
            uses[above[segment]] += uses[segment]
    return uses
