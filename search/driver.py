"""The search itself, without I/O: it says what is to be drawn and valued, and grows its tree by the results.

    Expand --results--> Score --values--> the tree grows, in the order of the Expands --> Expand, ...

Results may come in any order. An expansion joins the tree only after all that were proposed before it, so
the policy always sees the same trees: one seed and the same answers to the same work make the same tree,
wherever and however fast that is carried out. What a later expansion waits for is only its place: it is
valued as soon as it is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Literal, NamedTuple, TypeAlias

from mallee.protocol.errors import InternalError, InvalidParameter
from mallee.search.policy import Policy, SearchBudget
from mallee.search.results import SearchResult, result_of
from mallee.search.scores import Scoring, path_score
from mallee.search.tree import Node, Proposal, Tree

NO_BUDGET: Final = SearchBudget()

Reason: TypeAlias = Literal["done", "found", "tokens", "nodes", "expansions"]
"""done: the policy has no more wishes. found: it stopped. The others: that part of the budget is spent."""


class Expand(NamedTuple):
    """Draw `num` continuations of the state `key`, with this seed, of at most `max_tokens` tokens each.

    `node` is the node's number, and `work` that of the work.
    """

    work: int
    node: int
    key: str
    num: int
    max_tokens: int
    seed: int


class Score(NamedTuple):
    """Value these proposals, which go on from `node`. `texts`: of each, from the root's end on."""

    work: int
    node: int
    proposals: tuple[Proposal, ...]
    texts: tuple[str, ...]
    num_tokens: tuple[int, ...]  # of the texts


@dataclass(slots=True)
class _Growth:
    """One expansion on its way into the tree. `proposals` is None until it is drawn."""

    node: Node
    num: int
    max_tokens: int
    proposals: Sequence[Proposal] | None = None
    is_new: list[bool] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)  # indexes of proposals that are being valued
    is_ready: bool = False


