"""New trees from those of a source: nodes of different trees exchange what was tried below them.

Why exchange and not a law of widths by depth: in a search, what is tried next depends on what became of
what was tried before, and a first-order law forgets it. Here a node keeps its siblings, and a list of
children keeps its lengths and which of them were expanded; what is mixed is which list hangs below
which node, and only between nodes alike: at the same depth, with about as many siblings, of which about as
many were expanded. So every depth has exactly its lists, and widths of parents and children go together
as they did. Beams hold because in breadth-first trees with beams only lists are exchanged below which as
many nodes of each level are expanded. Sizes of trees hold because an exchange that would take a tree away
from the size it had is not made: searches that stop at a budget (several have exactly the largest size)
come back to that size, others to about theirs, so that sizes vary as they did.

The alternative, drawing lists with replacement top down, was rejected: sizes then vary twice as much,
since what a tree's lists have in common is lost, and budgets would have to be cut.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.synth.programs.forest import Forest
from mallee.synth.programs.orders import Order
from mallee.synth.programs.sums import summed_up
from mallee.traces.numbers import Floats, Int32s, Ints
from mallee.traces.workload import NO_PARENT

LEAST_ALIKE: Final = 8
"""A group of nodes that may exchange is not divided further into smaller ones than this."""

_LOOSE: Final = 0.25  # of a tree's size, while mixing
_CLOSE: Final = 0.1  # of the standard deviation of sizes, at the end
_MIXES: Final = 8  # proposals per node that was expanded
_REPAIRS: Final = 8  # times as many more at most, until all sizes are right
_SHALLOW: Final = 50  # mean depth from which on fewer are made
_BUDGET_SHARE: Final = 0.2  # of the trees that have the largest size: then it is a budget
_BEAM_SHARE: Final = 0.5  # of the trees that expand as many nodes of a level: then it is a beam


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchanges that a forest allows; nodes with children are in groups that are alike."""

    parent: Int32s
    tree: Ints  # of each node
    members: Ints  # nodes with children, group after group
    low: Ints  # of each member: where its group begins
    high: Ints  # and ends
    below: Ints  # nodes below each node
    sizes: Ints  # of trees
    close: Ints  # by how much the size of each tree may differ at the end
    mean_depth: float  # of the members

    def mixed(self, rng: np.random.Generator) -> Int32s:
        """The parent of each node after a round of exchanges: each node and list is used once."""
        num = len(self.members)
        at = np.arange(len(self.parent))  # at[c]: the node that has the children that c had
        holder = at.copy()
        below = self.below.copy()
        drift = np.zeros(len(self.sizes), np.int64)
        loose = np.maximum(1, _LOOSE * self.sizes).astype(np.int64)
        # A proposal goes up to both roots: fewer where that is far, as in chains of turns.
        mixes = max(1, min(_MIXES, int(_MIXES * _SHALLOW / (1 + self.mean_depth))))
        for limit, rounds in ((loose, mixes), (self.close, _REPAIRS * mixes)):
            for _ in range(rounds):
                if limit is self.close and (np.abs(drift) <= limit).all():
                    break
                _exchange(
                    self.parent, self.tree, self.members, self.low, self.high, at, holder, below,
                    drift, limit, rng.integers(0, max(1, num), num), rng.random(num),
                )  # fmt: skip
        is_root = self.parent == NO_PARENT
        mixed = at[self.parent].astype(np.int32)
        mixed[is_root] = NO_PARENT
        return mixed


def exchange_of(forest: Forest) -> Exchange:
    """Groups of nodes that are alike; programs that are no trees are in none."""
    parent, program = forest.nodes.parent, forest.program
    width = np.bincount(parent[parent >= 0], minlength=len(parent))
    below = summed_up(parent, np.arange(len(parent)), np.ones(len(parent), np.int64)) - 1
    members = np.flatnonzero((width > 0) & (forest.order[program] != Order.RECORDED))
    above = np.maximum(parent, 0)
    siblings = np.where(parent >= 0, width[above], 0)
    expanded = np.bincount(parent[(width > 0) & (parent >= 0)], minlength=len(parent))
    tried = np.where(parent >= 0, expanded[above], 0)
    kind = forest.order[program].astype(np.int64) * 2 + forest.has_waits[program]
    group = _coded(np.stack([kind, forest.nodes.depth, _beam_codes(forest, width)])[:, members])
    # How much is tried below a node says how good it looked, which is what a best-first search follows.
    followed = np.where(forest.order[program] == Order.BEST, below, 0)
    for feature in (followed, siblings, tried):
        group = _divided(group, feature[members])
    order = np.lexsort((members, group))
    members, group = members[order], group[order]
    return Exchange(
        parent=parent,
        tree=program,
        members=members,
        low=np.searchsorted(group, group, side="left"),
        high=np.searchsorted(group, group, side="right"),
        below=below,
        sizes=forest.sizes,
        close=_closeness(forest),
        mean_depth=float(forest.nodes.depth[members].mean()) if len(members) else 0.0,
    )


