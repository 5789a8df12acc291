"""The split of a device's memory: one sum, and its refusals; the look at a device."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError, DeviceMemoryExhausted
from mallee.worker.memory.budget import (
    GIB,
    MIB,
    Budget,
    DeviceMemory,
    Room,
    Work,
    check_context,
    out_of_memory,
)
from mallee.worker.memory.device import Identity, host_memory, identify, probe
from mallee.worker.memory.errors import memory_errors, start_errors
from mallee.worker.model.kv_memory import TorchKV
from mallee.worker.transfer.movers import Carrier
from mallee.worker.transfer.values import DEVICE, HOST, Place, Transfer

H200 = DeviceMemory("NVIDIA H200", 140 * GIB, 139 * GIB)
GB10 = DeviceMemory("NVIDIA GB10", 120 * GIB, 110 * GIB, is_unified=True)
LLAMA_8B = Work(
    weights=15 * GIB,
    token_nbytes=200 << 10,
    row_nbytes=2 * 128_256,
    block_nbytes=2 * MIB,
    max_rows=256,
    max_step_tokens=8192,
    kept_rows=256,
    staged_blocks=32,
    draw_nbytes=256 * MIB,
)


def room(device: DeviceMemory, **options: float) -> Room:
    return Room(lambda name: device, **{"max_rows": 256, **options})  # type: ignore[arg-type]


def parts(budget: Budget) -> dict[str, int]:
    return dict(budget.lines())


def test_the_lines_are_the_whole_device_and_kv_is_the_rest() -> None:
    """I23, part: an H200 with an 8B model."""
    budget = room(H200).split(H200, LLAMA_8B)
    found = parts(budget)
    assert sum(found.values()) == H200.total
    assert found["in use before"] == GIB
    assert found["reserve"] == pytest.approx(13 * GIB, abs=MIB), "a tenth, of which 1 GiB is used"
    assert found["weights"] == 15 * GIB
    assert found["logits"] == (2 * 256 + 256) * 2 * 128_256 + 256 * MIB
    assert found["staging"] == 64 * MIB
    assert 107 * GIB < budget.kv < 109 * GIB
    text = str(budget)
    assert text.startswith("140.00 GiB of memory of NVIDIA H200, of which 0.9 may be used: weights")
    assert f"KV {budget.kv / GIB:.2f} GiB" in text
    assert "host tier" not in text


def test_without_graphs_their_memory_is_for_kv() -> None:
    """I13, part: `engine.cuda_graphs: off`."""
    on, off = (room(H200, **own).split(H200, LLAMA_8B) for own in ({}, {"graphs": 0}))
    assert (on.graphs, off.graphs) == (GIB // 2, 0)
    assert off.kv == on.kv + GIB // 2
    assert "CUDA graphs 0.50 GiB" in str(on)
    assert "CUDA graphs" not in str(off)


@given(
    total=st.integers(20, 200),
    used=st.integers(0, 60),
    share=st.floats(0.3, 1.0),
    host=st.integers(0, 40),
    is_unified=st.booleans(),
)
def test_no_byte_is_counted_twice(
    total: int, used: int, share: float, host: int, is_unified: bool
) -> None:
    """X29, part, I23, part: whatever the device, the lines sum to it; else there is a clear refusal."""
    device = DeviceMemory("d", total * GIB, max(0, total - used) * GIB, is_unified)
    made = room(device, share=share, host_tier=host * GIB)
    try:
        budget = made.split(device, LLAMA_8B)
    except ConfigError as error:
        text = str(error)
        assert all(part in text for part in ("a block of KV, 2097152 bytes", "engine.kv_dtype"))
        return
    found = parts(budget)
    assert sum(found.values()) == device.total
    assert made.split(device, LLAMA_8B) == replace(made, host_tier=0).split(device, LLAMA_8B)
    assert all(nbytes >= 0 for nbytes in found.values())
    assert device.total - found["reserve"] - found["in use before"] <= share * device.total + 1


def test_a_host_tier_of_a_unified_device_is_kv() -> None:
    """X29, part: on a GB10 it adds to KV that is given, and KV that is sized has those bytes anyway."""
    plain, tiered = room(GB10), room(GB10, host_tier=20 * GIB)
    assert plain.split(GB10, LLAMA_8B).share == 0.8
    assert plain.split(GB10, LLAMA_8B) == tiered.split(GB10, LLAMA_8B)
    assert tiered.given(GB10, 30 * GIB) == 50 * GIB
    assert room(H200, host_tier=20 * GIB).given(H200, 30 * GIB) == 30 * GIB


def test_workers_that_share_a_device_take_parts_of_it() -> None:
    whole = room(H200).split(H200, LLAMA_8B)
    half = room(H200, part=0.5).split(H200, LLAMA_8B)
    assert half.share == 0.45
    assert half.reserve - whole.reserve == pytest.approx(0.45 * H200.total, abs=MIB)
    second = H200._replace(free=H200.free - int(0.45 * H200.total))
    again = room(second, part=0.5).split(second, LLAMA_8B)
    assert again.kv == pytest.approx(half.kv, rel=0.001), "the first one's memory is not its own"


def test_a_device_that_others_fill_leaves_what_is_free() -> None:
    busy = H200._replace(free=60 * GIB)
    budget = room(busy).split(busy, LLAMA_8B)
    assert parts(budget)["in use before"] == 80 * GIB
    assert budget.reserve == int(0.02 * H200.total), "for it may need a little more"


def test_a_context_that_does_not_fit_is_refused_with_numbers_and_remedies() -> None:
    small = DeviceMemory("RTX", 24 * GIB, 24 * GIB)
    budget = room(small).split(small, LLAMA_8B)
    check_context(budget, 8192, GIB)
    with pytest.raises(ConfigError) as caught:
        check_context(budget, 131_072, 16 * GIB)
    text = str(caught.value)
    assert "a sequence of engine.max_model_len=131072, 16.00 GiB of KV" in text
    assert f"KV {budget.kv / GIB:.2f} GiB" in text
    assert "engine.device_share" in text


def test_kv_that_is_given_must_be_free_beside_the_weights() -> None:
    """X29, part: together with a host tier in the same memory."""
    assert room(H200, host_tier=50 * GIB).given(H200, 100 * GIB) == 100 * GIB
    with pytest.raises(ConfigError, match=r"KV of 140.00 GiB .* has 139.00 GiB of 140.00 GiB free"):
        room(H200).given(H200, 140 * GIB)
    with pytest.raises(ConfigError, match=r"with 50.00 GiB of engine.host_gib in the same memory"):
        room(GB10, host_tier=50 * GIB).given(GB10, 100 * GIB)


def test_an_allocation_that_fails_at_the_start_names_the_budget() -> None:
    budget = room(H200).split(H200, LLAMA_8B)
    text = str(out_of_memory("taking the memory of KV", budget))
    assert text.startswith("the device ran out of memory while taking the memory of KV (140.00 GiB")
    assert "lower engine.max_model_len" in str(out_of_memory("loading the weights", None))


# The look at a device, with fakes for CUDA and for the host, and allocations that it refuses


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
    devices = Path("/sys/bus/pci/devices")
    if devices.is_dir() and any(devices.iterdir()):  # a container may hide it
        assert (devices / place.pci / "numa_node").exists(), place


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_that_is_full_sheds_and_goes_on() -> None:
    """I26, part."""
    with pytest.raises(DeviceMemoryExhausted, match="out of memory"), memory_errors("cuda"):
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

    with pytest.raises(DeviceMemoryExhausted) as caught, memory_errors("cuda"):
        step()
    assert caught.value.fields == {"reason": "CUDA out of memory. Tried to allocate 2.00 GiB"}
    assert kept[0]() is None
    with (
        pytest.raises(ConfigError, match="while loading the weights; lower"),
        start_errors("loading the weights"),
    ):
        refuse()


def test_other_errors_pass() -> None:
    for guard in (memory_errors("cpu"), start_errors("loading")):
        with pytest.raises(ValueError, match="mine"), guard:
            raise ValueError("mine")


def test_a_copy_that_the_device_has_no_room_for_is_a_move_that_failed() -> None:
    """I26, part: the thread that moves blocks goes on."""

    class Full:
        """A stream of a device without room for what is gathered."""

        def new_rows(self, num: int, nbytes: int) -> Any:
            return np.zeros((num, nbytes), np.uint8)

        def mark(self) -> object:
            return None

        def run(self, copy: Callable[[], None], after: object) -> None:
            refuse()

    memory = TorchKV(torch.zeros(2, 8, 2, 1, 4), block_size=4, copies=Full())
    carrier = Carrier(memory, memory.new_rows(2), None, lambda: 0.0)
    moved = carrier.carry_out(Transfer(1, Place(DEVICE, (0,)), Place(HOST, (1,))))
    assert moved.num_blocks == 0
    assert isinstance(moved.error, DeviceMemoryExhausted)
