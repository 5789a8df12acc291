"""Drafts are as long as they pay, and stop where they lose."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.worker.speculation.worth import MAX_PAUSE, Acceptance, StepCosts


def play(rate: float, break_even: float, num_tokens: int = 3000, most: int = 5) -> Acceptance:
    """A branch that draws so many tokens, whose drafts are right at `rate`."""
    rng, acceptance, position = random.Random(4), Acceptance(), 1
    while position < num_tokens:
        length = acceptance.length(position, break_even, most)
        right = 0
        while right < length and rng.random() < rate:
            right += 1
        if length:
            acceptance.learn(length, right)
        position += right + 1
    return acceptance


def test_a_drafter_that_loses_is_turned_off_and_tried_rarely() -> None:
    """I15, part, X23, part: at break-even 0.3 one that is right once in ten times drafts next to nothing."""
    losing, winning = play(0.1, 0.3), play(0.8, 0.3)
    assert losing.num_drafted < 40
    assert winning.num_drafted > 2500
    assert winning.num_accepted / winning.num_drafted > 0.55


def test_a_drafter_that_becomes_right_is_turned_on_again() -> None:
    """I15, part: a trial that succeeds ends the pause."""
    acceptance = Acceptance()
    position, num_before = 0, 0
    for position in range(20 * MAX_PAUSE):
        length = acceptance.length(position, 0.3, 5)
        if length:
            is_right = position > 4000
            acceptance.learn(length, length if is_right else 0)
            num_before += not is_right
    assert num_before < 25
    assert acceptance.rate > 0.9
    assert acceptance.paused(position) == 0


@given(
    st.floats(0.02, 0.95), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=40)
)
def test_the_last_token_of_a_draft_is_worth_its_position(
    break_even: float, past: list[tuple[int, int]]
) -> None:
    """I15, part: rate ** length >= break-even > rate ** (length + 1), against a search."""
    acceptance = Acceptance()
    for num, right in past:
        acceptance.learn(num, min(num, right))
    rate = acceptance.rate
    expected = next(k for k in range(1, 10_000) if rate**k < break_even * (1 - 1e-12)) - 1
    assert acceptance.length(0, break_even, 1000) == pytest.approx(min(expected, 1000), abs=0)


@given(
    a=st.floats(1e-4, 1.0),
    b=st.floats(1e-6, 0.1),
    sizes=st.lists(st.integers(1, 64), min_size=8, max_size=60),
    rows=st.integers(1, 64),
)
def test_break_even_is_the_share_of_a_position_in_the_time_of_a_token(
    a: float, b: float, sizes: list[int], rows: int
) -> None:
    """I15, part: of steps that take a + b n seconds; unknown while all are alike, or take no time."""
    costs = StepCosts()
    unknown = costs.break_even(rows)
    for n in sizes:
        costs.learn(n, 0.0)
    assert costs.break_even(rows) == unknown
    for n in sizes:
        costs.learn(n, a + b * n)
    found = costs.break_even(rows)
    if max(sizes) - min(sizes) < 4:
        return
    assert found == pytest.approx(min(0.95, max(0.02, b * rows / (a + b * rows))), abs=1e-3)