@kernel
def _root(parent: Int32s, at: Ints, node: int) -> int:
    while parent[node] >= 0:
        node = at[parent[node]]
    return node


@kernel
def _exchange(
    parent: Int32s,
    tree: Ints,
    members: Ints,
    low: Ints,
    high: Ints,
    at: Ints,
    holder: Ints,
    below: Ints,
    drift: Ints,
    limit: Ints,
    picks: Ints,
    shares: Floats,
) -> None:
    """Proposals, one by one; one that takes sizes further beyond their `limit` is not made.

    `holder[u]` is the node whose children node u has now, `at` its inverse; `below[c]` counts the nodes below
    the children that c had, `drift` [trees] nodes more than at first.
    """
    for i in range(len(picks)):
        pick = picks[i]
        u = members[pick]
        v = members[low[pick] + int(shares[i] * (high[pick] - low[pick]))]
        if u == v:
            continue
        a, b = holder[u], holder[v]
        more = below[b] - below[a]
        s, t = tree[_root(parent, at, u)], tree[_root(parent, at, v)]
        if more != 0 and s != t:
            excess = max(0, abs(drift[s]) - limit[s]) + max(0, abs(drift[t]) - limit[t])
            then = max(0, abs(drift[s] + more) - limit[s]) + max(0, abs(drift[t] - more) - limit[t])
            if then > excess:
                continue
            drift[s] += more
            drift[t] -= more
        for node, change in ((u, more), (v, -more)):
            while parent[node] >= 0:
                below[parent[node]] += change
                node = at[parent[node]]
        holder[u], holder[v] = b, a
        at[a], at[b] = v, u


def _coded(rows: Ints) -> Ints:
    """One number for each different column of `rows`."""
    return np.unique(rows, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _divided(group: Ints, feature: Ints) -> Ints:
    """Each group divided by values of `feature`, neighbours together until there are enough alike."""
    order = np.lexsort((feature, group))
    begins: list[int] = []
    bounds = np.flatnonzero(np.diff(group[order], prepend=-1, append=-1)).tolist()
    for begin, end in pairwise(bounds):
        begins.append(begin)
        for step in (np.flatnonzero(np.diff(feature[order[begin:end]])) + 1).tolist():
            if begin + step - begins[-1] >= LEAST_ALIKE <= end - begin - step:
                begins.append(begin + step)
    divided = np.empty(len(group), np.int64)
    divided[order] = np.searchsorted(begins, np.arange(len(group)), side="right")
    return divided


def _closeness(forest: Forest) -> Ints:
    """By how much sizes may differ: little of what they vary, and nothing where a size is a budget."""
    close = np.zeros(forest.num_programs, np.int64)
    for kind in np.unique(forest.order):
        trees = forest.order == kind
        sizes = forest.sizes[trees]
        is_full = sizes == sizes.max()
        is_budget = is_full.sum() > max(1, _BUDGET_SHARE * len(sizes))
        close[trees] = np.where(is_full & is_budget, 0, int(_CLOSE * sizes.std()))
    return close


def _beam_codes(forest: Forest, width: Ints) -> Ints:
    """Equal for nodes below which as many are expanded in each level that a beam holds.

    A beam holds the levels of breadth-first trees of which most trees expand equally many nodes.
    """
    program, depth, parent = forest.program, forest.nodes.depth, forest.nodes.parent
    is_expanded = (width > 0) & (forest.order[program] == Order.BREADTH)
    codes = []
    for level in range(1, int(depth[is_expanded].max(initial=0)) + 1):
        here = is_expanded & (depth == level)
        seen = np.bincount(program[here])
        seen = seen[seen > 0]
        if len(seen) > 1 and np.bincount(seen).max() >= _BEAM_SHARE * len(seen):
            below = summed_up(parent, np.arange(len(parent)), here.astype(np.int64))
            codes.append(np.where(depth < level, below, 0))  # of its own level each is expanded
    return _coded(np.stack([np.zeros(len(parent), np.int64), *codes]))
