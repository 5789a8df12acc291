"""Any device agrees with torch operations on the CPU (`--device cuda` for one)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.doubles.random_model import random_model
from mallee.worker.model.attention.torch import TorchAttention
from mallee.worker.model.backend import choose_backend
from mallee.worker.model.cpu.attention import TiledAttention
from mallee.worker.model.cpu.ops import FusedOps
from mallee.worker.model.ops import Ops
from mallee.worker.model.parity.tolerance import TOLERANCES
from support.forward_schedule import run_schedule

FAMILIES = ("llama", "qwen3", "gemma3_text")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_device_agrees_with_the_reference(
    family: str, dtype: str, block_size: int, device: str, sequences: Callable[..., Any]
) -> None:
    """D1, D7, part, I7, part: logits of prompts, chunks, forks and decodes, within the dtype's tolerance."""
    model = random_model(family, 3, head_dim=32 if device == "cpu" else 64)
    options: dict[str, Any] = {"dtype": dtype, "block_size": block_size, "num_blocks": 200}
    reference = run_schedule(sequences(model.forward(**options, uses_kernels=False)), 5)
    has_kernels = device == "cpu" or dtype == "bfloat16"
    forward = model.forward(**options, device=device, uses_kernels=has_kernels)
    ours = run_schedule(sequences(forward), 5)
    difference = max(float((a - b).abs().max()) for a, b in zip(ours, reference, strict=True))
    assert difference < TOLERANCES[dtype].logits


def test_kernels_are_for_the_cpu_and_can_be_switched_off() -> None:
    config = random_model(head_dim=32).config
    wide: dict[str, Any] = {"dtype": torch.float32, "kv_dtype": torch.float32, "block_size": 16}
    assert isinstance(choose_backend(config, device="cpu", **wide).ops, FusedOps)
    for name in ("cpu", "cuda"):
        plain = choose_backend(config, device=name, uses_kernels=False, **wide)
        assert type(plain.ops) is Ops
        assert isinstance(plain.attention, TorchAttention)
    narrow = {**wide, "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    has_tiles = TiledAttention.is_supported(**narrow, head_dim=32, group_size=2)
    found = choose_backend(config, device="cpu", **narrow).attention
    assert isinstance(found, TiledAttention) == has_tiles
