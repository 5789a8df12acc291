"""The interface of a product with a weight matrix."""

from typing import Protocol

import torch


class Linear(Protocol):
    """x -> x W^T for a checkpoint's W [out, in]. Immutable."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> [n, out], contiguous, in x's dtype."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + (x -> [n, out]), as a new tensor."""
        ...

    def nbytes_beside(self, table: torch.Tensor) -> int:
        """Bytes of the weight; 0 if it is a view of `table`."""
        ...

    @property
    def label(self) -> str:
        """The product in a few words, for the log."""
        ...
