"""Copies of KV on a stream of their own: gathered bytes, and the order among what a device computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.model import GroupSpec
from mallee.worker.kv.sides.group import row_spans
from mallee.worker.memory.copies import CudaCopies
from mallee.worker.model.cpu import copies
from mallee.worker.model.cpu.copies import copy_pieces
from mallee.worker.model.kv_memory import GroupedKV, TorchKV

BLOCK_SIZE, NUM_BLOCKS = 4, 9


class AtOnce:
    """A `CopyStream` of a device that is the host; counts what is enqueued."""

    def __init__(self) -> None:
        self.num_runs = 0

    def new_rows(self, num: int, nbytes: int) -> Any:
        return np.zeros((num, nbytes), np.uint8)

    def mark(self) -> object:
        return self.num_runs

    def run(self, copy: Callable[[], None], after: object) -> None:
        self.num_runs += 1
        copy()


def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Every byte another one than its neighbours."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = torch.arange(nbytes, dtype=torch.int64).mul_(37).add_(11).remainder_(251)
    return raw.to(torch.uint8).view(dtype).view(*shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@given(blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True))
def test_gathered_blocks_are_those_that_are_copied_one_by_one(
    dtype: torch.dtype, blocks: list[int]
) -> None:
    """S8, part: in whatever order, of values of any width; and they come back to the same place."""
    shape = (3, NUM_BLOCKS * BLOCK_SIZE, 2, 5)  # no whole number of words in FP8
    plain = TorchKV(filled(*shape, dtype=dtype), BLOCK_SIZE)
    stream = AtOnce()
    beside = TorchKV(filled(*shape, dtype=dtype), BLOCK_SIZE, stream)
    expected, found = plain.new_rows(len(blocks)), beside.new_rows(len(blocks))
    plain.read(blocks, expected)
    beside.read(blocks, found, beside.mark())
    assert (found == expected).all()
    assert stream.num_runs == 1
    beside.write(blocks[::-1], found)
    plain.write(blocks[::-1], expected)
    every = range(NUM_BLOCKS)
    after, there = plain.new_rows(NUM_BLOCKS), beside.new_rows(NUM_BLOCKS)
    plain.read(every, after)
    beside.read(every, there)
    assert (there == after).all()


@pytest.mark.parametrize("num_values", [8, 16, 24, 5])  # pieces of 32, 64 and 96 bytes; of 20
def test_copies_past_the_caches_are_those_through_them(
    num_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S8, part: blocks in any order, to a slice of a memory and back; unaligned ones go the other way."""
    shape = (3, NUM_BLOCKS * BLOCK_SIZE, num_values)
    plain = TorchKV(filled(*shape, dtype=torch.uint8), BLOCK_SIZE)
    expected = plain.new_rows(NUM_BLOCKS)[2:7]
    plain.read((8, 3, 4, 5, 0), expected)
    sizes: list[int] = []

    def copy(addresses: Any, nbytes: int) -> None:
        sizes.append(nbytes)
        copy_pieces(addresses, nbytes)

    monkeypatch.setattr(copies, "UNCACHED_NBYTES", 0)
    monkeypatch.setattr(copies, "copy_pieces", copy)
    past = TorchKV(filled(*shape, dtype=torch.uint8), BLOCK_SIZE)
    found = past.new_rows(NUM_BLOCKS)[2:7]
    past.read((8, 3, 4, 5, 0), found)
    assert (found == expected).all()
    there = TorchKV(torch.zeros(shape, dtype=torch.uint8), BLOCK_SIZE)
    there.write((1, 6, 2, 3, 8), found)
    again = there.new_rows(5)
    there.read((1, 6, 2, 3, 8), again)
    assert (again == expected).all()
    assert sizes == ([] if num_values == 5 else [4 * num_values] * 3)


def test_rows_of_window_blocks_are_copied_on_the_stream_too() -> None:
    """S8, part: several rows a block, the last one filled up with zeros."""
    groups = (
        GroupSpec(kind="full", layers=(0, 1), nbytes=40),
        GroupSpec(kind="window", layers=(2, 3, 4), nbytes=60, window=6),
    )
    spans = row_spans(groups, NUM_BLOCKS, BLOCK_SIZE)
    memories = [
        filled(layers, NUM_BLOCKS * BLOCK_SIZE, 2, 5, dtype=torch.bfloat16) for layers in (2, 3)
    ]
    plain = GroupedKV(memories, BLOCK_SIZE, spans)
    beside = GroupedKV([memory.clone() for memory in memories], BLOCK_SIZE, spans, AtOnce())
    rows = [3, *spans[0].rows(2)]
    expected, found = plain.new_rows(len(rows)), beside.new_rows(len(rows))
    plain.read(rows, expected)
    beside.read(rows, found)
    assert (found == expected).all()


class FakeCuda:
    """torch.cuda as far as copies need it: notes what waits for what, and when the host does."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.inside = ""
        self.num_events = 0

    def Stream(self, device: Any) -> "FakeStream":
        return FakeStream(self, "copies")

    def Event(self, *, blocking: bool) -> "FakeEvent":
        assert blocking
        return FakeEvent(self, "end")

    def current_stream(self, device: Any) -> "FakeStream":
        return FakeStream(self, "steps")

    default_stream = current_stream

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        self.inside = stream.name
        yield
        self.inside = ""


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.name = name
        self._cuda = cuda

    def record_event(self) -> "FakeEvent":
        self._cuda.num_events += 1
        return FakeEvent(self._cuda, f"{self.name} {self._cuda.num_events}")

    def wait_event(self, event: "FakeEvent") -> None:
        self._cuda.log.append(f"{self.name} wait for {event.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.name = name
        self._cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self._cuda.log.append(f"{stream.name} record {self.name}")

    def synchronize(self) -> None:
        self._cuda.log.append(f"the host waits for {self.name}")


def test_a_copy_waits_for_what_was_launched_before_its_mark_and_for_nothing_later() -> None:
    cuda = FakeCuda()
    copies = CudaCopies(torch.device("cpu"), cuda)

    def copy() -> None:
        cuda.log.append(f"{cuda.inside} copy")

    mark = copies.mark()
    copies.mark()  # of a later step
    copies.run(copy, mark)
    copies.run(copy, None)
    ends = ["copies copy", "copies record end", "the host waits for end"]
    assert cuda.log == ["copies wait for steps 1", *ends, "copies wait for steps 3", *ends]
