"""Attention backends against the plain form, and what they promise to read."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.attention import attend_plain
from mallee.worker.forward import Row
from mallee.worker.model.attention.base import (
    MAX_WINDOWED_TOKENS,
    MIN_SHARED_SAVING,
    NEVER_SHARED,
    AttentionSplit,
    split_batch,
)
from mallee.worker.model.attention.torch import MAX_PADDED_BLOCKS, MAX_PADDED_TOKENS, TorchAttention
from mallee.worker.model.cpu.attend import is_available
from mallee.worker.model.cpu.attention import MIN_KEYS, TiledAttention
from mallee.worker.model.cpu.layout import CONTROL
from mallee.worker.model.plan import Plan, make_plan
from support.attention_rows import batches, make_row
from support.attention_rows import forked as forked_rows
from support.splits import WatchedAttention, block_reads
from support.torch_threads import torch_threads

SIZE = 4
HEADS, KV_HEADS, DIM = 6, 2, 16
SCALE = 0.2
SAVINGS = st.sampled_from([MIN_SHARED_SAVING, NEVER_SHARED])

needs_tiles = pytest.mark.skipif(not is_available(), reason="this CPU has no AVX-512")


def run(
    attention: Any,
    rows: list[Row],
    dtype: torch.dtype,
    *,
    shape: tuple[int, int, int] = (HEADS, KV_HEADS, DIM),
    size: int = SIZE,
    min_saving: int = MIN_SHARED_SAVING,
    window: int | None = None,
) -> tuple[Plan, float]:
    """Attend over random memory; the plan and the largest error."""
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, dim = shape
    num_slots = size * (1 + max(int(row.table.max()) for row in rows))
    memory = torch.randn(num_slots, 2, kv_heads, dim, generator=generator).to(dtype)
    plan = make_plan(
        rows,
        block_size=size,
        device="cpu",
        prepare=attention.prepare,
        windows=(None, window),
        min_saving=min_saving,
    )
    q = torch.randn(len(plan.tokens), heads, dim, generator=generator).to(dtype)
    with torch.inference_mode():
        ours = attention.attend(plan.reads[window], q, memory, scale=SCALE)
        plain = attend_plain(rows, q, memory, size, scale=SCALE, window=window)
    return plan, float((ours.float() - plain.float()).abs().max())


ATTENTION = TorchAttention(SIZE)
"""One for all, whose scratch memory grows and serves several dtypes."""


def forked(num_rows: int, shared: int, own: int) -> list[Row]:
    return forked_rows(num_rows, shared, own, size=SIZE)


def decodes(*tables: list[int]) -> list[Row]:
    """A token in the last block of each."""
    return [make_row(table, (len(table) - 1) * SIZE + 1, 1) for table in tables]


MIDDLES = [[100 + 40 * i + j for j in range(40)] for i in range(3)]


@pytest.mark.parametrize(
    ("rows", "shared", "num_blocks"),
    [
        pytest.param(forked(32, shared=64, own=2), [64], 64 + 32 * 2, id="once for all rows"),
        pytest.param(
            decodes(*([*range(64), *MIDDLES[i // 3], 300 + 10 * i] for i in range(9))),
            *([64, 40, 40, 40], 64 + 3 * 40 + 9),
            id="nested",
        ),
        pytest.param(forked(3, shared=5, own=2), [], 3 * 7, id="too small a saving"),
        pytest.param(
            decodes(*([0, 1, *MIDDLES[i // 3][:30], 300 + i] for i in range(6))),
            *([32, 32], 2 * 32 + 6),
            id="sessions that share little, forks of each that share much",
        ),
        pytest.param(
            [make_row([*range(40), 40 + i], 40 * SIZE, 1) for i in range(4)],
            *([40], 40 + 4),
            id="all cached blocks",
        ),
    ],
)
def test_what_rows_share_is_read_once_where_that_spares_enough(
    rows: list[Row], shared: list[int], num_blocks: int
) -> None:
    """D7, part: reads are prefix + sum of branches in whole blocks, not rows x prefix."""
    watched = WatchedAttention(ATTENTION)
    _, difference = run(watched, rows, torch.float32)
    assert difference < 1e-5
    run(watched, rows, torch.float32, min_saving=NEVER_SHARED)
    found, flat = watched.splits
    assert [len(prefix.blocks) for prefix in found.shared] == shared
    assert block_reads(found) == num_blocks
    assert block_reads(flat) == sum(len(row.table) for row in rows)


def test_very_deep_trees_are_planned() -> None:
    rows = [make_row([*range(i + 1), 2000 + i], (i + 1) * SIZE, 1) for i in range(400)]
    watched = WatchedAttention(ATTENTION)
    plan = make_plan(rows, block_size=SIZE, device="cpu", prepare=watched.prepare)
    assert len(plan.tokens) == 400
    assert block_reads(watched.splits[0]) < sum(len(row.table) for row in rows) / 4


@given(
    batches([SIZE], [1, 1, 1, 2, 7, MAX_PADDED_TOKENS, MAX_PADDED_TOKENS + 1, 40]),
    st.sampled_from([None, 1, 7, 3 * SIZE, 60]),
    SAVINGS,
    st.sampled_from([(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]),
)
def test_random_mixtures_agree_with_the_plain_form(
    batch: tuple[list[Row], int],
    window: int | None,
    min_saving: int,
    dtype: tuple[torch.dtype, float],
) -> None:
    """D7, part: random page tables, prefixes read together or not, chunk lengths (the torch backend's side).

    In fp32 within 1e-5, in bf16 within its rounding.
    """
    _, difference = run(ATTENTION, batch[0], dtype[0], min_saving=min_saving, window=window)
    assert difference < dtype[1]


def test_padding_groups_are_bounded() -> None:
    """Of rows of very different lengths."""
    rows: list[Row] = []
    first = 0
    for num_blocks in [2, 3, 50, 60, 300, 40, 1, 1, 90, 100, 310, 2, 2, 33] * 3:
        rows.append(make_row(list(range(first, first + num_blocks)), num_blocks * SIZE - 1, 1))
        first += num_blocks
    plan, difference = run(ATTENTION, rows, torch.float32)
    assert difference < 1e-5
    for padded in plan.reads[None].padded:
        assert len(padded.blocks) == 1 or padded.blocks.numel() <= MAX_PADDED_BLOCKS


SHAPES = [(9, 3, 64), (4, 1, 256), (2, 2, 32), (16, 1, 96)]


def tiled(shape: tuple[int, int, int] = SHAPES[0]) -> TiledAttention:
    heads, kv_heads, dim = shape
    return TiledAttention(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)


def tiled_over(memory: torch.Tensor, rows: list[Row], q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Attention of rows over 16 tokens a block in `memory`, and what was read together."""
    kv_heads, dim = memory.shape[2:]
    attention = tiled((q.shape[1], kv_heads, dim))
    plan = make_plan(rows, block_size=16, device="cpu", prepare=attention.prepare)
    return attention.attend(plan.reads[None], q, memory, scale=SCALE), plan.reads[None]


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_tiles
@given(
    batches([16, 32, 48], [1, 1, 1, 2, 7, 17, 40, 200], longest=25),
    st.sampled_from(SHAPES),
    st.sampled_from([None, 1, 20, 64, 500]),
    SAVINGS,
)
def test_tiles_agree_with_the_plain_form(
    batch: tuple[list[Row], int], shape: tuple[int, int, int], window: int | None, min_saving: int
) -> None:
    """D7, part, I7, part: random trees, chunks, windows, sizes and shapes, within bfloat16's rounding."""
    rows, size = batch
    options: dict[str, Any] = {"shape": shape, "min_saving": min_saving, "window": window}
    _, difference = run(tiled(shape), rows, torch.bfloat16, size=size, **options)
    assert difference < 2e-2


@needs_tiles
def test_tiles_read_a_shared_prefix_once_whoever_computes_it() -> None:
    """D7, part: reads are prefix + sum of branches; a prefix that several threads share out is read once."""
    tables = [[*range(128), 128 + 2 * i, 129 + 2 * i] for i in range(32)]
    rows = [make_row(table, 128 * 16 + 20, 1) for table in tables]
    with torch_threads(2):
        watched = WatchedAttention(tiled())
        plan, difference = run(watched, rows, torch.bfloat16, shape=SHAPES[0], size=16)
    assert difference < 2e-2
    assert block_reads(watched.splits[0]) == 128 + 32 * 2
    num_jobs = plan.reads[None].control[CONTROL.num_tasks] // 3
    assert 2 + 32 <= num_jobs <= 128 * 16 // MIN_KEYS + 32


@needs_tiles
def test_a_long_prompt_has_the_same_bits_by_one_thread_and_by_several() -> None:
    """Its tasks are enough for all threads: each has all its keys, and nothing is left to merge."""
    rows = [make_row(list(range(128)), 0, 128 * 16)]
    memory, q = random(2048, 2, 3, 64), random(2048, 9, 64, seed=2)
    found = []
    for num_threads in (1, 2):
        with torch_threads(num_threads):
            outputs, reads = tiled_over(memory, rows, q)
        assert not reads.has_merges
        found.append(outputs)
    assert torch.equal(*found)


@needs_tiles
def test_what_was_never_written_is_never_met() -> None:
    """Slots behind a row's last token hold NaN here: their weight is 0, and so is their share."""
    memory = torch.full((64, 2, 3, 64), torch.nan, dtype=torch.bfloat16)
    memory[:21] = random(21, 2, 3, 64)
    rows, q = [make_row([0, 1], 20, 1)], random(1, 9, 64, seed=2)
    found, _ = tiled_over(memory, rows, q)
    plain = attend_plain(rows, q, memory, 16, scale=SCALE)
    assert float((found.float() - plain.float()).abs().max()) < 2e-2


@needs_tiles
def test_tiles_give_far_keys_as_much_weight_as_near_ones() -> None:
    """I7, part: equal scores at 262 144 positions; half of the values are 1, and so the mean is 0.5."""
    num_blocks = 1 << 14
    memory = torch.zeros(num_blocks * 16, 2, 1, 32, dtype=torch.bfloat16)
    memory[: num_blocks * 8, 1] = 1
    rows = [make_row(list(range(num_blocks)), num_blocks * 16 - 1, 1)]
    found, _ = tiled_over(memory, rows, torch.ones(1, 1, 32, dtype=torch.bfloat16))
    assert float((found.float() - 0.5).abs().max()) <= 2e-3


@needs_tiles
def test_tiles_leave_torchs_own_use_of_them_alone() -> None:
    """Products in bfloat16 use the same registers: they give equal bits before, between and after."""
    x, weight = random(2, 64, 256, seed=3)
    expected = x @ weight.t()
    rows = [make_row([0, 1], 20, 1)] * 3
    for _ in range(3):
        run(tiled(), rows, torch.bfloat16, shape=SHAPES[0], size=16)
        assert torch.equal(x @ weight.t(), expected)


def test_tiles_are_for_what_they_fit() -> None:
    fits: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "block_size": 16,
        "head_dim": 64,
        "group_size": 3,
    }
    assert TiledAttention.is_supported(**fits) == is_available()
    for other in (
        {"dtype": torch.float32},
        {"kv_dtype": torch.float8_e4m3fn},
        {"block_size": 8},
        {"head_dim": 80},
        {"group_size": 17},
    ):
        assert not TiledAttention.is_supported(**{**fits, **other})


# A split, whatever a backend makes of it


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


@given(BATCHES, st.sampled_from([None, 1, 3, 16, 50, 200]), SAVINGS)
def test_every_token_meets_every_key_it_sees_exactly_once(
    batch: tuple[list[Row], int], window: int | None, min_saving: int
) -> None:
    """D7, part, D19: over random trees, block sizes, chunk lengths and windows; shared or not.

    Sharing pays for its merge; blocks before the window of a segment's tokens are not read.
    """
    rows, size = batch
    split = split_batch(rows, block_size=size, window=window, min_saving=min_saving)
    assert met(split) == expected(rows, size, window)
    assert min_saving != NEVER_SHARED or split.shared == ()
    owner = np.repeat(np.arange(len(rows)), [len(row.tokens) for row in rows])
    for prefix in split.shared:
        num_rows = len(set(owner[prefix.tokens].tolist()))
        assert (num_rows - 1) * len(prefix.blocks) >= MIN_SHARED_SAVING
    for segment in split.segments:
        assert segment.first < size, "a leading block that no token sees"
        assert len(segment.blocks) * size < segment.last + segment.size + size, "a trailing one"
