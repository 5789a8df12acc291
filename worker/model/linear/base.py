"""The interface of a product with a weight matrix, the base of those with 8 bits, and several as one."""

from collections.abc import Sequence
from typing import Protocol

import torch

from mallee.worker.model.linear.matrix import Matrix, Quantized, as_bytes, runs, write_rows


class Linear(Protocol):
    """x -> x W^T for a checkpoint's W [out, in]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> [n, out], contiguous, in x's dtype."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + (x -> [n, out]), as a new tensor."""
        ...

    def rewrite(self, parts: list[Matrix]) -> None:
        """Have W be the rows of `parts`, in order, from now on, in the memory that it has.

        They have the shapes and forms of those that it was made of, and may be on another device. May empty
        the list; beside what is in it, there is need for room for one W at most.
        """
        ...

    def nbytes_beside(self, table: torch.Tensor) -> int:
        """Bytes of the weight; 0 if it is a view of `table`."""
        ...

    @property
    def label(self) -> str:
        """The product in a few words, for the log."""
        ...


class QuantizedLinear:
    """A `Linear`, but for the product itself and its label."""

    __slots__ = ("_matrix",)

    def __init__(self, matrix: Quantized) -> None:
        self._matrix = matrix

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)

    def rewrite(self, parts: list[Matrix]) -> None:
        own = [part for part in parts if isinstance(part, Quantized)]
        assert [part.scheme for part in own] == [self._matrix.scheme] * len(parts), "another form"
        write_rows(as_bytes(self._matrix.values), [as_bytes(part.values) for part in own])
        write_rows(self._matrix.scales, [part.scales for part in own])

    def nbytes_beside(self, table: torch.Tensor) -> int:
        return self._matrix.nbytes


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
