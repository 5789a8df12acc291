"""Threads as tables: the marks of their steps, and the chances to drop context and to end.

The marks of a step are drawn from the cell of its kind, relation and context, with ranks that a copula ties
inside a step and over a thread: a slow session stays slow. A thread may end by position and context, and drop
a part of its context by context.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.extras import scipy
from mallee.synth.session.shareable.tables import MINORS, Cells, Chances, K, cells_of, fit_copula
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Floats, Int32s, Ints

_RELATIONS: Final = range(5)
_HEAD, _EXTEND, _REPEAT, _ROLLBACK, _RESET = _RELATIONS
_EVENTS: Final = (_REPEAT, _ROLLBACK, _RESET)
_LENGTH, _OUTPUT, _GAP, _THINK, _KEPT, _BRANCHES = range(6)
_CELL: Final = 4 * K  # steps that a cell of marks needs
_LEAST: Final = 1e-4  # chance to end


@dataclass(frozen=True, slots=True)
class ThreadLaw:
    """Of all kinds of threads."""

    marks: Cells  # by kind and relation; by context
    ends: Chances  # by kind; by position
    lengths: Chances  # by kind; by context: so many times as likely to end
    events: Chances  # by kind and relation; by context
    copula: Floats  # of `fit_copula`


def fit_threads(
    steps: Steps, kind: Ints, depth: Int32s, cut_off: Floats | None, *, size: int
) -> ThreadLaw:
    """Learn from the steps whose `kind` is not below 0. `depth`: blocks of each thread from the forest.

    A return to an older context counts as a rollback of the latest one.
    """
    previous = np.full(len(steps), -1, np.int64)
    goes_on = np.flatnonzero(steps.following >= 0)
    previous[steps.following[goes_on]] = goes_on
    is_head, over_with = previous < 0, steps.following < 0
    base = depth[steps.thread]
    before = np.where(is_head, size * base, steps.context[previous])
    full = before // size
    forked = is_head & steps.is_fork
    full[forked] = (steps.kept + np.maximum(0, steps.dropped))[forked]
    kept = np.minimum(steps.kept, full)
    above = (kept - base) / np.maximum(1, full - base)  # the forest's text is kept or dropped apart
    share = np.where(kept >= base, above, kept / np.maximum(1, base) - 1.0)
    relation = np.where(is_head, _HEAD, np.where(kept < full, _ROLLBACK, _EXTEND))
    relation[~is_head & (2 * kept < full)] = _RESET
    relation[(relation == _EXTEND) & (steps.context == before)] = _REPEAT
    length = np.where(np.isin(relation, (_EXTEND, _REPEAT)), steps.context - before, steps.fresh)
    columns = (length, steps.output, steps.gap_s, steps.think_s, share, steps.branches)
    marks = np.stack(columns, 1).astype(np.float64)
    keys = _keys(len(_RELATIONS) * kind + relation, before)
    own = kind >= 0
    cells = Cells.fit(keys[own], marks[own], _CELL)
    found = cells_of(cells.begins, keys)
    told = own & (found >= 0)
    weight = np.where(over_with, 1.0 if cut_off is None else 1.0 - cut_off, 1.0)
    hits = np.where(over_with, weight, 0.0)
    at, reached = _keys(kind, steps.position), _keys(kind, steps.context)
    at_length = np.ones(len(steps))
    for _ in range(3):  # by either in turn, so that the counts by either are the source's
        ends = Chances.fit(at[own], hits[own], (weight * at_length)[own])
        expected = weight * ends.at(at)
        lengths = Chances.fit(reached[own], hits[own], expected[own])
        at_length = lengths.at(reached)
    later = own & ~is_head
    return ThreadLaw(
        marks=cells,
        ends=ends,
        lengths=lengths,
        events=Chances.fit(
            np.concatenate(
                [_keys(len(_RELATIONS) * kind + each, before)[later] for each in _EVENTS]
            ),
            np.concatenate([1.0 * (relation == each)[later] for each in _EVENTS]),
            np.ones(len(_EVENTS) * int(later.sum())),
        ),
        copula=fit_copula(found[told], marks[told], steps.thread[told], steps.position[told]),
    )


def draw_threads(
    law: ThreadLaw, kind: Ints, depth: Ints, size: int, rng: np.random.Generator
) -> tuple[Steps, Floats]:
    """Threads of `kind` with `depth` blocks from the forest, each a session of its own.

    Besides, of each thread the share of its parent's context that it keeps if it is forked.
    """
    kept, fresh = law.copula
    own = rng.standard_normal((len(kind), len(kept))) @ kept.T
    thread = np.arange(len(kind))  # of those that go on
    tokens, position = size * depth, 0
    levels = []
    while len(thread):
        mine, base = kind[thread], depth[thread]
        relation = np.full(len(thread), _HEAD)
        if position:
            relation[:] = _EXTEND
            for each in _EVENTS:
                chance = law.events.at(_keys(len(_RELATIONS) * mine + each, tokens))
                relation[rng.random(len(thread)) < chance] = each
        scores = own[thread] + rng.standard_normal((len(thread), len(fresh))) @ fresh.T
        marks = law.marks.draw(
            _keys(len(_RELATIONS) * mine + relation, tokens), scipy("special").ndtr(scores)
        )
        length = np.rint(marks[:, _LENGTH]).astype(np.int64)
        full, share = tokens // size, marks[:, _KEPT]
        left = np.where(share < 0, base * (1.0 + share), base + share * (full - base))
        keep = np.where(
            relation >= _ROLLBACK, np.clip(np.rint(left).astype(np.int64), 0, full), full
        )
        least = np.maximum(1, size * keep + (position == 0))
        total = np.where(keep == full, tokens, size * keep) + length
        total = np.maximum(total, least)
        # an equal prompt shares its partial block too
        dropped = np.where((keep == full) & (total == tokens), -1, full - keep)
        at = np.full(len(thread), position)
        levels.append(np.column_stack([thread, at, keep, dropped, total - tokens, total, marks]))
        chance = law.ends.at(_keys(mine, at)) * law.lengths.at(_keys(mine, total))
        # as many as to be expected, spread evenly over contexts
        order = np.lexsort((total, mine))
        due = rng.random() + np.append(0.0, np.cumsum(np.clip(chance[order], _LEAST, 1.0)))
        ends = np.zeros(len(thread), np.bool_)
        ends[order] = np.diff(np.floor(due)) > 0
        ends |= cells_of(law.marks.begins, _keys(len(_RELATIONS) * mine + _EXTEND, total)) < 0
        thread, tokens, position = thread[~ends], total[~ends], position + 1
    whole = np.concatenate(levels)
    whole = whole[np.lexsort((whole[:, 1], whole[:, 0]))]
    thread, at, keep, dropped, added, total = whole[:, :6].astype(np.int64).T
    marks = whole[:, 6:]
    heads = np.flatnonzero(at == 0)
    following = np.arange(1, len(at) + 1, dtype=np.int32)
    following[np.append(heads[1:], len(at)) - 1] = -1
    none, no = np.full(len(at), -1, np.int32), np.zeros(len(at), np.bool_)
    steps = Steps(
        heads=heads.astype(np.int32),
        following=following,
        position=at.astype(np.int32),
        back=(at > 0).astype(np.int32),
        kept=keep.astype(np.int32),
        dropped=dropped.astype(np.int32),
        fresh=total - size * keep,
        added=added,
        context=total,
        output=np.maximum(1, np.rint(marks[:, _OUTPUT])).astype(np.int64),
        gap_s=np.maximum(0.0, marks[:, _GAP]),
        think_s=np.maximum(0.0, marks[:, _THINK]),
        branches=np.maximum(1, np.rint(marks[:, _BRANCHES])).astype(np.int32),
        cls=np.zeros(len(at), np.int32),
        kind=kind[thread].astype(np.int32),
        thread=thread.astype(np.int32),
        parent_step=none,
        is_fork=no,
        join=none.copy(),
        is_held=no.copy(),
        time_bin=np.zeros(len(at), np.int32),
    )
    return steps, marks[heads, _KEPT]


def _keys(major: Ints, values: Ints | Int32s) -> Ints:
    """Three for each power of two."""
    found: Ints = major * MINORS + (3 * np.log2(values + 1.0)).astype(np.int64)
    return found
