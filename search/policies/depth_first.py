"""Tree of thoughts, depth first."""

from mallee.search.policy import Expansion, Seeking, is_worth, rank
from mallee.search.tree import Tree


class DepthFirst(Seeking, frozen=True, kw_only=True, tag="tot_dfs"):
    """The best thought first, down to an answer; then back to the next best one that is left.

    Thoughts worth less than `prune_below` are left out with all that would follow them. Ends once an
    answer is worth `stop_at`, or when all thoughts have been tried. Source: Yao et al. 2023, algorithm 2.
    """

    branch: int = 5
    depth: int = 4
    step_tokens: int = 64
    prune_below: float | None = None

    def propose(self, tree: Tree) -> list[Expansion]:
        if tree.num_expanding:
            return []
        ahead = [tree.root]  # the next one last
        while ahead:
            node = ahead.pop()
            if node.is_closed or not is_worth(node, self.prune_below):
                continue
            if node.may_expand:
                return [Expansion(node, self.branch, self.step_tokens)]
            ahead += sorted(tree.children(node), key=rank, reverse=True)
        return []
