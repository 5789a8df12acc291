"""Attention backends against the plain form, and what they promise to read."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mallee.testing.attention import attend_plain
from mallee.worker.forward import Row
from mallee.worker.model.attention.amx import MIN_KEYS, TiledAttention
from mallee.worker.model.attention.base import Reads
from mallee.worker.model.attention.torch import MAX_PADDED_BLOCKS, MAX_PADDED_TOKENS, TorchAttention
from mallee.worker.model.kernels import amx
from mallee.worker.model.kernels.layout import CONTROL
from mallee.worker.model.plan import Plan, make_plan
from support.attention_rows import batches, make_row
from support.attention_rows import forked as forked_rows

SIZE = 4
HEADS, KV_HEADS, DIM = 6, 2, 16
SCALE = 0.2

needs_tiles = pytest.mark.skipif(not amx.is_available(), reason="this CPU has no AMX tiles")


def run(
    attention: Any,
    rows: list[Row],
    dtype: torch.dtype,
    *,
    shape: tuple[int, int, int] = (HEADS, KV_HEADS, DIM),
    size: int = SIZE,
    is_shared: bool = True,
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
        is_shared=is_shared,
    )
    q = torch.randn(len(plan.tokens), heads, dim, generator=generator).to(dtype)
    with torch.inference_mode():
        ours = attention.attend(plan.reads[window], q, memory, scale=SCALE)
        plain = attend_plain(rows, q, memory, size, scale=SCALE, window=window)
    return plan, float((ours.float() - plain.float()).abs().max())


def compare(
    rows: list[Row], dtype: torch.dtype, *, is_shared: bool = True, window: int | None = None
) -> tuple[Reads, float]:
    """Keys that the torch backend reads for `rows`, and its largest error."""
    plan, difference = run(TorchAttention(SIZE), rows, dtype, is_shared=is_shared, window=window)
    return plan.reads[window], difference


def forked(num_rows: int, shared: int, own: int, n: int = 1) -> list[Row]:
    return forked_rows(num_rows, shared, own, n, size=SIZE)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("n", [1, 5, MAX_PADDED_TOKENS + 3])
def test_a_shared_prefix_gives_what_flat_reading_gives(
    n: int, dtype: torch.dtype, tolerance: float
) -> None:
    """D7, part: cascade output equals flat paged output (fp32 1e-5, bf16 within its rounding)."""
    rows = forked(9, shared=20, own=6, n=n)
    cascade, difference = compare(rows, dtype)
    assert difference < tolerance
    flat, flat_difference = compare(rows, dtype, is_shared=False)
    assert flat_difference < tolerance
    assert any(len(prefix.blocks) == 20 for prefix in cascade.parts.shared)
    assert flat.parts.shared == ()


def test_shared_blocks_are_read_once_for_all_rows() -> None:
    """D7, part: reads are prefix + sum of branches (padded to whole blocks), not rows x prefix."""
    plan, _ = compare(forked(32, shared=64, own=2), torch.float32)
    assert plan.num_key_reads == 64 * SIZE + 32 * 2 * SIZE
    flat, _ = compare(forked(32, shared=64, own=2), torch.float32, is_shared=False)
    assert flat.num_key_reads == 32 * 66 * SIZE


def test_nested_prefixes_become_nested_trunks() -> None:
    rows = []
    for i in range(3):
        middle = [100 + 40 * i + j for j in range(40)]
        for j in range(3):
            table = [*range(64), *middle, 300 + 10 * (3 * i + j)]
            rows.append(make_row(table, 104 * SIZE + 1, 1))
    plan, difference = compare(rows, torch.float32)
    assert difference < 1e-5
    assert [len(prefix.blocks) for prefix in plan.parts.shared] == [64, 40, 40, 40]
    assert plan.parts.shared[0].tokens is None
    assert plan.num_key_reads == (64 + 3 * 40 + 9) * SIZE


def test_a_small_saving_makes_no_trunk() -> None:
    plan, difference = compare(forked(3, shared=5, own=2), torch.float32)
    assert difference < 1e-5
    assert plan.parts.shared == ()


def test_a_small_common_beginning_does_not_hide_larger_ones_behind_it() -> None:
    """Two sessions share a short system prompt; each session's forks share much more."""
    rows = []
    for i in range(2):
        session = [100 + 30 * i + j for j in range(30)]
        tables = [[0, 1, *session, 200 + 3 * i + j] for j in range(3)]
        rows += [make_row(table, 32 * SIZE + 1, 1) for table in tables]
    plan, difference = compare(rows, torch.float32)
    assert difference < 1e-5
    assert sorted(len(prefix.blocks) for prefix in plan.parts.shared) == [32, 32]


