"""Large pages for weights."""

from pathlib import Path

import pytest
import torch

from mallee.worker.model.linear.pages import PAGE_NBYTES, take_large_pages


def large_pages_kb(address: int) -> int:
    """Of the mapping with `address`, what lies in large pages."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            first, end = (int(part, 16) for part in name.split("-"))
            is_inside = first <= address < end
        elif is_inside and name == "AnonHugePages:":
            return int(rest[0])
    raise AssertionError(f"no mapping has {address:#x}")


def test_what_is_written_moves_to_large_pages_unchanged() -> None:
    room = torch.arange(5 * PAGE_NBYTES // 8)
    expected = room.clone()
    first = -(-room.data_ptr() // PAGE_NBYTES) * PAGE_NBYTES
    if not take_large_pages(first, 3 * PAGE_NBYTES):
        pytest.skip("this system makes no large pages of memory that is written")
    # The call's own word is of all three; the system may take some apart again at any time.
    assert large_pages_kb(first) >= PAGE_NBYTES // 1024
    assert torch.equal(room, expected)


def test_small_tensors_and_unmapped_memory_are_let_be() -> None:
    small = torch.ones(100)
    assert not take_large_pages(small.data_ptr(), small.nbytes)
    assert not take_large_pages(PAGE_NBYTES, PAGE_NBYTES)  # nothing lies so low
