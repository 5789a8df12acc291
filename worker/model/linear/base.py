"""The interface of a product with a weight matrix."""

from typing import Protocol

import torch

from mallee.worker.model.linear.matrix import Matrix


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
