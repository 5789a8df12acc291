"""Search trees by rules, without a source: beams, depth-first search, UCT.

To generate traffic like a source's, `fit_search` is closer: rules have mean widths, budgets and depths, and
no correlation between the lists of children of one tree. All are models as `synth.core.model.Model` says;
trees begin by chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mallee.synth.programs.rules.drafts import Draft, Rule, Texts
from mallee.synth.programs.rules.uct import uct_tree
from mallee.traces.workload import NO_PARENT


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
        left = self.budget
        todo = [(0, 1)] * _widths(rng, self.width, 1)[0]  # (parent, depth)
        while todo and left:
            parent, depth = todo.pop()
            waits = (len(drafts) - 1,) if len(drafts) > 1 else ()
            output = self.texts.outputs(rng, 1)[0]
            drafts.append(Draft(self.texts.step, output, "node", parent, waits))
            left -= 1
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
    levels: int = 20
    exploration: float = 2.0
    width: float = 4.0  # children of an expanded node, mean
    texts: Texts = field(default_factory=Texts)

    def draft(self, rng: np.random.Generator) -> Sequence[Draft]:
        """One tree."""
        parents = self.tree(rng, 1 + self.visits)
        outputs = self.texts.outputs(rng, len(parents))
        return [
            Draft(self.texts.task, 0, "root")
            if parent == NO_PARENT
            else Draft(self.texts.step, output, "node", parent, (i - 1,) if i > 1 else ())
            for i, (parent, output) in enumerate(zip(parents, outputs, strict=True))
        ]

    def tree(self, rng: np.random.Generator, nodes: int) -> list[int]:
        """Parents of the nodes of one tree in the order of visits; fewer if nothing is left to try."""
        widths = np.array(_widths(rng, self.width, nodes))
        steps = rng.standard_normal(nodes)
        parents: list[int] = uct_tree(widths, steps, self.exploration, self.levels).tolist()
        return parents
