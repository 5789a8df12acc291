"""The forest of shared texts as tables: which text many begin with as it is, the rest by level.

A segment that `K` lines begin with stays, by length and uses. Of the others each level of the forest has a
table of their lengths and one of their uses, and they are hung anew below what there is. Lines that
begin alike come near each other in time, so the distance to the next of the same has tables too.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from mallee.synth.session.forest import NO_SEGMENT, Forest
from mallee.synth.share.tables import K, TableBuilder, Tables
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

_NONE: Final = -1
_Values: TypeAlias = Ints | Int32s | Floats


@dataclass(frozen=True, slots=True)
class ForestLaw:
    """Tables are numbers in `tables`; -1: of too few to tell."""

    tables: Tables | None
    above: Int32s  # of segments that many begin with, as in `Forest`; parents first
    blocks: Int32s
    uses: Ints
    renewal: Floats
    level: Int32s  # segments above each
    others: Ints  # [levels] segments that few begin with
    other_blocks: Int32s  # [levels] tables
    other_uses: Int32s
    other_renewal: Int32s
    distance: Int32s  # [powers of two] tables: of segments chosen so often, lines to the next


def fit_forest_law(forest: Forest, which: Ints) -> ForestLaw:
    """Learns what the source's lines `which` begin with."""
    chosen = forest.chosen[which]
    direct = np.bincount(chosen[chosen != NO_SEGMENT], minlength=len(forest))
    uses = direct.astype(np.int64)
    for segment in range(len(forest) - 1, -1, -1):
        if forest.above[segment] != NO_SEGMENT:
            uses[forest.above[segment]] += uses[segment]
    level = np.zeros(len(forest), np.int32)
    for segment, above in enumerate(forest.above.tolist()):
        level[segment] = 0 if above == NO_SEGMENT else level[above] + 1
    is_kept = uses >= K
    place = np.cumsum(is_kept) - 1
    kept = np.flatnonzero(is_kept)  # what is above one that many use, many use
    above = forest.above[kept]
    builder = _Others()
    few = np.flatnonzero((uses >= 2) & ~is_kept)
    levels = int(level[few].max(initial=-1)) + 1
    of_all = np.flatnonzero(forest.uses < K)
    tables = [
        [
            builder.of(values[few], level[few] == each, of_all_values[of_all])
            for values, of_all_values in (
                (forest.blocks, forest.blocks), (uses, forest.uses), (forest.renewal, forest.renewal),
            )
        ]
        for each in range(levels)
    ]  # fmt: skip
    columns = np.array(tables, np.int32).reshape(levels, 3)
    distance = _distances(chosen, direct, builder)
    return ForestLaw(
        tables=builder.build(),
        above=np.where(above == NO_SEGMENT, NO_SEGMENT, place[above]).astype(np.int32),
        blocks=forest.blocks[kept],
        uses=uses[kept],
        renewal=forest.renewal[kept],
        level=level[kept],
        others=np.bincount(level[few], minlength=levels),
        other_blocks=columns[:, 0],
        other_uses=columns[:, 1],
        other_renewal=columns[:, 2],
        distance=distance,
    )


class _Others:
    """Tables of what there may be too few of."""

    def __init__(self) -> None:
        self._builder = TableBuilder()
        self._is_empty = True

    def of(self, values: _Values, which: Bools, wider: _Values | None = None) -> int:
        """A table of `which` values; of all, or of `wider`, if those are few; -1 if all are."""
        mine = values[which] if which.sum() >= K else values
        if len(mine) < K and wider is not None:
            mine = wider
        if len(mine) < K:
            return _NONE
        self._is_empty = False
        return self._builder.add(mine)

    def build(self) -> Tables | None:
        return None if self._is_empty else self._builder.build()


def _distances(chosen: Int32s, direct: Ints, builder: _Others) -> Int32s:
    """Lines from one that chose a segment to the next that did, by how many did (its power of two)."""
    lines = np.flatnonzero(chosen != NO_SEGMENT)
    lines = lines[np.argsort(chosen[lines], kind="stable")]
    is_next = chosen[lines[1:]] == chosen[lines[:-1]]
    apart = np.diff(lines)[is_next]
    power = np.log2(np.maximum(direct, 1)).astype(np.int64)[chosen[lines[1:]][is_next]]
    powers = int(power.max(initial=0)) + 1
    return np.array([builder.of(apart, power == each) for each in range(powers)], np.int32)


