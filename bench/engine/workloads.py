"""Loads for one engine: what arrives when, and what clients do with the answers.

    W1     one request, 256 tokens in, 256 out
    W2     mixed: prompts of 32 to 1024 tokens, answers of 16 to 256, all at once
    W3     a shared prefix of 1024 tokens, 32 of one's own, answers of 64, all at once
    fan    32 branches of 32 tokens on one parent of 1024
    tree   a search: 10 levels deep, 5 branches of 16 tokens each on the best one so far, prefix 512
    chain  the same without width: what branching costs those who don't branch

Branches are asked for in one of two ways, with the same draws: as forks of a capsule, or, by a client
that knows no capsules, as requests that carry the whole text again.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from mallee.protocol.messages import (
    Fork,
    Generate,
    Limits,
    Prefill,
    Sampling,
    Update,
    pack_tokens,
)

Request: TypeAlias = Prefill | Generate | Fork


class Spec(NamedTuple):
    """Lengths in tokens; `depth` levels of `width` branches."""

    prompts: tuple[int, int]  # shortest, longest
    outputs: tuple[int, int]
    shared: int = 0  # of every prompt
    requests: int = 1
    depth: int = 0  # 0: plain requests
    width: int = 0


SPECS: dict[str, Spec] = {
    "W1": Spec((256, 256), (256, 256)),
    "W2": Spec((32, 1024), (16, 256), requests=16),
    "W3": Spec((32, 32), (64, 64), shared=1024, requests=16),
    "fan": Spec((1024, 1024), (32, 32), depth=1, width=32),
    "tree": Spec((512, 512), (16, 16), depth=10, width=5),
    "chain": Spec((512, 512), (16, 16), depth=10, width=1),
}


@dataclass
class Client:
    """Plays one workload once. `answers` grow by branch: (request, branch) -> tokens."""

    spec: Spec
    vocab_size: int
    seed: int
    forks: bool
    answers: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._text: list[int] = []  # of the best branch so far
        self._capsule = ""
        self._level = 0
        self._open = 0

    def begin(self) -> list[Request]:
        """The requests that arrive at the start."""
        shared = self._tokens(self.spec.shared)
        if self.spec.depth:
            self._text = self._tokens(self.spec.prompts[0])
            if self.forks:
                return [Prefill("prefix", pack_tokens(self._text))]
            return self._expand()
        return [
            self._generate(f"r{i}", [*shared, *self._tokens(self._between(self.spec.prompts))], i)
            for i in range(self.spec.requests)
        ]

    def heard(self, update: Update) -> list[Request]:
        """The requests that the client sends on `update`. Raises RuntimeError on an error."""
        if update.finish == "error":
            raise RuntimeError(f"{update.request} failed: {update.error}")
        if update.request == "prefix":
            self._capsule = update.capsule or ""
            return self._expand()
        self.answers.setdefault((update.request, update.branch), []).extend(update.tokens)
        if update.finish is None or not self.spec.depth:
            return []
        self._open -= 1
        if self._open:
            return []
        self._level += 1
        best = self._rng.randrange(self.spec.width)  # any judge would do, if it is the same one
        request = f"level{self._level - 1}" + ("" if self.forks else f".{best}")
        index = best if self.forks else 0
        self._text += self.answers[request, index]
        self._capsule = f"{request}.{index}"
        return self._expand() if self._level < self.spec.depth else []

    def branch_answers(self) -> list[list[int]]:
        """All answers, in an order that does not depend on how they were asked for."""
        names = sorted(self.answers, key=lambda key: (key[0].split(".")[0], _rank(key)))
        return [self.answers[name] for name in names]

    def _expand(self) -> list[Request]:
        """The next level's branches."""
        self._open = self.spec.width
        name = f"level{self._level}"
        if self.forks:
            suffixes = (b"",) * self.spec.width
            sampling = Sampling(temperature=1.0, seed=self.seed + self._level)
            limits = Limits(self.spec.outputs[0], ignore_eos=True)
            return [Fork(name, self._capsule, suffixes, limits, sampling)]
        return [
            self._generate(f"{name}.{i}", self._text, self._level, first_branch=i)
            for i in range(self.spec.width)
        ]

    def _generate(
        self, name: str, tokens: Sequence[int], seed: int, *, first_branch: int = 0
    ) -> Generate:
        return Generate(
            name,
            pack_tokens(tokens),
            Limits(self._between(self.spec.outputs), ignore_eos=True),
            Sampling(temperature=1.0, seed=self.seed + seed),
            first_branch=first_branch,
        )

    def _tokens(self, n: int) -> list[int]:
        return [self._rng.randrange(3, self.vocab_size) for _ in range(n)]

    def _between(self, bounds: tuple[int, int]) -> int:
        """Any length is as likely as its double."""
        low, high = bounds
        return low if low == high else round(low * (high / low) ** self._rng.random())


def _rank(key: tuple[str, int]) -> int:
    request, branch = key
    return int(request.split(".")[1]) if "." in request else branch
