"""Cascade attention against the plain form, and what the plan promises to read."""

from typing import Any

import numpy as np
import pytest
import torch

from mallee.worker.forward import Row
from mallee.worker.model.attention import PagedAttention, attend_plain
from mallee.worker.model.plan import MAX_PADDED_BLOCKS, MAX_PADDED_TOKENS, Plan, make_plan

SIZE = 4
HEADS, KV_HEADS, DIM = 6, 2, 16


def make_row(table: list[int], start: int, n: int) -> Row:
    return Row(np.zeros(n, dtype=np.uint32), start, np.asarray(table, dtype=np.int32), True)


def compare(rows: list[Row], dtype: torch.dtype, *, is_shared: bool = True) -> tuple[Plan, float]:
    """Run both forms over random memory; the plan and the largest difference."""
    generator = torch.Generator().manual_seed(1)
    num_slots = SIZE * (1 + max(int(row.table.max()) for row in rows))
    memory = torch.randn(num_slots, 2, KV_HEADS, DIM, generator=generator).to(dtype)
    plan = make_plan(rows, block_size=SIZE, device="cpu", is_shared=is_shared)
    n = len(plan.tokens)
    q = torch.randn(n, HEADS, DIM, generator=generator).to(dtype)
    k, v = torch.randn(2, n, KV_HEADS, DIM, generator=generator).to(dtype)
    memory.index_copy_(0, plan.slots, torch.stack((k, v), 1))
    with torch.inference_mode():
        ours = PagedAttention(SIZE).attend(plan, q, k, v, memory)
        plain = attend_plain(rows, q, memory, SIZE)
    return plan, float((ours.float() - plain.float()).abs().max())


def forked(num_rows: int, shared: int, own: int, n: int = 1) -> list[Row]:
    """Rows over `shared` common blocks and `own` blocks each; `n` new tokens at the end."""
    rows = []
    for i in range(num_rows):
        table = [*range(shared), *(shared + i * own + j for j in range(own))]
        rows.append(make_row(table, (shared + own) * SIZE - n - i % 3, n))
    return rows


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
    assert any(len(trunk.blocks) == 20 for trunk in cascade.trunks)
    assert all(len(trunk.blocks) > 20 for trunk in flat.trunks)


def test_shared_blocks_are_read_once_for_all_rows() -> None:
    """D7: reads are prefix + sum of branches (padded to whole blocks), not rows x prefix."""
    plan, _ = compare(forked(32, shared=64, own=2), torch.float32)
    assert plan.key_reads == 64 * SIZE + 32 * 2 * SIZE
    assert plan.flat_key_reads > 32 * 64 * SIZE
    flat, _ = compare(forked(32, shared=64, own=2), torch.float32, is_shared=False)
    assert flat.key_reads == 32 * 66 * SIZE


def test_nested_prefixes_become_nested_trunks() -> None:
    rows = []
    for i in range(3):
        middle = [100 + 40 * i + j for j in range(40)]
        for j in range(3):
            table = [*range(64), *middle, 300 + 10 * (3 * i + j)]
            rows.append(make_row(table, 104 * SIZE + 1, 1))
    plan, difference = compare(rows, torch.float32)
    assert difference < 1e-5
    assert [len(trunk.blocks) for trunk in plan.trunks] == [64, 40, 40, 40]
    assert plan.trunks[0].tokens is None
    assert plan.key_reads == (64 + 3 * 40 + 9) * SIZE


def test_a_small_saving_makes_no_trunk() -> None:
    plan, difference = compare(forked(3, shared=5, own=2), torch.float32)
    assert difference < 1e-5
    assert plan.trunks == ()


def test_a_small_common_beginning_does_not_hide_larger_ones_behind_it() -> None:
    """Two sessions share a short system prompt; each session's forks share much more."""
    rows = []
    for i in range(2):
        session = [100 + 30 * i + j for j in range(30)]
        tables = [[0, 1, *session, 200 + 3 * i + j] for j in range(3)]
        rows += [make_row(table, 32 * SIZE + 1, 1) for table in tables]
    plan, difference = compare(rows, torch.float32)
    assert difference < 1e-5
    assert sorted(len(trunk.blocks) for trunk in plan.trunks) == [32, 32]


def test_very_deep_trees_are_planned() -> None:
    rows = [make_row([*range(i + 1), 2000 + i], (i + 1) * SIZE, 1) for i in range(400)]
    plan = make_plan(rows, block_size=SIZE, device="cpu")
    assert len(plan.tokens) == 400
    assert plan.key_reads < plan.flat_key_reads / 4


def test_an_identical_row_still_has_a_tail() -> None:
    """Rows that share all their cached blocks keep their own last block apart."""
    rows = [make_row([*range(40), 40 + i], 40 * SIZE, 1) for i in range(4)]
    plan, difference = compare(rows, torch.float32)
    assert difference < 1e-5
    assert len(plan.trunks) == 1
    assert plan.padded[0].blocks.tolist() == [[40], [41], [42], [43]]


@pytest.mark.parametrize("seed", range(25))
def test_random_mixtures_agree_with_the_plain_form(seed: int) -> None:
    """Random page tables, prefixes, chunk lengths (the torch backend's side)."""
    rng = np.random.default_rng(seed)
    ids = iter(rng.permutation(4000).tolist())
    stems: list[list[int]] = [[]]
    for _ in range(6):
        stem = stems[int(rng.integers(len(stems)))]
        stems.append([*stem, *(next(ids) for _ in range(int(rng.integers(1, 40))))])
    rows = []
    for _ in range(int(rng.integers(1, 20))):
        stem = stems[int(rng.integers(len(stems)))]
        start = len(stem) * SIZE + int(rng.integers(0, 30))
        n = int(rng.choice([1, 1, 1, 2, 7, 16, 17, 40]))
        num_own = -(-(start + n) // SIZE) - len(stem)
        rows.append(make_row([*stem, *(next(ids) for _ in range(num_own))], start, n))
    for is_shared in (True, False):
        _, difference = compare(rows, torch.float32, is_shared=is_shared)
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
    for padded in plan.padded:
        assert len(padded.blocks) == 1 or padded.blocks.numel() <= MAX_PADDED_BLOCKS
        covered += padded.real.tolist()
    assert sorted(covered) == list(range(len(rows)))


def test_scratch_memory_grows_and_serves_several_dtypes() -> None:
    attention = PagedAttention(SIZE)
    for dtype, own in ((torch.float32, 2), (torch.bfloat16, 9), (torch.float32, 30)):
        rows = forked(4, shared=20, own=own)
        num_slots = SIZE * (21 + 4 * own)
        memory = torch.randn(num_slots, 2, KV_HEADS, DIM).to(dtype)
        plan = make_plan(rows, block_size=SIZE, device="cpu")
        q = torch.randn(4, HEADS, DIM).to(dtype)
        k, v = memory[plan.slots].unbind(1)
        ours: Any = attention.attend(plan, q, k, v, memory)
        plain = attend_plain(rows, q, memory, SIZE)
        assert float((ours.float() - plain.float()).abs().max()) < 2e-2
