"""The policy of a search: the Protocol, and what policies have in common."""

from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from mallee.protocol.errors import InvalidParameter
from mallee.search.tree import Node, Proposal, Tree

MAX_WIDTH: Final = 128  # continuations of one node, or samples
MAX_DEPTH: Final = 256
MAX_STEP_TOKENS: Final = 1 << 20
MAX_EXPANSIONS: Final = 100_000

T = TypeVar("T", int, float)


class Expansion(NamedTuple):
    """A wish: `num` continuations of `node`, of at most `max_tokens` tokens each."""

    node: Node
    num: int
    max_tokens: int


class Policy(Protocol):
    """Decides where a tree grows.

    It is asked at the begin, and after each expansion whose results have joined the tree. They join in
    the order in which they were proposed, whenever they came: so a policy that decides by the tree alone
    decides the same wherever it runs. It changes nothing of the tree.
    """

    @property
    def depth(self) -> int:
        """Levels below the root: nodes on the last one are not expanded."""
        ...

    @property
    def merges(self) -> bool:
        """Whether a continuation with the text of a sibling is a duplicate: not valued, not expanded."""
        ...

    def propose(self, tree: Tree) -> list[Expansion]:
        """Expansions to begin now. Asked again after each list until it is empty.

        An empty list while nothing is being drawn ends the search.
        """
        ...

    def score(self, proposal: Proposal) -> bool:
        """Whether the proposal's value is asked for."""
        ...

    def select(self, tree: Tree) -> Node:
        """The end of the principal variation."""
        ...

    def stop(self, tree: Tree) -> bool:
        """Whether the search has found what it looks for. What is being drawn is given up then."""
        ...


class Stepwise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A base of policies for which equal siblings are one, and every step is valued."""

    @property
    def merges(self) -> bool:
        return True

    def score(self, proposal: Proposal) -> bool:
        return True


class SearchBudget(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Bounds of a search's tree: its tokens, its nodes without the root, the expansions that made it.

    An expansion that might exceed `tokens` or `nodes` draws fewer continuations.
    """

    tokens: int | None = None
    nodes: int | None = None
    expansions: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            within("budget.tokens", self.tokens, 1, 1 << 40)
        if self.nodes is not None:
            within("budget.nodes", self.nodes, 1, 1 << 40)
        if self.expansions is not None:
            within("budget.expansions", self.expansions, 1, MAX_EXPANSIONS)


def within(param: str, value: T, low: T, high: T) -> T:
    """`value`. Raises InvalidParameter outside of [low, high], and for NaN."""
    if not low <= value <= high:
        raise InvalidParameter(param, value, f"give {low} to {high}")
    return value


def check_steps(width: int, depth: int, step_tokens: int, *, name: str) -> None:
    """Raises InvalidParameter; `name` is that of the field with the width."""
    within(f"policy.{name}", width, 1, MAX_WIDTH)
    within("policy.depth", depth, 1, MAX_DEPTH)
    within("policy.step_tokens", step_tokens, 1, MAX_STEP_TOKENS)


def check_finite(param: str, value: float | None) -> None:
    """Raises InvalidParameter for NaN and infinities."""
    if value is not None and not abs(value) < float("inf"):
        raise InvalidParameter(param, value, "give a finite number, or leave it out")


def rank(node: Node) -> tuple[bool, float, int]:
    """The order of nodes, the best first: by score, those without one last, of equals the earlier."""
    return (node.score is None, -(node.score or 0.0), node.number)


def best(tree: Tree) -> Node:
    """The best answer, be it whole or cut at the last level; without any the best leaf."""
    answers = [tree.nodes[number] for number in tree.answers]
    return min(answers or tree.leaves(), key=rank)


def is_found(tree: Tree, stop_at: float | None) -> bool:
    """Whether an answer is worth `stop_at`."""
    if stop_at is None:
        return False
    scores = (tree.nodes[number].score for number in tree.answers)
    return any(score is not None and score >= stop_at for score in scores)


def is_worth(node: Node, least: float | None) -> bool:
    """Whether it has a score of at least that; the root needs none."""
    if least is None or node.parent is None:
        return True
    return node.score is not None and node.score >= least
