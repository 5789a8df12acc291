"""Recording by CUDA: the order in which torch.cuda is asked, by a stand-in; and the real one on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from bench.doubles.random_model import random_model
from mallee.worker.forward import ForwardBatch, Row
from mallee.worker.model.attention.flashinfer import FlashInferUnavailable, find_flashinfer
from mallee.worker.model.graphs.decode import GraphOptions
from mallee.worker.model.graphs.device import CudaGraphs
from mallee.worker.model.runner import TorchForward

MIB = 1 << 20


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class Recorded:
    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1

    def pool(self) -> str:
        return "its pool"


class Cuda:
    """Answers as torch.cuda, and notes the order. `fails`: captures end with an error, as torch ends them."""

    CUDAGraph = Recorded

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.current = Stream("default", self.log)
        self.fails = False

    def Stream(self, device: str) -> Stream:
        return Stream("side", self.log)

    def current_stream(self, device: str) -> Stream:
        return self.current

    def synchronize(self, device: str) -> None:
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.log.append("empty")

    def memory_reserved(self, device: str) -> int:
        return 20 * MIB

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: Recorded, *, pool: Any, stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        self.log.append(f"capture on {stream.name}, {pool}, {capture_error_mode}")
        self.current = stream
        yield
        if self.fails:  # before it leaves its stream, as torch's context does
            raise RuntimeError("operation not permitted when stream is capturing")
        self.current = Stream("default", self.log)


def test_work_is_warmed_up_and_recorded_on_a_stream_of_its_own() -> None:
    """I13, part: graphs share the memory of the one that they are told, and threads beside are let be."""
    cuda = Cuda()
    device = CudaGraphs("cuda", cuda=cuda)

    def work() -> None:
        cuda.log.append(f"work on {cuda.current.name}")

    first = device.capture(work, None)
    expected = [
        "side waits for default",
        *["work on side"] * 2,
        "default waits for side",
        "capture on side, None, thread_local",
        "work on side",
    ]
    assert cuda.log == expected
    device.capture(work, first)
    assert cuda.log[-2] == "capture on side, its pool, thread_local"
    assert cuda.log[: len(expected)] == expected
    first.replay()
    assert isinstance(first, Recorded)
    assert first.num_replays == 1
    cuda.fails, before = True, cuda.current
    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(work, first)
    assert cuda.current is before, "later steps would run beside the copies that they wait for"


def test_memory_and_time_are_taken_when_the_device_is_done() -> None:
    """I13, part: memory is what torch holds after it gave back the rest, not the device's figure."""
    cuda = Cuda()
    times = iter([9.0, 8.0, 4.0, 3.0, 5.0, 6.0, 7.0])

    def work() -> None:
        cuda.now += next(times)

    device = CudaGraphs("cuda", clock=lambda: cuda.now, cuda=cuda)
    assert device.taken() == 20 * MIB
    assert cuda.log == ["synchronize", "empty"]
    assert device.seconds(work) == 3.0
    assert cuda.log[2:] == ["synchronize"] * 14


# On a GPU


@pytest.fixture(scope="module")
def on_gpu() -> tuple[TorchForward, TorchForward]:
    """The same model with graphs and without."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    try:
        find_flashinfer("cuda")
    except FlashInferUnavailable as e:
        pytest.skip(str(e))
    model = random_model("gemma3_text", 3, head_dim=64, hidden_size=256, intermediate_size=512)
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "device": "cuda",
        "num_blocks": 1200,
        "block_size": 16,
    }
    graphs = GraphOptions(64, 512 * MIB)
    return model.forward(**options, graphs=graphs), model.forward(**options)


@pytest.mark.gpu
def test_on_a_gpu_replays_give_the_logits_of_eager_steps_and_capture_nothing(
    on_gpu: tuple[TorchForward, TorchForward],
) -> None:
    """I13, part, F3, part: steps of 1 to 65 rows, of which all but the last size are replays.

    Graphs take no more memory than they may.
    """
    graphed, eager = on_gpu
    assert 0 < graphed.memory_stats().graphs <= 512 * MIB
    before = graphed.stats().graphs
    assert before.sizes, "no graph won"
    tables = [np.array([2 * i, 2 * i + 1], np.int32) for i in range(65)]
    prompts = [Row(np.arange(17, dtype=np.uint32), 0, table, 1) for table in tables]
    for forward in on_gpu:
        forward.forward(ForwardBatch((), prompts))
    for step, num in enumerate([1, 2, 3, 7, 8, 33, 64, 65, 5]):
        tokens = [np.array([(step + i) % 128], np.uint32) for i in range(num)]
        rows = [
            Row(token, 17 + step, table, 1) for token, table in zip(tokens, tables, strict=False)
        ]
        found = [torch.stack([*each.forward(ForwardBatch((), rows))]).float() for each in on_gpu]
        error = (found[0] - found[1]).norm() / found[1].norm()
        assert float(error) < 4e-2, num
    after = graphed.stats().graphs
    assert after.num_captures == before.num_captures
    assert after.num_replays > before.num_replays
    assert dict(after.num_eager)["rows"] == 1
    assert eager.stats().graphs.sizes == ()


@pytest.mark.gpu
def test_on_a_gpu_what_cannot_be_recorded_is_refused_and_the_device_goes_on() -> None:
    """I13, part: work that waits for the device; CUDA tells, and later work is right."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    device = CudaGraphs("cuda")
    x = torch.ones(8, device="cuda")
    with pytest.raises(RuntimeError):
        device.capture(lambda: float(x.sum()), None)  # type: ignore[arg-type,return-value]
    graph = device.capture(lambda: x.add_(1), None)  # type: ignore[arg-type,return-value]
    x.zero_()
    graph.replay()
    assert x.tolist() == [1.0] * 8
