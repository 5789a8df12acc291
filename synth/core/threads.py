"""Which request goes on from which: a trace taken apart into lines of calls.

A *line* is one context that grows call by call: a session's main thread, or one sub-agent of it. Where
a trace names sessions these are believed, and inside a session class and `wait_for` tell lines
apart. Where it names none, a request goes on from the one that touched the deepest block they
share last, unless that block is *public*: a root that many different texts go on from (a system
prompt) says nothing about who is talking. Where sessions are named and waits are not, a request that has less
than half of the other's blocks begins a line of its own, unless the other line is over: then
that line has dropped its context.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.synth.core.prefix_tree import PrefixTree
from mallee.traces.numbers import Bools, Int32s, Ints
from mallee.traces.trace import Trace

PUBLIC_CHILDREN: Final = 5
"""A block that so many different blocks follow is public, where sessions have no names."""


@dataclass(frozen=True, slots=True)
class Lines:
    """For each of the trace's requests; -1: none.

    A line is spawned by a request of its session's other line and brings a root of its own, or, if
    `is_fork`, starts with what that request had.
    """

    line: Int32s  # its line; lines are numbered by first request
    previous: Int32s  # the request before it in its line
    source: Int32s  # earlier request of the line (of a forked line: of its parent's) it shares most with
    shared: Int32s  # leading blocks it has in common with `source`; 0 without one
    session: Int32s  # number of its session, numbered by first request
    spawner: Int32s  # of the first request of a line: the request that spawned or forked the line
    is_fork: Bools  # of the first request of a line
    has_edges: bool  # whether the trace says who waits for whom

    @property
    def num_lines(self) -> int:
        return int(self.line.max(initial=-1)) + 1

    @property
    def heads(self) -> Ints:
        """First request of each line."""
        return np.flatnonzero(self.previous < 0)


def lines_of(trace: Trace) -> Lines:
    """Takes `trace` apart. O(block references). Raises CodecError if its blocks are no prefix tree."""
    has_edges = len(trace.waits) > 0
    line, previous, source, shared, session, spawner, is_fork = take_apart(
        trace.starts,
        trace.blocks,
        trace.session,
        trace.cls,
        trace.wait_starts,
        trace.waits,
        public_blocks(trace),
        np.bincount(trace.waits, minlength=len(trace)),
        has_edges,
    )
    return Lines(line, previous, source, shared, session, spawner, is_fork, has_edges)


def public_blocks(trace: Trace) -> Bools:
    """Blocks that many others follow, and all before them."""
    tree = PrefixTree.of(trace)
    return with_ancestors(tree.children >= PUBLIC_CHILDREN, tree.parents)


# Takes a trace apart into lines: see `session.lines`, which says what the rules are.


@kernel
def with_ancestors(is_public: Bools, parents: Int32s) -> Bools:
    """Marks all blocks before a marked one, too."""
    for block in range(len(parents) - 1, -1, -1):  # a block's number is above its parent's
        if is_public[block] and parents[block] >= 0:
            is_public[parents[block]] = True
    return is_public


@kernel
def _common(starts: Ints, blocks: Int32s, one: int, other: int) -> int:
    """Leading blocks that two requests share."""
    most = min(starts[one + 1] - starts[one], starts[other + 1] - starts[other])
    shared = 0
    while shared < most and blocks[starts[one] + shared] == blocks[starts[other] + shared]:
        shared += 1
    return shared


@kernel
def _is_own(starts: Ints, blocks: Int32s, is_public: Bools, request: int, depth: int) -> bool:
    """Whether the request's text after `depth` blocks is no public one: nobody else begins like that."""
    at = starts[request] + depth
    if at >= starts[request + 1]:
        return True
    return not is_public[blocks[at]]


@kernel
def _is_most(starts: Ints, shared: int, request: int) -> bool:
    """Whether `shared` blocks are more than half of a request's."""
    return bool(2 * shared > starts[request + 1] - starts[request])


@kernel
def _awaited(
    starts: Ints,
    blocks: Int32s,
    wait_starts: Ints,
    waits: Int32s,
    cls: Int32s,
    session: Int32s,
    line: Int32s,
    last: Int32s,
    r: int,
    s: int,
    near: int,
    depth: int,
) -> tuple[int, int, int, int]:
    """Whom of session `s` request r waits for and shares most with, and how much; -1: nobody.

    First of all, then of those of its class that are the latest of their lines. What it shares with a line
    is `depth` if `near` is of that line.
    """
    parent, with_parent = -1, -1
    tip, with_tip = -1, -1
    for w in range(wait_starts[r], wait_starts[r + 1]):
        other = waits[w]
        if session[other] != s:
            continue
        mutual = _common(starts, blocks, r, other)
        if mutual > with_parent:
            parent, with_parent = other, mutual
        if near >= 0 and line[near] == line[other]:
            mutual = depth
        if cls[other] == cls[r] and last[line[other]] == other and mutual > with_tip:
            tip, with_tip = other, mutual
    return parent, with_parent, tip, with_tip


