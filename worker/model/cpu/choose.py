"""Chooses the attention and the small operations of a model on a CPU."""

import torch

from mallee.worker.model.attention.base import Attention
from mallee.worker.model.attention.torch import TorchAttention
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.cpu.attention import TiledAttention
from mallee.worker.model.cpu.ops import FusedOps
from mallee.worker.model.cpu.race import race
from mallee.worker.model.ops import Ops


def choose_cpu(
    config: ModelConfig, *, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int
) -> tuple[Attention, Ops]:
    """Compiled ones for what they support, else the reference. Compiles, as draws do, the first time."""
    race.compile()
    is_fused = dtype == kv_dtype and dtype in FusedOps.DTYPES
    ops = FusedOps() if is_fused else Ops()
    if TiledAttention.is_supported(
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        head_dim=config.head_dim,
        group_size=config.num_heads // config.num_kv_heads,
    ):
        tiled = TiledAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        return tiled, ops
    return TorchAttention(block_size), ops
