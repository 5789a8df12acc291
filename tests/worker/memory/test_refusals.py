"""Allocations that a device refuses."""

import weakref
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from mallee.protocol.errors import ConfigError, DeviceMemoryExhausted
from mallee.worker.kv.tiers.moves import Copier, Park
from mallee.worker.memory.refusals import shed, told
from mallee.worker.model import kv_memory
from mallee.worker.model.kv_memory import TorchKV

CUDA = torch.device("cuda")


def refuse(*args: object) -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB"
    )


def test_torchs_error_becomes_ours_with_what_it_asked_for() -> None:
    """I26, part: and it keeps no tensor of the step alive."""
    kept: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        hidden = torch.zeros(4)
        kept.append(weakref.ref(hidden))
        refuse(hidden)

    with pytest.raises(DeviceMemoryExhausted) as caught, shed("cuda"):
        step()
    assert caught.value.fields == {"reason": "CUDA out of memory. Tried to allocate 2.00 GiB"}
    assert kept[0]() is None
    with (
        pytest.raises(ConfigError, match="while loading the weights; lower"),
        told("loading the weights"),
    ):
        refuse()


def test_other_errors_pass() -> None:
    for guard in (shed("cpu"), told("loading")):
        with pytest.raises(ValueError, match="mine"), guard:
            raise ValueError("mine")


def test_a_copy_that_the_device_has_no_room_for_is_a_move_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I26, part: the thread that moves blocks goes on."""
    memory = TorchKV(torch.zeros(2, 8, 2, 1, 4), block_size=4)
    copy = kv_memory._copy

    def on_device(target: torch.Tensor, source: torch.Tensor) -> None:
        across = SimpleNamespace(device=target.device, copy_=refuse)
        copy(cast(Any, across), cast(Any, SimpleNamespace(device=CUDA)))

    monkeypatch.setattr(kv_memory, "_copy", on_device)
    arena = np.zeros((2, memory.block_nbytes), np.uint8)
    copier = Copier(memory, arena, None, lambda: 0.0)
    moved = copier.carry_out(Park(1, (7,), (0,), (1,)))
    assert moved.num_blocks == 0
    assert isinstance(moved.error, DeviceMemoryExhausted)
