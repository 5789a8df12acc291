"""The steps of a source: its requests, free of their place, to be used again elsewhere.

A request is a *step* of its thread. A step is free of its place: it says how much of the context it kept
(counted from the context's end where it kept most, from the begin where it dropped most), how much
text it added, how long an answer it got and how long after the step before it came.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.pace import BASE_S, TOKEN_S
from mallee.synth.core.threads import Threads
from mallee.traces.numbers import Bools, Floats, Int32s, Ints
from mallee.traces.trace import Trace

TIME_BINS: Final = 16


@dataclass(frozen=True, slots=True)
class Steps:
    """One row for each request of the source, in its order; -1: none. See the fields' comments.

    `begins` of threads are rows of `heads`. All lengths are tokens but those that say blocks.
    """

    heads: Int32s  # [threads] first step of each thread
    following: Int32s  # next step of its thread
    position: Int32s  # steps before it in its thread
    # how many steps before it the one is that it shares most with; of heads of forked threads: steps before
    # their parent step, which may be -1 (the answer that they go on from is in the step after it); else 0
    back: Int32s
    kept: Int32s  # blocks shared with that one
    dropped: (
        Int32s  # whole blocks of that one that it does not share; -1: it shares a partial one too
    )
    fresh: Ints  # prompt tokens after the shared blocks; of heads: after the forest's
    added: Ints  # prompt tokens more than the one it shares with, where dropped is -1
    context: Ints  # prompt tokens
    output: Ints
    gap_s: Floats  # since the step before began; of heads of spawned threads since the parent step began
    think_s: Floats  # of that gap, tools and people
    branches: Int32s
    cls: Int32s
    kind: Int32s  # equal for equal class and depth in the hierarchy: threads of one kind are alike
    thread: Int32s
    parent_step: Int32s  # of heads: the step that spawned their thread
    is_fork: (
        Bools  # of heads: it goes on from its parent step's context, `kept` and `dropped` say where
    )
    join: Int32s  # of heads of spawned threads: the step that waits for the thread's last one
    is_held: Bools  # what follows belongs to it: of a joined thread, between spawn and join, before a return
    time_bin: Int32s  # of `TIME_BINS` equal parts of the source's requests: when it began

    def __len__(self) -> int:
        return len(self.fresh)


def steps_of(trace: Trace, threads: Threads, forest_depth: Int32s) -> Steps:
    """Steps of `trace`. `forest_depth` of heads: leading blocks that the shared forest gives them."""
    num = len(trace)
    size = trace.block_size
    rows = np.arange(num)
    is_head = threads.previous < 0
    following = np.full(num, -1, np.int32)
    following[threads.previous[~is_head]] = np.flatnonzero(~is_head)
    source, shared = _sources(trace, threads, following)
    own = np.where(is_head & ~threads.is_fork, forest_depth, shared)
    full = trace.input_tokens[source] // size
    has_partial = shared > full  # equal prompts share their partial block too
    position = _positions(threads)
    here = np.where(
        threads.is_fork, position[threads.parent], np.where(is_head, position[source], position)
    )
    gap = trace.arrival_s - trace.arrival_s[np.where(is_head, threads.parent, threads.previous)]
    gap[is_head & (threads.parent < 0)] = 0.0
    join = _joins(trace, threads)
    return Steps(
        heads=threads.heads.astype(np.int32),
        following=following,
        position=position,
        back=(here - position[source]).astype(np.int32),
        kept=own.astype(np.int32),
        dropped=np.where(has_partial, -1, full - shared).astype(np.int32),
        fresh=trace.input_tokens - size * own.astype(np.int64),
        added=trace.input_tokens - trace.input_tokens[source],
        context=trace.input_tokens,
        output=trace.output_tokens,
        gap_s=np.maximum(gap, 0.0),
        think_s=_think_s(trace, threads, np.maximum(gap, 0.0)),
        branches=trace.branches,
        cls=trace.cls,
        kind=_kinds(trace, threads),
        thread=threads.thread,
        parent_step=np.where(is_head, threads.parent, -1).astype(np.int32),
        is_fork=threads.is_fork,
        join=join,
        is_held=_held(threads, join, position, following) | _returning(threads, position),
        time_bin=(rows * TIME_BINS // num).astype(np.int32),
    )


def _sources(trace: Trace, threads: Threads, following: Int32s) -> tuple[Ints, Ints]:
    """The request whose text each one continues (itself: none), and the blocks they share.

    Of a forked thread that is the step after its parent step, where it has more of that: an answer.
    """
    source = np.where(threads.source >= 0, threads.source, np.arange(len(trace))).astype(np.int64)
    shared = threads.shared.astype(np.int64)
    for head in np.flatnonzero(threads.is_fork).tolist():
        after = int(following[threads.parent[head]])
        if after < 0:
            continue
        one, other = trace.path(head), trace.path(after)
        most = min(len(one), len(other))
        differ = np.flatnonzero(one[:most] != other[:most])
        mutual = int(differ[0]) if len(differ) else most
        if mutual > shared[head]:
            source[head], shared[head] = after, mutual
    return source, shared


def _positions(threads: Threads) -> Int32s:
    order = np.argsort(threads.thread, kind="stable")
    counts = np.bincount(threads.thread)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(len(order)) - first
    return position


def _kinds(trace: Trace, threads: Threads) -> Int32s:
    depth = np.zeros(threads.num_threads, np.int64)
    for head in threads.heads.tolist():  # a parent step's thread comes before
        if threads.parent[head] >= 0:
            depth[threads.thread[head]] = depth[threads.thread[threads.parent[head]]] + 1
    both = depth[threads.thread] * len(trace.classes) + trace.cls
    _, kinds = np.unique(both, return_inverse=True)
    found: Int32s = kinds.astype(np.int32)
    return found


def _think_s(trace: Trace, threads: Threads, gap_s: Floats) -> Floats:
    """Tool and human time: the trace's own where it has edges, else what calls leave of the gaps."""
    if threads.has_edges:
        return trace.tool_wait_s
    before = np.where(threads.previous >= 0, threads.previous, threads.parent)
    service = BASE_S + TOKEN_S * trace.output_tokens[before]
    return np.where(before >= 0, np.maximum(0.0, gap_s - service), 0.0)


