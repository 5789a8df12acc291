"""A sampler's Triton kernels on a CPU: by Triton's interpreter (`tests/conftest.py`), or only counted."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The device that kernels run on."""


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels may be launched here; numbers overflow as they do on a GPU, without a warning."""
    if DEVICE == "cuda":
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    function: Any = interpreter.InterpretedFunction
    assert isinstance(language.sum, function), "TRITON_INTERPRET was not set in time"
    inner = function.__call__

    patched: set[int] = set()

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As `inner`, which patches Triton's language for each call of a function by another."""
        if self.fn.__module__.startswith("triton.") and id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            return inner(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    function.__call__ = called
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        function.__call__ = inner


class CountedKernels:
    """The module of a sampler's kernels for devices without numbers: launches do nothing, and are counted."""

    tl = SimpleNamespace(float32="fp32", bfloat16="bf16")

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def __getattr__(self, name: str) -> "_CountedKernel":
        return _CountedKernel(self.count, name)


class _CountedKernel:
    def __init__(self, count: Counter[str], name: str) -> None:
        self.count, self.name = count, name

    def __getitem__(self, grid: Any) -> Any:
        def launched(*arguments: Any, **constants: Any) -> None:
            self.count[self.name] += 1

        return launched
