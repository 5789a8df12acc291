"""The order of a device's work: streams on which KV is copied beside it, and marks that time it.

Copies have a stream of their own, so that they run beside a step instead of behind it. A *mark*, set by the
thread that launches the steps, says which of these a copy has to follow: those before it may still write the
blocks that it reads, or read the blocks that it writes. No later step touches these until the copy's end has
been told, which is when `run` returns.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


class CopyStream(Protocol):
    """One order of copies, beside what the device computes."""

    def new_rows(self, num: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of the host for `num` rows, which copies on this stream reach without help of the CPU."""
        ...

    def mark(self) -> object:
        """A mark behind what is launched so far. From the thread that launches."""
        ...

    def run(self, copy: Callable[[], None], after: object) -> None:
        """Have `copy` enqueue its work behind the mark `after`, and return when it is done. From any thread.

        Without a mark it follows all that is launched by now.
        """
        ...


class CudaCopies:
    """A `CopyStream` of a CUDA device, of page-locked rows. `cuda` is torch.cuda, or answers as that."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._stream = cuda.Stream(device)

    def new_rows(self, num: int, nbytes: int) -> npt.NDArray[np.uint8]:
        rows: npt.NDArray[np.uint8] = torch.empty(
            (num, nbytes), dtype=torch.uint8, pin_memory=True
        ).numpy()
        return rows

    def mark(self) -> object:
        mark: object = self._cuda.current_stream(self._device).record_event()
        return mark

    def run(self, copy: Callable[[], None], after: object) -> None:
        done = self._cuda.Event(blocking=True)  # its thread sleeps meanwhile
        with self._cuda.stream(self._stream):
            if after is None:
                after = self._cuda.default_stream(self._device).record_event()
            self._stream.wait_event(after)
            copy()
            done.record(self._stream)
        done.synchronize()


class CudaMarks:
    """`worker.gaps.Marks` by a CUDA device's events. `cuda` is torch.cuda, or answers as that."""

    __slots__ = ("_cuda", "_device")

    def __init__(self, device: str, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def seconds(self, first: Any, second: Any) -> float | None:
        return first.elapsed_time(second) / 1000 if second.query() else None
