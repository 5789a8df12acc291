"""Chances of what lines do next, given calls so far and tokens of context.

States are in bins that no trace chooses. One factor by position and one by context, each in fine bins, are
raked to a source's counts by either; a third in coarse bins tells what the two have to do with
each other.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.share.tables import K
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

POSITIONS: Final = 16
CONTEXTS: Final = 48
_FINE_POSITIONS: Final = 80
_FINE_CONTEXTS: Final = 72
_DOUBT: Final = 3.0  # events that a cell is thought to have seen besides, as often as expected
_ROUNDS: Final = 30


def position_bins(position: Ints | Int32s) -> Ints:
    """Coarse ones: powers of two."""
    bins: Ints = np.log2(position + 1.0).astype(np.int64)
    return np.minimum(bins, POSITIONS - 1)


def context_bins(tokens: Ints | Int32s) -> Ints:
    """Coarse ones: two for each power of two."""
    bins: Ints = (2 * np.log2(tokens + 1.0)).astype(np.int64)
    return np.minimum(bins, CONTEXTS - 1)


def _fine_positions(position: Ints | Int32s) -> Ints:
    later = 16 + (4 * np.log2(np.maximum(position, 16) / 16.0)).astype(np.int64)
    bins: Ints = np.where(position < 16, position, later)
    return np.minimum(bins, _FINE_POSITIONS - 1)


def _fine_contexts(tokens: Ints | Int32s) -> Ints:
    bins: Ints = (3 * np.log2(tokens + 1.0)).astype(np.int64)
    return np.minimum(bins, _FINE_CONTEXTS - 1)


@dataclass(frozen=True, slots=True)
class Chances:
    """Factors, each [kinds, events, bins]."""

    by_position: Floats
    by_context: Floats
    by_both: Floats  # bins are coarse positions and contexts

    def of(self, kind: Ints, event: int, position: int, tokens: Ints) -> Floats:
        """The chance of `event` for lines of each `kind`, after `position` steps before the last."""
        fine = _fine_positions(np.array([position]))[0]
        coarse = position_bins(np.array([position]))[0]
        chance = self.by_position[kind, event, fine]
        chance = chance * self.by_context[kind, event, _fine_contexts(tokens)]
        chance = chance * self.by_both[kind, event, coarse, context_bins(tokens)]
        found: Floats = np.minimum(1.0, chance)
        return found


@dataclass(frozen=True, slots=True)
class Counted:
    """Steps of which each had one chance; by step."""

    kind: Ints
    position: Int32s
    tokens: Ints
    weight: Floats  # how far a step counts


def fit_chances(steps: Counted, kinds: int, events: list[tuple[Bools, Floats]]) -> Chances:
    """`events`: which steps it may have happened to, and to how much of each it did."""
    shape = (kinds, len(events))
    found = Chances(
        np.zeros((*shape, _FINE_POSITIONS)),
        np.zeros((*shape, _FINE_CONTEXTS)),
        np.ones((*shape, POSITIONS, CONTEXTS)),
    )
    position, context = _fine_positions(steps.position), _fine_contexts(steps.tokens)
    cell = position_bins(steps.position) * CONTEXTS + context_bins(steps.tokens)
    for kind in range(kinds):
        for event, (may, hits) in enumerate(events):
            at = np.flatnonzero(may & (steps.kind == kind))
            if not hits[at].any():
                continue
            p, c = _raked(position[at], context[at], steps.weight[at], hits[at])
            found.by_position[kind, event], found.by_context[kind, event] = p, c
            expected = steps.weight[at] * p[position[at]] * c[context[at]]
            found.by_both[kind, event] = _both(cell[at], expected, hits[at])
    return found


def _raked(position: Ints, context: Ints, weight: Floats, hits: Floats) -> tuple[Floats, Floats]:
    """A factor by either state, so that hits by either are as they were; bins of few hits are joined."""
    did = hits > 0  # bins of few of those would tell where single lines end
    p_of = joined_bins(np.bincount(position[did], minlength=_FINE_POSITIONS), may_be_empty=True)
    c_of = joined_bins(np.bincount(context[did], minlength=_FINE_CONTEXTS), may_be_empty=True)
    num_p, num_c = int(p_of[-1]) + 1, int(c_of[-1]) + 1
    cell = p_of[position] * num_c + c_of[context]
    risk = np.bincount(cell, weight, num_p * num_c).reshape(num_p, num_c)
    count = np.bincount(cell, hits, num_p * num_c).reshape(num_p, num_c)
    rate = count.sum() / risk.sum()
    by_p, by_c = np.full(num_p, rate), np.ones(num_c)
    for _ in range(_ROUNDS):
        by_c = (count.sum(0) + 1.0) / (by_p @ risk + 1.0)
        by_p = (count.sum(1) + rate) / (risk @ by_c + 1.0)
    return by_p[p_of], by_c[c_of]


def joined_bins(counts: Ints, *, may_be_empty: bool = False) -> Ints:
    """For each bin a bin of at least `K` in all (if there are as many), those next to each other.

    With `may_be_empty` those before one that has as many alone may stay apart from it, if they have none.
    """
    found = np.zeros(len(counts), np.int64)
    number, inside, left = 0, 0, int(counts.sum())
    for i, count in enumerate(counts.tolist()):
        is_whole = inside >= K or (may_be_empty and not inside and count >= K and i > 0)
        if is_whole and left >= K:
            number, inside = number + 1, 0
        found[i] = number
        inside += count
        left -= count
    return found


def _both(cell: Ints, expected: Floats, hits: Floats) -> Floats:
    """What states together do to chances that either of them has no part in."""
    num = POSITIONS * CONTEXTS
    did = np.bincount(cell[hits > 0], minlength=num)
    is_known = (did >= K) | ((did == 0) & (np.bincount(cell, expected, num) >= K))
    ratio = (np.bincount(cell, hits, num) + _DOUBT) / (np.bincount(cell, expected, num) + _DOUBT)
    return np.where(is_known, ratio, 1.0).reshape(POSITIONS, CONTEXTS)
