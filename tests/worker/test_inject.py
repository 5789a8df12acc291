"""Tokens that come into a running branch."""

from typing import Any

import pytest

from mallee.mocker.passes import mock_spec
from mallee.protocol.messages import (
    CapsuleReply,
    Generate,
    Grammar,
    Inject,
    Limits,
    Sampling,
    Update,
    pack_tokens,
)
from mallee.testing.forward import MockForward, linear_tokens
from mallee.testing.structures import MockStructures
from mallee.worker.records import EngineConfig
from support.driving import engine_over

SPEC = mock_spec(vocab_size=64)
PROMPT = [7, 8, 9, 10, 11]
SEED = 99
SAMPLING = Sampling(temperature=1.0, seed=SEED)


class Driver:
    """An engine, and what it said."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.engine = engine_over(
            MockForward(SPEC, num_blocks=64, block_size=4),
            config=config or EngineConfig(),
            structures=MockStructures(SPEC.vocab_size, SPEC.eos_token_ids),
        )
        self.updates: list[Update] = []
        self.replies: list[CapsuleReply] = []

    def generate(self, max_tokens: int = 24, sampling: Sampling = SAMPLING, **more: Any) -> None:
        limits = Limits(max_tokens, ignore_eos=True)
        self.engine.submit(Generate("r", pack_tokens(PROMPT), limits, sampling, **more), "g")

    def inject(
        self, name: str, tokens: list[int], *, replaces: bool = False, of: str = "r"
    ) -> None:
        self.engine.submit(Inject(name, of, 0, pack_tokens(tokens), replaces), "g")

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            for frame in self.engine.step().frames.values():
                self.updates += frame.updates
                self.replies += frame.replies
            self.engine.check()

    def finish(self) -> list[int]:
        while self.engine.has_work:
            self.step()
        return [token for update in self.updates for token in update.tokens]

    @property
    def errors(self) -> dict[str, str]:
        return {each.request: each.error[0] for each in self.replies if each.error is not None}


def linear(text: list[int], n: int) -> list[int]:
    return linear_tokens(SPEC, text, n, sampling=SAMPLING, seed=SEED)


def test_a_branch_goes_on_as_a_linear_run_with_these_tokens() -> None:
    """F22, part: consumed at the next boundary, and exact; the update says where."""
    driver = Driver()
    driver.generate()
    driver.step(4)
    drawn = _tokens(driver)
    driver.inject("i", [1, 2, 3])
    driver.step()
    told = next(each for each in driver.updates if each.injected)
    assert (told.injected, told.position, told.tokens) == ("i", len(drawn), (1, 2, 3))
    tokens = driver.finish()
    assert tokens[: len(drawn)] == drawn == linear(PROMPT, len(drawn))
    left = 24 - len(drawn) - 3
    assert tokens == [*drawn, 1, 2, 3, *linear([*PROMPT, *drawn, 1, 2, 3], left)]
    assert driver.updates[-1].finish == "length"


def _tokens(driver: Driver) -> list[int]:
    return [token for update in driver.updates for token in update.tokens]


def test_the_last_of_several_wins_before_the_boundary_and_none_is_lost_otherwise() -> None:
    """F22, part: overwrite before consume wins; appended ones come in order."""
    driver = Driver()
    driver.generate()
    driver.step(2)
    before = len(_tokens(driver))
    driver.inject("a", [1])
    driver.inject("b", [2])
    driver.inject("c", [3, 3], replaces=True)
    driver.inject("d", [4])
    driver.step()
    assert driver.errors == {"a": "superseded", "b": "superseded"}
    assert [each.injected for each in driver.updates if each.injected] == ["c", "d"]
    assert _tokens(driver)[before : before + 3] == [3, 3, 4]


def test_a_refused_replacement_drops_nothing() -> None:
    """F22, part: a replacement that has no room takes no other's place."""
    driver = Driver()
    driver.generate()
    driver.step(2)
    driver.inject("much", [5] * 40)
    driver.inject("a", [1, 2])
    driver.inject("much too", [5] * 40, replaces=True)
    driver.step()
    assert driver.errors == dict.fromkeys(("much", "much too"), "invalid_parameter")
    assert [each.injected for each in driver.updates if each.injected] == ["a"]


def test_what_waits_for_a_prompt_comes_after_its_first_token() -> None:
    driver = Driver()
    driver.inject("early", [1])
    driver.generate(max_tokens=8)
    driver.inject("i", [5, 6])
    tokens = driver.finish()
    assert driver.errors == {"early": "branch_not_found"}
    assert tokens[1:3] == [5, 6]
    assert tokens[3:] == linear([*PROMPT, *tokens[:3]], 5)


def test_tokens_count_against_the_limit_and_leave_one_to_draw() -> None:
    """F22, part: the budget counts them."""
    driver = Driver()
    driver.generate(max_tokens=8)
    driver.step(3)
    num = len(_tokens(driver))
    driver.inject("much", [1] * 8)
    driver.inject("late", [1] * (8 - num))
    driver.inject("none", [])
    driver.inject("fits", [1] * (7 - num))
    tokens = driver.finish()
    assert driver.errors == dict.fromkeys(("much", "late", "none"), "invalid_parameter")
    assert len(tokens) == 8
    assert tokens[num:7] == [1] * (7 - num)


@pytest.mark.parametrize("branch", [1, -1])
def test_a_branch_under_a_grammar_takes_none(branch: int) -> None:
    driver = Driver()
    driver.generate(grammar=Grammar("choice", "[[3, 4, 5, 6]]"))
    driver.step()
    driver.inject("i", [3])
    driver.engine.submit(Inject("j", "r", branch, pack_tokens([3])), "g")
    driver.finish()
    assert driver.errors == {"i": "invalid_parameter", "j": "branch_not_found"}


def test_penalties_and_log_probabilities_count_injected_tokens_as_drawn() -> None:
    """F22, part: penalties see them; their log-probability is 0."""
    sampling = Sampling(1.0, seed=SEED, presence_penalty=2.0, logprobs=1)
    driver = Driver()
    driver.generate(sampling=sampling)
    driver.step(3)
    driver.inject("i", [1, 2])
    tokens = driver.finish()
    told = next(each for each in driver.updates if each.injected)
    assert told.logprobs == ((0.0, ()), (0.0, ()))
    num = told.position + 2
    again = Driver()
    text = pack_tokens([*PROMPT, *tokens[:num]])
    limits = Limits(24, ignore_eos=True)
    again.engine.submit(Generate("r", text, limits, sampling, drawn=num), "g")
    assert again.finish() == tokens[num:]
