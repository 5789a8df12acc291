"""Searches whose proposals and values come from a script instead of a model."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TypeAlias

from mallee.search.driver import NO_BUDGET, Expand, Score, Search
from mallee.search.policy import Policy, SearchBudget
from mallee.search.results import SearchResult
from mallee.search.scores import Scoring
from mallee.search.tree import Proposal

Draw: TypeAlias = Callable[[str, Expand], Sequence[Proposal]]
"""The continuations of a text (a node's key) for an expansion."""
Value: TypeAlias = Callable[[str], float | None]

ORIGIN = Proposal("", 0, key="")


class Play:
    """A search that is played to its end; `expanded` are the texts in the order of their expansions.

    With `shuffle` results come in any order, and as many are out at once as the search gives.
    """

    def __init__(
        self,
        policy: Policy,
        draw: Draw,
        value: Value = lambda text: None,
        *,
        seed: int = 0,
        budget: SearchBudget = NO_BUDGET,
        scoring: Scoring = "outside",
        shuffle: Random | None = None,
    ) -> None:
        self.search = Search(policy, ORIGIN, seed=seed, budget=budget, scoring=scoring)
        self.expanded: list[str] = []
        self.num_valued = 0
        self.most_at_once = 0
        self._draw = draw
        self._value = value
        self._run(shuffle)

    @property
    def result(self) -> SearchResult:
        return self.search.result()

    def _run(self, shuffle: Random | None) -> None:
        todo: list[Expand | Score] = []
        while not self.search.is_over:
            fresh = self.search.work()
            self.expanded += [each.key for each in fresh if isinstance(each, Expand)]
            todo += fresh
            self.most_at_once = max(self.most_at_once, len(todo))
            assert todo, "the search waits for nothing"
            each = todo.pop(shuffle.randrange(len(todo)) if shuffle is not None else 0)
            if isinstance(each, Expand):
                self.search.expanded(each.work, self._draw(each.key, each))
            else:
                self.num_valued += len(each.texts)
                self.search.scored(each.work, [self._value(text) for text in each.texts])
        assert self.search.work() == []


class Game:
    """A small game: each text's continuations, of one token each, and the values of texts.

    `moves` maps a text to what may follow it; a text that is not in it ends. Expansions draw the first ones.
    """

    def __init__(
        self,
        moves: Mapping[str, str | Sequence[str]],
        values: Mapping[str, float],
        chances: Mapping[str, float] | None = None,
    ) -> None:
        """`chances`: log-probabilities by text; others are unknown."""
        self._moves = moves
        self._values = values
        self._chances = chances or {}

    def draw(self, text: str, expand: Expand) -> list[Proposal]:
        found = list(self._moves[text])[: expand.num]
        return [
            Proposal(
                move,
                1,
                key=text + move,
                logprob=self._chances.get(text + move),
                is_end=text + move not in self._moves,
            )
            for move in found
        ]

    def value(self, text: str) -> float | None:
        return self._values.get(text)

    def play(self, policy: Policy, **options: object) -> Play:
        return Play(policy, self.draw, self.value, **options)  # type: ignore[arg-type]
