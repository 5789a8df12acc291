"""The game of 24: make 24 of four numbers by + - * /, each number used once. A scripted player of searches.

A text is a step a line, "4 + 8 = 12 (left: 9 10 12)", each of STEP_TOKENS tokens.
"""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations
from random import Random
from typing import Final, TypeAlias

from mallee.search.driver import Expand
from mallee.search.tree import Proposal

Numbers: TypeAlias = tuple[Fraction, ...]
"""In ascending order."""

STEP_TOKENS: Final = 12
VALUE_TOKENS: Final = 1  # that a valuer says of a text: sure, likely, impossible
GOAL: Final = Fraction(24)
_LEFT: Final = re.compile(r"\(left: ([^)]*)\)\n$")


def numbers(text: str) -> Numbers:
    return tuple(sorted(map(Fraction, text.split())))


def moves(left: Numbers) -> Iterator[tuple[str, Numbers]]:
    """All steps from `left`, each as its line and the numbers after it."""
    for i, j in combinations(range(len(left)), 2):
        a, b = left[i], left[j]
        others = [left[k] for k in range(len(left)) if k not in (i, j)]
        found = [(f"{a} + {b}", a + b), (f"{a} * {b}", a * b)]
        found += [(f"{a} - {b}", a - b), (f"{b} - {a}", b - a)]
        found += [(f"{x} / {y}", x / y) for x, y in ((a, b), (b, a)) if y]
        for step, made in found:
            after = tuple(sorted([*others, made]))
            yield f"{step} = {made} (left: {' '.join(map(str, after))})\n", after


@cache
def is_solvable(left: Numbers, with_fractions: bool = True) -> bool:
    """Whether 24 can be made, by brute force."""
    if len(left) == 1:
        return left[0] == GOAL
    return any(
        is_solvable(after, with_fractions)
        for _, after in moves(left)
        if with_fractions or all(each.denominator == 1 for each in after)
    )


class Player24:
    """Draws steps of one puzzle by the seed, each once, and values what is left after them.

    The value: of one number whether it is 24, of two whether they can make it; of three only whether they
    can without fractions, so that it is wrong about puzzles that need them.
    """

    def __init__(self, puzzle: str) -> None:
        self._begin = numbers(puzzle)

    def left(self, text: str) -> Numbers:
        found = _LEFT.search(text)
        return numbers(found[1]) if found else self._begin

    def steps(self, text: str, expand: Expand) -> Sequence[Proposal]:
        """A step each."""
        found = {after: line for line, after in moves(self.left(text))}
        lines = list(found.values())
        Random(expand.seed).shuffle(lines)
        return [self._proposal(text, line, 1) for line in lines[: expand.num]]

    def samples(self, text: str, expand: Expand) -> Sequence[Proposal]:
        """Whole answers: three steps each, at random."""
        rng = Random(expand.seed)
        found = []
        for _ in range(expand.num):
            lines, left = "", self._begin
            while len(left) > 1:
                line, left = rng.choice([*moves(left)])
                lines += line
            found.append(self._proposal(text, lines, 3))
        return found

    def value(self, text: str) -> float:
        left = self.left(text)
        if len(left) == 1:
            return 1.0 if left[0] == GOAL else 0.0
        if len(left) == 2:
            return 0.9 if is_solvable(left) else 0.0
        return 0.6 if is_solvable(left, with_fractions=False) else 0.2

    def _proposal(self, text: str, line: str, num_steps: int) -> Proposal:
        is_end = len(self.left(text + line)) == 1
        return Proposal(line, num_steps * STEP_TOKENS, text + line, is_end=is_end)


def is_solution(puzzle: str, text: str) -> bool:
    """Whether each line is a step that may follow those before, and the last leaves 24."""
    left = numbers(puzzle)
    for line in text.splitlines(keepends=True):
        known = dict(moves(left))
        if line not in known:
            return False
        left = known[line]
    return left == (GOAL,)
