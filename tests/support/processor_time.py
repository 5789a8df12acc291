"""A bound on the processor time of each test: what a busy machine makes slow, it does not make fail.

A landing test that takes more than `LANDING_S` fails unless `LISTED` says why it may; none may take more
than `LIMIT_S`. Fixtures count against nobody: those of a wider scope fall to whichever test comes first.
"""

import resource
import time
from collections.abc import Iterator, Mapping
from typing import Final

import pytest

from support.lanes import lane_of
from support.virtual.loop import VirtualLoop

LIMIT_S: Final = 20.0
LANDING_S: Final = 5.0
QUICK: Final = (None, "landing", "quick")  # profiles with few examples
# Part of a test's id -> the reason that it may take more than LANDING_S: 2 to 4 s on a quiet machine, more
# where another process shares the core's caches.
LISTED: Final = {
    "tests/test_layering.py::": "whichever comes first parses every module",
    "bench/test_scenes.py::": "replays of fleets that the figures of docs/benchmarks.md come from",
    "cli/synth/test_compare.py::": "fits two models to a trace, and draws the page",
}


def used_s() -> float:
    """Seconds of processor time of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def limit_of(test: str, is_nightly: bool, listed: Mapping[str, str] = LISTED) -> float | None:
    """The seconds that a test may take; None: as long as it likes."""
    if is_nightly:
        return None
    return LIMIT_S if any(part in test for part in listed) else LANDING_S


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    began = used_s()
    VirtualLoop.test_began = time.process_time()
    result = yield
    spent_s = used_s() - began
    profile = pyfuncitem.config.getoption("--hypothesis-profile", None)
    is_nightly = lane_of(pyfuncitem.path) != "landing" or profile not in QUICK
    limit_s = limit_of(pyfuncitem.nodeid, is_nightly)
    if limit_s is not None and spent_s > limit_s:
        pytest.fail(
            f"took {spent_s:.1f} s of processor time, more than {limit_s:g} s: make it cheaper, "
            "mark its file `process`, or list it in tests/support/processor_time.py",
            pytrace=False,
        )
    return result
