"""`examples/game_of_24.py`: its values by hand, and a run over a tiny model."""

from fractions import Fraction

import pytest
from anyio.to_thread import run_sync

from examples.game_of_24 import main, value
from mallee.search.policies.named import POLICIES
from mallee.testing.random_model import random_model
from support.game_of_24 import Player24, moves, numbers
from support.tiny_fleet import tiny_api

MODEL = random_model("llama", 5, max_position_embeddings=2048)


def test_values_are_those_of_steps_that_may_follow() -> None:
    """Every move of the rules is a step worth more than none; one that is altered is worth nothing."""
    given = [4, 5, 6, 10]
    assert value("", given) == 0.125
    for line, after in moves(numbers("4 5 6 10")):
        if any(each < 0 or Fraction(each).denominator > 1 for each in after):
            continue
        assert value(line, given) == 0.25
        assert value(line.replace("left: ", "left: 1 "), given) == 0.0
    solved = "4 * 5 = 20 (left: 6 10 20)\n10 - 6 = 4 (left: 4 20)\n4 + 20 = 24 (left: 24)\n"
    assert value(solved, given) == 1.0
    assert value(solved.replace("24", "25"), given) == 0.0
    assert value("4 / 0 = 1 (left: 1)", given) == 0.0
    assert Player24("4 5 6 10").value(solved) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_the_example_runs_with_every_policy(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """D33, part: against a service; a tiny model of random weights solves nothing."""
    async with tiny_api(MODEL, 1, num_blocks=2048) as (client, _):
        given = ["4", "5", "6", "10", "--policy", policy, "--url", str(client.base_url)]
        await run_sync(main, [*given, "--tokens", "600"])
    assert "not solved: " in capsys.readouterr().out
