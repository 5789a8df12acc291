"""What each request of a source did, told so that it can be done again somewhere else.

A request is a *step* of its line. A step is free of its place: it says how much of the context it kept
(counted from the context's end where it kept most, from the begin where it dropped most), how much
text it added, how long an answer it got and how long after the step before it came.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.threads import Lines
from mallee.traces.numbers import Bools, Floats, Int32s, Ints
from mallee.traces.trace import Trace

STRATA: Final = 16
BASE_S: Final = 0.05
TOKEN_S: Final = 0.02
"""A call's service time, where the trace has none: so much, and so much for each token of its answer."""


@dataclass(frozen=True, slots=True)
class Steps:
    """One row for each request of the source, in its order; -1: none. See the fields' comments.

    `begins` of lines are rows of `heads`. All lengths are tokens but those that say blocks.
    """

    heads: Int32s  # [lines] first step of each line
    following: Int32s  # next step of its line
    position: Int32s  # steps before it in its line
    # how many steps before it the one is that it shares most with; of heads of forked lines: steps before
    # their spawner, which may be -1 (the answer that they go on from is in the step after it); else 0
    back: Int32s
    kept: Int32s  # blocks shared with that one
    dropped: (
        Int32s  # whole blocks of that one that it does not share; -1: it shares a partial one too
    )
    fresh: Ints  # prompt tokens after the shared blocks; of heads: after the forest's
    added: Ints  # prompt tokens more than the one it shares with, where dropped is -1
    context: Ints  # prompt tokens
    output: Ints
    gap_s: Floats  # since the step before began; of heads of spawned lines since the spawner began
    think_s: Floats  # of that gap, tools and people
    branches: Int32s
    cls: Int32s
    kind: Int32s  # equal for equal class and depth in the hierarchy: lines of one kind are alike
    line: Int32s
    spawner: Int32s  # of heads: the step that spawned their line
    is_fork: Bools  # of heads: the line goes on from its spawner's context, `kept` and `dropped` say where
    join: Int32s  # of heads of spawned lines: the step that waits for the line's last one
    is_held: Bools  # what follows belongs to it: of a joined line, between spawn and join, before a return
    stratum: Int32s  # of `STRATA` equal parts of the source's requests: when it began

    def __len__(self) -> int:
        return len(self.fresh)


