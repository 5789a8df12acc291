"""A matrix of 8-bit values with its scales, and the exact float values that it stands for; several as one."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

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


Matrix: TypeAlias = torch.Tensor | Quantized


def runs(parts: Sequence[Matrix]) -> list[list[Matrix]]:
    """Neighbours that one matrix can hold, together: in the order of `parts`."""
    found: list[list[Matrix]] = []
    for part in parts:
        if found and _can_fuse(found[-1][-1], part):
            found[-1].append(part)
        else:
            found.append([part])
    return found


def _can_fuse(upper: Matrix, lower: Matrix) -> bool:
    if isinstance(upper, Quantized) and isinstance(lower, Quantized):
        return _can_stack(upper, lower)
    return not isinstance(upper, Quantized) and not isinstance(lower, Quantized)


def fused(run: Sequence[Matrix]) -> Matrix:
    """One matrix of the rows of all of a run."""
    quantized = [part for part in run if isinstance(part, Quantized)]
    if quantized:
        return _stacked(quantized)
    plain = [part for part in run if isinstance(part, torch.Tensor)]
    return plain[0] if len(plain) == 1 else torch.cat(plain)


def write_rows(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy the rows of all `parts`, in order, over those of `target`, of which there are as many."""
    assert sum(map(len, parts)) == len(target), "a matrix of another shape"
    begin = 0
    for part in parts:
        own = target[begin : begin + len(part)]
        assert own.shape == part.shape, "a matrix of another shape"
        own.copy_(part)
        begin += len(part)


def _stacked(parts: Sequence[Quantized]) -> Quantized:
    """One matrix of the rows of all `parts`, each of which may follow the one before it."""
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([as_bytes(part.values) for part in parts]).view(parts[0].values.dtype)
    return Quantized(values, torch.cat([part.scales for part in parts]), parts[0].scheme)


def _can_stack(upper: Quantized, lower: Quantized) -> bool:
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
    if values.dtype == torch.int8:
        return True
    raw = as_bytes(values)
    for begin in range(0, len(raw), BLOCK):  # there may be no room for a mask of all
        if bool((raw[begin : begin + BLOCK].bitwise_and(0x7F) == 0x7F).any()):
            return False
    return True
