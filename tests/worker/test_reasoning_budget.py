"""Budgets of reasoning in the engine: the closing token comes when so many tokens are drawn without it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.doubles.forward import linear_tokens
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

CLOSE, OPEN = 9, 7
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
@given(
    st.integers(0, 12),
    st.integers(1, 3),
    st.integers(1, 60),
    st.sampled_from([None, None, 0, 1, 2]),
)
def test_reasoning_takes_its_budget_and_one_token(
    make_bench: MakeBench, most: int, n: int, first: int, begins: int | None
) -> None:
    """F28, part: n branches equal the rule applied to one sequence each, from any prompt.

    It has begun before the answer, or begins with the answer's first or second token, or perhaps never.
    """
    bench = make_bench(max_step_tokens=8)
    prompt, seed = [*PROMPT, first], branch_seed(SAMPLING.seed, 0)
    plain = linear_tokens(bench.forward.spec, prompt, 2, sampling=SAMPLING, seed=seed)
    budget = ReasoningBudget(most, CLOSE, None if begins is None else [*plain, OPEN][begins])
    bench.run(Generate("r", pack_tokens(prompt), Limits(20, reasoning=budget), SAMPLING, n=n))
    for i in range(n):
        tokens = bench.answers["r", i].tokens
        assert tokens == expected(bench, prompt, 20, budget, branch=i)
        if begins is None:
            assert CLOSE in tokens[: most + 1]


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
