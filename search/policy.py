"""The policy of a search: the Protocol, and what policies have in common."""

import sys
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

import msgspec

from mallee.protocol.errors import InvalidParameter
from mallee.search.tree import Node, Proposal, Tree

MAX_WIDTH: Final = 128  # continuations of one node, or samples
MAX_DEPTH: Final = 256
MAX_STEP_TOKENS: Final = 1 << 20
MAX_EXPANSIONS: Final = 100_000
MAX_FLOAT: Final = sys.float_info.max
FINITE: Final = (-MAX_FLOAT, MAX_FLOAT)
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(("branch", "n", "trees", "wave", "width"), (1, MAX_WIDTH)),
    **dict.fromkeys(("max_tokens", "step_tokens"), (1, MAX_STEP_TOKENS)),
    **dict.fromkeys(("prune_below", "stop_at"), FINITE),
    "c": (0.0, 1000.0),
    "depth": (1, MAX_DEPTH),
    "expansions": (1, MAX_EXPANSIONS),
    "in_flight": (1, 64),
}
"""Least and most of the fields of policies, by their names."""


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
    """A base of policies that value every step, and for which equal siblings are one.

    A field of a name in `RANGES` is checked. Raises InvalidParameter.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name in RANGES and (value := getattr(self, name)) is not None:
                within(f"policy.{name}", value, *RANGES[name])

    @property
    def merges(self) -> bool:
        return True

    def score(self, proposal: Proposal) -> bool:
        return True

    def select(self, tree: Tree) -> Node:
        return best(tree)

    def stop(self, tree: Tree) -> bool:
        return False


class Seeking(Stepwise, frozen=True, kw_only=True):
    """A base of policies that end once an answer is worth `stop_at`."""

    stop_at: float | None = None

    def stop(self, tree: Tree) -> bool:
        return is_found(tree, self.stop_at)


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
        most = {"tokens": 1 << 40, "nodes": 1 << 40, "expansions": MAX_EXPANSIONS}
        for name, high in most.items():
            if (value := getattr(self, name)) is not None:
                within(f"budget.{name}", value, 1, high)


def within(param: str, value: float, low: float, high: float) -> None:
    """Raises InvalidParameter outside of [low, high], and for NaN."""
    if low <= value <= high:
        return
    is_any = high == MAX_FLOAT
    remedy = "give a finite number, or leave it out" if is_any else f"give {low} to {high}"
    raise InvalidParameter(param, value, remedy)


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
