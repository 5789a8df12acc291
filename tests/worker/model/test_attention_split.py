"""A split, whatever a backend makes of it: every token meets every key it sees exactly once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mallee.worker.forward import Row
from mallee.worker.model.attention.base import (
    MAX_WINDOWED_TOKENS,
    MIN_SHARED_SAVING,
    AttentionSplit,
    split_batch,
)
from support.attention_rows import batches

BATCHES = batches([1, 4, 8, 16, 32], [1, 1, 1, 2, 5, 16, 17, 40, MAX_WINDOWED_TOKENS + 9])


def met(split: AttentionSplit) -> list[list[int]]:
    """The slots of memory that each token meets, rising, each as often as it is met."""
    found: list[list[np.ndarray]] = [[] for _ in range(split.num_tokens)]

    def slots(blocks: np.ndarray) -> np.ndarray:
        return (blocks[:, None] * split.block_size + np.arange(split.block_size)).reshape(-1)

    for prefix in split.shared:
        shared = slots(prefix.blocks)
        for token in prefix.tokens.tolist():
            found[token].append(shared)
    for segment in split.segments:
        own = slots(segment.blocks)
        for i in range(segment.size):
            found[segment.begin + i].append(own[max(segment.first + i, 0) : segment.last + i + 1])
    return [np.sort(np.concatenate(parts)).tolist() for parts in found]


def expected(rows: list[Row], size: int, window: int | None) -> list[list[int]]:
    found = []
    for row in rows:
        at = np.arange(row.start + len(row.tokens))
        slots = row.table[at // size].astype(np.int64) * size + at % size
        for position in range(row.start, row.start + len(row.tokens)):
            first = 0 if window is None else max(0, position - window + 1)
            found.append(np.sort(slots[first : position + 1]).tolist())
    return found


@given(BATCHES, st.sampled_from([None, 1, 3, 16, 50, 200]), st.booleans())
def test_every_token_meets_every_key_it_sees_exactly_once(
    batch: tuple[list[Row], int], window: int | None, is_shared: bool
) -> None:
    """D7, part, D19: over random trees, block sizes, chunk lengths and windows; shared or not.

    Sharing pays for its merge; blocks before the window of a segment's tokens are not read.
    """
    rows, size = batch
    split = split_batch(rows, block_size=size, window=window, is_shared=is_shared)
    assert met(split) == expected(rows, size, window)
    assert is_shared or split.shared == ()
    owner = np.repeat(np.arange(len(rows)), [len(row.tokens) for row in rows])
    for prefix in split.shared:
        num_rows = len(set(owner[prefix.tokens].tolist()))
        assert (num_rows - 1) * len(prefix.blocks) >= MIN_SHARED_SAVING
    for segment in split.segments:
        assert segment.first < size, "a leading block that no token sees"
        assert len(segment.blocks) * size < segment.last + segment.size + size, "a trailing one"
