"""The order of visits in exchanged trees, and their arrivals in an open loop."""

from itertools import chain
from typing import NamedTuple

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.synth.programs.forest import Forest
from mallee.synth.programs.orders import Order
from mallee.synth.programs.sums import summed_down, summed_up
from mallee.traces.numbers import Floats, Int32s, Ints
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
    nodes = np.flatnonzero(forest.order[forest.program] == Order.BEST)
    old = forest.nodes.parent.tolist()
    scripts: dict[int, list[int]] = {node: [] for node in old}
    for node in nodes.tolist():
        child, above = node, old[node]
        while above >= 0:
            scripts[above].append(child)
            child, above = above, old[above]
    coming = {node: iter(script) for node, script in scripts.items()}
    holder = dict(zip(parent.tolist(), old, strict=True))  # whose list hangs below a node
    left = below.tolist()  # nodes below each that are still to come
    place = np.full(len(old), -1).tolist()
    for root in nodes[parent[nodes] == NO_PARENT].tolist():
        place[root] = 0
        for visit in range(1, left[root] + 1):
            node = root
            while place[node] >= 0:
                left[node] -= 1
                which = holder[node]
                entries = chain(coming[which], (each for each in scripts[which] if left[each]))
                node = next(each for each in entries if place[each] < 0 or left[each])
            place[node] = visit
    return np.array(place)


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
