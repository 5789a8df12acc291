"""Products with a matrix of plain floats."""

from collections.abc import Sequence

import torch

from mallee.worker.model.linear.matrix import Matrix, write_rows


class Plain:
    """A weight [in, out]; a view of `stored` [out, in], as checkpoints hold it, if that is given."""

    __slots__ = ("_stored", "_weight")

    def __init__(self, weight: torch.Tensor, stored: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._stored = stored

    @classmethod
    def view(cls, stored: torch.Tensor) -> "Plain":
        """The product with `stored` [out, in], which is not copied."""
        stored = stored.contiguous()
        return cls(stored.t(), stored)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._weight)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.addmm(residual, x, self._weight)

    def rewrite(self, parts: list[Matrix]) -> None:
        write_rows(self._weight.t(), floats_of(parts))

    def nbytes_beside(self, table: torch.Tensor) -> int:
        return 0 if self._stored is table else self._weight.nbytes

    @property
    def label(self) -> str:
        return str(self._weight.dtype).removeprefix("torch.")


def floats_of(parts: Sequence[Matrix]) -> list[torch.Tensor]:
    """`parts`, all of which have plain floats."""
    floats = [part for part in parts if isinstance(part, torch.Tensor)]
    assert len(floats) == len(parts), "another form"
    return floats
