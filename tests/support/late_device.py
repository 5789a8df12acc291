"""A device that does what was enqueued only when the host waits for it, and on several streams; on a CPU.

It stands behind FlashInfer's emulation and Mallee's copies (`worker/memory/transfer.py`), and refuses what
CUDA would take and get wrong, or would wait for: pinned memory that is overwritten before its copy has ended,
copies from pageable memory, and launches on a stream that knows nothing of the copy that they need.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch

from support import flashinfer_emulator
from support.recorded_graphs import RecordedGraph, RecordedGraphs

Place = Literal["pinned", "device"]
"""Of a tensor; one without a place lies in pageable memory of the host."""
COPYING = ("mallee.worker.model.attention.flashinfer", "mallee.worker.model.graphs.tables")


class Ticket(NamedTuple):
    """A copy that was enqueued."""

    stream: int
    number: int


class LateDevice:
    """Counts what was enqueued, and what the host and each stream know to be done."""

    def __init__(self) -> None:
        self.stream = 0
        self.num_waits = 0
        self._enqueued = 0
        self._done = 0
        self._seen: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand behind the emulation, and behind the copies and marks of attention."""
        device = self

        class Mark:
            """As that of `transfer`, on this device."""

            def __init__(self, _: torch.device) -> None:
                self._number = device._enqueued

            def wait(self) -> None:
                device.num_waits += 1
                device._done = max(device._done, self._number)

        monkeypatch.setattr(flashinfer_emulator, "DEVICE", self)
        for module in COPYING:
            monkeypatch.setattr(f"{module}.Mark", Mark)
        monkeypatch.setattr(f"{COPYING[0]}.staged", pinned)
        monkeypatch.setattr(f"{COPYING[1]}.sent_on", on_device)

    def enqueue(self) -> Ticket:
        self._enqueued += 1
        return Ticket(self.stream, self._enqueued)

    def is_done(self, ticket: Ticket) -> bool:
        """Whether the host knows that it is."""
        return ticket.number <= self._done

    def is_before(self, ticket: Ticket) -> bool:
        """Whether a launch on the current stream comes after it."""
        seen = self._seen[self.stream].get(ticket.stream, 0)
        return ticket.stream == self.stream or self.is_done(ticket) or ticket.number <= seen

    @contextmanager
    def on_stream(self, stream: int, *, waits: bool = True) -> Iterator[None]:
        """Another stream, which waits for the one before, as that does for it in the end."""
        before, self.stream = self.stream, stream
        if waits:
            self._seen[stream][before] = self._enqueued
        try:
            yield
        finally:
            self.stream = before
            self._seen[before][stream] = self._enqueued


class LateGraphs(RecordedGraphs):
    """Records on a stream of its own, as CUDA does."""

    def __init__(self, device: LateDevice, **options: Any) -> None:
        super().__init__(**options)
        self._late = device

    def capture(self, work: Any, beside: Any) -> RecordedGraph:
        with self._late.on_stream(1):
            return super().capture(work, beside)


def placed(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    tensor.place = place  # type: ignore[attr-defined]
    return tensor


def pinned(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """As `transfer.staged`."""
    return placed(torch.from_numpy(np.ascontiguousarray(values)), "pinned")


def on_device(staged: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As `transfer.sent_on`."""
    assert getattr(staged, "place", None) == "pinned", "a copy from pageable memory"
    return placed(staged.clone(), "device")
