"""Threads as tables: how a step treats the context before it, when a thread ends, and the marks of steps.

A thread's state is its number of calls and its tokens of context, in bins that no trace chooses. Each event
(the end, a rollback, a reset, a repeat, a return) has a factor by either. The marks of a step are drawn from
the table of its kind, relation and context, with ranks that a Gaussian copula ties inside a step
and over a thread: a slow session stays slow.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from mallee.synth.session.shareable.tables import K, TableBuilder, Tables, normal_cdf, scores_in
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

HEAD, EXTEND, ROLLBACK, RESET, REPEAT, OLDER = range(6)
RARE: Final = (ROLLBACK, RESET, REPEAT, OLDER)
END: Final = 0
"""The first event; those of `RARE` follow, given that the thread goes on."""
LENGTH, OUTPUT, GAP, THINK, DROPPED, KEPT, BACK = range(7)
TIED: Final = 4
"""Marks that the copula ties: all before `DROPPED`."""
_POSITIONS: Final = 40
_CONTEXTS: Final = 56
_CELL: Final = 4 * K  # steps that a cell of its own needs
_LAGS: Final = (2, 4, 8)  # steps apart, where only the thread itself still ties marks
_EVEN: Final = 32  # threads of a cell from which on ranks are spread evenly over them
_MOST_BACK: Final = 64


def position_bins(position: Ints | Int32s) -> Ints:
    """Single positions, then four bins for each power of two."""
    later = 8 + (4 * np.log2(np.maximum(position, 8) / 8.0)).astype(np.int64)
    bins: Ints = np.where(position < 8, position, later)
    return np.minimum(bins, _POSITIONS - 1)


def context_bins(tokens: Ints | Int32s) -> Ints:
    """Three bins for each power of two, from 64 tokens on."""
    bins: Ints = (3 * np.log2(np.maximum(tokens, 64) / 64.0)).astype(np.int64)
    return np.minimum(bins, _CONTEXTS - 1)


@dataclass(frozen=True, slots=True)
class ThreadLaw:
    """By kind of thread."""

    tables: Tables
    cls: Int32s
    by_position: Floats  # [kinds, events, positions] factors of chances
    by_context: Floats  # [kinds, events, contexts]
    place: Int32s  # [kinds, relations, contexts] first of a step's tables, one for each mark
    own_after: int  # block size where threads continue only from text of their own; else 0
    kept: Floats  # [TIED, TIED] makes the scores that a thread keeps of independent ones
    fresh: Floats  # [TIED, TIED] and those that come new with each step
    branching: Floats  # [kinds] share of steps with several branches
    branches: int  # table of how many then; -1


def fit_threads(
    steps: Steps, kind: Ints, depth: Int32s, cut_off: Floats | None, *, own_after: int
) -> ThreadLaw:
    """Learn from the steps whose `kind` is not below 0. `depth`: blocks of each thread from the forest."""
    rng = np.random.default_rng(0)  # breaks ties of equal values
    kinds = int(kind.max()) + 1
    previous = np.full(len(steps), -1, np.int64)
    goes_on = np.flatnonzero(steps.following >= 0)
    previous[steps.following[goes_on]] = goes_on
    from_forest = depth[steps.thread]
    relation = _relations(steps, previous < 0, kind)
    state = context_bins(np.where(previous < 0, from_forest, steps.context[previous]))
    marks = _marks(steps, relation, previous, from_forest)
    builder = TableBuilder()
    place = _placed(kind, relation, state, marks, builder)
    cells = place[np.maximum(kind, 0), relation, state].astype(np.int64)
    cells = np.where(kind < 0, -1, cells)
    scores = np.stack([scores_in(cells + 1, marks[:, m], rng) for m in range(TIED)], 1)
    kept, fresh = _copula(scores[kind >= 0], steps.thread[kind >= 0], steps.position[kind >= 0])
    several = (steps.branches > 1) & (kind >= 0)
    branches = builder.add_if(steps.branches[several])
    by_kind = [kind == each for each in range(kinds)]
    by_position, by_context = _chances(steps, kind, relation, from_forest, cut_off, own_after)
    is_single = place[:, EXTEND, 0] < 0  # kinds of which no thread goes on
    by_position[is_single, END], by_context[is_single, END] = 1.0, 1.0
    return ThreadLaw(
        tables=builder.build(),
        cls=np.array([np.bincount(steps.cls[mine]).argmax() for mine in by_kind], np.int32),
        by_position=by_position,
        by_context=by_context,
        place=place,
        own_after=own_after,
        kept=kept,
        fresh=fresh,
        branching=np.array([several[mine].mean() if branches >= 0 else 0.0 for mine in by_kind]),
        branches=branches,
    )


def _relations(steps: Steps, is_head: Bools, kind: Ints) -> Ints:
    """The relation of each step to the context before it; rare ones of a kind count as `EXTEND`."""
    relation = np.full(len(steps), EXTEND)
    relation[steps.dropped > 0] = ROLLBACK
    relation[steps.dropped > steps.kept] = RESET
    relation[steps.dropped < 0] = REPEAT
    relation[steps.back > 1] = OLDER
    relation[is_head] = HEAD
    for each in RARE:
        counts = np.bincount(kind[(relation == each) & (kind >= 0)], minlength=int(kind.max()) + 1)
        relation[(relation == each) & (counts[kind] < K)] = EXTEND
    return relation


def _marks(steps: Steps, relation: Ints, previous: Ints, depth: Int32s) -> Floats:
    """[steps, marks]. `KEPT` counts blocks beyond the forest's text; below 0 it is a part of that."""
    grown = np.maximum(
        steps.context - steps.context[previous], np.where(steps.dropped, 0, -(1 << 40))
    )
    length = np.where(relation == EXTEND, grown, steps.fresh)
    length = np.where(relation == REPEAT, steps.added, length)
    less = steps.kept / np.maximum(1, depth) - 1.0
    kept = np.where(steps.kept < depth, less, steps.kept - depth)
    kept = np.where(relation == HEAD, 0.0, kept)
    dropped = np.where(relation == HEAD, 0, np.maximum(0, steps.dropped))
    is_fork_head = (relation == HEAD) & steps.is_fork
    dropped = np.where(is_fork_head, np.maximum(0, steps.dropped), dropped)
    columns = (length, steps.output, steps.gap_s, steps.think_s, dropped, kept, steps.back)
    return np.stack(columns, 1).astype(np.float64)


