"""Products of float activations with 8-bit matrices, widened piece by piece: any device, and the reference.

These mean exactly what the checkpoint stores, W = values * scales. The matrix stays in 8 bits; a call
widens all of it, so that a few rows cost many times a product with plain floats: 6 to 30 times for one
row on a CPU (measured). None has run on a GPU.
"""

import torch

from mallee.worker.model.linear.base import QuantizedLinear
from mallee.worker.model.linear.matrix import Quantized, widened
from mallee.worker.model.linear.scheme import BLOCK

_CPU_CHUNK = 1 << 20  # values widened at a time: they stay in the cache
_GPU_CHUNK = 1 << 24  # 96 MiB in float32 and bfloat16, within what a budget calls workspace


class _WeightOnly(QuantizedLinear):
    """The matrix, cut into chunks of rows."""

    __slots__ = ("_chunks",)

    def __init__(self, matrix: Quantized) -> None:
        super().__init__(matrix)
        rows, width = matrix.values.shape
        numel = _CPU_CHUNK if matrix.values.device.type == "cpu" else _GPU_CHUNK
        step = max(1, numel // (width * BLOCK)) * BLOCK
        self._chunks = [slice(i, min(i + step, rows)) for i in range(0, rows, step)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._chunks) == 1:
            return self._multiplied(x, self._chunks[0]).to(x.dtype)
        out = x.new_empty((len(x), len(self._matrix.values)))
        for chunk in self._chunks:
            out[:, chunk] = self._multiplied(x, chunk)
        return out

    def _multiplied(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        raise NotImplementedError


class RowScaled(_WeightOnly):
    """One scale a row, by which the products are multiplied: values are exact in bfloat16, W is not."""

    __slots__ = ()

    def _multiplied(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        values, scales, _ = self._matrix
        return torch.mm(x, widened(values[rows], x.dtype).t()) * scales[rows, 0]

    @property
    def label(self) -> str:
        return "8 bits a row, widened in each call"


class BlockScaled(_WeightOnly):
    """One scale a block: W is computed in float32 and rounded to x's dtype, as a dequantised file has it."""

    __slots__ = ()

    def _multiplied(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        values, scales, _ = self._matrix
        own = widened(values[rows], torch.float32)
        grid = scales[rows.start // BLOCK : -(-rows.stop // BLOCK)]
        by_column = grid.repeat_interleave(BLOCK, 1)[:, : own.shape[1]]
        num_whole = len(own) // BLOCK
        whole = own[: num_whole * BLOCK].view(num_whole, BLOCK, own.shape[1])
        whole *= by_column[:num_whole, None]
        own[num_whole * BLOCK :] *= by_column[num_whole:]  # of a last block that is cut
        return torch.mm(x, own.to(x.dtype).t())

    @property
    def label(self) -> str:
        return "8 bits in blocks, widened in each call"


def weight_only(matrix: Quantized) -> RowScaled | BlockScaled:
    """The reference product with `matrix`."""
    return BlockScaled(matrix) if matrix.has_blocks else RowScaled(matrix)
