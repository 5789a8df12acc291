"""The comparison of places for block tables: its reasons to skip, and its steps where there is no GPU."""

import numpy as np
import pytest
import torch

from bench.block_tables import Shape, Shared, Steps, compare, placements, reason_to_skip
from support.benches import run_bench

CPU = torch.device("cpu")
SHAPE = Shape(rows=32, context=256, layers=2)


def test_it_says_why_it_is_skipped() -> None:
    """D25: off a GB10 nothing is claimed."""
    assert "no CUDA device" in reason_to_skip(False, "", any_device=True)
    assert "NVIDIA H200 is no GB10" in reason_to_skip(True, "NVIDIA H200", any_device=False)
    assert reason_to_skip(True, "NVIDIA H200", any_device=True) == ""
    assert reason_to_skip(True, "NVIDIA GB10", any_device=False) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_the_script_ends_with_the_reason() -> None:
    """D25, part."""
    found, _ = run_bench("block_tables")
    assert "no CUDA device" in found["skipped"]
    assert "us" not in found


def test_every_placement_reads_what_was_written() -> None:
    """D25: also through memory that both sides reach, which on a CPU is any."""
    steps = Steps(SHAPE, CPU)
    known = placements(steps.first, CPU)
    view = np.zeros_like(steps.first)
    known["unified"] = Shared(view, torch.from_numpy(view), steps.first)
    expected = steps.first.copy()
    for _ in range(5):
        entries = steps.entries()
        rows, places, blocks = entries
        expected[rows, places] = blocks
        sums = {steps.run(each, entries)[1] for each in known.values()}
        assert len(sums) == 1
        for each in known.values():
            assert np.array_equal(each.table.numpy(), expected)


def test_a_placement_that_reads_an_old_table_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """D25, part: figures of different work are none."""
    monkeypatch.setattr("bench.block_tables.DeviceEntries.write", lambda *args: None)
    with pytest.raises(RuntimeError, match="placements read different tables"):
        compare(SHAPE, CPU, 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_placements_are_timed_on_a_device() -> None:
    """D25, part."""
    found, _ = run_bench("block_tables", "--any-device", "--steps", "5")
    assert set(found["us"]) == {"device_whole", "device_entries", "unified", "pinned"}
    assert min(each["step_us"] for each in found["us"].values()) > 0