@kernel
def _goes_on(
    starts: Ints,
    blocks: Int32s,
    is_public: Bools,
    followers: Ints,
    r: int,
    tip: int,
    shared: int,
) -> bool:
    """Whether r is the next of the line that ends with `tip`, which it waits for."""
    if _is_most(starts, shared, tip):
        return True
    if followers[tip] == 1 and _is_own(starts, blocks, is_public, r, shared):
        return True  # nobody else goes on from there: a context dropped
    return shared > 0 and not is_public[blocks[starts[r] + shared - 1]]


@kernel
def take_apart(
    starts: Ints,
    blocks: Int32s,
    named: Int32s,  # session by name, -1: none
    cls: Int32s,
    wait_starts: Ints,
    waits: Int32s,
    is_public: Bools,
    followers: Ints,  # how many wait for each request
    has_edges: bool,
) -> tuple[Int32s, Int32s, Int32s, Int32s, Int32s, Int32s, Bools]:
    """The fields of `session.lines.Lines`."""
    num = len(starts) - 1
    toucher = np.full(len(is_public), -1, np.int32)  # request that touched the block last
    line = np.full(num, -1, np.int32)
    previous = np.full(num, -1, np.int32)
    source = np.full(num, -1, np.int32)
    shared = np.zeros(num, np.int32)
    session = np.full(num, -1, np.int32)
    spawner = np.full(num, -1, np.int32)
    is_fork = np.zeros(num, np.bool_)
    last = np.full(num, -1, np.int32)  # of each line its latest request
    latest = np.full(num, -1, np.int32)  # of each session its latest request
    num_names = 1  # a part of a trace has fewer requests than the whole has sessions
    for r in range(num):
        num_names = max(num_names, named[r] + 1)
    by_name = np.full(num_names, -1, np.int32)
    num_lines = 0
    num_sessions = 0
    for r in range(num):
        low, high = starts[r], starts[r + 1]
        depth = 0
        while low + depth < high and toucher[blocks[low + depth]] >= 0:
            depth += 1
        near = toucher[blocks[low + depth - 1]] if depth else -1
        s = by_name[named[r]] if named[r] >= 0 else -1
        mine = -1  # the line it belongs to
        parent, with_parent = -1, 0
        if s >= 0:
            is_like = near >= 0 and session[near] == s and cls[near] == cls[r]
            parent, with_parent, tip, with_tip = _awaited(
                starts, blocks, wait_starts, waits, cls, session, line, last, r, s, near, depth
            )
            if parent < 0:  # agents that take turns in a session have texts of their own
                if is_like and (has_edges or _is_most(starts, depth, near)):
                    mine = line[near]
                elif cls[latest[s]] == cls[r] and _is_most(
                    starts, _common(starts, blocks, r, latest[s]), latest[s]
                ):  # another session had its text before
                    mine = line[latest[s]]
            elif tip >= 0 and _goes_on(starts, blocks, is_public, followers, r, tip, with_tip):
                mine = line[tip]
        elif named[r] < 0 and near >= 0 and not is_public[blocks[low + depth - 1]]:
            s = session[near]
            mine = line[near]
        if s < 0:
            s = num_sessions
            num_sessions += 1
            if named[r] >= 0:
                by_name[named[r]] = s
        if mine < 0:
            mine = num_lines
            num_lines += 1
            spawner[r] = latest[s]
            if parent >= 0:
                spawner[r] = parent
                if _is_most(starts, with_parent, parent):
                    is_fork[r] = True
                    source[r] = parent
                    shared[r] = with_parent
        else:
            previous[r] = last[mine]
            is_near = near >= 0 and line[near] == mine
            source[r] = near if is_near else last[mine]
            shared[r] = depth if is_near else _common(starts, blocks, r, last[mine])
        session[r] = s
        line[r] = mine
        last[mine] = r
        latest[s] = r
        for k in range(low, high):
            toucher[blocks[k]] = r
    if not has_edges:
        _join_resets(starts, blocks, cls, is_public, last, line, previous, source, shared, spawner)
    return line, previous, source, shared, session, spawner, is_fork


@kernel
def _join_resets(
    starts: Ints,
    blocks: Int32s,
    cls: Int32s,
    is_public: Bools,
    last: Int32s,
    line: Int32s,
    previous: Int32s,
    source: Int32s,
    shared: Int32s,
    spawner: Int32s,
) -> None:
    """A line spawned by the end of another that begins alike is that line, with its context dropped."""
    for r in range(len(line)):
        before = spawner[r]
        if before < 0 or last[line[before]] != before or cls[before] != cls[r]:
            continue
        mutual = _common(starts, blocks, r, before)
        if mutual > 0 and _is_own(starts, blocks, is_public, r, mutual):
            previous[r] = before
            source[r] = before
            shared[r] = mutual
            spawner[r] = -1
    num_lines = 0
    for r in range(len(line)):  # numbered by their first requests again
        if previous[r] < 0:
            line[r] = num_lines
            num_lines += 1
        else:
            line[r] = line[previous[r]]
