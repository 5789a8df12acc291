"""What lines of calls do, as tables: how they go on given where they are, and the marks of each step.

A line is in a state: calls so far and tokens of context, in bins that no trace chooses. From it comes the
chance that it ends, rolls back, resets and so on (a factor of each, raked to the source's counts by
either), and the tables of the next step's marks. Marks hang together inside a step, from one step to the
next, and over a whole line: some sessions are slow and some are brief throughout.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.session.steps import Steps
from mallee.synth.share.chances import (
    CONTEXTS,
    POSITIONS,
    Chances,
    Counted,
    context_bins,
    fit_chances,
    position_bins,
)
from mallee.synth.share.copula import Copula, fit_copula
from mallee.synth.share.tables import K, TableBuilder, Tables, scores_in
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

HEAD, EXTEND, ROLLBACK, RESET, REPEAT, OLDER = range(6)
RARE: Final = (ROLLBACK, RESET, REPEAT, OLDER)
END: Final = 0
"""First of a kind's chances; those of `RARE` follow, given that it goes on."""
LENGTH, OUTPUT, GAP, THINK = range(4)
MARKS: Final = 4
DROPPED, KEPT, BACK = range(3)
_OTHERS: Final = -1
_CELL: Final = 4 * K  # steps that a finer cell needs, so that its tables have a shape


@dataclass(frozen=True, slots=True)
class LineLaw:
    """By kind of line. A kind's tables: `place` has the first of `MARKS` in a row."""

    tables: Tables
    cls: Int32s
    chances: Chances  # events are `END` and those of `RARE`
    own_after: int  # lines go on, and keep when reset, beyond the forest's text; 0: or not
    place: Int32s  # [kinds, relations, positions, contexts]
    extra: Int32s  # [kinds, relations, 3] tables of blocks dropped, of blocks kept beyond the
    # forest's, if below 0 as a part of those (of first steps of forks: of fresh tokens), and of steps
    # back; -1: none
    copula: Copula
    head_ties: Floats  # [kinds] correlation of a first step's length and output
    branching: Floats  # [kinds] share of steps that have several branches
    branches: int  # table of how many then; -1


@dataclass(frozen=True, slots=True)
class _Rows:
    """The source's steps as their law sees them."""

    kind: Ints
    relation: Ints
    previous: Ints  # -1 of heads
    depth: Ints  # blocks of its line from the forest
    position: Ints  # in the bins of tables
    state: Ints  # context before it, of heads the forest's part, in those bins
    marks: Floats  # [steps, MARKS]

    def __len__(self) -> int:
        return len(self.kind)


def fit_lines(
    steps: Steps,
    kind: Ints,
    depth: Int32s,
    cut_off: Floats | None,
    rng: np.random.Generator,
    *,
    own_after: int,
) -> LineLaw:
    """Learns from the steps whose `kind` (of its own numbering, from 0) is not below 0.

    `own_after`: block size, where a line was told by text of its own and goes on only from that; else 0.
    """
    rows = _rows(steps, kind, depth)
    kinds = int(kind.max()) + 1
    builder = TableBuilder()
    place = _placed(rows, kinds, builder)
    extra = _extras(rows, steps, kinds, builder)
    scores = _scores(rows, place, rng)
    several = (steps.branches > 1) & (kind >= 0)
    tells = int(several.sum()) >= K
    branches = builder.add(steps.branches[several]) if tells else -1
    by_kind = [kind == each for each in range(kinds)]
    return LineLaw(
        tables=builder.build(),
        cls=np.array([np.bincount(steps.cls[mine]).argmax() for mine in by_kind], np.int32),
        chances=_chances(rows, steps, cut_off, own_after, place),
        own_after=own_after,
        place=place,
        extra=extra,
        copula=fit_copula(scores, kind, rows.previous, steps.thread, steps.position),
        head_ties=np.array([_head_ties(rows, scores, each) for each in range(kinds)]),
        branching=np.array([several[mine].mean() if tells else 0.0 for mine in by_kind]),
        branches=branches,
    )


def _rows(steps: Steps, kind: Ints, depth: Int32s) -> _Rows:
    num = len(steps)
    previous = np.full(num, -1, np.int64)
    goes_on = np.flatnonzero(steps.following >= 0)
    previous[steps.following[goes_on]] = goes_on
    is_head = previous < 0
    relation = _relations(steps, is_head)
    for each in RARE:  # what a kind does rarely is not told
        counts = np.bincount(kind[(relation == each) & (kind >= 0)], minlength=int(kind.max()) + 1)
        relation[(relation == each) & (counts[kind] < K)] = EXTEND
    before = np.where(is_head, depth[steps.thread], steps.context[previous])
    length = np.where(relation == EXTEND, steps.context - steps.context[previous], steps.fresh)
    is_rare = (relation == EXTEND) & (steps.dropped != 0)
    length = np.where(is_rare, np.maximum(length, 0), length)
    length = np.where(relation == REPEAT, steps.added, length)
    length[is_head & steps.is_fork] = steps.context[is_head & steps.is_fork]
    marks = np.stack([length, steps.output, steps.gap_s, steps.think_s], 1).astype(np.float64)
    return _Rows(
        kind.astype(np.int64),
        relation,
        previous,
        depth[steps.thread].astype(np.int64),
        position_bins(steps.position),
        context_bins(before),
        marks,
    )


