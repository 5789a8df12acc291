"""Budgets of reasoning in the engine: the closing token comes when so many tokens are drawn without it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import (
    Cut,
    Fork,
    Generate,
    Inject,
    Limits,
    ReasoningBudget,
    Sampling,
    pack_tokens,
)
from mallee.testing.forward import linear_tokens

CLOSE, OPEN, VOCAB = 9, 7, 64
SAMPLING = Sampling(temperature=1.0, seed=3)
PROMPT = [1, 2, 3, 4, 5]
MakeBench = Callable[..., Any]


def expected(
    bench: Any, prompt: Sequence[int], n: int, budget: ReasoningBudget, *, branch: int = 0
) -> list[int]:
    """The answer by the plain rule, token by token, from draws of one undisturbed sequence."""
    seed, drawn = branch_seed(SAMPLING.seed, branch), []
    for _ in range(n):
        begin: int | None = 0
        if budget.open is not None:
            begin = drawn.index(budget.open) + 1 if budget.open in drawn[:2] else None
        is_over = (
            begin is not None and CLOSE not in drawn and len(drawn) - begin >= budget.max_tokens
        )
        text = [*prompt, *drawn]
        (token,) = linear_tokens(bench.forward.spec, text, 1, sampling=SAMPLING, seed=seed)
        drawn.append(CLOSE if is_over else token)
    return drawn


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 12), st.integers(1, 3), st.integers(1, 60), st.booleans())
def test_reasoning_takes_its_budget_and_one_token(
    make_bench: MakeBench, most: int, n: int, first: int, is_open: bool
) -> None:
    """F28, part: n branches equal the rule applied to one sequence each, from any prompt."""
    bench = make_bench(max_step_tokens=8)
    budget = ReasoningBudget(most, CLOSE, None if is_open else OPEN)
    prompt = [*PROMPT, first]
    bench.run(Generate("r", pack_tokens(prompt), Limits(20, reasoning=budget), SAMPLING, n=n))
    for i in range(n):
        tokens = bench.answers["r", i].tokens
        assert tokens == expected(bench, prompt, 20, budget, branch=i)
        if is_open:
            assert CLOSE in tokens[: most + 1]


def test_without_a_beginning_there_is_no_end(bench: Any) -> None:
    """An answer that doesn't begin with the opening token is left alone; behind one token it is seen."""
    free = Generate("free", pack_tokens(PROMPT), Limits(20), SAMPLING)
    bench.run(free)
    drawn = bench.answers["free", 0].tokens
    absent = next(t for t in range(VOCAB) if t not in drawn)
    others = next(t for t in range(VOCAB) if t not in drawn and t != absent)
    for name, begin, at in (("none", absent, None), ("0", drawn[0], 1), ("1", drawn[1], 2)):
        budget = ReasoningBudget(3, others, begin)
        bench.run(Generate(name, pack_tokens(PROMPT), Limits(20, reasoning=budget), SAMPLING))
        tokens = bench.answers[name, 0].tokens
        if at is None:
            assert tokens == drawn
        else:
            assert tokens[: at + 3] == drawn[: at + 3]
            assert tokens[at + 3] == others


@pytest.mark.parametrize("at", [1, 4, 6, 9])
def test_an_answer_that_goes_on_elsewhere_keeps_to_its_budget(bench: Any, at: int) -> None:
    """X4, part: cut at any place and gone on from there, continued or resumed, it is the same."""
    limits = Limits(16, reasoning=ReasoningBudget(6, CLOSE))
    whole = expected(bench, PROMPT, 16, limits.reasoning)
    told = pack_tokens([*PROMPT, *whole[:at]])
    bench.run(Generate("moved", told, limits, SAMPLING, drawn=at))
    assert bench.answers["moved", 0].tokens == whole[at:]
    bench.run(Generate("r", pack_tokens(PROMPT), limits, SAMPLING))
    bench.run(Cut("r", 0, len(PROMPT) + at))
    bench.run(Fork("back", "r.0", (b"",), Limits(0), resumes=True))
    assert bench.answers["back", 0].tokens == whole[at:]


def test_injected_tokens_count(bench: Any) -> None:
    """F22, part: what is injected takes of the budget, and the end comes right behind where it is over."""
    limits = Limits(24, reasoning=ReasoningBudget(6, CLOSE))
    bench.submit(Generate("r", pack_tokens(PROMPT), limits, SAMPLING))
    while not bench.answers.get(("r", 0)) or not bench.answers["r", 0].tokens:
        bench.step()
    assert len(bench.answers["r", 0].tokens) < 6
    more = [20, 21, 22, 23, 24, 25, 26, 27]
    bench.run(Inject("i", "r", 0, pack_tokens(more)))
    tokens = bench.answers["r", 0].tokens
    at = tokens.index(20)
    assert tokens[at : at + 9] == [*more, CLOSE]


def test_a_token_outside_the_vocabulary_is_refused(bench: Any) -> None:
    """The error names it."""
    for budget in (ReasoningBudget(1, VOCAB), ReasoningBudget(1, 2, -1), ReasoningBudget(-1, 2)):
        bench.run(Generate("r", pack_tokens(PROMPT), Limits(4, reasoning=budget)))
        error = bench.answers.pop(("r", -1)).error
        assert error is not None
        assert "reasoning" in error.message
