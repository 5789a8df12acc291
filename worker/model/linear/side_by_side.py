"""Several products of the same activations as one, for matrices that can't become one matrix."""

from collections.abc import Sequence

import torch

from mallee.worker.model.linear.base import Linear
from mallee.worker.model.linear.matrix import Matrix, runs


class SideBySide:
    """The outputs of all `parts`, in order: queries in 8 bits beside values in bfloat16, or blocks that
    would hold rows of two matrices. Costs a product for each part and a copy."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self._parts], 1)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)

    def rewrite(self, parts: list[Matrix]) -> None:
        for own, run in zip(self._parts, runs(parts), strict=True):
            own.rewrite(run)

    def nbytes_beside(self, table: torch.Tensor) -> int:
        return sum(part.nbytes_beside(table) for part in self._parts)

    @property
    def label(self) -> str:
        return " beside ".join(dict.fromkeys(part.label for part in self._parts))
