"""The result of a search, as a value that processes send each other."""

import msgspec

from mallee.search.tree import Node, State, Tree


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One node, by its number. `value` is the mean over the `visits` valued nodes in its subtree.

    `capsule`: the state after it, "" where none was kept.
    """

    number: int
    parent: int | None
    depth: int
    text: str
    tokens: int
    state: State
    logprob: float | None
    score: float | None
    visits: int
    value: float | None
    capsule: str = ""


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A search's outcome.

    `principal`: numbers of the nodes from the root to the one that was selected, the root left out.
    `text` and `score` are its text and score. `reason`: found, done, or tokens, nodes, expansions of the
    budget. `tokens` were drawn for the nodes of the tree; what was given up at the end is not counted.
    """

    text: str
    score: float | None
    reason: str
    principal: tuple[int, ...]
    tokens: int
    expansions: int
    nodes: tuple[NodeResult, ...]

    @property
    def best(self) -> NodeResult:
        """The node that was selected."""
        return self.nodes[self.principal[-1] if self.principal else 0]


def result_of(tree: Tree, best: Node, reason: str, num_tokens: int) -> SearchResult:
    """The result of a tree of which `best` was selected."""
    return SearchResult(
        text=tree.text(best),
        score=best.score,
        reason=reason,
        principal=tuple(node.number for node in tree.path(best)[1:]),
        tokens=num_tokens,
        expansions=tree.num_expansions,
        nodes=tuple(map(node_result, tree.nodes)),
    )


def node_result(node: Node) -> NodeResult:
    """A node of a tree as a value."""
    drawn = node.proposal
    return NodeResult(
        number=node.number,
        parent=node.parent,
        depth=node.depth,
        text=drawn.text,
        tokens=drawn.num_tokens,
        state=node.state,
        logprob=drawn.logprob,
        score=node.score,
        visits=node.visits,
        value=node.value,
        capsule=drawn.key,
    )