def _joins(trace: Trace, threads: Threads) -> Int32s:
    """For the head of each spawned thread the request that waits for the thread's last one."""
    num = len(trace)
    heads = threads.heads
    last = np.zeros(threads.num_threads, np.int64)
    np.maximum.at(last, threads.thread, np.arange(num))
    join = np.full(num, -1, np.int32)
    waiting = trace.waiters
    waited = trace.waits
    is_join = (last[threads.thread[waited]] == waited) & (
        threads.thread[waiting] != threads.thread[waited]
    )
    is_join &= threads.session[waiting] == threads.session[waited]
    for r, w in zip(waiting[is_join].tolist(), waited[is_join].tolist(), strict=True):
        head = heads[threads.thread[w]]
        parent_step = threads.parent[head]
        if parent_step >= 0 and threads.thread[r] == threads.thread[parent_step] and join[head] < 0:
            join[head] = r
    return join


def _held(threads: Threads, join: Int32s, position: Int32s, following: Int32s) -> Bools:
    """Steps from a parent step up to the one before the join, and those of the joined thread."""
    joined = np.zeros(threads.num_threads, np.bool_)
    joined[threads.thread[join >= 0]] = True
    held = joined[threads.thread]
    for head in np.flatnonzero(join >= 0).tolist():
        step, end = int(threads.parent[head]), int(join[head])
        while step >= 0 and position[step] < position[end]:
            held[step] = True
            step = int(following[step])
    return held


def _returning(threads: Threads, position: Int32s) -> Bools:
    """Steps from one that a later step of the thread returns to, up to the one before that step."""
    num = len(position)
    held = np.zeros(num, np.bool_)
    before = threads.previous
    returns = np.flatnonzero((before >= 0) & (threads.source >= 0) & (threads.source != before))
    for step in returns.tolist():
        at = int(before[step])
        while at >= 0 and position[at] >= position[threads.source[step]] and not held[at]:
            held[at] = True
            at = int(before[at])
    return held
