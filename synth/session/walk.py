"""Threads of steps become requests: lengths, shared blocks and times, each from the step before."""

from typing import NamedTuple

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Bools, Floats, Int32s, Ints


class Plan(NamedTuple):
    """Threads of the source's steps: thread i is `steps[starts[i]:starts[i + 1]]`."""

    starts: Ints
    steps: Int32s

    @property
    def num_threads(self) -> int:
        return len(self.starts) - 1

    @property
    def thread_of(self) -> Ints:
        """Thread of each index."""
        return np.repeat(np.arange(self.num_threads), np.diff(self.starts))


class Places(NamedTuple):
    """The hierarchy of a plan's threads; indices are into the plan's steps, -1: none."""

    order: Ints  # threads, none above its parent's
    parent: Int32s  # of each thread the index that spawned it
    join: Int32s  # of each thread the index that waits for its last


class Changes(NamedTuple):
    """The change that each index makes to the context before it; see `Steps`."""

    back: Int32s
    kept: Int32s
    dropped: Int32s
    fresh: Ints
    added: Ints
    source_base: Ints  # blocks of the forest in the first request of the step's own thread


class Bases(NamedTuple):
    """By thread."""

    is_fork: Bools
    text: Ints  # blocks of its text in the forest
    first: Ints  # how many of these its first request has


class Lengths(NamedTuple):
    """By index of a plan's steps."""

    tokens: Ints  # of the prompt
    source: Ints  # index that it shares most with, or -1
    shared: Ints  # blocks shared with that, or with the forest's text
    blocks: Ints
    text: Ints  # leading blocks with the ids of the forest's text, if not shared with `source`

    def without_ids(self) -> "Lengths":
        """For a source that names no blocks."""
        none = np.zeros_like(self.tokens)
        return Lengths(self.tokens, none - 1, none, none, none)


class Paths(NamedTuple):
    """Rows whose block ids can be spelled out."""

    source: Ints  # row whose path it shares `shared` blocks of
    shared: Ints
    blocks: Ints
    first_id: Ints  # of the blocks after the shared ones
    text: Ints  # blocks that are of the forest's text
    root: Ints  # number of that text


