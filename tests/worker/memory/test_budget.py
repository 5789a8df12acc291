"""The split of a device's memory: one sum, and its refusals."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError
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
