"""The forest of shared texts as tables.

A segment that `K` threads begin with is kept, by length and uses. Of the others each level of the
forest has a table of lengths and one of uses, and they are attached anew. Threads that begin alike come near
each other in time, so the distances between them are a table too.
"""

from dataclasses import dataclass

import numpy as np

from mallee.synth.session.forest import NO_SEGMENT, Forest
from mallee.synth.session.shareable.tables import K, TableBuilder, Tables
from mallee.traces.numbers import Floats, Int32s, Ints


@dataclass(frozen=True, slots=True)
class ForestLaw:
    """Tables are numbers in `tables`; -1: of too few to tell."""

    tables: Tables
    above: Int32s  # of kept segments, as in `Forest`; parents first
    blocks: Int32s
    uses: Ints
    renewal: Floats
    level: Int32s  # segments above each
    others: Ints  # [levels] segments that few begin with
    other_blocks: Int32s  # [levels] tables
    other_uses: Int32s
    other_renewal: Floats  # [levels] means
    distance: (
        int  # table: threads from one that begins with a segment to the next, by the mean distance
    )


def fit_forest_law(forest: Forest, which: Ints) -> ForestLaw:
    """Learn the texts that threads `which` begin with."""
    chosen = forest.chosen[which]
    uses = np.bincount(chosen[chosen != NO_SEGMENT], minlength=len(forest)).astype(np.int64)
    direct = uses.copy()
    level = np.zeros(len(forest), np.int32)
    for segment in range(len(forest) - 1, -1, -1):
        if forest.above[segment] != NO_SEGMENT:
            uses[forest.above[segment]] += uses[segment]
    for segment, above in enumerate(forest.above.tolist()):
        level[segment] = 0 if above == NO_SEGMENT else level[above] + 1
    is_kept = uses >= K  # and so is what is above
    place = np.append(np.cumsum(is_kept) - 1, NO_SEGMENT)
    few = (uses >= 2) & ~is_kept
    builder = TableBuilder()
    mine = [few & (level == each) for each in range(int(level[few].max(initial=-1)) + 1)]
    blocks = [builder.add_if(forest.blocks[each], forest.blocks[few]) for each in mine]
    counts = [builder.add_if(uses[each], uses[few]) for each in mine]
    renewal = float(forest.renewal[few].mean()) if few.sum() >= K else 0.0
    threads = np.flatnonzero(chosen != NO_SEGMENT)
    threads = threads[np.argsort(chosen[threads], kind="stable")]
    is_next = chosen[threads[1:]] == chosen[threads[:-1]]
    usual = len(which) / np.maximum(1, direct[chosen[threads[1:]]])
    return ForestLaw(
        above=place[forest.above[is_kept]].astype(np.int32),
        blocks=forest.blocks[is_kept],
        uses=uses[is_kept],
        renewal=forest.renewal[is_kept],
        level=level[is_kept],
        others=np.array([each.sum() for each in mine], np.int64),
        other_blocks=np.array(blocks, np.int32),
        other_uses=np.array(counts, np.int32),
        other_renewal=np.array(
            [forest.renewal[each].mean() if each.sum() >= K else renewal for each in mine]
        ),
        distance=builder.add_if((np.diff(threads) / usual)[is_next]),
        tables=builder.build(),
    )


def draw_forest(law: ForestLaw, num_threads: int, rng: np.random.Generator) -> Forest:
    """A forest, and what `num_threads` threads begin with."""
    above, blocks = law.above.tolist(), law.blocks.tolist()
    left, renewal, level = law.uses.tolist(), law.renewal.tolist(), law.level.tolist()
    for parent, uses in zip(law.above.tolist(), law.uses.tolist(), strict=True):
        if parent != NO_SEGMENT:
            left[parent] -= uses
    left.append(num_threads - int(law.uses[law.above == NO_SEGMENT].sum()))  # last: of no segment
    for each, count in enumerate(law.others.tolist()):
        if law.other_uses[each] < 0:
            continue
        drawn = np.rint(law.tables.spread_out(int(law.other_uses[each]), count, rng)).astype(int)
        lengths = np.rint(law.tables.spread_out(int(law.other_blocks[each]), count, rng))
        parents = [i for i, at in enumerate(level) if at == each - 1] if each else [NO_SEGMENT]
        for uses, length in zip(np.maximum(2, drawn).tolist(), lengths.tolist(), strict=True):
            weights = np.array([left[i] if left[i] >= uses else 0 for i in parents], np.float64)
            if not weights.any():
                continue
            parent = parents[int(rng.choice(len(parents), p=weights / weights.sum()))]
            left[parent] -= uses
            left.insert(-1, uses)
            above.append(parent)
            blocks.append(max(1, int(length)))
            renewal.append(float(law.other_renewal[each]))
            level.append(each)
    begins = [_begins(law, count, num_threads, rng) for count in left]
    order = np.argsort(np.concatenate(begins), kind="stable")[:num_threads]
    segments = np.append(np.arange(len(above)), NO_SEGMENT)
    chosen = np.repeat(segments, [len(each) for each in begins])[order].astype(np.int32)
    depth = np.zeros(len(above) + 1, np.int32)  # the last is that of no segment
    for i, parent in enumerate(above):
        depth[i] = blocks[i] + depth[parent]
    uses_of = np.maximum(0, left)
    for i in range(len(above) - 1, -1, -1):
        uses_of[above[i]] += uses_of[i]
    return Forest(
        above=np.array(above, np.int32),
        blocks=np.array(blocks, np.int32),
        uses=uses_of[:-1],
        renewal=np.array(renewal, np.float64),
        chosen=chosen,
        depth=depth[chosen],
        first=depth[chosen],
    )


def _begins(law: ForestLaw, count: int, num_threads: int, rng: np.random.Generator) -> Floats:
    """Places in [0, `num_threads`) of `count` threads that begin alike."""
    count = max(0, count)
    if law.distance < 0 or not count:
        return num_threads * rng.random(count)
    apart = law.tables.spread_out(law.distance, count, rng) * num_threads / count
    apart *= min(1.0, num_threads / max(float(apart.sum()), 1e-9))
    places: Floats = (num_threads * rng.random() + np.cumsum(apart)) % num_threads
    return places


def both(first: Forest, second: Forest) -> Forest:
    """Two forests beside each other; threads of the second after those of the first."""

    def shifted(segments: Int32s) -> Int32s:
        return np.where(segments == NO_SEGMENT, NO_SEGMENT, segments + len(first)).astype(np.int32)

    return Forest(
        above=np.concatenate([first.above, shifted(second.above)]),
        blocks=np.concatenate([first.blocks, second.blocks]),
        uses=np.concatenate([first.uses, second.uses]),
        renewal=np.concatenate([first.renewal, second.renewal]),
        chosen=np.concatenate([first.chosen, shifted(second.chosen)]),
        depth=np.concatenate([first.depth, second.depth]),
        first=np.concatenate([first.first, second.first]),
    )
