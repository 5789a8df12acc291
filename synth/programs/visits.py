"""The order of visits in exchanged trees, and their arrivals in an open loop."""

from typing import NamedTuple

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.synth.programs.forest import Forest
from mallee.synth.programs.orders import Order
from mallee.synth.programs.sums import summed_down, summed_up
from mallee.traces.numbers import Bools, Floats, Int32s, Ints
from mallee.traces.workload import NO_PARENT


class Visits(NamedTuple):
    """Nodes, program after program: in program p those from `starts[p]` to `starts[p + 1]`."""

    starts: Ints
    node: Ints
    since_s: Floats  # arrival, since the program's begin


def visits_of(forest: Forest, parent: Int32s) -> Visits:
    """The visits of programs whose nodes have the parents `parent`, as recorded or exchanged.

    Nodes of one list of children keep their order. Recorded programs are visited as they were.
    """
    nodes = forest.nodes
    order = np.argsort(nodes.depth, kind="stable")  # exchanges keep depths
    is_root = parent == NO_PARENT
    program = summed_down(parent, order, np.where(is_root, forest.program, 0))
    kind = forest.order[program]
    below = summed_up(parent, order, np.ones(len(nodes), np.int64)) - 1
    before = _preorder(parent, order, below)
    before[kind == Order.RECORDED] = np.flatnonzero(kind == Order.RECORDED)
    free_s = summed_down(parent, order, np.where(is_root, 0.0, nodes.gap_s))
    place = np.select([kind == Order.BREADTH, kind == Order.FREE], [nodes.depth, free_s])
    if (kind == Order.BEST).any():
        place = np.where(kind == Order.BEST, _replayed(forest, parent, below), place)
    node = np.lexsort((before, place, program))
    starts = np.searchsorted(program[node], np.arange(forest.num_programs + 1))
    since_s = np.where(kind == Order.FREE, free_s, nodes.gap_s)
    return Visits(starts, node, _arrivals(starts, node, nodes.batch, since_s))


def _replayed(forest: Forest, parent: Int32s, below: Ints) -> Ints:
    """Place of each node of best-first trees if below each list the choices are made as they were.

    A list of children has a script: which child each visit below the list was, or led to. A visit
    goes down from the root and takes the next entry of each script. Where less is below a child than
    its script says entries are passed over, where more is, the rest comes last.
    """
    old = forest.nodes.parent
    is_best = forest.order[forest.program] == Order.BEST
    below_old = summed_up(old, np.arange(len(old)), is_best.astype(np.int64)) - is_best
    script_starts = np.append(0, np.cumsum(below_old))
    script = np.empty(script_starts[-1], np.int32)
    _write_scripts(old, is_best, script_starts, script)
    holder = np.full(len(old), NO_PARENT, np.int64)  # whose list hangs below a node
    has_parent = old != NO_PARENT
    holder[parent[has_parent]] = old[has_parent]
    return _follow_scripts(parent, is_best, holder, script_starts, script, below.copy())


@kernel
def _write_scripts(parent: Int32s, is_best: Bools, starts: Ints, script: Int32s) -> None:
    written = starts.copy()
    for node in range(len(parent)):
        if not is_best[node]:
            continue
        child, above = np.int32(node), parent[node]
        while above >= 0:
            script[written[above]] = child
            written[above] += 1
            child, above = above, parent[above]


@kernel
def _follow_scripts(
    parent: Int32s, is_best: Bools, holder: Ints, starts: Ints, script: Int32s, left: Ints
) -> Ints:
    """`left` [n] counts the nodes below each that are still to come."""
    place = np.full(len(parent), -1, np.int64)
    at_entry = starts.copy()
    for root in range(len(parent)):
        if parent[root] >= 0 or not is_best[root]:
            continue
        place[root] = 0
        for visit in range(1, left[root] + 1):
            node = np.int32(root)
            while node == root or place[node] >= 0:
                which = holder[node]
                child = np.int32(-1)
                while child < 0 and at_entry[which] < starts[which + 1]:
                    child = script[at_entry[which]]
                    at_entry[which] += 1
                    if place[child] >= 0 and left[child] == 0:
                        child = np.int32(-1)
                if child < 0:  # more than the script says: whichever has more to come
                    at = starts[which]
                    while left[script[at]] == 0:
                        at += 1
                    child = script[at]
                left[node] -= 1
                node = child
            place[node] = visit
    return place


@kernel
def _preorder(parent: Int32s, order: Ints, below: Ints) -> Ints:
    """Place of each node in its tree if all below a node comes before its next sibling, from 0."""
    place = np.zeros(len(parent), np.int64)
    used = np.zeros(len(parent), np.int64)  # by children so far
    for node in order:
        above = parent[node]
        if above >= 0:
            place[node] = place[above] + 1 + used[above]
            used[above] += below[node] + 1
    return place


@kernel
def _arrivals(starts: Ints, node: Ints, batch: Int32s, gap_s: Floats) -> Floats:
    """Since the begin of its program, for each visit: gaps count from the last of the batch before."""
    since = np.zeros(len(node))
    for program in range(len(starts) - 1):
        before = latest = 0.0
        for i in range(starts[program], starts[program + 1]):
            if i > starts[program] and batch[node[i]] != batch[node[i - 1]]:
                before = latest
            latest = max(latest, before + gap_s[node[i]])
            since[i] = latest
    return since
