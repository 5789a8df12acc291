"""Threads as tables: how a step treats the context before it, when a thread ends, and the marks of steps.

Threads end by their number of calls and their context, in bins that no trace chooses; what else happens to a
context (a rollback, a reset, a repeat) happens at any step. The marks of a step are drawn from the table of
its kind, relation and context, with ranks that a Gaussian copula ties inside a step and over a thread: a slow
session stays slow.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.extras import scipy
from mallee.synth.session.shareable.tables import K, TableBuilder, Tables, scores_in
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Floats, Int32s, Ints

HEAD, EXTEND, ROLLBACK, RESET, REPEAT = range(5)
_RARE: Final = (ROLLBACK, RESET, REPEAT)
_MARKS: Final = 7
LENGTH, OUTPUT, GAP, THINK, DROPPED, KEPT, BRANCHES = range(_MARKS)
_TIED: Final = 4
"""Marks that the copula ties: all before `DROPPED`."""
_POSITIONS: Final = 40
_CONTEXTS: Final = 56
_CELL: Final = 4 * K  # steps that a cell of its own needs
_LEAST: Final = 1e-4  # chance to end
_LAG: Final = 4  # steps apart, where only the thread itself still ties marks


def _position_bins(position: Ints | Int32s) -> Ints:
    """Single positions, then four bins for each power of two."""
    later = 8 + (4 * np.log2(np.maximum(position, 8) / 8.0)).astype(np.int64)
    bins: Ints = np.where(position < 8, position, later)
    return np.minimum(bins, _POSITIONS - 1)


def _context_bins(tokens: Ints | Int32s) -> Ints:
    """Three bins for each power of two, from 64 tokens on."""
    bins: Ints = (3 * np.log2(np.maximum(tokens, 64) / 64.0)).astype(np.int64)
    return np.minimum(bins, _CONTEXTS - 1)


@dataclass(frozen=True, slots=True)
class ThreadLaw:
    """By kind of thread."""

    cls: Int32s
    ends: Floats  # [kinds, positions] chance to end
    at_length: Floats  # [kinds, contexts] so many times as likely
    events: Floats  # [kinds, relations] chance of the next step's relation, if it is a rare one
    place: Int32s  # [kinds, relations, contexts] first of a step's tables, one for each mark
    own_after: int  # block size where threads continue only from text of their own; else 0
    kept: Floats  # [tied, tied] makes the scores that a thread keeps of independent ones
    fresh: Floats  # [tied, tied] and those that come new with each step


def fit_threads(
    steps: Steps,
    kind: Ints,
    depth: Int32s,
    cut_off: Floats | None,
    *,
    size: int,
    own_after: int,
    builder: TableBuilder,
) -> ThreadLaw:
    """Learn from the steps whose `kind` is not below 0. `depth`: blocks of each thread from the forest.

    A return to an older context counts as a rollback of the latest one.
    """
    rng = np.random.default_rng(0)  # breaks ties of equal values
    kinds = range(int(kind.max()) + 1)
    previous = np.full(len(steps), -1, np.int64)
    goes_on = np.flatnonzero(steps.following >= 0)
    previous[steps.following[goes_on]] = goes_on
    is_head = previous < 0
    base = depth[steps.thread]
    dropped = np.maximum(0, steps.context[previous] // size - steps.kept)
    dropped = np.where(is_head, np.where(steps.is_fork, np.maximum(0, steps.dropped), 0), dropped)
    relation = np.where(dropped > 0, np.where(dropped > steps.kept, RESET, ROLLBACK), EXTEND)
    relation[(steps.dropped < 0) & (steps.back <= 1)] = REPEAT
    relation[is_head] = HEAD
    for each in _RARE:  # few of a kind count as `EXTEND`
        counts = np.bincount(kind[(relation == each) & (kind >= 0)], minlength=len(kinds))
        relation[(relation == each) & (counts[kind] < K)] = EXTEND
    grown = steps.context - steps.context[previous]
    length = np.where(dropped > 0, np.maximum(0, grown), grown)
    length = np.where(relation == EXTEND, length, steps.fresh)
    length = np.where(relation == REPEAT, steps.added, length)
    less = steps.kept / np.maximum(1, base) - 1.0  # a part of the forest's text
    over = np.where(is_head, 0.0, np.where(steps.kept < base, less, steps.kept - base))
    columns = (length, steps.output, steps.gap_s, steps.think_s, dropped, over, steps.branches)
    marks = np.stack(columns, 1).astype(np.float64)
    state = _context_bins(np.where(is_head, base, steps.context[previous]))
    place = np.full((len(kinds), REPEAT + 1, _CONTEXTS), -1, np.int32)
    for one, each in np.ndindex(len(kinds), REPEAT + 1):
        mine = np.flatnonzero((kind == one) & (relation == each))
        bins = joined_bins(np.bincount(state[mine], minlength=_CONTEXTS), _CELL)
        for cell in np.unique(bins[state[mine]]).tolist() if len(mine) >= K else ():
            rows = mine[bins[state[mine]] == cell]
            tables = [builder.add(column) for column in marks[rows].T]
            place[one, each, bins == cell] = tables[0]
    cells = np.where(kind < 0, -1, place[np.maximum(kind, 0), relation, state]).astype(np.int64)
    scores = np.stack([scores_in(cells + 1, marks[:, m], rng) for m in range(_TIED)], 1)
    kept, fresh = _copula(scores[kind >= 0], steps.thread[kind >= 0], steps.position[kind >= 0])
    over_with = steps.following < 0
    weight = np.where(over_with, 1.0 if cut_off is None else 1.0 - cut_off, 1.0)
    if own_after:
        weight = weight * np.where(over_with, steps.context // own_after > base, 1.0)
    at, context = _position_bins(steps.position), _context_bins(steps.context)
    hits = np.where(over_with, weight, 0.0)
    ends, at_length = np.ones((len(kinds), _POSITIONS)), np.ones((len(kinds), _CONTEXTS))
    events = np.zeros((len(kinds), REPEAT + 1))
    for one in kinds:
        mine, live = kind == one, (kind == one) & ~over_with
        if place[one, EXTEND].max() >= 0:  # else no thread of the kind goes on
            for _ in range(3):  # by either in turn, so that the counts by either are the source's
                expected = weight[mine] * at_length[one, context[mine]]
                ends[one] = _ratio(at[mine], expected, hits[mine], _POSITIONS, few=K / mine.sum())
                expected = weight[mine] * ends[one, at[mine]]
                at_length[one] = _ratio(context[mine], expected, hits[mine], _CONTEXTS, few=1.0)
        next_relation = relation[steps.following[live]]
        for each in _RARE:
            events[one, each] = (next_relation == each).mean() if live.any() else 0.0
    classes = [np.bincount(steps.cls[kind == one]).argmax() for one in kinds]
    return ThreadLaw(
        np.array(classes, np.int32), ends, at_length, events, place, own_after, kept, fresh
    )


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


def _ratio(bins: Ints, expected: Floats, hits: Floats, num: int, *, few: float) -> Floats:
    """Hits for each expected one, by bins of `K` hits or more; `few` where there are fewer in all."""
    if (hits > 0).sum() < K:
        return np.full(num, few)
    joined = joined_bins(np.bincount(bins[hits > 0], minlength=num), K)
    one, other = (np.bincount(joined[bins], each, num) for each in (hits, expected))
    ratio: Floats = one / np.maximum(1.0, other)
    return ratio[joined]


def _copula(scores: Floats, thread: Int32s, position: Int32s) -> tuple[Floats, Floats]:
    """Products of scores some steps apart are what the thread keeps; the rest comes new with each step."""
    order = np.lexsort((position, thread))
    one, other = order[:-_LAG], order[_LAG:]
    is_pair = thread[one] == thread[other]
    products = scores[one[is_pair]].T @ scores[other[is_pair]] / max(1, is_pair.sum())
    of_thread = _proper(products if is_pair.sum() >= 10 * K else 0 * products, 1e-9)
    whole = _proper(scores.T @ scores / len(scores), 1e-6)
    roots = [np.linalg.cholesky(each) for each in (of_thread, _proper(whole - of_thread, 0.02))]
    return roots[0].astype(np.float64), roots[1].astype(np.float64)


def _proper(matrix: Floats, least: float) -> Floats:
    """The nearest symmetric matrix that is positive definite."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    found: Floats = (vectors * np.maximum(values, least)) @ vectors.T
    return found


