"""Rotary position embedding: how queries and keys are turned by their positions."""

import math
from typing import NamedTuple

import torch

from mallee.worker.model.config import LinearScaling, Llama3Scaling, Rope


class Rotation(NamedTuple):
    """The rotation of each of a batch's tokens, [n, 1, head_dim] each."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary:
    """Cosines and signed sines of every position: [max_positions, 1, head_dim] each.

    x rotated is x * cos + halves_swapped(x) * sin; the sign of transformers' rotate_half is in sin.
    """

    __slots__ = ("_cos", "_sin")

    def __init__(
        self,
        rope: Rope,
        *,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: str,
        rotary_dim: int | None = None,
    ) -> None:
        """Turns `rotary_dim` dimensions (None: all): the first of both halves of a head (`WeightReader`)."""
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.zeros(max_positions, head_dim // 2)
        turned = inverse_frequencies(rope, rotary_dim or head_dim)
        angles[:, : len(turned)] = torch.outer(positions, turned)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), -1).unsqueeze(1).to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of tokens at `positions` [n]."""
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))


def inverse_frequencies(rope: Rope, rotary_dim: int) -> torch.Tensor:
    """Angle per position, one per pair of dimensions: [rotary_dim / 2], float32.

    In float32 from the first step on, as transformers does: at position 8000 the last bit of a
    frequency is half a thousandth of a radian.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    plain = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case scaling:
            return _stretched(plain, scaling)


def _stretched(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Low frequencies divided by the factor, high ones as they are, a ramp between the two."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_max_positions / wavelengths
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    return torch.where(
        turns < low, plain / scaling.factor, torch.where(turns > high, plain, between)
    )
