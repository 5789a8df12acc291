"""Log-probabilities against a sort of all tokens, one row at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.messages import TokenLogprobs
from mallee.worker.forward import LogprobQuery
from mallee.worker.model.sampling import rows
from mallee.worker.model.sampling.logprobs import logprobs
from support.examples import examples


def reference(query: LogprobQuery) -> TokenLogprobs:
    """Of one row: the likeliest first, equals by rising id."""
    values = query.logits.float().log_softmax(0).tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[: query.num_top]
    return values[query.token], tuple((i, values[i]) for i in order)


@examples(100)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([5, 97, 3000]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    num_levels=st.sampled_from([1, 3, 40, 10_000]),
    asked=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 4), st.sampled_from([0, 1, 5, 20])),
        min_size=1,
        max_size=12,
    ),
    slab=st.sampled_from([1, 7000, 1 << 22]),
)
def test_a_batch_says_what_a_sort_of_each_row_says(
    seed: int,
    size: int,
    dtype: torch.dtype,
    num_levels: int,
    asked: list[tuple[int, int, int]],
    slab: int,
) -> None:
    """I5: mixed counts, rows asked for several times, equals everywhere, in slabs."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(7, size, generator=generator).clamp(-3, 3)
    batch = ((noise * num_levels).round() * (4 / num_levels)).to(dtype).unbind(0)
    queries = [LogprobQuery(batch[row], token, num_top) for row, token, num_top in asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "SLAB", slab)
        assert logprobs(queries) == [reference(query) for query in queries]


def test_rows_whose_candidates_end_among_equals_are_looked_at_again() -> None:
    """I5: 900 equals, of which the lowest ids count; other rows of the batch are settled before."""
    flat, clear = torch.zeros(1000), torch.arange(1000, 0, -1).float()
    flat[100:] = 1.0
    (_, top), (_, other) = logprobs([LogprobQuery(flat, 0, 5), LogprobQuery(clear, 0, 3)])
    assert [token for token, _ in top] == [100, 101, 102, 103, 104]
    assert [token for token, _ in other] == [0, 1, 2]


def test_more_than_there_are_is_all_and_no_numbers_have_no_likeliest() -> None:
    ((_, top),) = logprobs([LogprobQuery(torch.zeros(5), 1, 20)])
    assert [token for token, _ in top] == [0, 1, 2, 3, 4]
    ((chance, top),) = logprobs([LogprobQuery(torch.full((50,), torch.nan), 1, 3)])
    assert chance != chance
    assert top == ()
    assert logprobs([]) == []