def _placed(
    kind: Ints, relation: Ints, state: Ints, marks: Floats, builder: TableBuilder
) -> Int32s:
    """Tables of each cell; a cell of few steps has those of a wider one."""
    place = np.full((int(kind.max()) + 1, 6, _CONTEXTS), -1, np.int32)

    def tables(which: Ints) -> int:
        first, *_ = [builder.add(marks[which, mark]) for mark in range(marks.shape[1])]
        return first

    for each in range(6):
        everywhere = np.flatnonzero((kind >= 0) & (relation == each))
        if len(everywhere) < K:
            continue
        place[:, each] = tables(everywhere)
        for one in range(len(place)):
            mine = everywhere[kind[everywhere] == one]
            if len(mine) < K:
                continue
            place[one, each] = tables(mine)
            bins = joined_bins(np.bincount(state[mine], minlength=_CONTEXTS), _CELL)
            for cell in np.unique(bins[state[mine]]).tolist() if bins[-1] else []:
                place[one, each, bins == cell] = tables(mine[bins[state[mine]] == cell])
    return place


def joined_bins(counts: Ints, least: int) -> Ints:
    """For each bin a number; neighbours are joined until each has at least `least`, if all have.

    Empty bins before one that has as many stay apart from it.
    """
    found = np.zeros(len(counts), np.int64)
    number, inside, left = 0, 0, int(counts.sum())
    for i, count in enumerate(counts.tolist()):
        if left >= least and (inside >= least or (not inside and count >= least and i)):
            number, inside = number + 1, 0
        found[i] = number
        inside += count
        left -= count
    return found


