"""Tokens that come into a running branch."""

from typing import Any

import pytest

from bench.doubles.forward import linear_tokens
from mallee.mocker.passes import mock_spec
from mallee.protocol.messages import (
    Generate,
    Grammar,
    Inject,
    Limits,
    Sampling,
    Update,
    pack_tokens,
)

SPEC = mock_spec(vocab_size=64)
PROMPT = [7, 8, 9, 10, 11]
SEED = 99
SAMPLING = Sampling(temperature=1.0, seed=SEED)


class Driver:
    """A bench for one request, "r"."""

    def __init__(self, make_bench: Any) -> None:
        self.bench = make_bench(max_step_tokens=2048)

    def generate(self, max_tokens: int = 24, sampling: Sampling = SAMPLING, **more: Any) -> None:
        limits = Limits(max_tokens, ignore_eos=True)
        self.bench.submit(Generate("r", pack_tokens(PROMPT), limits, sampling, **more))

    def inject(self, name: str, tokens: list[int], *, replaces: bool = False) -> None:
        self.bench.submit(Inject(name, "r", 0, pack_tokens(tokens), replaces))

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.bench.step()

    def finish(self) -> list[int]:
        self.bench.run()
        return self.tokens

    @property
    def tokens(self) -> list[int]:
        return list(self.bench.answers["r", 0].tokens)

    @property
    def injected(self) -> list[Update]:
        return [each for each in self.bench.gateways["g"] if each.injected]

    @property
    def errors(self) -> dict[str, str]:
        replies = self.bench.replies.values()
        return {each.request: each.error[0] for each in replies if each.error is not None}


@pytest.fixture
def driver(make_bench: Any) -> Driver:
    return Driver(make_bench)


def linear(text: list[int], n: int) -> list[int]:
    return linear_tokens(SPEC, text, n, sampling=SAMPLING, seed=SEED)


def test_the_last_of_several_wins_before_the_boundary_and_none_is_lost_otherwise(
    driver: Driver,
) -> None:
    """F22, part: overwrite before consume wins; appended ones come in order."""
    driver.generate()
    driver.step(2)
    before = len(driver.tokens)
    driver.inject("a", [1])
    driver.inject("b", [2])
    driver.inject("c", [3, 3], replaces=True)
    driver.inject("d", [4])
    driver.step()
    assert driver.errors == {"a": "superseded", "b": "superseded"}
    assert [each.injected for each in driver.injected] == ["c", "d"]
    assert driver.tokens[before : before + 3] == [3, 3, 4]


def test_a_refused_replacement_drops_nothing(driver: Driver) -> None:
    """F22, part: a replacement that has no room takes no other's place."""
    driver.generate()
    driver.step(2)
    driver.inject("much", [5] * 40)
    driver.inject("a", [1, 2])
    driver.inject("much too", [5] * 40, replaces=True)
    driver.step()
    assert driver.errors == dict.fromkeys(("much", "much too"), "invalid_parameter")
    assert [each.injected for each in driver.injected] == ["a"]


def test_what_waits_for_a_prompt_comes_after_its_first_token(driver: Driver) -> None:
    driver.inject("early", [1])
    driver.generate(max_tokens=8)
    driver.inject("i", [5, 6])
    tokens = driver.finish()
    assert driver.errors == {"early": "branch_not_found"}
    assert tokens[1:3] == [5, 6]
    assert tokens[3:] == linear([*PROMPT, *tokens[:3]], 5)


def test_tokens_count_against_the_limit_and_leave_one_to_draw(driver: Driver) -> None:
    """F22, part: the budget counts them."""
    driver.generate(max_tokens=8)
    driver.step(3)
    num = len(driver.tokens)
    driver.inject("much", [1] * 8)
    driver.inject("late", [1] * (8 - num))
    driver.inject("none", [])
    driver.inject("fits", [1] * (7 - num))
    tokens = driver.finish()
    assert driver.errors == dict.fromkeys(("much", "late", "none"), "invalid_parameter")
    assert len(tokens) == 8
    assert tokens[num:7] == [1] * (7 - num)


@pytest.mark.parametrize("branch", [1, -1])
def test_a_branch_under_a_grammar_takes_none(driver: Driver, branch: int) -> None:
    driver.generate(grammar=Grammar("choice", "[[3, 4, 5, 6]]"))
    driver.step()
    driver.inject("i", [3])
    driver.bench.submit(Inject("j", "r", branch, pack_tokens([3])))
    driver.finish()
    assert driver.errors == {"i": "invalid_parameter", "j": "branch_not_found"}


def test_penalties_and_log_probabilities_count_injected_tokens_as_drawn(driver: Driver) -> None:
    """F22, part: penalties see them; their log-probability is 0."""
    sampling = Sampling(1.0, seed=SEED, presence_penalty=2.0, logprobs=1)
    driver.generate(sampling=sampling)
    driver.step(3)
    driver.inject("i", [1, 2])
    tokens = driver.finish()
    (told,) = driver.injected
    assert told.logprobs == ((0.0, ()), (0.0, ()))
    num = told.position + 2
    text = pack_tokens([*PROMPT, *tokens[:num]])
    again = Generate("again", text, Limits(24, ignore_eos=True), sampling, drawn=num)
    driver.bench.run(again)
    assert driver.bench.answers["again", 0].tokens == tokens[num:]