def steps_of(trace: Trace, lines: Lines, forest_depth: Int32s) -> Steps:
    """Steps of `trace`. `forest_depth` of heads: leading blocks that the shared forest gives them."""
    num = len(trace)
    size = trace.block_size
    rows = np.arange(num)
    is_head = lines.previous < 0
    following = np.full(num, -1, np.int32)
    following[lines.previous[~is_head]] = np.flatnonzero(~is_head)
    source, shared = _sources(trace, lines, following)
    own = np.where(is_head & ~lines.is_fork, forest_depth, shared)
    full = trace.input_tokens[source] // size
    has_partial = shared > full  # equal prompts share their partial block too
    position = _positions(lines)
    here = np.where(
        lines.is_fork, position[lines.spawner], np.where(is_head, position[source], position)
    )
    gap = trace.arrival_s - trace.arrival_s[np.where(is_head, lines.spawner, lines.previous)]
    gap[is_head & (lines.spawner < 0)] = 0.0
    join = _joins(trace, lines)
    return Steps(
        heads=lines.heads.astype(np.int32),
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
        think_s=_think_s(trace, lines, np.maximum(gap, 0.0)),
        branches=trace.branches,
        cls=trace.cls,
        kind=_kinds(trace, lines),
        line=lines.line,
        spawner=np.where(is_head, lines.spawner, -1).astype(np.int32),
        is_fork=lines.is_fork,
        join=join,
        is_held=_held(lines, join, position, following) | _returning(lines, position),
        stratum=(rows * STRATA // num).astype(np.int32),
    )


def _sources(trace: Trace, lines: Lines, following: Int32s) -> tuple[Ints, Ints]:
    """Whose text each request goes on from (itself: nobody's), and how many blocks of it.

    Of a forked line that is the step after its spawner, where it has more of that: the spawner's answer.
    """
    source = np.where(lines.source >= 0, lines.source, np.arange(len(trace))).astype(np.int64)
    shared = lines.shared.astype(np.int64)
    for head in np.flatnonzero(lines.is_fork).tolist():
        after = int(following[lines.spawner[head]])
        if after < 0:
            continue
        one, other = trace.path(head), trace.path(after)
        most = min(len(one), len(other))
        differ = np.flatnonzero(one[:most] != other[:most])
        mutual = int(differ[0]) if len(differ) else most
        if mutual > shared[head]:
            source[head], shared[head] = after, mutual
    return source, shared


def _positions(lines: Lines) -> Int32s:
    order = np.argsort(lines.line, kind="stable")
    counts = np.bincount(lines.line)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    position = np.empty(len(order), np.int32)
    position[order] = np.arange(len(order)) - first
    return position


def _kinds(trace: Trace, lines: Lines) -> Int32s:
    depth = np.zeros(lines.num_lines, np.int64)
    for head in lines.heads.tolist():  # a spawner's line comes before
        if lines.spawner[head] >= 0:
            depth[lines.line[head]] = depth[lines.line[lines.spawner[head]]] + 1
    both = depth[lines.line] * len(trace.classes) + trace.cls
    _, kinds = np.unique(both, return_inverse=True)
    found: Int32s = kinds.astype(np.int32)
    return found


def _think_s(trace: Trace, lines: Lines, gap_s: Floats) -> Floats:
    """Tool and human time: the trace's own where it has edges, else what calls leave of the gaps."""
    if lines.has_edges:
        return trace.tool_wait_s
    before = np.where(lines.previous >= 0, lines.previous, lines.spawner)
    service = BASE_S + TOKEN_S * trace.output_tokens[before]
    return np.where(before >= 0, np.maximum(0.0, gap_s - service), 0.0)


def _joins(trace: Trace, lines: Lines) -> Int32s:
    """For the head of each spawned line the request that waits for the line's last one."""
    num = len(trace)
    heads = lines.heads
    last = np.zeros(lines.num_lines, np.int64)
    np.maximum.at(last, lines.line, np.arange(num))
    join = np.full(num, -1, np.int32)
    waiting = np.repeat(np.arange(num), np.diff(trace.wait_starts))
    waited = trace.waits
    is_join = (last[lines.line[waited]] == waited) & (lines.line[waiting] != lines.line[waited])
    is_join &= lines.session[waiting] == lines.session[waited]
    for r, w in zip(waiting[is_join].tolist(), waited[is_join].tolist(), strict=True):
        head = heads[lines.line[w]]
        spawner = lines.spawner[head]
        if spawner >= 0 and lines.line[r] == lines.line[spawner] and join[head] < 0:
            join[head] = r
    return join


def _held(lines: Lines, join: Int32s, position: Int32s, following: Int32s) -> Bools:
    """Steps from a spawner up to the one before the join, and those of the joined line."""
    joined = np.zeros(lines.num_lines, np.bool_)
    joined[lines.line[join >= 0]] = True
    held = joined[lines.line]
    for head in np.flatnonzero(join >= 0).tolist():
        step, end = int(lines.spawner[head]), int(join[head])
        while step >= 0 and position[step] < position[end]:
            held[step] = True
            step = int(following[step])
    return held


def _returning(lines: Lines, position: Int32s) -> Bools:
    """Steps from one that a later step of the line returns to, up to the one before that step."""
    num = len(position)
    held = np.zeros(num, np.bool_)
    before = lines.previous
    returns = np.flatnonzero((before >= 0) & (lines.source >= 0) & (lines.source != before))
    for step in returns.tolist():
        at = int(before[step])
        while at >= 0 and position[at] >= position[lines.source[step]] and not held[at]:
            held[at] = True
            at = int(before[at])
    return held
