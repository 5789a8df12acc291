"""Programs by name, for traffic without a source: beams, depth-first search, UCT, swarms.

To generate traffic like a source's, `fit_search` is closer: rules have mean widths, budgets and depths, and
no correlation between the lists of children of one tree. All are models as `synth.core.model.Model` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log, sqrt
from typing import Final

import numpy as np

from mallee.synth.core.jit import kernel
from mallee.synth.programs.emit import Draft
from mallee.synth.programs.rule import Rule, Texts
from mallee.traces.numbers import Floats, Ints

_TOOL_WAIT_S: Final = 1.0  # before a join; mean


def _widths(rng: np.random.Generator, mean: float, count: int) -> list[int]:
    """Children of `count` expanded nodes: 1 and more, `mean` on average (Poisson beyond 1)."""
    return [1 + more for more in rng.poisson(mean - 1.0, count).tolist()]


@dataclass(frozen=True, slots=True)
class Beam(Rule):
    """Breadth-first: the `beam` best nodes of each level are expanded; each level waits for the last."""

    name = "beams"
    beam: int = 5
    levels: int = 4
    width: float = 4.0  # children of an expanded node, mean
    texts: Texts = field(default_factory=Texts)

    def draft(self, rng: np.random.Generator) -> Sequence[Draft]:
        """One tree. Nodes are good by chance."""
        drafts = [Draft(self.texts.task, 0, "root")]
        level = [0]
        for depth in range(self.levels):
            kept = np.sort(rng.permutation(len(level))[: self.beam]).tolist()
            waits = tuple(level) if depth else ()
            first = len(drafts)
            for place, width in zip(kept, _widths(rng, self.width, len(kept)), strict=True):
                drafts += [
                    Draft(self.texts.step, output, "node", level[place], waits)
                    for output in self.texts.outputs(rng, width)
                ]
            level = list(range(first, len(drafts)))
        return drafts


@dataclass(frozen=True, slots=True)
class DepthFirst(Rule):
    """One visit after the other: a node is followed up by chance, else the search backtracks.

    It ends after `budget` visits, or when nothing is left to try.
    """

    name = "depth-first"
    budget: int = 100
    levels: int = 10
    follow: float = 0.4  # chance that a visited node has children
    width: float = 4.0  # children of an expanded node, mean
    texts: Texts = field(default_factory=Texts)

    def draft(self, rng: np.random.Generator) -> Sequence[Draft]:
        """One tree."""
        drafts = [Draft(self.texts.task, 0, "root")]
        todo = [(0, 1)] * _widths(rng, self.width, 1)[0]  # (parent, depth)
        while todo and len(drafts) <= self.budget:
            parent, depth = todo.pop()
            waits = (len(drafts) - 1,) if len(drafts) > 1 else ()
            output = self.texts.outputs(rng, 1)[0]
            drafts.append(Draft(self.texts.step, output, "node", parent, waits))
            if depth < self.levels and rng.random() < self.follow:
                width = _widths(rng, self.width, 1)[0]
                todo += [(len(drafts) - 1, depth + 1)] * width
        return drafts


@dataclass(frozen=True, slots=True)
class Uct(Rule):
    """MCTS: each visit adds a child to the node that upper confidence bounds lead to.

    Values are made up: a child's is its parent's and a normal step of 1. So `exploration`, the bound's
    factor, alone says how far the search follows what looked good: 0 goes straight down.
    """

    name = "MCTS"
    visits: int = 100
    exploration: float = 2.0
    width: float = 4.0  # children of an expanded node, mean
    texts: Texts = field(default_factory=Texts)

    def draft(self, rng: np.random.Generator) -> Sequence[Draft]:
        """One tree."""
        widths = np.array(_widths(rng, self.width, 1 + self.visits))
        steps = rng.standard_normal(1 + self.visits)
        parents = uct_tree(widths, steps, self.exploration).tolist()
        outputs = self.texts.outputs(rng, len(parents))
        return [
            Draft(self.texts.step, output, "node", parent, (i - 1,) if i > 1 else ())
            if i
            else Draft(self.texts.task, 0, "root")
            for i, (parent, output) in enumerate(zip(parents, outputs, strict=True))
        ]


@kernel
def uct_tree(widths: Ints, steps: Floats, exploration: float) -> Ints:
    """Parents of nodes in the order in which they are added; the root's is -1.

    A node takes `widths` children before one of them is followed; its value is its parent's and its step.
    """
    num = len(widths)
    parents = np.full(num, -1)
    counts = np.zeros(num, np.int64)  # children
    values, totals, visits = np.zeros(num), np.zeros(num), np.ones(num)
    for node in range(1, num):
        at = 0
        while counts[at] >= widths[at]:
            spread, chosen, highest = exploration * sqrt(log(visits[at])), -1, -inf
            for child in range(at + 1, node):
                if parents[child] == at:
                    bound = totals[child] / visits[child] + spread / sqrt(visits[child])
                    if bound > highest:
                        chosen, highest = child, bound
            at = chosen
        parents[node] = at
        counts[at] += 1
        values[node] = totals[node] = values[at] + steps[node]
        while at >= 0:
            totals[at] += values[node]
            visits[at] += 1
            at = parents[at]
    return parents


@dataclass(frozen=True, slots=True)
class Swarm(Rule):
    """One context that many branches continue at once.

    A swarm forks the context `width` times and goes on when all branches have ended, from the one that ended
    first. The lengths of answers say which branch ends first, as they do in real swarms at equal
    speed.
    """

    name = "swarms"
    width: int = 8  # forks
    texts: Texts = field(default_factory=Texts)

    def draft(self, rng: np.random.Generator) -> Sequence[Draft]:
        """One swarm."""
        outputs = self.texts.outputs(rng, self.width)
        branches = [Draft(self.texts.step, output, "branch", parent=0) for output in outputs]
        join = Draft(
            tokens=self.texts.task,
            output_tokens=self.texts.outputs(rng, 1)[0],
            cls="join",
            parent=1 + outputs.index(min(outputs)),
            waits=tuple(range(1, 1 + self.width)),
            tool_wait_s=float(rng.exponential(_TOOL_WAIT_S)),
        )
        return [Draft(self.texts.task, 0, "root"), *branches, join]


PROGRAMS: Final[dict[str, Rule]] = {
    "bfs": Beam(),
    "dfs": DepthFirst(),
    "mcts": Uct(),
    "swarm": Swarm(),
}
