"""The bound on the processor time of a test."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import processor_time
from support.processor_time import (
    LANDING_S,
    LIMIT_S,
    MOST_TIMES_SLOWER,
    REFERENCE_S,
    FullCollections,
    judge,
    limit_of,
    pytest_pyfunc_call,
    times_slower,
)


def test_a_landing_test_has_more_time_where_it_is_listed_and_a_nightly_one_any() -> None:
    listed = {"test_a.py::test_big": "it is big"}
    assert limit_of("tests/test_a.py::test_small", is_nightly=False, listed=listed) == LANDING_S
    assert limit_of("tests/test_a.py::test_big[1]", is_nightly=False, listed=listed) == LIMIT_S
    assert limit_of("tests/test_a.py::test_small", is_nightly=True, listed=listed) is None


@pytest.mark.parametrize(("work_s", "times"), [(0.5, 1.0), (1.0, 1.0), (2.5, 2.5), (9.0, 4.0)])
def test_the_machine_is_as_slow_as_its_reference_work_within_bounds(
    work_s: float, times: float
) -> None:
    """In times of the reference: a faster machine has no stricter limit, the slowest no arbitrary one."""
    now = 7.0

    def work() -> None:
        nonlocal now
        now += work_s * REFERENCE_S

    assert times_slower(work, lambda: now) == pytest.approx(times)
    assert MOST_TIMES_SLOWER == 4.0


def test_a_test_is_judged_by_its_time_on_the_machine_of_reference() -> None:
    asked: list[float] = []

    def slower(times: float) -> Callable[[], float]:
        return lambda: asked.append(times) or times  # type: ignore[func-returns-value]

    assert judge(4.9, 5.0, slower(1.0)) is None
    assert judge(60.0, None, slower(1.0)) is None
    assert not asked, "the work is done only where a test is over its limit"
    assert judge(6.4, 5.0, slower(1.3)) is None
    late = judge(6.4, 5.0, slower(1.25))
    assert late is not None
    assert (late.spent_s, late.reference_s) == (6.4, pytest.approx(5.12))


def test_full_collections_are_measured_and_others_not() -> None:
    ticks: Iterator[float] = iter([1.0, 4.0, 10.0, 10.5])
    full = FullCollections(lambda: next(ticks))
    for generation in (2, 0, 2):
        for phase in ("start", "stop"):
            full(phase, {"generation": generation})
    assert full.spent_s == 3.5


def test_a_full_collection_costs_a_test_nothing() -> None:
    """It looks at what earlier tests have left, here many objects."""
    heap = [[] for _ in range(200_000)]  # type: ignore[var-annotated]
    began, used = time.process_time(), processor_time.used_s()
    gc.collect()
    assert processor_time.used_s() - used < (time.process_time() - began) / 2
    assert len(heap) == 200_000


@pytest.mark.parametrize(("spent_s", "passes"), [(4.9, True), (20.1, False)])
def test_a_test_that_takes_too_long_fails(
    spent_s: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the machine is now: it counts as four times slower at most."""
    used: Iterator[float] = iter([10.0, 10.0 + spent_s])
    # The bound on this test itself reads it, too, when it ends.
    monkeypatch.setattr(processor_time, "used_s", lambda: next(used, 0.0))
    config = SimpleNamespace(getoption=lambda *_: None)
    item = SimpleNamespace(nodeid="tests/test_a.py::test_b", path=Path(__file__), config=config)
    hook = pytest_pyfunc_call(item)  # type: ignore[arg-type]
    next(hook)
    if passes:
        with pytest.raises(StopIteration):
            hook.send(None)
    else:
        with pytest.raises(pytest.fail.Exception, match=r"took .* \(20\.1 s here and now"):
            hook.send(None)
