"""Threads of steps become requests: lengths, shared blocks and times, each from the step before."""

from typing import NamedTuple

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Bools, Floats, Int32s, Ints


class Plan(NamedTuple):
    """Threads of the source's steps, each row one step: thread i has the rows from `starts[i]` on."""

    starts: Ints
    steps: Int32s  # of each row
    thread: Ints  # of each row
    heads: Int32s  # the first step of each thread
    parent: Ints  # of each thread the row that spawned it; -1: none
    join: Ints  # of each thread the row that waits for its last; -1: none
    is_fork: Bools  # of each thread
    root: Ints  # of each thread the thread of its session without a parent
    order: Ints  # threads, none above its parent's

    @property
    def num_threads(self) -> int:
        return len(self.heads)

    def sessions(self, begins: Ints, steps: Steps) -> tuple["Plan", Ints]:
        """The sessions of the threads `begins` alone, and these threads' new numbers."""
        is_in = np.zeros(self.num_threads, np.bool_)
        is_in[begins] = True
        kept = is_in[self.root]
        counts = np.diff(self.starts)[kept]
        plan = plan_of(counts, self.steps[kept[self.thread]], steps)
        return plan, (np.cumsum(kept) - 1)[begins]


def plan_of(counts: Ints, picked: Int32s, steps: Steps) -> Plan:
    """Threads of so many of the `picked` steps each. With a thread come its parent and what joins it."""
    starts = np.append(0, np.cumsum(counts))
    thread = np.repeat(np.arange(len(counts)), counts)
    heads = picked[starts[:-1]]
    row = np.full(len(steps), -1)
    row[picked[::-1]] = np.arange(len(picked))[::-1]  # of a step used twice: the first one
    parent, join = (
        np.where(each[heads] >= 0, row[each[heads]], -1) for each in (steps.parent_step, steps.join)
    )
    above = np.where(parent >= 0, thread[parent], np.arange(len(heads)))
    root, depth = np.arange(len(heads)), np.zeros(len(heads), np.int64)
    while (is_below := above[root] != root).any():
        depth += is_below
        root = above[root]
    order = np.argsort(depth, kind="stable")
    return Plan(
        starts=starts,
        steps=picked,
        thread=thread,
        heads=heads,
        parent=parent,
        join=join,
        is_fork=steps.is_fork[heads],
        root=root,
        order=order,
    )


class Changes(NamedTuple):
    """The change that each of the source's steps makes to the context before it; see `Steps`."""

    back: Int32s
    kept: Int32s
    dropped: Int32s
    added: Ints
    base: Int32s  # blocks of the forest in the first request of the step's own thread


class Bases(NamedTuple):
    """By thread of a plan."""

    text: Ints  # blocks of its text in the forest
    first: Ints  # how many of these its first request has


class Lengths(NamedTuple):
    """By row of a plan."""

    tokens: Ints  # of the prompt
    source: Ints  # row that it shares most with, or -1
    shared: Ints  # blocks shared with that, or with the forest's text
    blocks: Ints
    text: Ints  # leading blocks with the ids of the forest's text, if not shared with `source`


@kernel
def walk_lengths(
    plan: Plan, changes: Changes, bases: Bases, fresh: Ints, size: int, has_partial: bool
) -> Lengths:
    """Lengths of all prompts of a plan, of which `fresh` tokens come after the shared blocks."""
    starts = plan.starts
    num = len(fresh)
    tokens = np.zeros(num, np.int64)
    source = np.full(num, -1, np.int64)
    shared = np.zeros(num, np.int64)
    blocks = np.zeros(num, np.int64)
    named = np.zeros(num, np.int64)
    is_first = np.zeros(num + 1, np.bool_)
    is_first[starts] = True
    for place in range(len(plan.order)):
        thread = plan.order[place]
        base = bases.first[thread]
        is_trunk = not plan.is_fork[thread]  # nothing was dropped so far
        for i in range(starts[thread], starts[thread + 1]):
            step = plan.steps[i]
            back, kept, dropped = changes.back[step], changes.kept[step], changes.dropped[step]
            if i == starts[thread]:
                other = plan.parent[thread] if plan.is_fork[thread] else -1
                if other >= 0 and back < 0 and not is_first[other + 1]:
                    other += 1
            else:
                other = max(starts[thread], i - max(1, back))
            if other < 0:
                keep = base
                total = size * keep + fresh[i]
            else:
                source[i] = other
                has_text = kept >= changes.base[step]  # all of the forest's
                if dropped < 0:  # an equal prompt, partial block and all
                    keep = blocks[other]
                    total = tokens[other] + changes.added[step]
                else:
                    full = tokens[other] // size
                    if dropped <= kept:
                        keep = full - dropped
                        if has_text:
                            keep = max(keep, base)
                    elif has_text:
                        keep = base + kept - changes.base[step]
                    else:
                        keep = min(base, kept)
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
def walk_times(plan: Plan, gap_s: Floats) -> Floats:
    """Begin of each index after its session's. Joined threads are fitted in before their join.

    `gap_s` of a spawned thread's first index is after its parent.
    """
    starts = plan.starts
    at_s = np.zeros(len(gap_s))
    for place in range(len(plan.order)):
        thread = plan.order[place]
        low, high = starts[thread], starts[thread + 1]
        above, join = plan.parent[thread], plan.join[thread]
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
def walk_turns(plan: Plan) -> Ints:
    """For each index how many others come before it, one waiting for another: the order at equal times."""
    starts = plan.starts
    turn = np.zeros(starts[-1], np.int64)
    least = np.zeros(starts[-1], np.int64)  # after those that are joined
    is_changed = True
    while is_changed:  # as often as joins are nested
        is_changed = False
        for place in range(len(plan.order)):
            thread = plan.order[place]
            above, join = plan.parent[thread], plan.join[thread]
            now = 0 if above < 0 else turn[above] + 1
            for i in range(starts[thread], starts[thread + 1]):
                now = max(now, least[i])
                turn[i] = now
                now += 1
            if join >= 0 and least[join] < now:
                least[join] = now
                is_changed = True
    return turn


def seconds_left(steps: Steps, begins_s: Floats, end_s: float) -> Floats:
    """From each of the source's steps to its end. `begins_s`: of the threads without a parent."""
    order = np.lexsort((steps.position, steps.thread)).astype(np.int32)
    plan = plan_of(np.bincount(steps.thread), order, steps)
    begin_s = np.zeros(plan.num_threads)
    begin_s[plan.parent < 0] = begins_s
    left_s = np.empty(len(steps))
    left_s[order] = end_s - begin_s[plan.root[plan.thread]] - walk_times(plan, steps.gap_s[order])
    return left_s