def draw_threads(
    law: ThreadLaw, tables: Tables, kind: Ints, depth: Ints, size: int, rng: np.random.Generator
) -> Steps:
    """Threads of `kind` with `depth` blocks of `size` tokens from the forest, each a session of its own."""
    thread = np.arange(len(kind))  # of those that go on
    own = rng.standard_normal((len(kind), _TIED)) @ law.kept.T
    tokens, position = size * depth, 0
    levels = []
    while len(thread):
        mine, base = kind[thread], depth[thread]
        relation = np.full(len(thread), EXTEND if position else HEAD)
        for each in _RARE if position else ():
            is_hit = rng.random(len(thread)) < law.events[mine, each]
            relation[is_hit & (relation == EXTEND)] = each
        first = law.place[mine, relation, _context_bins(tokens if position else base)]
        shares = rng.random((len(thread), _MARKS))
        scores = own[thread] + rng.standard_normal((len(thread), _TIED)) @ law.fresh.T
        shares[:, :_TIED] = scipy("special").ndtr(scores)
        marks = tables.draw(first.astype(np.int64)[:, None] + np.arange(_MARKS), shares)
        length, dropped, output, branches = (
            np.rint(marks[:, mark]).astype(np.int64) for mark in (LENGTH, DROPPED, OUTPUT, BRANCHES)
        )
        full, over = tokens // size, marks[:, KEPT]
        left = (base + np.where(over < 0, np.ceil(base * over), np.rint(over))).astype(np.int64)
        keep = np.where(relation == RESET, np.clip(left, 0, full // 2), full)
        keep = np.where(relation == ROLLBACK, full - np.clip(dropped, 0, full // 2), keep)
        if law.own_after and position:
            keep = np.maximum(keep, np.minimum(base + 1, full))
        grows = (relation == EXTEND) | (relation == REPEAT)
        total = np.where(grows, tokens + length, size * keep + np.maximum(0, length))
        total = np.maximum(total, np.maximum(1, size * keep + (position == 0)))
        dropped = np.where(relation == REPEAT, -1, full - keep) if position else dropped
        at = np.full(len(thread), position)
        levels.append((thread, at, keep, dropped, total - tokens, total, output, branches, marks))
        chance = law.ends[mine, _position_bins(at)] * law.at_length[mine, _context_bins(total)]
        ends = rng.random(len(thread)) < np.maximum(chance, _LEAST)
        if law.own_after:
            ends |= total // law.own_after <= base
        thread, tokens, position = thread[~ends], total[~ends], position + 1
    thread, at, keep, dropped, added, total, output, branches, marks = (
        np.concatenate(column) for column in zip(*levels, strict=True)
    )
    order = np.lexsort((at, thread))
    heads = np.flatnonzero(at[order] == 0)
    following = np.arange(1, len(order) + 1, dtype=np.int32)
    following[np.append(heads[1:], len(order)) - 1] = -1
    _, cls = np.unique(law.cls, return_inverse=True)
    none, no = np.full(len(order), -1, np.int32), np.zeros(len(order), np.bool_)
    return Steps(
        heads=heads.astype(np.int32),
        following=following,
        position=at[order].astype(np.int32),
        back=(at[order] > 0).astype(np.int32),
        kept=keep[order].astype(np.int32),
        dropped=dropped[order].astype(np.int32),
        fresh=(total - size * keep)[order],
        added=added[order],
        context=total[order],
        output=np.maximum(1, output[order]),
        gap_s=np.maximum(0.0, marks[order, GAP]),
        think_s=np.maximum(0.0, marks[order, THINK]),
        branches=np.maximum(1, branches[order]).astype(np.int32),
        cls=cls.astype(np.int32)[kind[thread[order]]],
        kind=kind[thread[order]].astype(np.int32),
        thread=thread[order].astype(np.int32),
        parent_step=none,
        is_fork=no,
        join=none.copy(),
        is_held=no.copy(),
        time_bin=np.zeros(len(order), np.int32),
    )