def draw_forest(law: ForestLaw, num_lines: int, rng: np.random.Generator) -> Forest:
    """A forest and what `num_lines` lines choose in it."""
    above, blocks = law.above.tolist(), law.blocks.tolist()
    left, renewal = law.uses.tolist(), law.renewal.tolist()
    level = law.level.tolist()
    alone = num_lines - sum(u for u, a in zip(left, above, strict=True) if a == NO_SEGMENT)
    for a, u in zip(law.above.tolist(), law.uses.tolist(), strict=True):
        if a != NO_SEGMENT:
            left[a] -= u
    for each in range(len(law.others)):
        if law.tables is None or law.other_uses[each] == _NONE:
            continue
        count = int(law.others[each])
        drawn = np.rint(law.tables.spread_out(int(law.other_uses[each]), count, rng)).astype(int)
        lengths = np.rint(law.tables.spread_out(int(law.other_blocks[each]), count, rng))
        # rarer segments are replaced sooner
        rank = np.argsort(np.argsort(-drawn, kind="stable"), kind="stable")
        renewals = law.tables.draw(
            np.full(count, law.other_renewal[each]), (rank + 0.5) / max(count, 1)
        )
        parents = [i for i, at in enumerate(level) if at == each - 1]
        for uses, length, renews in zip(
            np.maximum(2, drawn).tolist(), lengths.tolist(), renewals.tolist(), strict=True
        ):
            parent = _parent(each, uses, alone, left, parents, rng)
            if parent is None:
                continue
            if parent == NO_SEGMENT:
                alone -= uses
            else:
                left[parent] -= uses
            above.append(parent)
            blocks.append(max(1, int(length)))
            left.append(uses)
            renewal.append(min(1.0, max(0.0, renews)))
            level.append(each)
    return _chosen(law, above, blocks, left, renewal, num_lines, rng)


def _parent(
    level: int, uses: int, alone: int, left: list[int], parents: list[int], rng: np.random.Generator
) -> int | None:
    """A segment with so many uses left, by chance of those; None if there is none."""
    if not level:
        return NO_SEGMENT if alone >= uses else None
    weights = np.array([left[i] if left[i] >= uses else 0 for i in parents], np.float64)
    if not weights.any():
        return None
    at = np.searchsorted(np.cumsum(weights), rng.random() * weights.sum(), side="right")
    return parents[int(at)]


def _chosen(
    law: ForestLaw,
    above: list[int],
    blocks: list[int],
    left: list[int],
    renewal: list[float],
    num_lines: int,
    rng: np.random.Generator,
) -> Forest:
    times, segments = [], []
    for segment, count in enumerate(left):
        if count > 0:
            times.append(_times(law, count, num_lines, rng))
            segments.append(np.full(count, segment))
    others = num_lines - sum(len(each) for each in segments)
    times.append(num_lines * rng.random(max(0, others)))
    segments.append(np.full(max(0, others), NO_SEGMENT))
    order = np.argsort(np.concatenate(times), kind="stable")[:num_lines]
    chosen = np.concatenate(segments)[order].astype(np.int32)
    depths = np.zeros(len(above) + 1, np.int32)  # the last is that of no segment
    uses = np.array([max(0, each) for each in left], np.int64)
    for i, parent in enumerate(above):
        depths[i] = blocks[i] + (depths[parent] if parent != NO_SEGMENT else 0)
    for i in range(len(above) - 1, -1, -1):
        if above[i] != NO_SEGMENT:
            uses[above[i]] += uses[i]
    return Forest(
        above=np.array(above, np.int32),
        blocks=np.array(blocks, np.int32),
        uses=uses,
        renewal=np.array(renewal, np.float64),
        chosen=chosen,
        depth=depths[chosen],
        first=depths[chosen],
    )


def _times(law: ForestLaw, count: int, num_lines: int, rng: np.random.Generator) -> Floats:
    """When in [0, `num_lines`) so many lines choose the same segment."""
    power = min(int(np.log2(count)), len(law.distance) - 1)
    table = int(law.distance[power]) if power >= 0 else _NONE
    if law.tables is None or table == _NONE:
        return num_lines * rng.random(count)
    apart = law.tables.spread_out(table, count, rng)
    apart *= min(1.0, num_lines / max(float(apart.sum()), 1e-9))
    times: Floats = (num_lines * rng.random() + np.cumsum(apart)) % num_lines
    return times


def both(first: Forest, second: Forest) -> Forest:
    """Two forests beside each other; lines of the second after those of the first."""
    shift = len(first)
    return Forest(
        above=_shifted(first.above, second.above, shift),
        blocks=np.concatenate([first.blocks, second.blocks]),
        uses=np.concatenate([first.uses, second.uses]),
        renewal=np.concatenate([first.renewal, second.renewal]),
        chosen=_shifted(first.chosen, second.chosen, shift),
        depth=np.concatenate([first.depth, second.depth]),
        first=np.concatenate([first.first, second.first]),
    )


def _shifted(first: Int32s, second: Int32s, by: int) -> Int32s:
    moved = np.where(second == NO_SEGMENT, NO_SEGMENT, second + by)
    return np.concatenate([first, moved]).astype(np.int32)
