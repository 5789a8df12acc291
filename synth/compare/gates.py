"""The gates: measures in which two traces must agree, and bars for how far they may differ.

A gate measures a source (`a`) against another trace (`b`). Where the source has nothing of the kind and the
other neither, a gate does not apply, and says so; where only one of them has, the distance is infinite
and the gate fails. Differences that have a sign keep it, so that over several seeds those that cancel
out are told from those that don't: the value of a gate over seeds is the median of its values,
and what is held against the bar is its size.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from mallee.synth.analysis.analysis import Analysis
from mallee.synth.compare.copies import COPIES
from mallee.synth.compare.distances import ks, relative, w1_share
from mallee.synth.compare.measures import (
    Measure,
    Value,
    binned,
    counted,
    curve,
    depth_and_width,
    ideal_hit,
    means,
    sampled,
    second_order,
)
from mallee.traces.numbers import Floats

BINS_S: Final = (1.0, 10.0, 60.0, 300.0)
DRIFT: Final = "ideal hit rate at 1x, 4x, 16x"  # name of the gate of stationarity


class Gate(NamedTuple):
    """`bar` None: told, and never failed. `statistic` is how the value is computed, in words."""

    name: str
    group: str
    statistic: str
    bar: float | None


class Outcome(NamedTuple):
    """A gate over one or more seeds. `low` and `high` are the least and the most of the seeds."""

    gate: Gate
    value: float | None
    low: float | None
    high: float | None
    why: str

    @property
    def verdict(self) -> str:
        """pass, FAIL, n/a, or told where there is no bar."""
        if self.value is None:
            return "n/a"
        if self.gate.bar is None:
            return "told"
        return "pass" if abs(self.value) <= self.gate.bar else "FAIL"


def compare(a: Analysis, b: Analysis) -> dict[str, Value]:
    """By name of the gate, those that two analyses tell."""
    return {name: measure(a, b) for name, measure in MEASURES.items()}


def outcomes(comparisons: Sequence[Mapping[str, Value]], gates: Sequence[Gate]) -> list[Outcome]:
    """Over seeds, of those of `gates` that were measured. One of `comparisons` for each seed."""
    return [
        _outcome(gate, values)
        for gate in gates
        if (values := [each[gate.name] for each in comparisons if gate.name in each])
    ]


def _outcome(gate: Gate, values: Sequence[Value]) -> Outcome:
    """The median. A seed in which neither trace has anything of the kind agrees: it counts as 0."""
    known = [each.value for each in values if each.value is not None]
    if not known:
        return Outcome(gate, None, None, None, values[0].why)
    numbers = [math.inf if math.isnan(v) else v for v in known] + [0.0] * (len(values) - len(known))
    why = next((each.why for each in values if each.why and each.value is not None), "")
    return Outcome(gate, statistics.median(numbers), min(numbers), max(numbers), why)


_KS: Final = "two-sample KS"
_W1: Final = "W1 / mean of the source"


def _ks(
    name: str, group: str, what: str, of: Callable[[Analysis], Floats], bar: float | None
) -> tuple[Gate, Measure]:
    return Gate(f"{name} KS", group, _KS, bar), sampled(what, of, ks)


def _w1(
    name: str, group: str, what: str, of: Callable[[Analysis], Floats], bar: float
) -> tuple[Gate, Measure]:
    return Gate(f"{name} W1", group, _W1, bar), sampled(what, of, w1_share)


def _lengths(name: str, of: Callable[[Analysis], Floats]) -> Iterator[tuple[Gate, Measure]]:
    yield _ks(name, "lengths", "requests", of, 0.05)
    yield _w1(name, "lengths", "requests", of, 0.10)


def _reuse_gaps(name: str, of: Callable[[Analysis], Floats]) -> Iterator[tuple[Gate, Measure]]:
    what = "requests that find anything"
    yield _ks(name, "reuse", what, of, 0.05)
    yield _w1(name, "reuse", what, of, 0.15)


def _arrivals() -> Iterator[tuple[Gate, Measure]]:
    yield _ks("gaps between arrivals", "arrivals", "gaps", lambda a: a.gaps_s, 0.05)
    statistic = "relative difference of variance / mean of counts"
    for bin_s in BINS_S:
        gate = Gate(f"dispersion {bin_s:g} s", "arrivals", statistic, 0.25)
        yield gate, binned("dispersion", bin_s, relative)
    statistic = "difference of lag-1 autocorrelation of counts"
    for bin_s in BINS_S:
        gate = Gate(f"autocorrelation {bin_s:g} s", "arrivals", statistic, 0.1)
        yield gate, binned("autocorrelation", bin_s, lambda one, other: other - one)


def _curves() -> Iterator[tuple[Gate, Measure]]:
    where = "difference of hit rates at 8 sizes of cache (the source's)"
    yield (
        Gate("LRU curve, mean", "reuse", f"mean {where}", 0.02),
        curve(lambda errors: float(errors.mean())),
    )
    yield (
        Gate("LRU curve, worst", "reuse", f"largest {where}", 0.05),
        curve(lambda errors: float(errors.max())),
    )
    statistic = "difference of the shares of blocks that an endless cache holds"
    yield Gate("ideal hit rate", "reuse", statistic, None), ideal_hit


def _tree() -> Iterator[tuple[Gate, Measure]]:
    yield _ks("branch width", "tree", "branches", lambda a: a.branch_widths, 0.10)
    yield (
        Gate("branch count", "tree", "relative difference", 0.15),
        counted("branches", lambda a: float(len(a.branch_widths))),
    )
    yield _ks("branch depth", "tree", "branches", lambda a: a.branch_depths, 0.10)
    yield (
        Gate("roots", "tree", "relative difference", 0.25),
        counted("roots", lambda a: float(a.roots)),
    )
    statistic = "earth mover's distance between histograms, in doublings"
    yield Gate("branch depth and width", "tree", statistic, None), depth_and_width


def _sessions() -> Iterator[tuple[Gate, Measure]]:
    group = "sessions"
    yield _ks("turns per session", group, "sessions", lambda a: a.turns_per_session, 0.10)
    yield _ks("children per spawn", group, "spawns", lambda a: a.children_per_spawn, 0.10)
    yield _ks("live siblings", group, "siblings", lambda a: a.live_siblings, 0.10)
    yield _ks("join wait", group, "joins", lambda a: a.join_wait_s, 0.10)
    yield (
        Gate("shared with the parent", group, "difference of means (share of blocks)", 0.02),
        means("spawns", lambda a: a.shared_with_parent),
    )
    statistic = "mean difference of rank correlations inside and between sessions"
    yield Gate("second order", group, statistic, None), second_order


_TWO_TRACES: Final = (
    *_lengths("ISL", lambda a: a.isl),
    *_lengths("OSL", lambda a: a.osl),
    *_lengths("new tokens", lambda a: a.new_tokens),
    *_arrivals(),
    *_curves(),
    *_reuse_gaps("reuse gap, requests", lambda a: a.reuse_gap_requests),
    *_reuse_gaps("reuse gap, seconds", lambda a: a.reuse_gap_s),
    _ks("hit depth", "reuse", "requests", lambda a: a.hit_depth, None),
    *_tree(),
    *_sessions(),
)
MEASURES: Final[dict[str, Measure]] = {gate.name: measure for gate, measure in _TWO_TRACES}
GATES: Final[tuple[Gate, ...]] = (
    *(gate for gate, _ in _TWO_TRACES),
    Gate(
        DRIFT,
        "length",
        "widest difference of the three, after the first fifth of the source's length",
        0.02,
    ),
    Gate(
        COPIES,
        "sessions",
        "share of requests in long sessions with lengths of one of the source",
        None,
    ),
)
"""In the order in which they are shown."""
