"""Chooses the attention and the small operations that a model runs on.

The torch ones run everywhere and are the reference; a CPU has compiled ones for what they support. On CUDA
attention is FlashInfer's, and the small operations are Triton's: a device never falls back to the reference,
which is asked for.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from mallee.protocol.errors import ConfigError
from mallee.protocol.messages import TokenLogprobs
from mallee.worker.forward import Draw, LogprobQuery
from mallee.worker.model import installation
from mallee.worker.model.attention.base import Attention
from mallee.worker.model.attention.flashinfer import (
    FlashInferAttention,
    FlashInferUnavailable,
    check_supported,
    find_flashinfer,
)
from mallee.worker.model.attention.torch import TorchAttention
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.cpu.attention import TiledAttention
from mallee.worker.model.cpu.ops import FusedOps
from mallee.worker.model.cpu.race import race
from mallee.worker.model.graphs.device import CudaGraphs
from mallee.worker.model.kernels.cuda_ops import choose_ops
from mallee.worker.model.kernels.triton_launch import NoTriton
from mallee.worker.model.linear.choose import Machine
from mallee.worker.model.ops import Ops
from mallee.worker.model.sampling.device import DeviceSampler
from mallee.worker.model.sampling.sampler import Drawn, HostSampler

USE_TORCH = "or set engine.attention: torch for operations of torch, which are much slower"


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
    Raises ConfigError where FlashInfer is missing or can't compute this model on CUDA, where Triton's kernels
    are missing or wrong there, and where `is_deterministic` can't be had.
    """
    is_cuda = torch.device(device).type == "cuda"
    ops = Ops()
    if uses_kernels and (is_cuda or flashinfer is not None):
        shape: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "head_dim": config.head_dim}
        try:
            check_supported(**shape)
            package = flashinfer or find_flashinfer(device)
            if is_cuda:
                ops = choose_ops(config, dtype=dtype, kv_dtype=kv_dtype, device=device)
            found = FlashInferAttention(
                package,
                **shape,
                device=device,
                block_size=block_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                windows=config.windows,
                capability=Machine.of(device).capability,
                seconds=CudaGraphs(device).seconds if is_cuda and not is_deterministic else None,
                is_deterministic=is_deterministic,
            )
        except (FlashInferUnavailable, NoTriton) as e:
            remedy = "deterministic=True needs it" if is_deterministic else USE_TORCH
            raise ConfigError(f"device={device!r}: {e}; {remedy}") from e
        return Backend(found, ops)
    if is_deterministic:
        raise ConfigError("deterministic=True needs FlashInfer's kernels, on device cuda")
    if is_cuda or not uses_kernels:
        return Backend(TorchAttention(block_size, device), ops)
    race.compile()  # as draws do, the first time
    if dtype == kv_dtype and dtype in FusedOps.DTYPES:
        ops = FusedOps()
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
        return Backend(tiled, ops)
    return Backend(TorchAttention(block_size), ops)


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
