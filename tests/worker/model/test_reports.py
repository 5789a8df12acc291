"""Log-probabilities of tokens that are still being drawn, against those of known tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.messages import Sampling, TokenLogprobs
from mallee.worker.forward import Draw, LogprobQuery
from mallee.worker.model.sampling import reports
from mallee.worker.model.sampling.logprobs import logprobs
from support.examples import examples


@examples(40)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([3, 40, 300]),
    nums=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    num_levels=st.sampled_from([1, 2, 1000]),
    is_right=st.booleans(),
    is_batch=st.booleans(),
)
def test_they_are_those_of_known_tokens(
    seed: int, size: int, nums: list[int], num_levels: int, is_right: bool, is_batch: bool
) -> None:
    """To the bit, also where the likeliest end among equals, and where the device guessed wrong."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(num_levels, (len(nums), size), generator=generator)
    rows = levels.to(torch.bfloat16).div(100)
    logits = list(rows) if is_batch else [row.clone() for row in rows]
    guesses = torch.randint(size, (len(nums),), generator=generator)
    tokens = [(t + (not is_right and i % 2)) % size for i, t in enumerate(guesses.tolist())]
    draws = [Draw(row, Sampling(logprobs=num), 0, 0) for row, num in zip(logits, nums, strict=True)]
    each = zip(logits, tokens, nums, strict=True)
    expected = logprobs([LogprobQuery(row, token, num) for row, token, num in each])
    asked: list[LogprobQuery] = []

    def again(queries: list[LogprobQuery]) -> list[TokenLogprobs]:
        asked.extend(queries)
        return logprobs(queries)

    found = reports.collect(reports.launch(draws, guesses), tokens, again)
    assert found == expected
    if is_right and (size <= 32 or (num_levels == 1000 and not any(nums))):
        assert not asked, "all was launched"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_no_numbers_have_no_likeliest(bad: float) -> None:
    row = torch.zeros(50)
    row[7] = bad
    draw = Draw(row, Sampling(logprobs=2), 0, 0)
    found = reports.collect(reports.launch([draw], torch.tensor([3])), [3], logprobs)
    expected = logprobs([LogprobQuery(row, 3, 2)])
    assert repr(found) == repr(expected)
    assert found[0][1] == ()
