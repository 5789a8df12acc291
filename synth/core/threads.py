"""The threads of a trace: contexts that grow call by call.

A thread is a session's main context, or that of one of its agents. Where a trace names sessions, these
are believed, and inside a session class, text and `wait_for` tell threads apart. Where it names none, a
request continues the one that touched the deepest block they share last, unless that block is *public*: a
root that many different texts continue (a system prompt) does not tell sessions apart.

Agents that take turns in one session wait for each other and keep contexts of their own, so a request
continues what it has most of its text from, not what it waits for. A request that shares less than half of
the blocks before it begins a thread, unless nothing else continues the earlier one: then that thread
has dropped its context. A request that waits for calls of its session continues only these or what they
waited for: siblings with one prompt run beside each other and are threads of their own.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.synth.core.prefix_tree import PrefixTree
from mallee.traces.numbers import Bools, Int32s, Ints
from mallee.traces.trace import Trace

PUBLIC_CHILDREN: Final = 5
"""A block that so many different blocks follow is public."""


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads of a trace and its prefix tree. Arrays are by request; -1: none.

    A thread has a parent request in another thread of its session. It brings a root of its own or, if
    `is_fork`, starts with its parent's prompt.
    """

    thread: Int32s  # numbered by first request
    previous: Int32s  # request before it in its thread
    source: Int32s  # earlier request of the thread (of a fork: of its parent's) it shares most with
    shared: Int32s  # leading blocks in common with `source`; 0 without one
    session: Int32s  # numbered by first request
    parent: Int32s  # of a thread's first request
    is_fork: Bools  # of a thread's first request
    has_edges: bool  # whether the trace has `wait_for`
    tree: PrefixTree

    @property
    def num_threads(self) -> int:
        return int(self.thread.max(initial=-1)) + 1

    @property
    def heads(self) -> Ints:
        """First request of each thread."""
        return np.flatnonzero(self.previous < 0)


class _Requests(NamedTuple):
    """A trace as the kernels read it."""

    starts: Ints
    blocks: Int32s
    named: Int32s  # session by name, -1: none
    cls: Int32s
    wait_starts: Ints
    waits: Int32s
    waiters: Ints  # requests that wait for each
    is_public: Bools  # of each block
    has_edges: bool
    partial: int  # blocks at the end of prompts that no continuation has: 1 if partial ones count


class _Found(NamedTuple):
    """The fields of `Threads` while they are filled."""

    thread: Int32s
    previous: Int32s
    source: Int32s
    shared: Int32s
    session: Int32s
    parent: Int32s
    is_fork: Bools
    known: Int32s  # leading blocks that an earlier request has
    last: Int32s  # of each thread its latest request
    asked: Int32s  # latest request that a search through waits was for
    open: Int32s  # requests whose waits that search has still to see


def threads_of(trace: Trace) -> Threads:
    """Take `trace` apart. O(block references). Raises CodecError if its blocks are no prefix tree."""
    tree = PrefixTree.of(trace)
    num, has_edges = len(trace), len(trace.waits) > 0
    requests = _Requests(
        starts=trace.starts,
        blocks=trace.blocks,
        named=trace.session,
        cls=trace.cls,
        wait_starts=trace.wait_starts,
        waits=trace.waits,
        waiters=np.bincount(trace.waits, minlength=num),
        is_public=public_blocks(tree),
        has_edges=has_edges,
        partial=int(trace.rule == "ceil"),
    )
    found = _Found(
        thread=np.full(num, -1, np.int32),
        previous=np.full(num, -1, np.int32),
        source=np.full(num, -1, np.int32),
        shared=np.zeros(num, np.int32),
        session=np.full(num, -1, np.int32),
        parent=np.full(num, -1, np.int32),
        is_fork=np.zeros(num, np.bool_),
        known=np.zeros(num, np.int32),
        last=np.full(num, -1, np.int32),
        asked=np.full(num, -1, np.int32),
        open=np.empty(num + 1, np.int32),
    )
    # part of a trace has fewer requests than the whole has sessions
    by_name = np.full(int(trace.session.max(initial=0)) + 1, -1, np.int32)
    _take_apart(requests, found, by_name, np.full(len(tree), -1, np.int32))
    _join_dropped(requests, found)
    return Threads(*found[:7], has_edges, tree)