@kernel
def walk_lengths(
    plan: Plan, places: Places, changes: Changes, bases: Bases, size: int, has_partial: bool
) -> Lengths:
    """Lengths of all prompts of a plan."""
    starts, kept, dropped, fresh = plan.starts, changes.kept, changes.dropped, changes.fresh
    num = len(fresh)
    tokens = np.zeros(num, np.int64)
    source = np.full(num, -1, np.int64)
    shared = np.zeros(num, np.int64)
    blocks = np.zeros(num, np.int64)
    named = np.zeros(num, np.int64)
    is_first = np.zeros(num + 1, np.bool_)
    is_first[starts] = True
    for place in range(len(places.order)):
        thread = places.order[place]
        base = bases.first[thread]
        is_trunk = not bases.is_fork[thread]  # nothing was dropped so far
        for i in range(starts[thread], starts[thread + 1]):
            if i == starts[thread]:
                other = places.parent[thread] if bases.is_fork[thread] else -1
                if other >= 0 and changes.back[i] < 0 and not is_first[other + 1]:
                    other += 1
            else:
                other = max(starts[thread], i - max(1, changes.back[i]))
            if other < 0:
                keep = base
                total = size * keep + fresh[i]
            else:
                source[i] = other
                has_text = kept[i] >= changes.source_base[i]  # all of the forest's
                if dropped[i] < 0:  # an equal prompt, partial block and all
                    keep = blocks[other]
                    total = tokens[other] + changes.added[i]
                else:
                    full = tokens[other] // size
                    if dropped[i] <= kept[i]:
                        keep = full - dropped[i]
                        if has_text:
                            keep = max(keep, base)
                    elif has_text:
                        keep = base + kept[i] - changes.source_base[i]
                    else:
                        keep = min(base, kept[i])
                    keep = max(0, min(keep, full))
                    total = size * keep + fresh[i]
            total = max(1, total)
            tokens[i] = total
            count = total // size
            if has_partial and total % size:
                count += 1
            blocks[i] = count
            shared[i] = min(keep, count)
            if other >= 0:
                is_trunk &= other == i - 1 and shared[i] >= tokens[other] // size
                # a shared partial block is the request's own, and the forest's text ends before it
                is_trunk &= shared[i] <= named[other] or named[other] >= bases.text[thread]
            if is_trunk:
                named[i] = min(bases.text[thread], total // size)
                if (
                    other < 0 and total < size * keep
                ):  # it ends inside the text's last, partial block
                    named[i] = min(keep, count)
    return Lengths(tokens, source, shared, blocks, named)


@kernel
def walk_times(plan: Plan, places: Places, gap_s: Floats) -> Floats:
    """Begin of each index after its session's. Joined threads are fitted in before their join.

    `gap_s` of a spawned thread's first index is after its parent.
    """
    starts = plan.starts
    at_s = np.zeros(len(gap_s))
    for place in range(len(places.order)):
        thread = places.order[place]
        low, high = starts[thread], starts[thread + 1]
        above, join = places.parent[thread], places.join[thread]
        at_s[low] = 0.0 if above < 0 else at_s[above] + gap_s[low]
        for i in range(low + 1, high):
            at_s[i] = at_s[i - 1] + gap_s[i]
        if above >= 0 and join >= 0 and at_s[high - 1] >= at_s[join]:
            room = at_s[join] - at_s[above]
            scale = 0.999 * room / (at_s[high - 1] - at_s[above]) if room > 0 else 0.0
            for i in range(low, high):
                at_s[i] = at_s[above] + scale * (at_s[i] - at_s[above])
    return at_s


@kernel
def walk_turns(plan: Plan, places: Places) -> Ints:
    """For each index how many others come before it, one waiting for another: the order at equal times."""
    starts = plan.starts
    turn = np.zeros(starts[-1], np.int64)
    least = np.zeros(starts[-1], np.int64)  # after those that are joined
    is_changed = True
    while is_changed:  # as often as joins are nested
        is_changed = False
        for place in range(len(places.order)):
            thread = places.order[place]
            above, join = places.parent[thread], places.join[thread]
            now = 0 if above < 0 else turn[above] + 1
            for i in range(starts[thread], starts[thread + 1]):
                now = max(now, least[i])
                turn[i] = now
                now += 1
            if join >= 0 and least[join] < now:
                least[join] = now
                is_changed = True
    return turn


@kernel
def spell_out(picked: Ints, rows: Paths, forest_starts: Ints, forest: Ints) -> tuple[Ints, Ints]:
    """(starts, ids) of the `picked` rows' paths, one after another.

    A row has, after the `shared` blocks of its source, up to `text` blocks of the forest's path `root`, then
    `first_id`, `first_id` + 1 and so on. Without a source it has the forest's from the begin.
    """
    starts = np.zeros(len(picked) + 1, np.int64)
    for k in range(len(picked)):
        starts[k + 1] = starts[k] + rows.blocks[picked[k]]
    ids = np.empty(starts[-1], np.int64)
    for k in range(len(picked)):
        i = picked[k]
        high = rows.blocks[i]
        low = starts[k]
        while high > 0:
            keep = rows.shared[i] if rows.source[i] >= 0 else 0
            for b in range(max(keep, rows.text[i]), high):
                ids[low + b] = rows.first_id[i] + b - rows.shared[i]
            if rows.text[i] > keep:
                at = forest_starts[rows.root[i]]
                for b in range(keep, min(rows.text[i], high)):
                    ids[low + b] = forest[at + b]
            high = min(high, keep)
            i = rows.source[i]
    return starts, ids


def places_of(plan: Plan, parent_step: Int32s, join_step: Int32s) -> Places:
    """`parent_step`, `join_step`: per thread, the source's steps; -1: none."""
    tops = [int(each.max(initial=0)) for each in (plan.steps, parent_step, join_step)]
    where = np.full(max(tops) + 1, -1, np.int64)
    where[plan.steps[::-1]] = np.arange(len(plan.steps))[::-1]  # a step used twice: the first one
    parent = np.where(parent_step >= 0, where[np.maximum(parent_step, 0)], -1).astype(np.int32)
    join = np.where(join_step >= 0, where[np.maximum(join_step, 0)], -1).astype(np.int32)
    thread_of = plan.thread_of
    is_joined = (join >= 0) & (parent >= 0)
    lost = is_joined & ((thread_of[join] != thread_of[parent]) | (join <= parent))
    join[lost | (parent < 0)] = -1
    return Places(_parents_first(parent, thread_of), parent, join)


def seconds_left(steps: Steps, begins_s: Floats, end_s: float) -> Floats:
    """From each of the source's steps to its end. `begins_s`: of the threads without a parent."""
    order = np.lexsort((steps.position, steps.thread)).astype(np.int32)
    plan = Plan(np.append(0, np.cumsum(np.bincount(steps.thread))), order)
    parent = steps.parent_step[steps.heads]
    places = places_of(plan, parent, steps.join[steps.heads])
    begin_s = np.zeros(len(parent))
    begin_s[parent < 0] = begins_s
    for thread in np.flatnonzero(parent >= 0).tolist():  # a parent's thread comes before
        begin_s[thread] = begin_s[steps.thread[parent[thread]]]
    since_s = walk_times(plan, places, steps.gap_s[order])
    left_s = np.empty(len(steps))
    left_s[order] = end_s - begin_s[steps.thread[order]] - since_s
    return left_s


def _parents_first(parent: Int32s, thread_of: Ints) -> Ints:
    above_of = np.where(parent >= 0, thread_of[np.maximum(parent, 0)], -1)
    depth = np.zeros(len(above_of), np.int64)
    above = above_of
    while (is_below := above >= 0).any():
        depth[is_below] += 1
        above = np.where(is_below, above_of[np.maximum(above, 0)], -1)
    return np.argsort(depth, kind="stable")
