"""The tree of a search: each node is a continuation of its parent's text.

A value that is given to a node counts for all nodes above it too. So `visits` of a node are the valued
nodes in its subtree, itself included, and `value` is their mean, whatever the policy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["open", "ended", "cut", "duplicate"]
"""open: may be expanded. ended: the answer is whole. cut: at the deepest level. duplicate: of a sibling."""

ROOT: Final = 0


class Proposal(NamedTuple):
    """A continuation that was drawn. `key`: the proposer's name of the state after it.

    `logprob`: the sum over its tokens; None if unknown. `is_end`: nothing follows it. `tokens` and their
    `logprobs` are there if ids were asked for.
    """

    text: str
    num_tokens: int
    key: str = ""
    logprob: float | None = None
    is_end: bool = False
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class Node:
    """A continuation in the tree. `number` counts nodes in the order in which they joined it.

    `score`: the value that was given to it. `num_pending`: proposals that are being drawn in its subtree.
    `is_closed`: no node of its subtree can be expanded any more.
    """

    number: int
    parent: int | None
    depth: int
    proposal: Proposal
    state: State = "open"
    score: float | None = None
    visits: int = 0
    total: float = 0.0
    children: list[int] = field(default_factory=list)
    num_pending: int = 0
    is_expanding: bool = False
    is_expanded: bool = False
    is_closed: bool = False

    @property
    def value(self) -> float | None:
        """The mean of the values in its subtree; None without any."""
        return self.total / self.visits if self.visits else None

    @property
    def may_expand(self) -> bool:
        """Whether nothing has followed it yet, and something can."""
        return self.state == "open" and not self.is_expanded and not self.is_expanding


class Tree:
    """Nodes by number, the root first. Policies read it; the `Search` that owns it lets it grow."""

    __slots__ = ("_depth", "answers", "nodes", "num_expanding", "num_expansions")

    def __init__(self, root: Proposal, depth: int) -> None:
        self._depth = depth
        self.nodes: list[Node] = [Node(ROOT, None, 0, root)]
        self.answers: list[int] = []  # numbers of nodes that end an answer: ended or cut
        self.num_expansions = 0  # that were begun
        self.num_expanding = 0  # of them, those that are not done

    @property
    def root(self) -> Node:
        return self.nodes[ROOT]

    def children(self, node: Node) -> list[Node]:
        return [self.nodes[number] for number in node.children]

    def path(self, node: Node) -> list[Node]:
        """From the root to `node`, both included."""
        return [*self._upwards(node)][::-1]

    def text(self, node: Node) -> str:
        """The text below the root, to the end of `node`."""
        return "".join(each.proposal.text for each in self.path(node)[1:])

    def leaves(self) -> list[Node]:
        """Nodes without children, duplicates left out."""
        return [node for node in self.nodes if not node.children and node.state != "duplicate"]

    def begin(self, node: Node, num: int) -> None:
        """`num` continuations of `node` are being drawn."""
        self.num_expansions += 1
        self.num_expanding += 1
        node.is_expanding = True
        for each in self._upwards(node):
            each.num_pending += num

    def end(self, node: Node, num: int) -> None:
        """The `num` continuations that were begun have come: they are added next, and then it `settle`s."""
        self.give_up(node, num)
        node.is_expanded = True

    def give_up(self, node: Node, num: int) -> None:
        """The `num` continuations that were begun won't come."""
        self.num_expanding -= 1
        node.is_expanding = False
        for each in self._upwards(node):
            each.num_pending -= num

    def add(self, parent: Node, proposal: Proposal, score: float | None, *, is_new: bool) -> Node:
        """A child of `parent`; one that is not new is a duplicate of another child."""
        depth = parent.depth + 1
        state: State = "open"
        if not is_new:
            state = "duplicate"
        elif proposal.is_end:
            state = "ended"
        elif depth >= self._depth:
            state = "cut"
        node = Node(len(self.nodes), parent.number, depth, proposal, state)
        node.is_closed = state != "open"
        self.nodes.append(node)
        parent.children.append(node.number)
        if state in ("ended", "cut"):
            self.answers.append(node.number)
        if score is not None:
            node.score = score
            for each in self._upwards(node):
                each.visits += 1
                each.total += score
        return node

    def settle(self, node: Node) -> None:
        """Close `node`, and those above it, as far as all below is closed."""
        for each in self._upwards(node):
            is_done = each.is_expanded and not each.is_expanding
            if not is_done or not all(child.is_closed for child in self.children(each)):
                return
            each.is_closed = True

    def _upwards(self, node: Node) -> Iterator[Node]:
        yield node
        while node.parent is not None:
            node = self.nodes[node.parent]
            yield node
