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
    visits = summed_up(old, np.arange(len(old)), is_best.astype(np.int64)) - is_best
    holder = np.full(len(old), NO_PARENT)  # whose list hangs below a node
    holder[parent[parent >= 0]] = old[parent >= 0]
    starts = np.append(0, np.cumsum(visits))
    return _follow_scripts(old, parent, is_best, holder, starts, below.copy())


@kernel
def _follow_scripts(
    old: Int32s, parent: Int32s, is_best: Bools, holder: Ints, starts: Ints, left: Ints
) -> Ints:
    """The script of list i is from `starts[i]` on; `left` counts nodes below each still to come."""
    script = np.empty(starts[-1], np.int64)
    coming = starts.copy()
    for node in np.flatnonzero(is_best):
        child, above = node, old[node]
        while above >= 0:
            script[coming[above]] = child
            coming[above] += 1
            child, above = above, old[above]
    coming[:] = starts
    place = np.full(len(old), -1)
    for root in np.flatnonzero(is_best & (parent < 0)):
        place[root] = 0
        for visit in range(1, left[root] + 1):
            node = root
            while place[node] >= 0:
                left[node] -= 1
                which = holder[node]
                at, end = coming[which], starts[which + 1]
                while at < end and place[script[at]] >= 0 and not left[script[at]]:
                    at += 1
                coming[which] = min(at + 1, end)
                if at == end:
                    at = starts[which]
                    while not left[script[at]]:
                        at += 1
                node = script[at]
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
