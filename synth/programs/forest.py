"""The programs of a trace whose requests fork others, as arrays.

A program is what hangs together: forks and what they fork, requests and those they wait for, turns of a
session. A program with one root and forks alone is a *tree*, searched in one of the orders of
`synth.programs.orders`. All else is *recorded*: its shape is kept as it is.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mallee.synth.core.extras import scipy
from mallee.synth.programs.orders import Order, Search, recognise, undecided
from mallee.synth.programs.prompts import Prompts, learn_prompts
from mallee.synth.programs.sums import summed_down
from mallee.traces.numbers import Bools, Floats, Int32s, Ints, Numbers
from mallee.traces.trace import NO_SESSION, Trace, picked_lists
from mallee.traces.workload import NO_PARENT


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
    batch: Int32s  # those that began together have one number
    gap_s: Floats  # from the last arrival of the batch before; of a free search from its parent's
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
    has_waits: Bools  # whether batches wait for those before
    begin_s: Floats
    nodes: Nodes
    prompts: Prompts  # of the roots, in their order

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
    everyone = np.arange(len(trace))
    program = _programs(trace)
    order = np.argsort(program, kind="stable")
    place = np.argsort(order)
    program = program[order]
    starts = np.append(np.flatnonzero(np.diff(program, prepend=-1)), len(trace))
    parent = trace.parent[order]
    is_root = parent == NO_PARENT
    parent = np.where(is_root, NO_PARENT, place[parent]).astype(np.int32)
    depth = summed_down(parent, everyone, (~is_root).astype(np.int32))
    wait_starts, awaited = picked_lists(trace.wait_starts, trace.waits, order)
    waits = place[awaited]
    searches = _searches(starts, parent, wait_starts, waits)
    kinds = np.array([search.order for search in searches], np.int8)
    is_recorded = kinds[program] == Order.RECORDED
    batch = _batches(searches, starts, depth)
    has_forks = np.isin(everyone[is_root], parent)
    counts = np.diff(wait_starts)
    nodes = Nodes(
        parent=parent,
        depth=depth,
        cls=trace.cls[order],
        session=_local(trace.session[order], program),
        added_tokens=_added(trace)[order],
        output_tokens=trace.output_tokens[order],
        branches=trace.branches[order],
        tool_wait_s=trace.tool_wait_s[order],
        batch=batch,
        gap_s=_gaps(trace.arrival_s[order], parent, starts, batch, kinds[program] == Order.FREE),
        wait_starts=np.append(0, np.cumsum(np.where(is_recorded, counts, 0))),
        waits=waits[np.repeat(is_recorded, counts)].astype(np.int32),
    )
    return Forest(
        name=trace.name,
        block_size=trace.block_size,
        is_ceil=trace.rule == "ceil",
        classes=trace.classes,
        starts=starts,
        order=kinds,
        has_waits=np.array([search.has_waits for search in searches]),
        begin_s=trace.arrival_s[order[starts[:-1]]],
        nodes=nodes,
        prompts=learn_prompts(trace, order[is_root], program[is_root], has_forks),
    )


def _programs(trace: Trace) -> Ints:
    """Program of each request, numbered by first request.

    Trees are programs of their own, whatever their session; other requests of a session are one.
    """
    num = len(trace)
    forks = np.flatnonzero(trace.parent != NO_PARENT)
    waiting = trace.waiters
    is_in_tree = np.zeros(num, np.bool_)
    is_in_tree[forks] = is_in_tree[trace.parent[forks]] = True
    turns = np.flatnonzero((trace.session != NO_SESSION) & ~is_in_tree)
    left = np.concatenate([forks, waiting, turns])
    right = np.concatenate([trace.parent[forks], trace.waits, num + trace.session[turns]])
    size = num + len(trace.sessions)
    links = scipy("sparse").coo_array((np.ones(len(left)), (left, right)), shape=(size, size))
    found = scipy("sparse.csgraph").connected_components(links, directed=False)[1]
    return Numbers().of(found[:num].astype(np.int64)).astype(np.int64)


def _searches(starts: Ints, parent: Int32s, wait_starts: Ints, waits: Ints) -> list[Search]:
    parents, firsts, edges = parent.tolist(), wait_starts.tolist(), waits.tolist()
    found: list[Search | None] = []
    for begin, end in pairwise(starts.tolist()):
        local = [p - begin if p >= 0 else -1 for p in parents[begin:end]]
        named = [
            [w - begin for w in edges[firsts[node] : firsts[node + 1]]]
            for node in range(begin, end)
        ]
        found.append(recognise(local, named))
    default = undecided(found)
    return [default if search is None else search for search in found]


def _batches(searches: list[Search], starts: Ints, depth: Int32s) -> Int32s:
    """Batch of each node; visits of one are neighbours, before and after an exchange of nodes."""
    batch = np.arange(len(depth), dtype=np.int32)
    for search, start, end in zip(searches, starts[:-1], starts[1:], strict=True):
        if search.order in (Order.RECORDED, Order.FREE):
            batch[start:end] = 0
        elif search.order == Order.BREADTH:
            batch[start:end] = depth[start:end]
        elif search.batches:
            sizes = np.diff([*search.batches, end - start])
            batch[start:end] = np.repeat(start + np.array(search.batches), sizes)
    return batch


def _added(trace: Trace) -> Ints:
    """Tokens that forks add to their parents' prompts and answers."""
    before = trace.input_tokens[trace.parent] + trace.output_tokens[trace.parent]
    added = np.maximum(trace.input_tokens - before, 0)
    return np.where(trace.parent == NO_PARENT, trace.input_tokens, added)


def _local(session: Int32s, program: Ints) -> Int32s:
    """Sessions numbered inside their program."""
    pairs, at = np.unique(np.stack([program, session]), axis=1, return_inverse=True)
    is_named = pairs[1] != NO_SESSION
    named_before = np.cumsum(is_named) - is_named
    first = np.searchsorted(pairs[0], pairs[0])
    local = np.where(is_named, named_before - named_before[first], NO_SESSION)
    return local[at.reshape(-1)].astype(np.int32)


def _gaps(arrival_s: Floats, parent: Int32s, starts: Ints, batch: Int32s, is_free: Bools) -> Floats:
    """From the arrival that a node's own counts from, the begin of its program if none was before."""
    first = np.zeros(len(batch), np.int64)  # of a node's batch
    begins = np.union1d(starts[:-1], np.flatnonzero(np.diff(batch)) + 1)
    first[begins] = begins
    first = np.maximum.accumulate(first)
    before = np.maximum(first - 1, np.repeat(starts[:-1], np.diff(starts)))
    before = np.where(is_free & (parent != NO_PARENT), parent, before)
    return np.maximum(arrival_s - arrival_s[before], 0.0)
