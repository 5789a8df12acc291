"""Lines of calls drawn from their law: what a trace that never was would have been learned as.

Lines are walked side by side, one step of all at a time. Chances and ranks are spread evenly over the lines
of a step, not thrown for each by itself: so counts and tables come out as the law says.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.share.chances import context_bins, position_bins
from mallee.synth.share.steps import (
    BACK,
    DROPPED,
    END,
    EXTEND,
    GAP,
    HEAD,
    KEPT,
    LENGTH,
    MARKS,
    OLDER,
    OUTPUT,
    RARE,
    REPEAT,
    RESET,
    ROLLBACK,
    THINK,
    LineLaw,
)
from mallee.synth.share.tables import mixed, normal_scores
from mallee.traces.numbers import Bools, Floats, Ints

_EVEN: Final = 32  # lines of a kind at one step, from where on ranks are spread over them
_RECENT: Final = 128  # of fewer lines than that, ranks are among those of the steps before too
_NORMAL: Final = normal_scores(np.repeat((np.arange(32)[:, None] + 0.5) / 32, MARKS, 1))
_MOST_BACK: Final = 64


@dataclass(frozen=True, slots=True)
class DrawnSteps:
    """Rows in no order; lengths are as in `Steps`."""

    line: Ints
    position: Ints
    back: Ints
    kept: Ints
    dropped: Ints
    fresh: Ints
    added: Ints
    context: Ints
    output: Ints
    gap_s: Floats
    think_s: Floats


def draw_steps(
    law: LineLaw, kind: Ints, depth: Ints, size: int, rng: np.random.Generator
) -> DrawnSteps:
    """Steps of lines of `kind` that have `depth` blocks of `size` tokens from the forest."""
    walk = _Walk(law, kind, depth, size, rng)
    levels = [walk.heads()]
    while walk.goes_on():
        levels.append(walk.step())
    columns = [np.concatenate(column) for column in zip(*levels, strict=True)]
    return DrawnSteps(*columns)


class _Walk:
    """All lines at one step of theirs."""

    def __init__(
        self, law: LineLaw, kind: Ints, depth: Ints, size: int, rng: np.random.Generator
    ) -> None:
        self._law = law
        self._rng = rng
        self._size = size
        self._kinds = len(law.cls)
        self._offset = rng.random((self._kinds, 1 + len(RARE)))
        self._line = np.arange(len(kind))  # of those that go on, as all below
        self._kind = kind
        self._depth = depth
        self._position = 0
        self._tokens = np.zeros(len(kind), np.int64)
        self._before: deque[Ints] = deque(maxlen=_MOST_BACK)  # by line
        self._own = self._by_kind(law.copula.line)
        self._changing = self._by_kind(law.copula.first)
        self._num = len(kind)
        self._recent: dict[int, Floats] = {}  # by cell

    def heads(self) -> tuple[Ints | Floats, ...]:
        scores = self._scores()
        ties = self._law.head_ties[self._kind]
        score = scores[:, LENGTH]
        # what ties answers to lengths at later steps gives way to what does at first ones
        line, first = self._law.copula.line, self._law.copula.first
        both = line[:, LENGTH] * line[:, OUTPUT] + first[:, LENGTH] * first[:, OUTPUT]
        variance = self._law.copula.variance
        tie = both.sum(-1) / np.sqrt(variance[:, LENGTH] * variance[:, OUTPUT])
        tie = tie[self._kind]
        rest = (scores[:, OUTPUT] - tie * score) / np.sqrt(np.maximum(1e-6, 1 - tie**2))
        scores[:, OUTPUT] = ties * score + np.sqrt(np.maximum(0.0, 1 - ties**2)) * rest
        marks = self._marks(np.full(self._num, HEAD), self._depth, scores)
        fresh = np.maximum(1, np.rint(marks[:, LENGTH])).astype(np.int64)
        self._tokens = self._size * self._depth + fresh
        zero = np.zeros_like(fresh)
        return self._row(zero, self._depth, zero, fresh, zero, marks)

    def goes_on(self) -> bool:
        """Ends lines; whether any are left."""
        ends = self._hits(END, np.ones(len(self._line), np.bool_))
        latest = np.zeros(self._num, np.int64)
        latest[self._line] = self._tokens
        self._before.appendleft(latest)
        self._line, self._kind, self._depth, self._tokens = (
            each[~ends] for each in (self._line, self._kind, self._depth, self._tokens)
        )
        self._own, self._changing = self._own[~ends], self._changing[~ends]
        self._position += 1
        return len(self._line) > 0

    def step(self) -> tuple[Ints | Floats, ...]:
        num, law = len(self._line), self._law
        self._position -= 1  # chances are given the state before
        relation = np.full(num, EXTEND)
        for event, each in enumerate(RARE, 1):
            relation[self._hits(event, relation == EXTEND)] = each
        self._position += 1
        noise = self._by_kind(law.copula.noise)
        carried = np.zeros((num, MARKS))
        for kind in range(self._kinds):
            mine = self._kind == kind
            carried[mine] = mixed(self._changing[mine], law.copula.carry[kind])
        self._changing = carried + noise
        marks = self._marks(relation, self._tokens, self._scores())
        length = np.rint(marks[:, LENGTH]).astype(np.int64)
        dropped = np.rint(self._extra(relation, DROPPED)).astype(np.int64)
        over = self._extra(relation, KEPT)
        back = np.rint(self._extra(relation, BACK)).astype(np.int64)
        most = min(self._position, _MOST_BACK)
        back = np.where(relation == OLDER, np.clip(back, 1, most), 1)
        other = np.stack(list(self._before))[back - 1, self._line]
        full: Ints = other // self._size
        left = self._depth + np.where(over < 0, np.ceil(self._depth * over), np.rint(over))
        keep: Ints = np.where(relation == RESET, np.clip(left.astype(np.int64), 0, full // 2), full)
        keep = np.where(relation == ROLLBACK, full - np.clip(dropped, 0, full // 2), keep)
        keep = np.where(relation == OLDER, np.maximum(0, full - dropped), keep)
        if law.own_after:
            keep = np.maximum(keep, np.minimum(self._depth + 1, full))
        grows = (relation == EXTEND) | (relation == REPEAT)
        total = np.where(grows, other + length, self._size * keep + np.maximum(0, length))
        total = np.maximum(total, np.maximum(1, self._size * keep))
        self._tokens = total
        is_repeat = relation == REPEAT
        return self._row(
            back,
            keep,
            np.where(is_repeat, -1, full - keep),
            total - self._size * keep,
            np.where(is_repeat, total - other, 0),
            marks,
        )

    def _row(
        self, back: Ints, kept: Ints, dropped: Ints, fresh: Ints, added: Ints, marks: Floats
    ) -> tuple[Ints | Floats, ...]:
        position = np.full(len(self._line), self._position)
        output = np.maximum(1, np.rint(marks[:, OUTPUT])).astype(np.int64)
        gap_s = np.maximum(0.0, marks[:, GAP])
        think_s = np.maximum(0.0, marks[:, THINK])
        return (
            self._line, position, back, kept, dropped, fresh, added, self._tokens, output, gap_s, think_s,
        )  # fmt: skip

    def _hits(self, event: int, among: Bools) -> Bools:
        """Lines to which `event` happens: of each kind as many as their chances add up to."""
        law = self._law
        chance = law.chances.of(self._kind, event, self._position, self._tokens)
        if event == END and law.own_after:
            chance[self._tokens // law.own_after <= self._depth] = 1.0
        chance = np.where(among, chance, 0.0)
        hits = np.zeros(len(chance), np.bool_)
        order = np.lexsort((self._tokens, self._kind))
        for kind in range(self._kinds):
            mine = order[self._kind[order] == kind]
            sums = self._offset[kind, event] + np.cumsum(chance[mine])
            if len(mine):
                hits[mine] = np.floor(sums) > np.floor(sums - chance[mine])
                self._offset[kind, event] = sums[-1] % 1.0
        return hits

    def _by_kind(self, matrices: Floats) -> Floats:
        """Independent scores for each line, times the matrix of its kind."""
        found = self._rng.standard_normal((len(self._line), MARKS))
        for kind in range(self._kinds):
            mine = self._kind == kind
            found[mine] = mixed(found[mine], matrices[kind])
        return found

    def _scores(self) -> Floats:
        scale = np.sqrt(self._law.copula.variance)
        scores: Floats = (self._own + self._changing) / scale[self._kind]
        return scores

    def _marks(self, relation: Ints, state: Ints, scores: Floats) -> Floats:
        position = position_bins(np.full(len(relation), self._position))
        first = self._law.place[self._kind, relation, position, context_bins(state)].astype(
            np.int64
        )
        shares = np.empty_like(scores)
        order = np.argsort(first, kind="stable")
        cells, begins = np.unique(first[order], return_index=True)
        for cell, mine in zip(cells.tolist(), np.split(order, begins[1:]), strict=True):
            if len(mine) < _EVEN:
                recent = np.concatenate([self._recent.get(cell, _NORMAL), scores[mine]])
                shares[mine] = self._even(recent)[-len(mine) :]
                self._recent[cell] = recent[-_RECENT:]
            else:
                shares[mine] = self._even(scores[mine])
        return self._law.tables.draw(first[:, None] + np.arange(MARKS), shares)

    def _even(self, scores: Floats) -> Floats:
        """Shares by rank, column by column."""
        ranks = np.argsort(np.argsort(scores, 0, kind="stable"), 0, kind="stable")
        shares: Floats = (ranks + self._rng.random(scores.shape)) / len(scores)
        return shares

    def _extra(self, relation: Ints, which: int) -> Floats:
        """Blocks or steps of those relations that have any; 0 of others."""
        tables = self._law.extra[self._kind, relation, which].astype(np.int64)
        found = self._law.tables.draw(np.maximum(tables, 0), self._rng.random(len(tables)))
        return np.where(tables >= 0, found, 0.0)
