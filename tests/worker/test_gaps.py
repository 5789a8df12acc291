"""Gaps in a device's work, by marks that are known late, by CUDA's events, and by a clock."""

from itertools import count
from typing import Any

import numpy as np

from bench.doubles.random_model import random_model
from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, ForwardBatch, LogprobQuery, Row
from mallee.worker.gaps import HostGap, WorkGaps
from mallee.worker.memory.copies import CudaMarks


class Cuda:
    """Answers as torch.cuda. Its events come `late` seconds after they are recorded, in a stream's order."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0
        self.current = object()
        outer = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                self.at = 0.0

            def record(self, stream: object) -> None:
                assert stream is outer.current
                self.at = max(outer.now, outer.free_at)

            def query(self) -> bool:
                return self.at <= outer.now

            def elapsed_time(self, other: Any) -> float:
                assert self.query()
                assert other.query()
                return float(other.at - self.at) * 1000

        self.Event = Event

    def current_stream(self, device: str) -> object:
        assert device == "cuda:1"
        return self.current

    def work(self, gaps: WorkGaps, seconds: float) -> None:
        gaps.begin()
        self.free_at = max(self.now, self.free_at) + seconds
        gaps.end()


def test_a_gap_counts_once_the_device_has_come_to_its_end() -> None:
    """By CUDA's events: work behind other work leaves none, whatever the host does meanwhile."""
    cuda = Cuda()
    gaps = WorkGaps(CudaMarks("cuda:1", cuda=cuda))
    cuda.work(gaps, 5.0)
    cuda.now = 2.0
    cuda.work(gaps, 1.0)
    assert gaps.stats() == HostGap(0, 0.0), "the device is not there yet"
    cuda.now = 9.0
    assert gaps.stats() == HostGap(1, 0.0)
    cuda.work(gaps, 1.0)
    assert gaps.stats() == HostGap(2, 3.0)
    cuda.now = 20.0
    gaps.rest()
    cuda.work(gaps, 1.0)
    assert gaps.stats() == HostGap(2, 3.0), "there was no work"


def test_a_cpu_has_gaps_by_its_clock() -> None:
    """A pass, a draw and a report are pieces; a piece that fails is none."""
    ticks = count()
    forward = random_model().forward(clock=lambda: float(next(ticks)))
    row = Row(np.array([1, 2, 3], np.uint32), 0, np.array([0], np.int32), 1)
    (logits,) = forward.forward(ForwardBatch((), [row]))
    forward.sample([Draw(logits, Sampling(), 0, 3)])
    assert forward.gaps.stats() == HostGap(1, 1.0)
    forward.logprobs([LogprobQuery(logits, 1, 2)])
    assert forward.gaps.stats() == HostGap(2, 2.0)
    forward.gaps.rest()
    forward.forward(ForwardBatch((), [row]))
    assert forward.gaps.stats() == HostGap(2, 2.0)