def test_very_deep_trees_are_planned() -> None:
    rows = [make_row([*range(i + 1), 2000 + i], (i + 1) * SIZE, 1) for i in range(400)]
    plan = make_plan(rows, block_size=SIZE, device="cpu", prepare=TorchAttention(SIZE).prepare)
    assert len(plan.tokens) == 400
    assert plan.reads[None].num_key_reads < plan.num_flat_key_reads / 4


def test_an_identical_row_still_has_a_tail() -> None:
    """Rows that share all their cached blocks keep their own last block apart."""
    rows = [make_row([*range(40), 40 + i], 40 * SIZE, 1) for i in range(4)]
    plan, difference = compare(rows, torch.float32)
    assert difference < 1e-5
    assert len(plan.parts.shared) == 1
    assert plan.parts.padded[0].blocks.tolist() == [[40], [41], [42], [43]]


@given(
    batches([SIZE], [1, 1, 1, 2, 7, 16, 17, 40]),
    st.sampled_from([None, 1, 7, 3 * SIZE, 60]),
    st.booleans(),
)
def test_random_mixtures_agree_with_the_plain_form(
    batch: tuple[list[Row], int], window: int | None, is_shared: bool
) -> None:
    """Random page tables, prefixes, chunk lengths (the torch backend's side)."""
    _, difference = compare(batch[0], torch.float32, is_shared=is_shared, window=window)
    assert difference < 1e-5


def test_padding_groups_are_bounded_and_cover_every_short_row_once() -> None:
    rows: list[Row] = []
    first = 0
    for num_blocks in [2, 3, 50, 60, 300, 40, 1, 1, 90, 100, 310, 2, 2, 33] * 3:
        rows.append(make_row(list(range(first, first + num_blocks)), num_blocks * SIZE - 1, 1))
        first += num_blocks
    plan, difference = compare(rows, torch.float32)
    assert difference < 1e-5
    covered: list[int] = []
    for padded in plan.parts.padded:
        assert len(padded.blocks) == 1 or padded.blocks.numel() <= MAX_PADDED_BLOCKS
        covered += padded.real.tolist()
    assert sorted(covered) == list(range(len(rows)))


def test_scratch_memory_grows_and_serves_several_dtypes() -> None:
    attention = TorchAttention(SIZE)
    for dtype, own in ((torch.float32, 2), (torch.bfloat16, 9), (torch.float32, 30)):
        _, difference = run(attention, forked(4, shared=20, own=own), dtype)
        assert difference < 2e-2


SHAPES = [(9, 3, 64), (4, 1, 256), (2, 2, 32), (16, 1, 96)]


def tiled(shape: tuple[int, int, int], size: int) -> TiledAttention:
    heads, kv_heads, dim = shape
    return TiledAttention(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)


@needs_tiles
@given(
    batches([16, 32, 48], [1, 1, 1, 2, 7, 17, 40, 200], longest=25),
    st.sampled_from(SHAPES),
    st.sampled_from([None, 1, 20, 64, 500]),
    st.booleans(),
)
def test_tiles_agree_with_the_plain_form(
    batch: tuple[list[Row], int], shape: tuple[int, int, int], window: int | None, is_shared: bool
) -> None:
    """D7, part, I7, part: random trees, chunks, windows, sizes and shapes, within bfloat16's rounding."""
    rows, size = batch
    attention = tiled(shape, size)
    _, difference = run(
        attention, rows, torch.bfloat16, shape=shape, size=size, is_shared=is_shared, window=window
    )
    assert difference < 2e-2


