"""Whole answers side by side: best of n, and self-consistency."""

from typing import Final

from mallee.protocol.errors import InvalidParameter
from mallee.search.policy import Expansion, Stepwise, best, is_found, rank, within
from mallee.search.tree import Node, Proposal, Tree

MAX_MARK: Final = 256  # characters


class Sampling(Stepwise, frozen=True):
    """A base of policies that draw `n` answers, `wave` at a time (by default all at once)."""

    n: int = 8
    wave: int | None = None
    max_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wave is not None:
            within("policy.wave", self.wave, 1, self.n)

    @property
    def depth(self) -> int:
        return 1

    @property
    def merges(self) -> bool:
        return False

    def propose(self, tree: Tree) -> list[Expansion]:
        """The next wave, once the one before has joined the tree."""
        num_left = self.num_left(tree)
        if tree.num_expanding or not num_left:
            return []
        return [Expansion(tree.root, min(self.wave or self.n, num_left), self.max_tokens)]

    def num_left(self, tree: Tree) -> int:
        """Samples that were not asked for yet."""
        return max(self.n - tree.num_expansions * (self.wave or self.n), 0)


class BestOfN(Sampling, frozen=True, kw_only=True, tag="best_of_n"):
    """The best of `n` answers. No further wave is drawn once an answer is worth `stop_at`."""

    stop_at: float | None = None

    def stop(self, tree: Tree) -> bool:
        return is_found(tree, self.stop_at)


class SelfConsistency(Sampling, frozen=True, kw_only=True, tag="self_consistency"):
    """The answer that most of `n` samples agree on.

    A sample's answer is its text after the last `after` in it, up to `until`, without spaces around it; with
    neither its whole text. Samples without one have no vote; of equal counts the answer that came first
    wins. With `weighted` a vote counts as much as the sample's score. No further wave is drawn once the
    samples that are left can't change the outcome.
    """

    after: str = ""
    until: str = ""
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for param, mark in (("policy.after", self.after), ("policy.until", self.until)):
            if len(mark) > MAX_MARK:
                raise InvalidParameter(param, mark, f"give at most {MAX_MARK} characters")

    def score(self, proposal: Proposal) -> bool:
        return self.weighted

    def select(self, tree: Tree) -> Node:
        """The best sample of those with the answer that won."""
        votes = self.votes(tree)
        if not votes:
            return best(tree)
        won = max(votes, key=lambda answer: votes[answer])  # of equals the first
        voters = (node for node in tree.leaves() if self.answer(node.proposal.text) == won)
        return min(voters, key=rank)

    def stop(self, tree: Tree) -> bool:
        """With weights a sample may count any amount, so that none is left out."""
        num_left = self.num_left(tree)
        if self.weighted or not num_left:
            return False
        counts = sorted(self.votes(tree).values(), reverse=True)
        return bool(counts) and counts[0] > sum(counts[1:2]) + num_left

    def votes(self, tree: Tree) -> dict[str, float]:
        """Votes by answer, in the order in which answers came."""
        votes: dict[str, float] = {}
        for node in tree.children(tree.root):
            answer = self.answer(node.proposal.text)
            if answer:
                vote = (node.score or 0.0) if self.weighted else 1.0
                votes[answer] = votes.get(answer, 0.0) + vote
        return votes

    def answer(self, text: str) -> str:
        """The answer in a sample; empty if there is none."""
        if self.after:
            _, is_there, text = text.rpartition(self.after)
            if not is_there:
                return ""
        if self.until:
            text = text.lstrip().partition(self.until)[0]
        return text.strip()
