"""The launches of a device that a run would have, counted on a CPU."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class LaunchCount(TorchDispatchMode):
    """Counts operations of torch that are neither views nor allocations, by name.

    A sum with a product counts twice: CUDA copies the summand to the result before it multiplies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    @property
    def num(self) -> int:
        return self.found.total()

    def one(self, name: str, kernel: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Count `kernel` once, whatever its stand-in does."""
        self.found[name] += 1
        with _disable_current_modes():
            return kernel(*args, **options)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        found = func(*args, **(kwargs or {}))
        made = {_storage(x) for x in tree_leaves(found) if torch.is_tensor(x)}
        name = func.__name__
        is_view = made <= given and not func._schema.is_mutable
        if not is_view and "empty" not in name:
            self.found[name] += 2 if name.startswith("addmm") else 1
        return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
