"""Products of activations rounded to 8 bits, a scale for each row, with a matrix of one scale a row.

A checkpoint asks for it ("dynamic" activations): both factors have 8 bits, and the hardware multiplies
these. Beside W = values * scales the activations lose precision here: a share of 2^-4 at most of a
number in float8, of half a 127th of a row's largest number in int8.
"""

import torch

from mallee.worker.model.linear.quantized import QuantizedLinear

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_LEAST_SCALE = 1e-12  # of a row of zeros


def rounded_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, in] as values of `dtype` and float32 scales [n, 1]; each row's largest value is used fully."""
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / _LARGEST[dtype]).clamp_(min=_LEAST_SCALE)
    scaled = wide / scales
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scales


class RoundedFloat8(QuantizedLinear):
    """By torch._scaled_mm: GPUs from compute capability 8.9 on, dimensions in multiples of 16.

    Tested on a CPU, where torch emulates it slowly. It has never run on a GPU.
    """

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales, _ = self._matrix
        rounded, own = rounded_rows(x, torch.float8_e4m3fn)
        found: torch.Tensor = torch._scaled_mm(
            rounded, values.t(), scale_a=own, scale_b=scales.t(), out_dtype=x.dtype
        )
        return found

    @property
    def label(self) -> str:
        return "float8 times float8"


class RoundedInt8(QuantizedLinear):
    """By torch._int_mm on a CPU: 0.6 to 1.1 of the time of bfloat16, packed by oneDNN (measured)."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales, _ = self._matrix
        rounded, own = rounded_rows(x, torch.int8)
        return (torch._int_mm(rounded, values.t()) * own * scales.t()).to(x.dtype)

    @property
    def label(self) -> str:
        return "int8 times int8"
