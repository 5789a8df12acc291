"""Products of activations rounded to 8 bits, a scale for each row, with a matrix of one scale a row.

A checkpoint asks for it ("dynamic" activations): both factors have 8 bits, and the hardware multiplies
these. Beside W = values * scales the activations lose precision here: a share of 2^-4 at most of a
number in float8, of half a 127th of a row's largest number in int8.
"""

import torch

from mallee.worker.model.kernels.triton_launch import TritonKernels, power_of_two
from mallee.worker.model.linear.base import QuantizedLinear
from mallee.worker.model.linear.matrix import Quantized

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_LEAST_SCALE = 1e-12  # of a row of zeros


def rounded_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, in] as values of `dtype` and float32 scales [n, 1]; each row's largest value is used fully."""
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / _LARGEST[dtype]).clamp_(min=_LEAST_SCALE)
    scaled = wide / scales
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scales


class Rounding:
    """`rounded_rows` to float8: with `kernels` in one launch instead of seven."""

    __slots__ = ("_kernels",)

    def __init__(self, kernels: TritonKernels | None = None) -> None:
        self._kernels = kernels

    @property
    def label(self) -> str:
        return f"rounded by {'torch' if self._kernels is None else 'Triton'}"

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, in], contiguous, as float8 values and float32 scales [n, 1]."""
        if self._kernels is None:
            return rounded_rows(x, torch.float8_e4m3fn)
        assert x.is_contiguous()
        n, width = x.shape
        values = torch.empty((n, width), dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty((n, 1), dtype=torch.float32, device=x.device)
        block = power_of_two(width)
        self._kernels.launch(
            "round_rows",
            (n,),
            x,
            values.view(torch.uint8),
            scales,
            width=width,
            block=block,
            num_warps=min(16, max(1, block // 512)),
        )
        return values, scales


class RoundedFloat8(QuantizedLinear):
    """By torch._scaled_mm: GPUs from compute capability 8.9 on, dimensions in multiples of 16.

    Tested on a CPU, where torch emulates it slowly. It has never run on a GPU.
    """

    __slots__ = ("_rounding",)

    def __init__(self, matrix: Quantized, kernels: TritonKernels | None = None) -> None:
        """With `kernels` they round the activations."""
        super().__init__(matrix)
        self._rounding = Rounding(kernels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales, _ = self._matrix
        rounded, own = self._rounding(x)
        found: torch.Tensor = torch._scaled_mm(
            rounded, values.t(), scale_a=own, scale_b=scales.t(), out_dtype=x.dtype
        )
        return found

    @property
    def label(self) -> str:
        return f"float8 times float8, {self._rounding.label}"
