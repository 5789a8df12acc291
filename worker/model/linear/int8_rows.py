"""Products of bfloat16 activations with INT8 rows on a CPU."""

import torch

from mallee.worker.model.linear.matrix import Quantized
from mallee.worker.model.linear.weight_only import RowScaled

_MOST_ROWS = 16


class FewRows(RowScaled):
    """By torch._weight_int8pack_mm up to 16 rows, and widened beyond.

    It reads half of bfloat16's bytes: 1 row takes 0.4 to 0.9 of the time of the packed product, 2 rows
    0.8 to 1.2, 8 rows three times as much; widening overtakes it at about 16 rows (measured).
    """

    __slots__ = ("_ones",)

    def __init__(self, matrix: Quantized) -> None:
        super().__init__(matrix)
        self._ones = torch.ones(len(matrix.values), dtype=torch.bfloat16)  # it would round scales

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > _MOST_ROWS:
            return super().__call__(x)
        values, scales, _ = self._matrix
        found = torch._weight_int8pack_mm(x.contiguous(), values, self._ones) * scales[:, 0]
        return found.to(x.dtype)

    def nbytes_beside(self, table: torch.Tensor) -> int:
        return super().nbytes_beside(table) + self._ones.nbytes

    @property
    def label(self) -> str:
        return "int8 a row, widened in each call beyond 16 rows"
