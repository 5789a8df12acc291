"""Launches of our Triton kernels of small operations, loaded here alone: where there is a CUDA device."""

from contextlib import nullcontext
from importlib import import_module
from subprocess import SubprocessError
from typing import Any

import torch


class NoTriton(RuntimeError):
    """Triton's kernels can't run here. The text says why."""


class TritonKernels:
    """The kernels of `mallee.worker.model.kernels.triton.fused`, by name. `module` has them."""

    __slots__ = ("_module",)

    def __init__(self, module: Any) -> None:
        self._module = module

    @classmethod
    def load(cls) -> "TritonKernels":
        """Raises NoTriton. Nothing is compiled yet."""
        if not torch.cuda.is_available():
            raise NoTriton("no CUDA device is here")
        try:
            return cls(import_module("mallee.worker.model.kernels.triton.fused"))
        except ImportError as e:
            raise NoTriton(f"Triton is not installed ({e}); pip install 'mallee[cuda]'") from e

    def launch(
        self, name: str, grid: tuple[int, ...], x: torch.Tensor, *more: Any, **options: Any
    ) -> None:
        """Enqueue a kernel on x's device; compile it if it is new. Raises NoTriton if that fails.

        Sums are not fused with products that torch rounds.
        """
        kernel: Any = getattr(self._module, name)
        failures = (self._module.TritonError, OSError, SubprocessError)
        try:
            with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
                kernel[grid](x, *more, enable_fp_fusion=False, **options)
        except failures as e:
            raise NoTriton(f"{name}: {e}") from e


def power_of_two(size: int) -> int:
    """The power of two from `size` on."""
    return 1 << (size - 1).bit_length()
