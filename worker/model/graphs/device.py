"""Recording a device's work and replaying it: CUDA's graphs, and the interface that decode steps know."""

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

_WARM_UPS: Final = 2
_TRIALS: Final = 5


class Graph(Protocol):
    """Recorded work. Keeps the memory that the work takes beside its inputs."""

    def replay(self) -> None:
        """Enqueue the work again, over whatever its inputs hold now."""
        ...


class GraphDevice(Protocol):
    """Records work. One thread at a time; others may use the device meanwhile."""

    def capture(self, work: Callable[[], None], beside: Graph | None) -> Graph:
        """Record `work`, after runs that warm it up. It has its memory in common with `beside`.

        So the two never run at the same time. `work` must neither wait for the device nor launch by what its
        inputs hold. Raises RuntimeError if it does, or if there is no memory.
        """
        ...

    def taken(self) -> int:
        """Bytes of the device's memory that the process holds, once unused ones were given back."""
        ...

    def seconds(self, work: Callable[[], object]) -> float:
        """The time of `work` until the device is done: the best of several."""
        ...


class CudaGraphs:
    """The graphs of a CUDA device. `cuda` answers as torch.cuda does, and is that by default."""

    __slots__ = ("_clock", "_cuda", "_device", "_stream")

    def __init__(
        self, device: str, *, clock: Callable[[], float] = time.perf_counter, cuda: Any = torch.cuda
    ) -> None:
        self._device = device
        self._clock = clock
        self._cuda = cuda
        self._stream = self._cuda.Stream(device)  # graphs that share memory share this, too

    def capture(self, work: Callable[[], None], beside: Graph | None) -> Graph:
        cuda = self._cuda
        current = cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with cuda.stream(self._stream):
            for _ in range(_WARM_UPS):  # libraries load kernels and take workspaces at first use
                work()
        current.wait_stream(self._stream)
        graph = cuda.CUDAGraph()
        pool = None if beside is None else beside.pool()  # type: ignore[attr-defined]
        # Back to this stream even if the recording fails: then torch's own context doesn't see to it. Other
        # threads may serve meanwhile, so what they do to the device must not count as ours.
        with (
            cuda.stream(current),
            cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        found: Graph = graph
        return found

    def taken(self) -> int:
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        # The device's own figure moves with other processes. This one lacks what CUDA itself has of a graph.
        return int(self._cuda.memory_reserved(self._device))

    def seconds(self, work: Callable[[], object]) -> float:
        times = []
        for number in range(_WARM_UPS + _TRIALS):
            self._cuda.synchronize(self._device)
            begin = self._clock()
            work()
            self._cuda.synchronize(self._device)
            if number >= _WARM_UPS:
                times.append(self._clock() - begin)
        return min(times)
