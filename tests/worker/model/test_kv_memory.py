"""Blocks of a torch model as rows of bytes."""

import numpy as np
import pytest
import torch

from mallee.worker.model.kv_memory import TorchKV


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_bytes_of_each_layer_of_their_blocks(dtype: torch.dtype) -> None:
    """Of blocks in a row and of scattered ones, into rows and back into other blocks."""
    memory = torch.randn(3, 40 * 4, 2, 8).to(dtype)  # [layers, slots, ...]
    kv = TorchKV(memory, 4)
    blocks = [5, 6, 7, 30, 2, 1, 12, 13]
    rows = np.empty((len(blocks), kv.block_nbytes), np.uint8)
    kv.read(blocks, rows)
    for block, row in zip(blocks, rows, strict=True):
        own = memory[:, block * 4 : block * 4 + 4].contiguous().view(torch.uint8)
        assert row.tobytes() == own.numpy().tobytes()
    other = TorchKV(torch.zeros_like(memory), 4)
    there = [20, 21, 3, 9, 10, 11, 0, 39]
    other.write(there, rows)
    back = np.empty_like(rows)
    other.read(there, back)
    assert (back == rows).all()
    untouched = set(range(40)) - set(there)
    assert all(not other._memory[:, b * 4 : b * 4 + 4].any() for b in untouched)
