"""D33: the game of 24 by scripted proposers and valuers, over a fixed set of puzzles."""

from itertools import combinations_with_replacement

from mallee.search.policies.depth_first import DepthFirst
from mallee.search.policies.levels import BreadthFirst
from mallee.search.policies.mcts import Mcts
from mallee.search.policies.sampling import BestOfN
from mallee.search.policy import Policy, SearchBudget
from support.game_of_24 import (
    STEP_TOKENS,
    VALUE_TOKENS,
    Player24,
    is_solution,
    is_solvable,
    numbers,
)
from support.scripted_search import Play

EVERY = [" ".join(map(str, each)) for each in combinations_with_replacement(range(1, 14), 4)]
NEED_FRACTIONS = ["3 3 8 8", "1 5 5 5", "1 3 4 6", "3 3 7 7", "4 4 7 7", "1 4 5 6"]
PUZZLES = [*EVERY[::61], *NEED_FRACTIONS, "4 5 6 10", "1 1 4 6", "1 1 1 1"]
BUDGET = SearchBudget(tokens=STEP_TOKENS * 3 * 128)  # what 128 samples take

STEPS = {"step_tokens": STEP_TOKENS, "depth": 3, "stop_at": 1.0}
DFS = DepthFirst(branch=36, prune_below=0.1, **STEPS)  # type: ignore[arg-type]
BFS = BreadthFirst(width=5, branch=36, prune_below=0.1, **STEPS)  # type: ignore[arg-type]
UCT = Mcts(expansions=1000, width=36, c=0.1, **STEPS)  # type: ignore[arg-type]
PLAIN = BestOfN(n=128, wave=1, max_tokens=3 * STEP_TOKENS, stop_at=1.0)


def solved(puzzle: str, policy: Policy, budget: SearchBudget = BUDGET) -> tuple[bool, int]:
    """Whether it was solved, and the tokens that were drawn for steps and for values."""
    player = Player24(puzzle)
    draw = player.samples if isinstance(policy, BestOfN) else player.steps
    play = Play(policy, draw, player.value, seed=24, budget=budget)
    result = play.result
    assert budget.tokens is None or result.tokens <= budget.tokens
    is_right = is_solution(puzzle, result.text)
    assert (result.reason == "found") == is_right
    return is_right, result.tokens + VALUE_TOKENS * play.num_valued


def test_every_puzzle_that_has_a_solution_is_solved() -> None:
    """D33, part: tree of thoughts depth first solves all that brute force does, and no other."""
    for puzzle in PUZZLES:
        assert solved(puzzle, DFS)[0] == is_solvable(numbers(puzzle)), puzzle


def test_monte_carlo_finds_solutions_wherever_the_values_lead_first() -> None:
    """D33, part: without a bound of tokens, since it comes to every step in the end."""
    for puzzle in PUZZLES[::4]:
        assert solved(puzzle, UCT, SearchBudget())[0] == is_solvable(numbers(puzzle)), puzzle


def test_breadth_first_solves_those_that_its_valuer_knows() -> None:
    """D33, part: five thoughts a level are enough where the values are right: without fractions."""
    for puzzle in PUZZLES:
        if is_solvable(numbers(puzzle), with_fractions=False):
            assert solved(puzzle, BFS)[0], puzzle


def test_a_search_solves_more_by_fewer_tokens_than_samples() -> None:
    """D33, part: at an equal budget of tokens, the valuer's words counted."""
    solvable = [puzzle for puzzle in PUZZLES if is_solvable(numbers(puzzle))][::4]
    searched = [solved(puzzle, DFS) for puzzle in solvable]
    sampled = [solved(puzzle, PLAIN) for puzzle in solvable]
    assert sum(right for right, _ in searched) == len(solvable)
    assert sum(right for right, _ in sampled) < len(solvable)
    assert 2 * sum(num for _, num in searched) < sum(num for _, num in sampled)
