"""Game of 24 with a real model: make 24 of four numbers, a step a line, by a search over forks.

    mallee serve --model smollm2
    python examples/game_of_24.py 4 5 6 10 --policy tot_dfs

The model proposes lines; arithmetic values them, so that a small model gets as far as its steps are right.
"""

import argparse
import re
from fractions import Fraction
from typing import Any

from mallee.client import Mallee
from mallee.search.policies.named import POLICIES, read_policy
from mallee.search.policy import SearchBudget

PROMPT = """\
Combine two of the numbers at a time with + - * / until 24 is left.
Numbers: 1 2 3 4
1 * 2 = 2 (left: 2 3 4)
2 * 3 = 6 (left: 4 6)
4 * 6 = 24 (left: 24)
Numbers: 4 9 10 13
13 - 9 = 4 (left: 4 4 10)
10 - 4 = 6 (left: 4 6)
4 * 6 = 24 (left: 24)
Numbers: {numbers}
"""
STEP = re.compile(r"(\d+(?:/\d+)?) ([-+*/]) (\d+(?:/\d+)?) = (-?\d+(?:/\d+)?) \(left: ([-/\d ]+)\)")
OPERATIONS: dict[str, Any] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else None,
}


def value(text: str, numbers: list[int]) -> float:
    """0 for a step that is wrong; else more the further it has come, and 1 where 24 is left."""
    left = sorted(map(Fraction, numbers))
    for line in text.splitlines():
        found = STEP.fullmatch(line.strip())
        if found is None:
            return 0.0
        a, b = Fraction(found[1]), Fraction(found[3])
        rest = list(left)
        for each in (a, b):
            if each not in rest:
                return 0.0
            rest.remove(each)
        made = OPERATIONS[found[2]](a, b)
        left = sorted(map(Fraction, found[5].split()))
        if made is None or made != Fraction(found[4]) or sorted([*rest, made]) != left:
            return 0.0
    if len(left) == 1:
        return 1.0 if left[0] == 24 else 0.0
    return (len(numbers) - len(left) + 1) / (2 * len(numbers))


def policy_of(name: str) -> Any:
    """A policy of three steps; 1.0 is a solution."""
    steps = {"depth": 3, "step_tokens": 40}
    fields: dict[str, dict[str, Any]] = {
        "best_of_n": {"n": 32, "wave": 8, "max_tokens": 120, "stop_at": 1.0},
        "self_consistency": {"n": 32, "max_tokens": 120, "weighted": True},
        "beam": {**steps, "width": 8, "branch": 8},
        "tot_bfs": {**steps, "width": 8, "branch": 8, "prune_below": 0.01, "stop_at": 1.0},
        "tot_dfs": {**steps, "branch": 8, "prune_below": 0.01, "stop_at": 1.0},
        "mcts": {**steps, "expansions": 60, "width": 8, "in_flight": 4, "c": 0.3, "stop_at": 1.0},
        "dvts": {**steps, "trees": 8, "branch": 8, "stop_at": 1.0},
    }
    return read_policy({"type": name, **fields[name]})[1]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make 24 of four numbers.")
    parser.add_argument("numbers", nargs=4, type=int)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="tot_dfs")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=20_000, help="Budget of the tree.")
    asked = parser.parse_args(given)
    prompt = PROMPT.format(numbers=" ".join(map(str, asked.numbers)))
    # Whole answers are several lines; steps of a search are one.
    is_whole = asked.policy in ("best_of_n", "self_consistency")
    with Mallee(asked.url) as client:
        result = client.search(
            *(policy_of(asked.policy), prompt),
            score=lambda text: value(text, asked.numbers),
            seed=asked.seed,
            budget=SearchBudget(tokens=asked.tokens),
            temperature=0.8,
            stop="Numbers" if is_whole else "\n",
            ends=["(left: 24)"],
        )
    print(result.text)
    print(
        f"{'solved' if result.score == 1.0 else 'not solved'}: {result.reason}, {result.expansions}"
        f" expansions, {len(result.nodes)} nodes, {result.tokens} tokens"
    )


if __name__ == "__main__":
    main()