def public_blocks(tree: PrefixTree) -> Bools:
    """Blocks that many different ones follow, and all before them."""
    return _with_ancestors(tree.children >= PUBLIC_CHILDREN, tree.parents)


@kernel
def _with_ancestors(is_public: Bools, parents: Int32s) -> Bools:
    """Mark all blocks before a marked one, too."""
    for block in range(len(parents) - 1, -1, -1):  # a block's number is above its parent's
        if is_public[block] and parents[block] >= 0:
            is_public[parents[block]] = True
    return is_public


@kernel
def _common(trace: _Requests, one: int, other: int) -> int:
    """Leading blocks that two requests share."""
    starts, blocks = trace.starts, trace.blocks
    most = min(starts[one + 1] - starts[one], starts[other + 1] - starts[other])
    shared = 0
    while shared < most and blocks[starts[one] + shared] == blocks[starts[other] + shared]:
        shared += 1
    return shared


@kernel
def _is_own(trace: _Requests, request: int, depth: int) -> bool:
    """Whether the request's text after `depth` blocks is not public."""
    at = trace.starts[request] + depth
    return bool(at >= trace.starts[request + 1] or not trace.is_public[trace.blocks[at]])


@kernel
def _is_most(trace: _Requests, shared: int, request: int) -> bool:
    """Whether `shared` blocks are more than half of a request's."""
    return bool(2 * shared > trace.starts[request + 1] - trace.starts[request])


@kernel
def _continues(trace: _Requests, found: _Found, depth: int, near: int) -> bool:
    """Whether a request with `depth` blocks of `near` has all of it, and more than a common beginning.

    Siblings that begin alike share most of their text too, but not what each was told.
    """
    low, high = trace.starts[near], trace.starts[near + 1]
    is_whole = depth >= high - low - trace.partial and depth > 0
    is_last = found.last[found.thread[near]] == near
    return bool(is_whole and is_last and not trace.is_public[trace.blocks[low + depth - 1]])


@kernel
def _is_after(trace: _Requests, found: _Found, r: int, near: int) -> bool:
    """Whether r waits for `near`, directly or through others. O(waits in between)."""
    num_open = 1
    found.open[0] = r
    while num_open:
        num_open -= 1
        one = found.open[num_open]
        for w in range(trace.wait_starts[one], trace.wait_starts[one + 1]):
            other = trace.waits[w]
            if other == near:
                return True
            if other > near and found.asked[other] != r:
                found.asked[other] = r
                found.open[num_open] = other
                num_open += 1
    return False


@kernel
def _awaited(
    trace: _Requests, found: _Found, r: int, s: int, near: int, depth: int
) -> tuple[int, int, int, int]:
    """Of the requests in session `s` that r waits for, those it shares most with, and how much.

    First of all of them, then of those of r's class that are the latest of their threads; -1: none. With
    the thread of `near` it shares `depth`.
    """
    parent, with_parent = -1, -1
    tip, with_tip = -1, -1
    for w in range(trace.wait_starts[r], trace.wait_starts[r + 1]):
        other = trace.waits[w]
        if found.session[other] != s:
            continue
        mutual = _common(trace, r, other)
        if mutual > with_parent:
            parent, with_parent = other, mutual
        thread = found.thread[other]
        if near >= 0 and found.thread[near] == thread:
            mutual = depth
        if trace.cls[other] == trace.cls[r] and found.last[thread] == other and mutual > with_tip:
            tip, with_tip = other, mutual
    return parent, with_parent, tip, with_tip


