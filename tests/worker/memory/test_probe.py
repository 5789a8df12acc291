"""The look at a device, with fakes for CUDA and for the host, and allocations that it refuses."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from mallee.protocol.errors import ConfigError, DeviceMemoryExhausted
from mallee.worker.kv.tiers.moves import Copier, Park
from mallee.worker.memory.budget import GIB, DeviceMemory
from mallee.worker.memory.device import Identity, host_memory, identify, probe
from mallee.worker.memory.refusals import shed, told
from mallee.worker.model import kv_memory
from mallee.worker.model.kv_memory import TorchKV


class FakeCuda:
    """Answers as torch.cuda does, for one device."""

    def __init__(self, name: str, free: int, total: int, **properties: Any) -> None:
        self._answer = free, total
        self._properties = SimpleNamespace(name=name, **properties)
        self.asked: list[str] = []

    def mem_get_info(self, device: str) -> tuple[int, int]:
        self.asked.append(device)
        return self._answer

    def get_device_properties(self, device: str) -> Any:
        return self._properties


def meminfo(folder: Path, total: int, available: int) -> Path:
    path = folder / "meminfo"
    path.write_text(
        f"MemTotal:       {total >> 10} kB\nMemFree:         1000 kB\n"
        f"MemAvailable:   {available >> 10} kB\nHugePages_Total:       0\n"
    )
    return path


def test_a_device_with_memory_of_its_own_tells_it(tmp_path: Path) -> None:
    """The host's has nothing to do with it."""
    cuda = FakeCuda("NVIDIA H200", 139 * GIB, 140 * GIB, is_integrated=0)
    found = probe("cuda:0", cuda=cuda, meminfo=tmp_path / "absent")
    assert found == DeviceMemory("NVIDIA H200", 140 * GIB, 139 * GIB)
    assert cuda.asked == ["cuda:0"]


def test_unified_memory_is_what_the_host_has_available(tmp_path: Path) -> None:
    """X29, part: CUDA counts the page cache of a GB10 as used, and NVML is never asked."""
    cuda = FakeCuda("NVIDIA GB10", 20 * GIB, 119 * GIB, is_integrated=1)
    path = meminfo(tmp_path, 120 * GIB, 100 * GIB)
    assert probe("cuda", cuda=cuda, meminfo=path) == DeviceMemory(
        "NVIDIA GB10", 119 * GIB, 100 * GIB, is_unified=True
    )


def test_a_host_that_does_not_tell_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    cuda = FakeCuda("NVIDIA GB10", 1, 2, is_integrated=1)
    with pytest.raises(ConfigError, match=r"can't be read .*give engine.kv_gib"):
        probe("cuda", cuda=cuda, meminfo=tmp_path / "absent")
    path = tmp_path / "old"
    path.write_text("MemTotal: 5 kB\n")
    with pytest.raises(ConfigError, match="has no MemAvailable; give"):
        probe("cuda", cuda=cuda, meminfo=path)


def test_this_machine_tells_its_memory() -> None:
    found = host_memory()
    assert 0 < found["MemAvailable"] <= found["MemTotal"]


def test_a_device_tells_its_place_on_the_bus() -> None:
    """As Linux writes it; an older torch does not tell."""
    place = {"pci_domain_id": 0, "pci_bus_id": 0x9B, "pci_device_id": 0}
    cuda = FakeCuda("NVIDIA H200", 1, 2, **place)
    assert identify("cuda", cuda=cuda) == Identity("NVIDIA H200", "0000:9b:00.0")
    assert identify("cuda", cuda=FakeCuda("old", 1, 2)) == Identity("old", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_tells_memory_name_and_place() -> None:
    found, place = probe("cuda"), identify("cuda")
    assert 0 < found.free <= found.total
    assert found.name == place.name
    assert (Path("/sys/bus/pci/devices") / place.pci / "numa_node").exists(), place


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_that_is_full_sheds_and_goes_on() -> None:
    """I26, part."""
    with pytest.raises(DeviceMemoryExhausted, match="out of memory"), shed("cuda"):
        torch.empty(2 * probe("cuda").total, dtype=torch.uint8, device="cuda")
    assert int(torch.ones(8, device="cuda").sum()) == 8


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
        copy(cast(Any, across), cast(Any, SimpleNamespace(device=torch.device("cuda"))))

    monkeypatch.setattr(kv_memory, "_copy", on_device)
    arena = np.zeros((2, memory.block_nbytes), np.uint8)
    copier = Copier(memory, arena, None, lambda: 0.0)
    moved = copier.carry_out(Park(1, (7,), (0,), (1,)))
    assert moved.num_blocks == 0
    assert isinstance(moved.error, DeviceMemoryExhausted)
