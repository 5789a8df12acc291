"""Lines of steps become requests: lengths, shared blocks and times, each from the one before."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.synth.session.recombine import Plan
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Bools, Floats, Int32s, Ints


@dataclass(frozen=True, slots=True)
class Places:
    """Where each line of a plan hangs. Lines are in an order in which none is above its parent."""

    order: Ints  # lines, parents first
    spawner: Int32s  # index (into the plan's steps) of the step that spawned each line, or -1
    join: Int32s  # index of the step that waits for each line's last, or -1


class Lengths(NamedTuple):
    """By index of a plan's steps."""

    tokens: Ints  # of the prompt
    source: Ints  # index that it shares most with, or -1
    shared: Ints  # blocks shared with that, or with the forest's text
    blocks: Ints
    text: (
        Ints  # leading blocks whose ids are those of the forest's text, if not shared with `source`
    )

    def without_ids(self) -> "Lengths":
        """For a source that names no blocks."""
        none = np.zeros_like(self.tokens)
        return Lengths(self.tokens, none - 1, none, none, none)


@kernel
def walk_lengths(
    starts: Ints,
    order: Ints,
    spawner: Int32s,
    is_fork: Bools,  # per line
    back: Int32s,
    kept: Int32s,
    dropped: Int32s,
    fresh: Ints,
    added: Ints,
    text: Ints,  # per line: blocks of its text in the forest
    base: Ints,  # per line: how many of these its first request has
    source_base: Ints,  # per index: how many the first request of the step's own line had
    size: int,
    has_partial: bool,
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The fields of `Lengths`."""
    num = len(fresh)
    tokens = np.zeros(num, np.int64)
    source = np.full(num, -1, np.int64)
    shared = np.zeros(num, np.int64)
    blocks = np.zeros(num, np.int64)
    named = np.zeros(num, np.int64)
    is_first = np.zeros(num + 1, np.bool_)
    is_first[starts] = True
    for place in range(len(order)):
        line = order[place]
        is_trunk = not is_fork[line]  # nothing was dropped so far
        for i in range(starts[line], starts[line + 1]):
            if i == starts[line]:
                other = spawner[line] if is_fork[line] else -1
                if other >= 0 and back[i] < 0 and not is_first[other + 1]:
                    other += 1
            else:
                other = max(starts[line], i - max(1, back[i]))
            if other < 0:
                keep = base[line]
                total = size * keep + fresh[i]
            else:
                source[i] = other
                if dropped[i] < 0:  # an equal prompt, partial block and all
                    keep = blocks[other]
                    total = tokens[other] + added[i]
                else:
                    full = tokens[other] // size
                    if dropped[i] <= kept[i]:
                        keep = full - dropped[i]
                        if kept[i] >= source_base[i]:  # all of the forest's text
                            keep = max(keep, base[line])
                    elif kept[i] >= source_base[i]:
                        keep = base[line] + kept[i] - source_base[i]
                    else:
                        keep = min(base[line], kept[i])
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
            if is_trunk:
                named[i] = min(text[line], total // size)
                if (
                    other < 0 and total < size * keep
                ):  # it ends inside the text's last, partial block
                    named[i] = min(keep, count)
    return tokens, source, shared, blocks, named


@kernel
def walk_times(
    starts: Ints,
    order: Ints,
    spawner: Int32s,
    join: Int32s,
    gap_s: Floats,  # per index; of a spawned line's first: after its spawner
) -> Floats:
    """When each index begins after its session did. Lines that are joined are fitted in before their join."""
    at_s = np.zeros(len(gap_s))
    for place in range(len(order)):
        line = order[place]
        low, high = starts[line], starts[line + 1]
        above = spawner[line]
        at_s[low] = 0.0 if above < 0 else at_s[above] + gap_s[low]
        for i in range(low + 1, high):
            at_s[i] = at_s[i - 1] + gap_s[i]
        if above >= 0 and join[line] >= 0 and at_s[high - 1] >= at_s[join[line]]:
            room = at_s[join[line]] - at_s[above]
            scale = 0.999 * room / (at_s[high - 1] - at_s[above]) if room > 0 else 0.0
            for i in range(low, high):
                at_s[i] = at_s[above] + scale * (at_s[i] - at_s[above])
    return at_s


@kernel
def walk_turns(starts: Ints, order: Ints, spawner: Int32s, join: Int32s) -> Ints:
    """For each index how many others come before it, one waiting for another: its order at equal times."""
    turn = np.zeros(starts[-1], np.int64)
    least = np.zeros(starts[-1], np.int64)  # after those that are joined
    is_changed = True
    while is_changed:  # as often as joins are nested
        is_changed = False
        for place in range(len(order)):
            line = order[place]
            now = 0 if spawner[line] < 0 else turn[spawner[line]] + 1
            for i in range(starts[line], starts[line + 1]):
                now = max(now, least[i])
                turn[i] = now
                now += 1
            if join[line] >= 0 and least[join[line]] < now:
                least[join[line]] = now
                is_changed = True
    return turn


@kernel
def paths_of(
    picked: Ints,
    source: Ints,
    shared: Ints,
    first: Ints,
    blocks: Ints,
    text: Ints,
    forest: Ints,
    forest_starts: Ints,
    root: Ints,
) -> tuple[Ints, Ints]:
    """(starts, ids) of the `picked` indices' paths, one after another.

    Index i has, after the `shared[i]` of its source, up to `text[i]` blocks of the forest's path
    `root[i]`, and then `first[i]`, `first[i]` + 1 and so on. One without a source has the forest's from its
    begin.
    """
    starts = np.zeros(len(picked) + 1, np.int64)
    for k in range(len(picked)):
        starts[k + 1] = starts[k] + blocks[picked[k]]
    ids = np.empty(starts[-1], np.int64)
    for k in range(len(picked)):
        i = picked[k]
        high = blocks[i]
        low = starts[k]
        while high > 0:
            keep = shared[i] if source[i] >= 0 else 0
            for b in range(max(keep, text[i]), high):
                ids[low + b] = first[i] + b - shared[i]
            if text[i] > keep:
                at = forest_starts[root[i]]
                for b in range(keep, min(text[i], high)):
                    ids[low + b] = forest[at + b]
            high = min(high, keep)
            i = source[i]
    return starts, ids


def places_of(plan: Plan, spawner_step: Int32s, join_step: Int32s) -> Places:
    """`spawner_step`, `join_step`: per line, the source's steps; -1: none."""
    tops = [int(each.max(initial=0)) for each in (plan.steps, spawner_step, join_step)]
    where = np.full(max(tops) + 1, -1, np.int64)
    where[plan.steps[::-1]] = np.arange(len(plan.steps))[::-1]  # a step used twice: the first one
    spawner = np.where(spawner_step >= 0, where[np.maximum(spawner_step, 0)], -1).astype(np.int32)
    join = np.where(join_step >= 0, where[np.maximum(join_step, 0)], -1).astype(np.int32)
    line_of = np.repeat(np.arange(plan.num_lines), np.diff(plan.starts))
    is_joined = (join >= 0) & (spawner >= 0)
    lost = is_joined & ((line_of[join] != line_of[spawner]) | (join <= spawner))
    join[lost | (spawner < 0)] = -1
    return Places(_parents_first(spawner, line_of), spawner, join)


def seconds_left(steps: Steps, begins_s: Floats, end_s: float) -> Floats:
    """From each of the source's steps to its end. `begins_s`: of the lines that nobody spawned."""
    order = np.lexsort((steps.position, steps.thread)).astype(np.int32)
    starts = np.append(0, np.cumsum(np.bincount(steps.thread)))
    spawner = steps.parent_step[steps.heads]
    places = places_of(Plan(starts, order), spawner, steps.join[steps.heads])
    begin_s = np.zeros(len(spawner))
    begin_s[spawner < 0] = begins_s
    for line in np.flatnonzero(spawner >= 0).tolist():  # a spawner's line comes before
        begin_s[line] = begin_s[steps.thread[spawner[line]]]
    since_s = walk_times(starts, places.order, places.spawner, places.join, steps.gap_s[order])
    left_s = np.empty(len(steps))
    left_s[order] = end_s - begin_s[steps.thread[order]] - since_s
    return left_s


def _parents_first(spawner: Int32s, line_of: Ints) -> Ints:
    parent = np.where(spawner >= 0, line_of[np.maximum(spawner, 0)], -1)
    depth = np.zeros(len(parent), np.int64)
    above = parent
    while (is_below := above >= 0).any():
        depth[is_below] += 1
        above = np.where(is_below, parent[np.maximum(above, 0)], -1)
    return np.argsort(depth, kind="stable")
