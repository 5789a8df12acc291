"""Allocations that a device refuses, as errors of ours: at the start, and in the middle of work."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames

import torch

from mallee.protocol.errors import DeviceMemoryExhausted
from mallee.worker.memory.budget import Budget, out_of_memory


@contextmanager
def start_errors(doing: str, budget: Budget | None = None) -> Iterator[None]:
    """Raises ConfigError, with the budget, in place of torch's error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(doing, budget) from error


@contextmanager
def memory_errors(device: str | torch.device) -> Iterator[None]:
    """Raises DeviceMemoryExhausted in place of torch's error, once what torch keeps is given back."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        clear_frames(error.__traceback__)  # they hold the step's tensors
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
        reason = str(error).partition(" GPU ")[0].rstrip(". ")
        raise DeviceMemoryExhausted(reason or "no reason told") from error
