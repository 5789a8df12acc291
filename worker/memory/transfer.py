"""Numbers on their way between the host and a device, which computes beside it.

To and from a GPU they go through pinned memory, by copies that only take their place on the device's stream:
neither waits for what was enqueued before. On any other device they are there at once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int64s = npt.NDArray[np.int64]


def staged(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`values` on the host, where a copy to `device` does not wait for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def sent(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`values` on `device`."""
    return staged(values, device).to(device, non_blocking=device.type == "cuda")


def sent_together(parts: Sequence[Int64s], device: torch.device) -> list[torch.Tensor]:
    """Each of `parts`, which have one dimension, on `device`: to a GPU in one copy."""
    if device.type != "cuda":
        return [sent(part, device) for part in parts]
    sizes = [len(part) for part in parts]
    return list(torch.split(sent(np.concatenate(parts), device), sizes))


class Fetched:
    """A copy of `tensor` for the host, which is begun here."""

    __slots__ = ("_done", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> torch.Tensor:
        """The copy. Waits for what was enqueued before it, and for nothing that came later."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor.cpu()
