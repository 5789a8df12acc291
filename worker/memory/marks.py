"""Marks in the work of a CUDA device, by its events."""

from typing import Any


class CudaMarks:
    """`worker.gaps.Marks`. `cuda` answers as torch.cuda does, and is that by default."""

    __slots__ = ("_cuda", "_device")

    def __init__(self, device: str, *, cuda: Any = None) -> None:
        self._device = device
        self._cuda = cuda or _cuda()

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def seconds(self, first: Any, second: Any) -> float | None:
        return first.elapsed_time(second) / 1000 if second.query() else None


def _cuda() -> Any:
    import torch

    return torch.cuda
