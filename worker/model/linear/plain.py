"""Products with a matrix of plain floats, in the layout that this machine multiplies fastest."""

from collections.abc import Sequence

import torch

from mallee.worker.model.linear.base import Linear
from mallee.worker.model.linear.matrix import Matrix, write_rows
from mallee.worker.model.linear.pages import take_large_pages


def plain_linear(weight: torch.Tensor) -> Linear:
    """`weight` [out, in], as checkpoints hold it; it is copied where another layout is faster."""
    if weight.device.type != "cpu":
        stored = weight.contiguous()
        return _Plain(stored.t(), stored)
    is_packable = weight.dtype == torch.bfloat16 and torch._C._has_mkldnn
    if is_packable and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return _Packed(weight)
    copied = weight.t().contiguous()
    take_large_pages(copied.data_ptr(), copied.nbytes)
    return _Plain(copied)


class _Plain:
    """A weight [in, out]: a view of the checkpoint's layout on accelerators, a copy on a CPU in float32.

    There 8 to 32 rows take a third to a fifth of [out, in]'s time; packed by oneDNN they would take a
    tenth less, but a single row half as much again (measured).
    """

    __slots__ = ("_stored", "_weight")

    def __init__(self, weight: torch.Tensor, stored: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._stored = stored  # the tensor that it is a view of

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._weight)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.addmm(residual, x, self._weight)

    def rewrite(self, parts: list[Matrix]) -> None:
        write_rows(self._weight.t(), _floats(parts))

    def nbytes_beside(self, table: torch.Tensor) -> int:
        return 0 if self._stored is table else self._weight.nbytes

    @property
    def label(self) -> str:
        return str(self._weight.dtype).removeprefix("torch.")


class _Packed:
    """On a CPU with bfloat16 arithmetic, packed by oneDNN: 1 to 64 rows take 0.55 to 0.7 of [in, out]'s
    time, hundreds of rows the same (measured)."""

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
        floats = _floats(parts)
        whole = floats[0] if len(floats) == 1 else torch.cat(floats)
        parts.clear()
        del floats
        self._weight.copy_(torch.ops.mkldnn._reorder_linear_weight(whole.contiguous(), None))

    def nbytes_beside(self, table: torch.Tensor) -> int:
        return self._nbytes

    @property
    def label(self) -> str:
        return "bfloat16, packed"


def _floats(parts: Sequence[Matrix]) -> list[torch.Tensor]:
    floats = [part for part in parts if isinstance(part, torch.Tensor)]
    assert len(floats) == len(parts), "another form"
    return floats
