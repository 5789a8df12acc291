"""The base of products with a matrix of 8 bits."""

import torch

from mallee.worker.model.linear.matrix import Matrix, Quantized, as_bytes, write_rows


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