@needs_tiles
def test_tiles_read_a_shared_prefix_once_whoever_computes_it() -> None:
    """D7, part: reads are prefix + sum of branches; a prefix that several threads share out is read once."""
    tables = [[*range(128), 128 + 2 * i, 129 + 2 * i] for i in range(32)]
    rows = [make_row(table, 128 * 16 + 20, 1) for table in tables]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        plan, difference = run(
            tiled((9, 3, 64), 16), rows, torch.bfloat16, shape=(9, 3, 64), size=16
        )
    finally:
        torch.set_num_threads(before)
    assert difference < 2e-2
    assert plan.reads[None].num_key_reads == 128 * 16 + 32 * 21
    num_jobs = plan.reads[None].parts.control[CONTROL.num_tasks] // 3
    assert 2 + 32 <= num_jobs <= 128 * 16 // MIN_KEYS + 32


@needs_tiles
def test_a_long_prompt_has_the_same_bits_by_one_thread_and_by_several() -> None:
    """Its tasks are enough for all threads: each has all its keys, and nothing is left to merge."""
    rows = [make_row(list(range(128)), 0, 128 * 16)]
    found = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            memory = torch.randn(
                2048, 2, 3, 64, generator=torch.Generator().manual_seed(1)
            ).bfloat16()
            q = torch.randn(2048, 9, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
            attention = tiled((9, 3, 64), 16)
            plan = make_plan(rows, block_size=16, device="cpu", prepare=attention.prepare)
            assert not plan.reads[None].parts.has_merges
            found.append(attention.attend(plan.reads[None], q, memory, scale=SCALE))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@needs_tiles
def test_what_was_never_written_is_never_met() -> None:
    """Slots behind a row's last token hold NaN here: their weight is 0, and so is their share."""
    memory = torch.full((64, 2, 3, 64), torch.nan, dtype=torch.bfloat16)
    memory[:21] = torch.randn(21, 2, 3, 64, generator=torch.Generator().manual_seed(1))
    rows = [make_row([0, 1], 20, 1)]
    attention = tiled((9, 3, 64), 16)
    plan = make_plan(rows, block_size=16, device="cpu", prepare=attention.prepare)
    q = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = attention.attend(plan.reads[None], q, memory, scale=SCALE)
    plain = attend_plain(rows, q, memory, 16, scale=SCALE)
    assert float((found.float() - plain.float()).abs().max()) < 2e-2


@needs_tiles
def test_tiles_give_far_keys_as_much_weight_as_near_ones() -> None:
    """I7, part: equal scores at 262 144 positions; half of the values are 1, and so the mean is 0.5."""
    num_blocks = 1 << 14
    memory = torch.zeros(num_blocks * 16, 2, 1, 32, dtype=torch.bfloat16)
    memory[: num_blocks * 8, 1] = 1
    rows = [make_row(list(range(num_blocks)), num_blocks * 16 - 1, 1)]
    attention = tiled((1, 1, 32), 16)
    plan = make_plan(rows, block_size=16, device="cpu", prepare=attention.prepare)
    q = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    found = attention.attend(plan.reads[None], q, memory, scale=SCALE)
    assert float((found.float() - 0.5).abs().max()) <= 2e-3


@needs_tiles
def test_tiles_leave_torchs_own_use_of_them_alone() -> None:
    """Products in bfloat16 use the same registers: they give equal bits before, between and after."""
    x, weight = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = x @ weight.t()
    rows = [make_row([0, 1], 20, 1)] * 3
    for _ in range(3):
        run(tiled((9, 3, 64), 16), rows, torch.bfloat16, shape=(9, 3, 64), size=16)
        assert torch.equal(x @ weight.t(), expected)


def test_tiles_are_for_what_they_fit() -> None:
    fits: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "block_size": 16,
        "head_dim": 64,
        "group_size": 3,
    }
    assert TiledAttention.is_supported(**fits) == amx.is_available()
    for other in (
        {"dtype": torch.float32},
        {"kv_dtype": torch.float8_e4m3fn},
        {"block_size": 8},
        {"head_dim": 80},
        {"group_size": 17},
    ):
        assert not TiledAttention.is_supported(**{**fits, **other})
