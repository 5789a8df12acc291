"""The result of a search, as a value that processes send each other, and the KV blocks of its tree."""

from collections.abc import Sequence

import msgspec

from mallee.search.tree import ROOT, Node, State, Tree


class NodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One node, by its number. `value` is the mean over the `visits` valued nodes in its subtree.

    `capsule`: the state after it, "" where none was kept. `token_ids` and their `token_logprobs`, if they
    were asked for: with the token that ended it, which is not in its capsule.
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
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    token_logprobs: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET


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
        token_ids=drawn.tokens or msgspec.UNSET,
        token_logprobs=drawn.logprobs or msgspec.UNSET,
    )


def num_blocks(nodes: Sequence[Node], begun: int, size: int) -> int:
    """KV blocks of `size` tokens that hold a tree which goes on from `begun` tokens, shared ones once.

    Counted as a worker lays it out. A continuation shares the full blocks before it, and has a copy of one
    that is not full. The last token of a node has no KV before something follows it, and then once for all
    that does. A node without a state holds nothing.
    """
    ends = {ROOT: begun}
    for node in nodes:
        if node.parent is not None:
            ends[node.number] = ends[node.parent] + node.proposal.num_tokens
    num = -(-begun // size)
    for node in nodes:
        end, held = ends[node.number], [_held(nodes[each], ends) for each in node.children]
        followed = [each for each in held if each is not None]
        num += sum(-(-each // size) - end // size for each in followed if each > end)
        if node.number != ROOT and followed:
            # The block of the last token stays by itself where it is full, or nothing copied it.
            num += end % size == 0 or min(followed) <= end
    return num


def _held(node: Node, ends: dict[int, int]) -> int | None:
    """Tokens up to which there is KV of a node; None: it left no state."""
    if not node.proposal.key:
        return None
    return ends[node.number] - 1