def _chances(
    steps: Steps, kind: Ints, relation: Ints, depth: Int32s, cut_off: Floats | None, own_after: int
) -> tuple[Floats, Floats]:
    """Factors by position and by context, of each event."""
    ends = steps.following < 0
    weight = np.where(ends, 1.0 if cut_off is None else 1.0 - cut_off, 1.0)
    if own_after:
        weight = weight * np.where(ends, steps.context // own_after > depth, 1.0)
    later = np.where(ends, EXTEND, relation[steps.following])
    position, context = position_bins(steps.position), context_bins(steps.context)
    by_position = np.zeros((int(kind.max()) + 1, 1 + len(RARE), _POSITIONS))
    by_context = np.zeros((len(by_position), 1 + len(RARE), _CONTEXTS))
    for one in range(len(by_position)):
        for event in range(1 + len(RARE)):
            is_hit = ends if event == END else later == RARE[event - 1]
            mine = np.flatnonzero((kind == one) & ((event == END) | ~ends))
            hits = np.where(is_hit[mine], weight[mine], 0.0)
            if not hits.any():
                by_position[one, event] = float(event == END) / len(steps)
                by_context[one, event] = 1.0
                continue
            expected = weight[mine]
            for _ in range(3):  # by either in turn, so that the counts by either are the source's
                of_context = _ratio(context[mine], expected, hits, _CONTEXTS)
                by_p = _ratio(
                    position[mine], weight[mine] * of_context[context[mine]], hits, _POSITIONS
                )
                expected = weight[mine] * by_p[position[mine]]
            by_position[one, event] = by_p
            by_context[one, event] = _ratio(context[mine], expected, hits, _CONTEXTS)
    return by_position, by_context


def _ratio(bins: Ints, expected: Floats, hits: Floats, num: int) -> Floats:
    """Hits for each expected one, by bins of `K` hits or more."""
    joined = joined_bins(np.bincount(bins[hits > 0], minlength=num), K)
    one = np.bincount(joined[bins], hits, int(joined[-1]) + 1)
    other = np.bincount(joined[bins], expected, int(joined[-1]) + 1)
    mean = hits.sum() / max(1e-9, expected.sum())
    ratio: Floats = (one + mean) / (other + 1.0)
    return ratio[joined]


def _copula(scores: Floats, thread: Int32s, position: Int32s) -> tuple[Floats, Floats]:
    """Products of scores some steps apart are what the thread keeps; the rest comes new with each step."""
    order = np.lexsort((position, thread))
    kept = []
    for lag in _LAGS:
        one, other = order[:-lag], order[lag:]
        is_pair = thread[one] == thread[other]
        if is_pair.sum() >= 10 * K:
            kept.append(scores[one[is_pair]].T @ scores[other[is_pair]] / is_pair.sum())
    whole = _proper(scores.T @ scores / len(scores), 1e-6)
    of_thread = _proper(np.mean(kept, 0), 1e-9) if kept else 1e-9 * np.eye(TIED)
    roots = [np.linalg.cholesky(each) for each in (of_thread, _proper(whole - of_thread, 0.02))]
    return roots[0].astype(np.float64), roots[1].astype(np.float64)


def _proper(matrix: Floats, least: float) -> Floats:
    """The nearest symmetric matrix that is positive definite."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    found: Floats = (vectors * np.maximum(values, least)) @ vectors.T
    return found


class DrawnSteps(NamedTuple):
    """Rows in no order; lengths are as in `Steps`."""

    thread: Ints
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

    def ordered(self, order: Ints) -> "DrawnSteps":
        columns: list[Any] = [column[order] for column in self]
        return DrawnSteps(*columns)


def draw_threads(
    law: ThreadLaw, kind: Ints, depth: Ints, size: int, rng: np.random.Generator
) -> DrawnSteps:
    """Steps of threads of `kind` with `depth` blocks of `size` tokens from the forest.

    Threads are walked side by side. Events happen to as many as their chances add up to, and ranks are
    spread evenly over the threads of a cell, so that counts and tables come out as the law has them.
    """
    walk = _Walk(law, kind, depth, size, rng)
    rows = [walk.step()]
    while walk.ends():
        rows.append(walk.step())
    return DrawnSteps(*(np.concatenate(column) for column in zip(*rows, strict=True)))


class _Walk:
    """All threads at one step of theirs."""

    def __init__(
        self, law: ThreadLaw, kind: Ints, depth: Ints, size: int, rng: np.random.Generator
    ) -> None:
        self._law, self._size, self._rng = law, size, rng
        self._thread = np.arange(len(kind))  # of those that go on
        self._kind, self._depth = kind, depth
        self._tokens = size * depth
        self._position = 0
        self._before: deque[Ints] = deque(maxlen=_MOST_BACK)  # tokens, by thread
        self._own = self._mixed(law.kept)
        self._offset = rng.random((len(law.cls), 1 + len(RARE)))

    def ends(self) -> bool:
        """End threads; whether any are left."""
        stays = ~self._hits(END, np.ones(len(self._thread), np.bool_))
        latest = np.zeros(len(self._own), np.int64)
        latest[self._thread] = self._tokens
        self._before.appendleft(latest)
        self._thread, self._kind = self._thread[stays], self._kind[stays]
        self._depth, self._tokens = self._depth[stays], self._tokens[stays]
        self._position += 1
        return len(self._thread) > 0

    def step(self) -> DrawnSteps:
        num, size = len(self._thread), self._size
        relation = np.full(num, EXTEND if self._position else HEAD)
        if self._position:
            for event, each in enumerate(RARE, 1):
                relation[self._hits(event, relation == EXTEND)] = each
        marks = self._marks(relation)
        length, dropped, back = (
            np.rint(marks[:, mark]).astype(np.int64) for mark in (LENGTH, DROPPED, BACK)
        )
        back = np.where(relation == OLDER, np.clip(back, 1, max(1, len(self._before))), 1)
        other = size * self._depth
        if self._position:
            other = np.stack(list(self._before))[back - 1, self._thread]
        full = other // size
        over = marks[:, KEPT]
        left = self._depth + np.where(over < 0, np.ceil(self._depth * over), np.rint(over))
        keep = np.where(relation == RESET, np.clip(left.astype(np.int64), 0, full // 2), full)
        keep = np.where(relation == ROLLBACK, full - np.clip(dropped, 0, full // 2), keep)
        keep = np.where(relation == OLDER, np.maximum(0, full - dropped), keep)
        if self._law.own_after and self._position:
            keep = np.maximum(keep, np.minimum(self._depth + 1, full))
        grows = (relation == EXTEND) | (relation == REPEAT)
        total = np.where(grows, other + length, size * keep + np.maximum(0, length))
        least = size * keep + (relation == HEAD)
        self._tokens = total = np.maximum(total, np.maximum(1, least))
        is_repeat = relation == REPEAT
        return DrawnSteps(
            thread=self._thread,
            position=np.full(num, self._position),
            back=back if self._position else np.zeros_like(back),
            kept=keep,
            dropped=np.where(relation == HEAD, dropped, np.where(is_repeat, -1, full - keep)),
            fresh=total - size * keep,
            added=np.where(is_repeat, total - other, 0),
            context=total,
            output=np.maximum(1, np.rint(marks[:, OUTPUT])).astype(np.int64),
            gap_s=np.maximum(0.0, marks[:, GAP]),
            think_s=np.maximum(0.0, marks[:, THINK]),
        )

    def _hits(self, event: int, among: Bools) -> Bools:
        """Threads to which `event` happens after the step before."""
        law = self._law
        position = max(0, self._position - (event != END))
        at = position_bins(np.array([position]))[0]
        chance = law.by_position[self._kind, event, at]
        chance = chance * law.by_context[self._kind, event, context_bins(self._tokens)]
        if event == END and law.own_after:
            chance[self._tokens // law.own_after <= self._depth] = 1.0
        chance = np.where(among, np.minimum(1.0, chance), 0.0)
        hits = np.zeros(len(chance), np.bool_)
        order = np.lexsort((self._tokens, self._kind))
        for kind in np.unique(self._kind).tolist():
            mine = order[self._kind[order] == kind]
            sums = self._offset[kind, event] + np.cumsum(chance[mine])
            hits[mine] = np.floor(sums) > np.floor(sums - chance[mine])
            self._offset[kind, event] = sums[-1] % 1.0
        return hits

    def _mixed(self, matrix: Floats) -> Floats:
        """Normal scores of each thread with the correlations of `matrix`."""
        drawn = self._rng.standard_normal((len(self._thread), TIED))
        mixed: Floats = (drawn[:, None, :] * matrix).sum(-1)
        return mixed

    def _marks(self, relation: Ints) -> Floats:
        law, rng = self._law, self._rng
        first = law.place[
            self._kind, relation, context_bins(self._tokens if self._position else self._depth)
        ]
        first = first.astype(np.int64)
        scores = self._own[self._thread] + self._mixed(law.fresh)
        shares = rng.random((len(first), BACK + 1))
        shares[:, :TIED] = normal_cdf(scores)
        order = np.argsort(first, kind="stable")
        _, begins = np.unique(first[order], return_index=True)
        for mine in np.split(order, begins[1:]):
            if len(mine) >= _EVEN:
                ranks = np.argsort(np.argsort(shares[mine], 0, kind="stable"), 0, kind="stable")
                shares[mine] = (ranks + rng.random(ranks.shape)) / len(mine)
        return law.tables.draw(first[:, None] + np.arange(BACK + 1), shares)
