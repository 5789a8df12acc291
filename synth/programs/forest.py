"""The programs of a trace whose requests fork others, as arrays.

A program is what hangs together: forks and what they fork, requests and those they wait for, turns of a
session. A program with one root and forks alone is a *tree*, searched in one of the orders of
`synth.programs.orders`. All else is *recorded*: its shape is kept as it is.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from mallee.synth.core.jit import kernel
from mallee.synth.programs.orders import Order, Search, recognise, undecided
from mallee.synth.programs.prompts import Prompts, learn_prompts
from mallee.traces.numbers import Floats, Int32s, Ints
from mallee.traces.trace import NO_SESSION, Trace
from mallee.traces.workload import NO_PARENT

NO_PROMPT: Final = -1


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of all programs; those of a program stand together, in the order of its visits."""

    parent: Int32s  # place of what it forks, or NO_PARENT
    depth: Int32s  # forks above it
    cls: Int32s
    session: Int32s  # number in its program, or NO_SESSION
    added_tokens: Ints  # of a fork: what it adds to its parent's text
    output_tokens: Ints
    branches: Int32s
    tool_wait_s: Floats
    gap_s: Floats  # from the arrival that `Order` counts from to its own
    batch: Int32s  # those that began together have one number
    prompt: Int32s  # place in the prompts, or NO_PROMPT
    wait_starts: Ints  # [n + 1]
    waits: Int32s  # places of nodes; of recorded programs alone

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True, slots=True)
class Forest:
    """The programs of a source: program p has nodes `starts[p]` to `starts[p + 1]`."""

    name: str
    block_size: int
    is_ceil: bool
    classes: tuple[str, ...]
    starts: Ints
    order: npt.NDArray[np.int8]  # an `Order`
    waits: npt.NDArray[np.int8]  # a `Waits`
    begin_s: Floats
    end_s: float  # last arrival
    nodes: Nodes
    prompts: Prompts

    @property
    def num_programs(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> Ints:
        """Nodes of each program."""
        return np.diff(self.starts)

    @property
    def program(self) -> Ints:
        """Of each node."""
        return np.repeat(np.arange(self.num_programs), self.sizes)


def forest_of(trace: Trace) -> Forest:
    """Takes `trace` apart. O(requests + waits + blocks of whole prompts)."""
    program = _programs(trace)
    order = np.lexsort((np.arange(len(trace)), program)).astype(np.int64)
    place = np.empty(len(trace), np.int64)
    place[order] = np.arange(len(trace))
    starts = np.append(np.flatnonzero(np.diff(program[order], prepend=-1)), len(trace))
    parent = trace.parent[order]
    parent = np.where(parent == NO_PARENT, NO_PARENT, place[parent]).astype(np.int32)
    wait_starts, waits = _waits(trace, order, place)
    searches = _searches(starts, parent, wait_starts, waits)
    begins_batch = np.ones(len(trace), np.bool_)
    for search, start, end in zip(searches, starts[:-1], starts[1:], strict=True):
        if search.batches:
            begins_batch[start:end] = False
            begins_batch[start + np.array(search.batches)] = True
    kinds = np.array([s.order for s in searches], np.int8)
    depth = depths(parent)
    program = program[order]
    is_root = parent == NO_PARENT
    has_forks = np.zeros(len(trace), np.bool_)
    has_forks[parent[~is_root]] = True
    prompts = learn_prompts(trace, order[is_root], program[is_root], has_forks[is_root])
    kept = np.repeat(kinds[program] == Order.RECORDED, np.diff(wait_starts))
    counts = np.where(kinds[program] == Order.RECORDED, np.diff(wait_starts), 0)
    nodes = Nodes(
        parent=parent,
        depth=depth,
        cls=trace.cls[order],
        session=_local(trace.session[order], program),
        added_tokens=_added(trace, order),
        output_tokens=trace.output_tokens[order],
        branches=trace.branches[order],
        tool_wait_s=trace.tool_wait_s[order],
        gap_s=_gaps(trace.arrival_s[order], parent, depth, starts, kinds),
        batch=np.cumsum(begins_batch).astype(np.int32),
        prompt=np.where(is_root, np.cumsum(is_root) - 1, NO_PROMPT).astype(np.int32),
        wait_starts=np.concatenate([[0], np.cumsum(counts)]),
        waits=waits[kept],
    )
    return Forest(
        name=trace.name,
        block_size=trace.block_size,
        is_ceil=trace.rule == "ceil",
        classes=trace.classes,
        starts=starts,
        order=kinds,
        waits=np.array([s.waits for s in searches], np.int8),
        begin_s=trace.arrival_s[order[starts[:-1]]],
        end_s=float(trace.arrival_s.max(initial=0.0)),
        nodes=nodes,
        prompts=prompts,
    )


def _programs(trace: Trace) -> Ints:
    """Program of each request, numbered by first request.

    Trees are programs of their own, whatever their session; other requests of a session are one.
    """
    joined = np.arange(len(trace), dtype=np.int64)
    waiting = np.repeat(np.arange(len(trace)), np.diff(trace.wait_starts))
    is_fork = np.flatnonzero(trace.parent != NO_PARENT)
    _join(joined, is_fork, trace.parent[is_fork].astype(np.int64))
    is_in_tree = np.zeros(len(trace), np.bool_)
    is_in_tree[is_fork] = True
    is_in_tree[trace.parent[is_fork]] = True
    _join(joined, waiting, trace.waits.astype(np.int64))
    turns = np.flatnonzero((trace.session != NO_SESSION) & ~is_in_tree)
    if len(turns):
        _, first = np.unique(trace.session[turns], return_index=True)
        firsts = np.zeros(len(trace.sessions), np.int64)
        firsts[trace.session[turns[first]]] = turns[first]
        _join(joined, turns, firsts[trace.session[turns]])
    _settle(joined)
    return np.unique(joined, return_inverse=True)[1].reshape(-1).astype(np.int64)


@kernel
def _join(joined: Ints, left: Ints, right: Ints) -> None:
    """Union of each pair; the smaller number stands for a set."""
    for i in range(len(left)):
        a, b = left[i], right[i]
        while joined[a] != a:
            joined[a] = joined[joined[a]]
            a = joined[a]
        while joined[b] != b:
            joined[b] = joined[joined[b]]
            b = joined[b]
        if a < b:
            joined[b] = a
        else:
            joined[a] = b


@kernel
def _settle(joined: Ints) -> None:
    """Each number's set; numbers name none above themselves."""
    for i in range(len(joined)):
        joined[i] = joined[joined[i]]


@kernel
def depths(parent: Int32s) -> Int32s:
    """Depth of each node, 0 for roots; parents have lower numbers than children."""
    depth = np.zeros(len(parent), np.int32)
    for i in range(len(parent)):
        if parent[i] >= 0:
            depth[i] = depth[parent[i]] + 1
    return depth


def _waits(trace: Trace, order: Ints, place: Ints) -> tuple[Ints, Int32s]:
    """Waits of the nodes, by place; parents are left out only where the trace does."""
    counts = np.diff(trace.wait_starts)[order]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    begin = np.repeat(trace.wait_starts[order] - starts[:-1], counts)
    return starts, place[trace.waits[begin + np.arange(starts[-1])]].astype(np.int32)


def _searches(starts: Ints, parent: Int32s, wait_starts: Ints, waits: Int32s) -> list[Search]:
    parents, firsts, edges = parent.tolist(), wait_starts.tolist(), waits.tolist()
    found: list[Search | None] = []
    bounds = starts.tolist()
    for begin, end in pairwise(bounds):
        local = [p - begin if p >= 0 else -1 for p in parents[begin:end]]
        named = [
            [w - begin for w in edges[firsts[node] : firsts[node + 1]]]
            for node in range(begin, end)
        ]
        found.append(recognise(local, named))
    default = undecided(found)
    return [default if search is None else search for search in found]


def _added(trace: Trace, order: Ints) -> Ints:
    """Tokens that forks add to their parents' prompts and answers."""
    parent = trace.parent[order]
    before = trace.input_tokens[parent] + trace.output_tokens[parent]
    added = np.maximum(trace.input_tokens[order] - before, 0)
    return np.where(parent == NO_PARENT, trace.input_tokens[order], added)


def _local(session: Int32s, program: Ints) -> Int32s:
    """Sessions numbered inside their program."""
    found = np.full(len(session), NO_SESSION, np.int32)
    named = np.flatnonzero(session != NO_SESSION)
    if len(named):
        pairs = program[named] * (int(session.max()) + 1) + session[named]
        unique, inverse = np.unique(pairs, return_inverse=True)
        owner = unique // (int(session.max()) + 1)
        first = np.searchsorted(owner, owner)
        found[named] = (np.arange(len(unique)) - first)[inverse.reshape(-1)]
    return found


def _gaps(
    arrival_s: Floats, parent: Int32s, depth: Int32s, starts: Ints, kinds: npt.NDArray[np.int8]
) -> Floats:
    """From the arrival that a program's order counts from: see `visits`."""
    program = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    kind = kinds[program]
    since = arrival_s[starts[program]]  # recorded: since the program's first
    visits = (kind == Order.DEPTH) | (kind == Order.BEST)
    since = np.where(visits, np.roll(arrival_s, 1), since)
    since = np.where(kind == Order.FREE, arrival_s[parent], since)
    levels = np.flatnonzero(kind == Order.BREADTH)
    if len(levels):
        width = int(depth.max()) + 1
        latest = np.zeros((len(starts) - 1) * width)
        level = program[levels] * width + depth[levels]
        np.maximum.at(latest, level, arrival_s[levels])
        since[levels] = latest[np.maximum(level - 1, 0)]
    since[starts[:-1]] = arrival_s[starts[:-1]]  # a program's first arrives when the program begins
    return np.maximum(arrival_s - since, 0.0)