def _relations(steps: Steps, is_head: Bools) -> Ints:
    """What each step did to the context before it."""
    relation = np.full(len(steps), EXTEND)
    relation[steps.dropped > 0] = ROLLBACK
    relation[steps.dropped > steps.kept] = RESET
    relation[steps.dropped < 0] = REPEAT
    relation[steps.back > 1] = OLDER
    relation[is_head] = HEAD
    return relation


def _placed(rows: _Rows, kinds: int, builder: TableBuilder) -> Int32s:
    """Tables of each cell; a cell with few steps has those of a wider one."""
    place = np.full((kinds, 6, POSITIONS, CONTEXTS), -1, np.int32)
    is_in = rows.kind >= 0
    for relation in range(6):
        everywhere = np.flatnonzero(is_in & (rows.relation == relation))
        if len(everywhere) < K:
            continue
        wide = _tables(rows, everywhere, builder)
        for kind in range(kinds):
            mine = everywhere[rows.kind[everywhere] == kind]
            own = wide if len(mine) < K or kinds == 1 else _tables(rows, mine, builder)
            place[kind, relation] = own
            _place_states(rows, mine, place[kind, relation], builder)
    return place


def _place_states(rows: _Rows, mine: Ints, place: Int32s, builder: TableBuilder) -> None:
    """Tables of the states in `mine`; those of few steps share one, as do positions in a state."""
    states = _cells(rows.state[mine])
    for state in np.unique(states).tolist():
        alike = mine[states == state]
        if len(alike) < K:
            continue
        wide = _tables(rows, alike, builder)
        if state == _OTHERS:
            place[:, np.unique(rows.state[alike])] = wide
            continue
        place[:, state] = wide
        positions = _cells(rows.position[alike])
        for position in np.unique(positions).tolist():
            cell = alike[positions == position]
            if K <= len(cell) < len(alike):
                which = np.unique(rows.position[cell])
                place[which, state] = _tables(rows, cell, builder)


def _cells(states: Ints) -> Ints:
    """`states` of `_CELL` steps or more; the others together are `_OTHERS`."""
    counts = np.bincount(states, minlength=1)
    return np.where(counts[states] >= _CELL, states, _OTHERS)


def _tables(rows: _Rows, which: Ints, builder: TableBuilder) -> int:
    first, *_ = (builder.add(rows.marks[which, mark]) for mark in range(MARKS))
    return first


def _extras(rows: _Rows, steps: Steps, kinds: int, builder: TableBuilder) -> Int32s:
    extra = np.full((kinds, 6, 3), -1, np.int32)
    short = steps.kept / np.maximum(1, rows.depth) - 1.0  # of the forest's text
    over = np.where(steps.kept < rows.depth, short, steps.kept - rows.depth)
    for kind in range(kinds):
        for relation in (HEAD, *RARE):
            mine = np.flatnonzero((rows.kind == kind) & (rows.relation == relation))
            if relation == HEAD:
                mine = mine[steps.is_fork[mine]]
            if len(mine) >= K:
                extra[kind, relation, DROPPED] = builder.add(np.maximum(0, steps.dropped[mine]))
                kept = steps.fresh if relation == HEAD else over
                extra[kind, relation, KEPT] = builder.add(kept[mine])
                extra[kind, relation, BACK] = builder.add(steps.back[mine])
    return extra


def _chances(
    rows: _Rows, steps: Steps, cut_off: Floats | None, own_after: int, place: Int32s
) -> Chances:
    ends = steps.following < 0
    known = np.ones(len(steps)) if cut_off is None else 1.0 - cut_off
    if own_after:
        known = known * (steps.context // own_after > rows.depth)
    relation = np.full(len(rows), EXTEND)
    relation[~ends] = rows.relation[steps.following[~ends]]
    events: list[tuple[Bools, Floats]] = [(rows.kind >= 0, np.where(ends, known, 0.0))]
    events += [(~ends, (relation == each).astype(np.float64)) for each in RARE]
    weight = np.where(ends, known, 1.0)
    counted = Counted(rows.kind, steps.position, steps.context, weight)
    found = fit_chances(counted, len(place), events)
    never = ~found.by_position[:, END].any(1)  # the source's end cut all of them off
    found.by_position[never, END] = 1.0 / len(steps)
    is_head_only = place[:, EXTEND, 0, 0] < 0
    found.by_position[is_head_only, END] = 1.0
    sure = never | is_head_only
    found.by_context[sure, END] = 1.0
    found.by_both[sure, END] = 1.0
    return found


def _scores(rows: _Rows, place: Int32s, rng: np.random.Generator) -> Floats:
    cells = place[np.maximum(rows.kind, 0), rows.relation, rows.position, rows.state].astype(int)
    cells = np.where((rows.kind < 0) | (cells < 0), cells.max() + 1, cells)
    columns = [scores_in(cells, rows.marks[:, mark], rng) for mark in range(MARKS)]
    return np.stack(columns, 1)


def _head_ties(rows: _Rows, scores: Floats, kind: int) -> float:
    mine = np.flatnonzero((rows.kind == kind) & (rows.relation == HEAD))
    if len(mine) < 2 * K:
        return 0.0
    return float(np.corrcoef(scores[mine, LENGTH], scores[mine, OUTPUT])[0, 1])
