"""Searches level by level: beams, tree of thoughts breadth first, diverse verifier trees."""

from mallee.search.policy import Expansion, Seeking, Stepwise, is_worth, rank
from mallee.search.tree import Node, Tree


class Beam(Stepwise, frozen=True, kw_only=True, tag="beam"):
    """The `width` best texts go on, each `branch` ways a level; whole answers keep their place among them.

    Ends when all of the beam are whole, or at `depth`.
    """

    width: int = 4
    branch: int = 4
    depth: int = 8
    step_tokens: int = 32

    def propose(self, tree: Tree) -> list[Expansion]:
        if tree.num_expanding:
            return []
        open_ones = [node for node in self.beam(tree) if node.may_expand]
        return [Expansion(node, self.branch, self.step_tokens) for node in open_ones]

    def select(self, tree: Tree) -> Node:
        """The best of the last beam."""
        return min(self.beam(tree), key=rank, default=tree.root)

    def beam(self, tree: Tree) -> list[Node]:
        """The last beam whose level is whole, the best first."""
        kept = [tree.root]
        while True:
            going = [node for node in kept if node.is_expanded]
            if not going or any(node.may_expand or node.is_expanding for node in kept):
                return kept
            done = [node for node in kept if not node.is_expanded]
            fresh = [child for node in going for child in tree.children(node)]
            found = [node for node in (*done, *fresh) if node.state != "duplicate"]
            if not found:
                return kept
            kept = sorted(found, key=rank)[: self.width]


class BreadthFirst(Seeking, frozen=True, kw_only=True, tag="tot_bfs"):
    """Tree of thoughts, breadth first: of each level the `width` best thoughts are expanded `branch` ways.

    Thoughts worth less than `prune_below` never are. Ends once an answer is worth `stop_at`.
    Source: Yao et al. 2023, algorithm 1.
    """

    width: int = 5
    branch: int = 5
    depth: int = 4
    step_tokens: int = 64
    prune_below: float | None = None

    def propose(self, tree: Tree) -> list[Expansion]:
        if tree.num_expanding:
            return []
        deepest = tree.nodes[-1].depth  # levels grow one after the other
        level = [node for node in tree.nodes if node.depth == deepest]
        if any(node.is_expanded for node in level):  # nothing followed it
            return []
        going = [node for node in level if node.may_expand and is_worth(node, self.prune_below)]
        kept = sorted(going, key=rank)[: self.width]
        return [Expansion(node, self.branch, self.step_tokens) for node in kept]


class DiverseTrees(Seeking, frozen=True, kw_only=True, tag="dvts"):
    """Diverse verifier tree search: `trees` beginnings, in each of which the best of `branch` steps goes on.

    The trees don't wait for each other, and none takes another's place. Ends once an answer is worth
    `stop_at`. Source: Beeching et al. 2024, scaling test-time compute with open models.
    """

    trees: int = 4
    branch: int = 4
    depth: int = 8
    step_tokens: int = 32

    def propose(self, tree: Tree) -> list[Expansion]:
        if tree.root.may_expand:
            return [Expansion(tree.root, self.trees, self.step_tokens)]
        ends = (self._end(tree, beginning) for beginning in tree.children(tree.root))
        return [Expansion(node, self.branch, self.step_tokens) for node in ends if node.may_expand]

    def select(self, tree: Tree) -> Node:
        """The best of the ends of all trees."""
        beginnings = (node for node in tree.children(tree.root) if node.state != "duplicate")
        ends = [self._end(tree, node) for node in beginnings]
        answers = [node for node in ends if node.state != "open"]
        return min(answers or ends, key=rank, default=tree.root)

    def _end(self, tree: Tree, node: Node) -> Node:
        """The last node on the path of the best steps from `node` on."""
        while new := [child for child in tree.children(node) if child.state != "duplicate"]:
            node = min(new, key=rank)
        return node
