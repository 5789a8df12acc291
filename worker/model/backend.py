"""Chooses the attention and the small operations that a model runs on.

The torch ones run everywhere and are the reference; a CPU has compiled ones for what they support.
"""

from typing import NamedTuple

import torch

from mallee.protocol.errors import ConfigError
from mallee.worker.model.attention.amx import TiledAttention
from mallee.worker.model.attention.base import Attention
from mallee.worker.model.attention.torch import TorchAttention
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.kernels.race import race
from mallee.worker.model.ops import FusedOps, Ops


def check_device(device: str) -> None:
    """Raises ConfigError if a model can't run there."""
    try:
        kind = torch.device(device).type
    except RuntimeError as e:
        raise ConfigError(f"device={device!r}: {e}") from e
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: give cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={device!r}: this torch ({torch.__version__}) finds no CUDA device; give cpu, or"
            " install a torch built for CUDA"
        )
    if kind == "cuda" and (torch.device(device).index or 0) >= (num := torch.cuda.device_count()):
        raise ConfigError(
            f"device={device!r}: this process has {num} CUDA device(s), from cuda:0 on; under Ray each worker"
            " has its own: give cuda"
        )


class Backend(NamedTuple):
    """The parts of a decoder that depend on the device."""

    attention: Attention
    ops: Ops


def choose_backend(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: str,
    block_size: int,
    uses_kernels: bool = True,
) -> Backend:
    """The fastest that this device and these dtypes allow; with uses_kernels False the reference.

    The first time on a machine kernels are compiled here, for some seconds.
    """
    attention: Attention = TorchAttention(block_size, device)
    if not uses_kernels or torch.device(device).type != "cpu":
        return Backend(attention, Ops())
    race.compile()
    ops = FusedOps() if dtype == kv_dtype and dtype in FusedOps.DTYPES else Ops()
    if TiledAttention.is_supported(
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        head_dim=config.head_dim,
        group_size=config.num_heads // config.num_kv_heads,
    ):
        attention = TiledAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
    return Backend(attention, ops)
