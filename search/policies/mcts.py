"""Monte Carlo tree search over texts.

One expansion draws all continuations of a node at once, as one fork, and each is valued where it ends: the
value function stands for rollouts, as in AlphaZero. A whole answer has one value, which drawing it again
would not change, so finished subtrees are left out of further visits instead of visited again.
"""

import math
from typing import Literal, TypeAlias

from mallee.search.policy import Expansion, Seeking, best
from mallee.search.tree import Node, Tree

Selector: TypeAlias = Literal["uct", "puct", "greedy"]


class Mcts(Seeking, frozen=True, kw_only=True, tag="mcts"):
    """`expansions` of `width` continuations each, where the selector leads to.

    `uct`: mean + c sqrt(ln N / n), N visits of the parent, n of the child. `puct`: mean + c p sqrt(N) /
    (1 + n), p the child's share of its siblings' mean token probabilities. `greedy`: the mean. Of equal ones
    the earlier. `in_flight` expansions run at once: proposals that are being drawn count as visits worth
    nothing (a virtual loss), so that the next descent goes elsewhere.

    `answer`: "value" takes the best answer, if there is one; "visits" the child with most visits, from the
    root on. Ends early once an answer is worth `stop_at`.
    """

    expansions: int = 50
    width: int = 4
    depth: int = 8
    step_tokens: int = 32
    selector: Selector = "uct"
    c: float = 1.4
    in_flight: int = 1
    answer: Literal["value", "visits"] = "value"

    def propose(self, tree: Tree) -> list[Expansion]:
        """One at a time: the next descent sees those that are being drawn."""
        is_full = tree.num_expanding >= self.in_flight
        if is_full or tree.num_expansions >= self.expansions:
            return []
        node = self._descend(tree)
        return [] if node is None else [Expansion(node, self.width, self.step_tokens)]

    def select(self, tree: Tree) -> Node:
        if self.answer == "value" and tree.answers:
            return best(tree)
        node = tree.root
        while new := [child for child in tree.children(node) if child.state != "duplicate"]:
            node = min(new, key=lambda child: (-child.visits, -_mean(child), child.number))
        return node

    def _descend(self, tree: Tree) -> Node | None:
        """The node to expand next; None while the selector leads to one that is being expanded."""
        node = tree.root
        while node.is_expanded and not node.is_closed:
            ahead = [child for child in tree.children(node) if not child.is_closed]
            if not ahead:
                return None
            worth = self._worths(tree, node, ahead)
            node = max(ahead, key=lambda child: (worth[child.number], -child.number))
        return node if node.may_expand else None

    def _worths(self, tree: Tree, parent: Node, ahead: list[Node]) -> dict[int, float]:
        """The selector's figures of children, by their numbers."""
        if self.selector == "greedy":
            return {child.number: _mean(child) for child in ahead}
        around = parent.visits + parent.num_pending
        if self.selector == "uct":
            return {child.number: self._uct(child, around) for child in ahead}
        shares = priors(tree.children(parent))
        root = math.sqrt(around)
        return {
            child.number: _mean(child) + self.c * shares[child.number] * root / (1 + _seen(child))
            for child in ahead
        }

    def _uct(self, child: Node, around: int) -> float:
        seen = _seen(child)
        if not seen:
            return math.inf
        return _mean(child) + self.c * math.sqrt(math.log(around) / seen)


def priors(siblings: list[Node]) -> dict[int, float]:
    """Shares of the siblings' mean token probabilities, by number; equal shares where one is unknown."""
    chances = [_chance(node) for node in siblings if node.state != "duplicate"]
    known = [each for each in chances if each is not None]
    total = math.fsum(known)
    if len(known) < len(chances) or not total:
        return {node.number: 1 / max(len(chances), 1) for node in siblings}
    return {node.number: (_chance(node) or 0.0) / total for node in siblings}


def _chance(node: Node) -> float | None:
    """The geometric mean of its tokens' probabilities."""
    logprob, num = node.proposal.logprob, node.proposal.num_tokens
    return None if logprob is None else math.exp(min(logprob, 0.0) / max(num, 1))


def _seen(node: Node) -> int:
    return node.visits + node.num_pending


def _mean(node: Node) -> float:
    """The mean of values, those that are being drawn being worth nothing."""
    return node.total / max(_seen(node), 1)
