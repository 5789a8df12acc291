"""The work that the bench of forks times: the same at any length, at any depth, and beside any siblings."""

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from bench.engine.fork import CHILDREN, through_engine


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """They call functions and free memory."""
    gc.disable()
    yield
    gc.enable()


def calls_in(work: Callable[[], object]) -> Counter[str]:
    """The calls of functions, also of those in C, by name."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            found[function.__name__ if event == "c_call" else frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def peak_nbytes(work: Callable[[], object]) -> int:
    """The memory that is allocated beyond what there is already."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, CHILDREN])
@pytest.mark.parametrize(
    ("few", "many"),
    [
        ({"length": 16}, {"length": 50_000}),
        ({"length": 2048, "depth": 2}, {"length": 2048, "depth": 500}),
        ({"length": 2048, "siblings": 1}, {"length": 2048, "siblings": 500}),
    ],
)
def test_a_fork_of_the_engine_is_the_same_work_for_any_parent(
    calls: int, few: dict[str, Any], many: dict[str, Any]
) -> None:
    """D23, part: not a call more, and no memory that grows: a copy of 50,000 ids would be 200 kB."""
    through_engine(calls=calls, **few).work()  # what is done once alone
    small, large = (through_engine(calls=calls, **each) for each in (few, many))
    assert calls_in(small.work) == calls_in(large.work)
    small, large = (through_engine(calls=calls, **each) for each in (few, many))
    assert peak_nbytes(large.work) < peak_nbytes(small.work) + 100 * CHILDREN