class Search:
    """One search. `work()` is what to carry out now; `expanded` and `scored` take results.

    `scoring`: "outside" asks for values by `Score`, the others count log-probabilities.
    """

    def __init__(
        self,
        policy: Policy,
        root: Proposal,
        *,
        seed: int,
        budget: SearchBudget = NO_BUDGET,
        scoring: Scoring = "outside",
    ) -> None:
        self._policy = policy
        self._seed = seed
        self._budget = budget
        self._scoring = scoring
        self._tree = Tree(root, policy.depth)
        self._num_tokens = 0  # of the tree, below the root
        self._num_reserved = 0  # tokens that expansions under way may draw
        self._growths: dict[int, _Growth] = {}  # by work, in the order of the proposals
        self._work: list[Expand | Score] = []
        self._reason: Reason | None = None
        self._plan()

    @property
    def is_over(self) -> bool:
        return self._reason is not None

    @property
    def tree(self) -> Tree:
        """The tree so far, to be read only."""
        return self._tree

    def work(self) -> list[Expand | Score]:
        """Work that was not given out before. Nothing once it is over: what still runs is to be ended."""
        work, self._work = self._work, []
        return work

    def expanded(self, work: int, proposals: Sequence[Proposal]) -> None:
        """The continuations of an `Expand`, at most as many as it asked for; it may be fewer."""
        growth = self._growth(work)
        if growth is None:
            return
        assert growth.proposals is None, f"the expansion {work} was drawn before"
        assert len(proposals) <= growth.num, "more continuations than were asked for"
        growth.proposals = proposals
        self._value(work, growth)
        self._grow()

    def scored(self, work: int, values: Sequence[float | None]) -> None:
        """The values of a `Score`, in its order; None for one that has none. Raises InvalidParameter."""
        growth = self._growth(work)
        if growth is None:
            return
        assert growth.asked, f"no values are awaited for {work}"
        for index, value in zip(growth.asked, values, strict=True):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and abs(value) < float("inf")):
                raise InvalidParameter("score", value, "a score is a finite number, or None")
            growth.scores[index] = value
        growth.asked = []
        growth.is_ready = True
        self._grow()

    def result(self) -> SearchResult:
        """The result so far, or in the end."""
        best = self._policy.select(self._tree)
        return result_of(self._tree, best, self._reason or "", self._num_tokens)

    def _growth(self, work: int) -> _Growth | None:
        """The expansion with that number; None for results that come after the end."""
        if self.is_over:
            return None
        growth = self._growths.get(work)
        assert growth is not None, f"no such work: {work}"
        return growth

    def _value(self, work: int, growth: _Growth) -> None:
        """Score a drawn expansion, or ask for its values."""
        proposals = growth.proposals or ()
        growth.scores = [None] * len(proposals)
        seen: set[str] = set()
        asked: list[int] = []
        for index, proposal in enumerate(proposals):
            is_new = not self._policy.merges or proposal.text not in seen
            seen.add(proposal.text)
            growth.is_new.append(is_new)
            if not is_new or not self._policy.score(proposal):
                continue
            if self._scoring == "outside":
                asked.append(index)
            else:
                path = self._tree.path(growth.node)[1:]
                above = [node.proposal for node in path]
                growth.scores[index] = path_score(self._scoring, (*above, proposal))
        growth.asked = asked
        growth.is_ready = not asked
        if asked:
            before = self._tree.text(growth.node)
            begun = sum(node.proposal.num_tokens for node in self._tree.path(growth.node)[1:])
            chosen = tuple(proposals[index] for index in asked)
            texts = tuple(before + proposal.text for proposal in chosen)
            num_tokens = tuple(begun + proposal.num_tokens for proposal in chosen)
            self._work.append(Score(work, growth.node.number, chosen, texts, num_tokens))

    def _grow(self) -> None:
        """Let expansions join the tree, as far as all before them have, and ask the policy after each."""
        tree = self._tree
        while self._growths and not self.is_over:
            work, growth = next(iter(self._growths.items()))
            if not growth.is_ready:
                return
            del self._growths[work]
            self._num_reserved -= growth.num * growth.max_tokens
            tree.end(growth.node, growth.num)
            found = zip(growth.proposals or (), growth.scores, growth.is_new, strict=True)
            for proposal, score, is_new in found:
                tree.add(growth.node, proposal, score, is_new=is_new)
                self._num_tokens += proposal.num_tokens
            tree.settle(growth.node)
            self._plan()

    def _plan(self) -> None:
        """Take the policy's wishes, as far as the budget goes."""
        if self._policy.stop(self._tree):
            self._end("found")
            return
        short: Reason = "done"
        while wishes := self._policy.propose(self._tree):
            for node, num, max_tokens in wishes:
                most = self._budget.expansions
                if most is not None and self._tree.num_expansions >= most:
                    short = "expansions"
                    break
                by_tokens, by_nodes = self._room(max_tokens)
                if min(by_tokens, by_nodes) < 1:
                    short = "tokens" if by_tokens < 1 else "nodes"
                    break
                self._begin(node, min(num, by_tokens, by_nodes), max_tokens)
            if short != "done":
                break
        if not self._growths:
            self._end(short)

    def _room(self, max_tokens: int) -> tuple[int, int]:
        """Continuations of so many tokens that the budget surely has room for: by tokens, by nodes."""
        tokens, nodes = self._budget.tokens, self._budget.nodes
        by_tokens = by_nodes = 1 << 40
        if tokens is not None:
            by_tokens = (tokens - self._num_tokens - self._num_reserved) // max(max_tokens, 1)
        if nodes is not None:
            by_nodes = nodes + 1 - len(self._tree.nodes) - self._tree.root.num_pending
        return by_tokens, by_nodes

    def _begin(self, node: Node, num: int, max_tokens: int) -> None:
        if node.state != "open" or num < 1 or max_tokens < 1:
            name = type(self._policy).__name__
            raise InternalError(
                f"the policy {name} asks for {num} continuations of {max_tokens} tokens of node"
                f" {node.number}, which is {node.state}"
            )
        work = self._tree.num_expansions
        self._tree.begin(node, num)
        self._num_reserved += num * max_tokens
        self._growths[work] = _Growth(node, num, max_tokens)
        seed = derived_seed(self._seed, work)
        self._work.append(Expand(work, node.number, node.proposal.key, num, max_tokens, seed))

    def _end(self, reason: Reason) -> None:
        """Give up all that is being drawn: it is no part of the tree."""
        self._reason = reason
        self._work.clear()
        for growth in self._growths.values():
            self._tree.give_up(growth.node, growth.num)
        self._growths.clear()


def derived_seed(seed: int, number: int) -> int:
    """The seed of a search's piece of work: in [0, 2**63), the same in every process."""
    digest = blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
