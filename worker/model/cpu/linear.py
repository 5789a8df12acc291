"""Products with a matrix on a CPU: plain floats in the layout that it multiplies fastest, and INT8 rows."""

import torch

from mallee.worker.model.cpu.pages import take_large_pages
from mallee.worker.model.linear.base import Linear, QuantizedLinear
from mallee.worker.model.linear.matrix import Matrix, Quantized
from mallee.worker.model.linear.plain import Plain, floats_of
from mallee.worker.model.linear.rounded import rounded_rows
from mallee.worker.model.linear.weight_only import RowScaled, weight_only

_MOST_ROWS = 16


def cpu_linear(matrix: Matrix, dtype: torch.dtype) -> Linear:
    """The product with `matrix` for activations of `dtype`; plain floats are copied into another layout."""
    if isinstance(matrix, torch.Tensor):
        return _plain(matrix)
    if dtype != torch.bfloat16 or matrix.scheme.values != "int8" or matrix.has_blocks:
        return weight_only(matrix)
    return RoundedInt8(matrix) if matrix.scheme.activations == "dynamic" else FewRows(matrix)


def _plain(weight: torch.Tensor) -> Linear:
    """Packed by oneDNN, or [in, out].

    In float32 8 to 32 rows take a third to a fifth of [out, in]'s time in that layout; packed they would take
    a tenth less, but a single row half as much again (measured).
    """
    is_packable = weight.dtype == torch.bfloat16 and torch._C._has_mkldnn
    if is_packable and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return _Packed(weight)
    copied = weight.t().contiguous()
    take_large_pages(copied.data_ptr(), copied.nbytes)
    return Plain(copied)


class _Packed:
    """With bfloat16 arithmetic, packed by oneDNN: 1 to 64 rows take 0.55 to 0.7 of [in, out]'s time,
    hundreds of rows the same (measured)."""

    __slots__ = ("_multiply", "_nbytes", "_weight")

    def __init__(self, weight: torch.Tensor) -> None:
        self._multiply = torch.ops.mkldnn._linear_pointwise  # not in every build of torch
        self._nbytes = weight.nbytes  # packed ones don't tell theirs
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        take_large_pages(torch.ops.mkldnn.data_ptr(self._weight), weight.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._multiply(x, self._weight, None, "none", [], None)
        return found

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._multiply.binary(x, residual, self._weight, None, "add")
        return found

    def rewrite(self, parts: list[Matrix]) -> None:
        """Packed rows lie among each other: all are packed beside them first."""
        floats = floats_of(parts)
        whole = floats[0] if len(floats) == 1 else torch.cat(floats)
        parts.clear()
        del floats
        self._weight.copy_(torch.ops.mkldnn._reorder_linear_weight(whole.contiguous(), None))

    def nbytes_beside(self, table: torch.Tensor) -> int:
        return self._nbytes

    @property
    def label(self) -> str:
        return "bfloat16, packed"


class FewRows(RowScaled):
    """INT8 rows by torch._weight_int8pack_mm up to 16 rows of activations, and widened beyond.

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


class RoundedInt8(QuantizedLinear):
    """INT8 rows by torch._int_mm: 0.6 to 1.1 of the time of bfloat16, packed by oneDNN (measured)."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales, _ = self._matrix
        rounded, own = rounded_rows(x, torch.int8)
        return (torch._int_mm(rounded, values.t()) * own * scales.t()).to(x.dtype)

    @property
    def label(self) -> str:
        return "int8 times int8"
