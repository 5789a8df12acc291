"""A bound on the processor time of each test: what a busy machine makes slow, it does not make fail.

A landing test that takes more than `LANDING_S` fails unless `LISTED` says why it may; none may take more
than `LIMIT_S`. Fixtures count against nobody: those of a wider scope fall to whichever test comes first. Nor
do full garbage collections: each looks at what all tests before have left.

Processes that share cores and caches slow each other, in processor time too. So the limits are seconds of a
machine that does `reference_work` in `REFERENCE_S`: a test over its limit is judged by what it would have
taken there, by the work's time right after it.
"""

import gc
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import pytest

from support.lanes import lane_of
from support.virtual.loop import VirtualLoop

LIMIT_S: Final = 20.0
LANDING_S: Final = 5.0
REFERENCE_S: Final = 0.045  # on a quiet core of two, of an AMD EPYC with 32 MiB of shared cache
MOST_TIMES_SLOWER: Final = 4.0
QUICK: Final = (None, "landing", "quick")  # profiles with few examples
# Part of a test's id -> the reason that it may take more than LANDING_S: 2 to 4 s on a quiet machine, more
# where another process shares the core's caches.
LISTED: Final = {
    "tests/test_layering.py::": "whichever comes first parses every module",
    "bench/test_scenes.py::": "replays of fleets that the figures of docs/benchmarks.md come from",
    "cli/synth/test_compare.py::": "fits two models to a trace, and draws the page",
}


class FullCollections:
    """Measures the processor time of full garbage collections; to be among `gc.callbacks`."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.spent_s = 0.0
        self._clock = clock
        self._began = 0.0

    def __call__(self, phase: str, about: Mapping[str, int]) -> None:
        if about["generation"] < 2:
            return
        if phase == "start":
            self._began = self._clock()
        else:
            self.spent_s += self._clock() - self._began


_full_collections = FullCollections()
gc.callbacks.append(_full_collections)


def used_s() -> float:
    """Seconds of processor time of this process but for full collections, and of children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own_s = time.process_time() - _full_collections.spent_s
    return own_s + children.ru_utime + children.ru_stime


def reference_work() -> None:
    """Make strings and follow them through a table of 3 MB, as ordinary code does; no garbage to collect."""
    for _ in range(6):
        following = {str(i): str((7919 * i + 1) % 20_000) for i in range(20_000)}
        at = "0"
        for _ in range(80_000):
            at = following[at]


def times_slower(
    work: Callable[[], None] = reference_work, clock: Callable[[], float] = time.process_time
) -> float:
    """The factor, of 1 to `MOST_TIMES_SLOWER`, by which this machine is slower than that of reference."""
    began = clock()
    work()
    return min(max(1.0, (clock() - began) / REFERENCE_S), MOST_TIMES_SLOWER)


def limit_of(test: str, is_nightly: bool, listed: Mapping[str, str] = LISTED) -> float | None:
    """The seconds that a test may take; None: as long as it likes."""
    if is_nightly:
        return None
    return LIMIT_S if any(part in test for part in listed) else LANDING_S


class Verdict(NamedTuple):
    """A test's processor time, here and on the machine of reference."""

    spent_s: float
    slower: float

    @property
    def reference_s(self) -> float:
        return self.spent_s / self.slower


def judge(
    spent_s: float, limit_s: float | None, slower: Callable[[], float] = times_slower
) -> Verdict | None:
    """The test's times if it took longer than it may."""
    if limit_s is None or spent_s <= limit_s:
        return None
    verdict = Verdict(spent_s, slower())
    return verdict if verdict.reference_s > limit_s else None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    began = used_s()
    VirtualLoop.test_began = time.process_time()
    result = yield
    spent_s = used_s() - began
    profile = pyfuncitem.config.getoption("--hypothesis-profile", None)
    is_nightly = lane_of(pyfuncitem.path) != "landing" or profile not in QUICK
    limit_s = limit_of(pyfuncitem.nodeid, is_nightly)
    if (verdict := judge(spent_s, limit_s)) is not None:
        pytest.fail(
            f"took {verdict.reference_s:.1f} s of processor time, more than {limit_s:g} s: make it cheaper, "
            "mark its file `process`, or list it in tests/support/processor_time.py "
            f"({spent_s:.1f} s here and now, as the reference work takes {verdict.slower:.1f} times as long)",
            pytrace=False,
        )
    return result
