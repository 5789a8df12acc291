"""Our Triton kernels on a CPU, by Triton's interpreter, which rounds to bfloat16 here as hardware does.

By itself it cuts the lower bits off. Numbers that are infinite or none are no fault, and numpy warns of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from support.launch_count import LaunchCount

_COUNTS: list[LaunchCount] = []


@contextmanager
def counting(count: LaunchCount) -> Iterator[None]:
    """Our kernels' launches go to `count`, too."""
    _COUNTS.append(count)
    try:
        yield
    finally:
        _COUNTS.pop()


class Interpreted:
    """A kernel, launched as Triton's. What the interpreter does in torch is no operation of ours."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            for count in _COUNTS:
                count.found[self._kernel.__name__] += 1
            with _disable_current_modes(), np.errstate(all="ignore"):
                self._kernel[grid](*args, **options)

        return launch


def interpreted() -> SimpleNamespace:
    """The kernels' module. Skips where there is no Triton, or it compiles (`tests/conftest.py`)."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles here: there is a CUDA device")
    from mallee.worker.model.kernels.triton import fused

    _round_as_hardware()
    kernels = {
        name: Interpreted(getattr(fused, name)) for name in fused.__all__ if name[0].islower()
    }
    return SimpleNamespace(**kernels, TritonError=fused.TritonError)


def _round_as_hardware() -> None:
    from triton import language as tl
    from triton.runtime import interpreter

    theirs = interpreter._convert_float
    if theirs.__name__ == "convert":
        return

    def convert(values: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if given != tl.float32 or wanted != tl.bfloat16:
            return theirs(values, given, wanted, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = convert
