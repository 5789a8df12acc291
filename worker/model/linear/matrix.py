"""A matrix of 8-bit values with its scales, and the exact float values that it stands for."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mallee.worker.model.linear.scheme import BLOCK, Scheme


class Quantized(NamedTuple):
    """W [out, in] = values * scales. Scales are float32: [out, 1], or one for each block, edges included."""

    values: torch.Tensor
    scales: torch.Tensor
    scheme: Scheme

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def has_blocks(self) -> bool:
        return self.scheme.scales == "block"


def stacked(parts: Sequence[Quantized]) -> Quantized:
    """One matrix of the rows of all `parts`, which `can_stack`."""
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([as_bytes(part.values) for part in parts]).view(parts[0].values.dtype)
    return Quantized(values, torch.cat([part.scales for part in parts]), parts[0].scheme)


def can_stack(upper: Quantized, lower: Quantized) -> bool:
    """Whether `lower` may follow `upper` in one matrix: no block may hold rows of both."""
    ends_with_block = len(upper.values) % BLOCK == 0
    return upper.scheme == lower.scheme and (ends_with_block or not upper.has_blocks)


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """`values` as int8: not all of torch moves float8."""
    return values.view(torch.int8)


def widened(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """8-bit values in bfloat16 or float32, exactly; of float8 there must be no NaN.

    On a CPU torch widens float8 value by value; by bits it takes a fifth of the time (measured).
    """
    if values.dtype == torch.int8 or values.device.type != "cpu":
        return values.to(dtype)
    bits = as_bytes(values).to(torch.int16)
    sign = bits.bitwise_and(-(1 << 15))
    bits.bitwise_and_(0x7F).bitwise_left_shift_(4).bitwise_or_(sign)
    # e4m3's exponent counts from 7 and bfloat16's from 127; a product of subnormals is right too.
    return bits.view(torch.bfloat16).mul_(2.0**120).to(dtype)


def is_number(values: torch.Tensor) -> bool:
    """Whether no float8 among the values is a NaN (e4m3 has no infinity)."""
    raw = as_bytes(values)
    return values.dtype == torch.int8 or not bool(((raw == 0x7F) | (raw == -1)).any())
