"""Numbers on their way between the host and a device, which computes beside it.

To and from a GPU they go through pinned memory, by copies that only take their place on the device's stream:
neither waits for what was enqueued before. On any other device they are there at once.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Int64s = npt.NDArray[np.int64]

_ALIGNMENT: Final = 16


def staged(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`values` on the host, where a copy to `device` does not wait for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def sent(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`values` on `device`."""
    return sent_on(staged(values, device), device)


def sent_on(staged: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of `staged` on `device`."""
    return staged.to(device, non_blocking=device.type == "cuda")


def sent_together(parts: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Each of `parts` on `device`: to a GPU in one copy, each at a multiple of 16 bytes."""
    if device.type == "cpu":
        return [sent(part, device) for part in parts]
    whole, spans = packed(parts, is_pinned=device.type == "cuda")
    there = whole.to(device, non_blocking=True)
    return [
        there[span].view(torch.from_numpy(part).dtype).view(part.shape)
        for span, part in zip(spans, parts, strict=True)
    ]


def packed(
    parts: Sequence[npt.NDArray[Any]], *, is_pinned: bool = False
) -> tuple[torch.Tensor, list[slice]]:
    """The bytes of all `parts` in one tensor, and the place of each in it."""
    sizes = [-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts]
    begins = [sum(sizes[:i]) for i in range(len(parts))]
    spans = [slice(at, at + part.nbytes) for at, part in zip(begins, parts, strict=True)]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=is_pinned)
    raw = whole.numpy()
    for span, part in zip(spans, parts, strict=True):
        raw[span] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return whole, spans


class Mark:
    """A place in what was enqueued on a device's stream: after all that was, before what comes."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Until the device has come there: at once on any but a GPU."""
        if self._event is not None:
            self._event.synchronize()


class Fetched:
    """A copy of `tensor` for the host, which is begun here."""

    __slots__ = ("_done", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
        self._done = Mark(tensor.device)

    def wait(self) -> torch.Tensor:
        """The copy. Waits for what was enqueued before it, and for nothing that came later."""
        self._done.wait()
        return self._tensor.cpu()
