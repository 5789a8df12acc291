"""Chooses the attention and the small operations that a model runs on.

The torch ones run everywhere and are the reference; a CPU has compiled ones for what they support, and on
CUDA attention is FlashInfer's where that is installed.
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mallee.protocol.errors import ConfigError
from mallee.protocol.messages import TokenLogprobs
from mallee.worker.forward import Draw, LogprobQuery
from mallee.worker.model import installation
from mallee.worker.model.attention.amx import TiledAttention
from mallee.worker.model.attention.base import Attention
from mallee.worker.model.attention.flashinfer import (
    FlashInferAttention,
    FlashInferUnavailable,
    check_supported,
    find_flashinfer,
)
from mallee.worker.model.attention.torch import TorchAttention
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.kernels.race import race
from mallee.worker.model.ops import FusedOps, Ops
from mallee.worker.model.sampling.device import DeviceSampler
from mallee.worker.model.sampling.sampler import Drawn, HostSampler

log = logging.getLogger(__name__)


def check_device(device: str) -> None:
    """Raises ConfigError if a model can't run there."""
    try:
        kind = torch.device(device).type
    except RuntimeError as e:
        raise ConfigError(f"device={device!r}: {e}") from e
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: give cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        reasons = "; ".join(installation.no_device(installation.look()))
        raise ConfigError(f"device={device!r}: {reasons}; or give cpu")
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
    is_deterministic: bool = False,
    flashinfer: Any = None,
) -> Backend:
    """The fastest that this device and these dtypes allow; with uses_kernels False the reference.

    `flashinfer`: FlashInfer's package, for any device; None: on CUDA the installed one. The first time on
    a machine kernels are compiled here, for some seconds, FlashInfer's for some minutes.
    Raises ConfigError where `is_deterministic` can't be had.
    """
    is_cuda = torch.device(device).type == "cuda"
    if uses_kernels and (is_cuda or flashinfer is not None):
        shape: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "head_dim": config.head_dim}
        try:
            check_supported(**shape)
            package = flashinfer or find_flashinfer(device)
        except FlashInferUnavailable as e:
            if is_deterministic:
                raise ConfigError(f"deterministic=True: {e}") from e
            log.warning("attention on %s runs in torch operations: %s", device, e)
        else:
            found = FlashInferAttention(
                package,
                **shape,
                device=device,
                block_size=block_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                windows=config.windows,
                is_deterministic=is_deterministic,
            )
            return Backend(found, Ops())
    if is_deterministic:
        raise ConfigError("deterministic=True needs FlashInfer's kernels, on device cuda")
    attention: Attention = TorchAttention(block_size, device)
    if is_cuda or not uses_kernels:
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


class Sampler(Protocol):
    """Draws tokens from logits on one device; see `Forward` and `DeviceForward`."""

    def sample(self, draws: Sequence[Draw]) -> list[int]: ...

    def launch(self, draws: Sequence[Draw]) -> Drawn: ...

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]: ...


def choose_sampler(device: str, dtype: torch.dtype, vocab_size: int) -> Sampler:
    """The way to draw there, from such logits. On CUDA kernels are compiled here. Raises ConfigError."""
    found = torch.device(device)
    if found.type == "cpu":
        return HostSampler()
    sampler = DeviceSampler()
    if found.type == "cuda":
        sampler.compile(found, dtype, vocab_size)
    return sampler
