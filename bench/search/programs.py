"""Search programs: each says which texts to continue next, and is told the answers.

A program is a generator. It yields a round of `Expand`s, which run side by side, and gets for each the
texts that its answers lead to. It knows neither engines nor requests, so that one program is driven by
forks and by plain requests. What a judge would say of an answer is drawn: equal seeds give equal searches.
"""

import math
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.uint32]

VOCABULARY: Final = 32_000


class Text(NamedTuple):
    """A text of a search; `capsule` is its state at an engine that forks, "" elsewhere."""

    tokens: Tokens
    capsule: str = ""


class Expand(NamedTuple):
    """Continue `text` and `suffix` by `width` answers of `tokens` tokens each."""

    text: Text
    width: int
    tokens: int
    suffix: Tokens


Round: TypeAlias = Sequence[Expand]
Program: TypeAlias = Generator[Round, Sequence[Sequence[Text]], None]
NOTHING: Final = np.zeros(0, np.uint32)


def drawn_text(seed: int, num: int) -> Tokens:
    """A text that no other seed has."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, num, np.uint32)


def steps(
    root: Text, seed: int, *, depth: int, width: int, tokens: int, suffix: int = 0
) -> Program:
    """`depth` levels: `width` answers each, of which one goes on, behind `suffix` tokens of the client's."""
    rng, text = random.Random(seed), root
    for _ in range(depth):
        asked = drawn_text(rng.getrandbits(32), suffix)
        (found,) = yield [Expand(text, width, tokens, asked)]
        text = found[rng.randrange(width)]


def beam(root: Text, seed: int, *, beam: int, width: int, depth: int, tokens: int) -> Program:
    """Beam search over steps: `width` of each of the `beam` best texts, `depth` times."""
    rng, texts = random.Random(seed), [root]
    for _ in range(depth):
        found = yield [Expand(text, width, tokens, NOTHING) for text in texts]
        texts = rng.sample([text for each in found for text in each], min(beam, width * len(texts)))


def thoughts(
    root: Text, seed: int, *, keep: int, width: int, votes: int, depth: int, tokens: int
) -> Program:
    """Tree of thoughts, breadth first: thoughts of each kept text, votes on each thought, the best are kept.

    A vote is a question of 32 tokens and an answer of 8. Source: Yao et al. 2023, 5 kept, 3 votes.
    """
    rng, texts = random.Random(seed), [root]
    question = drawn_text(seed + 1, 32)
    for _ in range(depth):
        found = yield [Expand(text, width, tokens, NOTHING) for text in texts]
        thought = [text for each in found for text in each]
        yield [Expand(text, votes, 8, question) for text in thought]
        texts = rng.sample(thought, min(keep, len(thought)))


class _Node:
    """A text of the tree that `mcts` grows, with its visits and the sum of what they were worth."""

    __slots__ = ("children", "parent", "text", "total", "value", "visits")

    def __init__(self, text: Text, value: float, parent: "_Node | None") -> None:
        self.text = text
        self.value = self.total = value
        self.parent = parent
        self.visits = 1
        self.children: list[_Node] = []

    def bound(self, spread: float) -> float:
        return self.total / self.visits + spread / math.sqrt(self.visits)


def mcts(
    root: Text,
    seed: int,
    *,
    expansions: int,
    rollouts: int,
    tokens: int,
    leaves: int = 1,
    exploration: float = 2.0,
) -> Program:
    """Monte Carlo tree search: upper confidence bounds lead to a text, which gets `rollouts` answers.

    Each answer is a child, worth what its parent is and a normal step. `leaves` texts are expanded
    at a time; one that is chosen counts a visit at once, so that others are chosen beside it.
    """
    rng, top = random.Random(seed), _Node(root, 0.0, None)
    while expansions:
        chosen: list[_Node] = []
        for _ in range(min(leaves, expansions)):
            node = top
            while node.children:
                spread = exploration * math.sqrt(math.log(node.visits))
                node = max(node.children, key=lambda child: child.bound(spread))
            if node in chosen:
                break  # there is no other one yet
            chosen.append(node)
            _visit(node, 0.0)
        expansions -= len(chosen)
        found = yield [Expand(node.text, rollouts, tokens, NOTHING) for node in chosen]
        for node, texts in zip(chosen, found, strict=True):
            for text in texts:
                child = _Node(text, node.value + rng.gauss(0.0, 1.0), node)
                node.children.append(child)
                _visit(node, child.value)


def _visit(node: _Node | None, value: float) -> None:
    """Count a visit of `node` and all above it."""
    while node is not None:
        node.visits += 1
        node.total += value
        node = node.parent


class Shape(NamedTuple):
    """A program with its figures, and the words of a report for it."""

    text: str
    program: Callable[..., Program]
    figures: dict[str, Any]

    def begin(self, root: Text, seed: int) -> Program:
        return self.program(root, seed, **self.figures)


SEARCH: Final[dict[str, Any]] = {"expansions": 50, "rollouts": 20, "tokens": 50}
SHAPES: Final[dict[str, Shape]] = {
    "chain": Shape("a chain of 10 steps", steps, {"depth": 10, "width": 1, "tokens": 16}),
    "session": Shape(
        "one hot session: 8 turns of 64 tokens and 128 of answer",
        steps,
        {"depth": 8, "width": 1, "tokens": 128, "suffix": 64},
    ),
    "tree": Shape("a tree, 5 wide, 10 deep", steps, {"depth": 10, "width": 5, "tokens": 16}),
    "beam": Shape(
        "beam search, 4 of 16, 8 steps", beam, {"beam": 4, "width": 4, "depth": 8, "tokens": 32}
    ),
    "thoughts": Shape(
        "tree of thoughts, 5 of 25, 3 votes each, 4 levels",
        thoughts,
        {"keep": 5, "width": 5, "votes": 3, "depth": 4, "tokens": 32},
    ),
    "mcts": Shape("MCTS, 50 expansions of 20 rollouts of 50", mcts, SEARCH),
    "mcts_4": Shape("the same, 4 expansions at a time", mcts, SEARCH | {"leaves": 4}),
}