@kernel
def _take_apart(trace: _Requests, found: _Found, by_name: Int32s, toucher: Int32s) -> None:
    """Fill `found`. `by_name` [names] and `toucher` [blocks] begin as -1."""
    starts, blocks, cls = trace.starts, trace.blocks, trace.cls
    thread, session = found.thread, found.session
    latest = np.full(len(cls), -1, np.int32)  # of each session its latest request
    num_threads = 0
    num_sessions = 0
    for r in range(len(cls)):
        low, high = starts[r], starts[r + 1]
        depth = 0
        while low + depth < high and toucher[blocks[low + depth]] >= 0:
            depth += 1
        found.known[r] = depth
        near = toucher[blocks[low + depth - 1]] if depth else -1
        name = trace.named[r]
        s = by_name[name] if name >= 0 else -1
        mine = -1  # the thread it belongs to
        parent, with_parent = -1, 0
        if s >= 0:
            is_like = near >= 0 and session[near] == s and cls[near] == cls[r]
            parent, with_parent, tip, with_tip = _awaited(trace, found, r, s, near, depth)
            if parent < 0:
                if is_like and (trace.has_edges or _is_most(trace, depth, near)):
                    mine = thread[near]
                elif cls[latest[s]] == cls[r] and _is_most(
                    trace, _common(trace, r, latest[s]), latest[s]
                ):  # another session had its text before
                    mine = thread[latest[s]]
            elif (
                tip >= 0
                and (
                    _is_most(trace, with_tip, tip)
                    or (with_tip > 0 and not trace.is_public[blocks[low + with_tip - 1]])
                    or (
                        0 < with_tip == depth
                        and trace.waiters[tip] == 1
                        and _is_own(trace, r, depth)
                    )
                )
            ):  # the last: nothing else has more of its text, and nothing else waits: a context dropped
                mine = thread[tip]
            elif (
                is_like
                and depth > with_parent
                and _continues(trace, found, depth, near)
                and _is_after(trace, found, r, near)
            ):
                mine = thread[near]  # an agent whose turn it is again
        elif name < 0 and near >= 0 and not trace.is_public[blocks[low + depth - 1]]:
            s = session[near]
            mine = thread[near]
        if s < 0:
            s = num_sessions
            num_sessions += 1
            if name >= 0:
                by_name[name] = s
        if mine < 0:
            mine = num_threads
            num_threads += 1
            found.parent[r] = latest[s]
            if parent >= 0:
                found.parent[r] = parent
                if _is_most(trace, with_parent, parent):
                    found.is_fork[r] = True
                    found.source[r] = parent
                    found.shared[r] = with_parent
        else:
            before = found.last[mine]
            found.previous[r] = before
            is_near = near >= 0 and thread[near] == mine
            found.source[r] = near if is_near else before
            found.shared[r] = depth if is_near else _common(trace, r, before)
        session[r] = s
        thread[r] = mine
        found.last[mine] = r
        latest[s] = r
        for k in range(low, high):
            toucher[blocks[k]] = r


@kernel
def _join_dropped(trace: _Requests, found: _Found) -> None:
    """Join a thread to its parent's if that ends there: a context dropped, not an agent beside it.

    With waits: if nothing else waits for the parent and the new text is nobody else's. Without: if both
    begin alike.
    """
    thread, previous, last = found.thread, found.previous, found.last
    for r in range(len(thread)):
        before = found.parent[r]
        if before < 0 or found.is_fork[r] or last[thread[before]] != before:
            continue
        if trace.cls[before] != trace.cls[r]:
            continue
        mutual = _common(trace, r, before)
        is_drop = mutual > 0
        if trace.has_edges:
            is_drop = False  # unless r is what waits for the parent
            for w in range(trace.wait_starts[r], trace.wait_starts[r + 1]):
                is_drop |= trace.waits[w] == before
            is_drop &= trace.waiters[before] == 1 and found.known[r] <= mutual
        if is_drop and _is_own(trace, r, mutual):
            previous[r] = before
            found.source[r] = before
            found.shared[r] = mutual
            found.parent[r] = -1
    num_threads = 0
    for r in range(len(thread)):  # numbered by their first requests again
        if previous[r] < 0:
            thread[r] = num_threads
            num_threads += 1
        else:
            thread[r] = thread[previous[r]]
