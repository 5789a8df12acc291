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
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from mallee.synth.analysis.analysis import Analysis
from mallee.synth.analysis.arrivals import BINS_S, Counts
from mallee.synth.compare.distances import emd, ks, relative, w1_share
from mallee.traces.numbers import Floats

DRIFT: Final = "ideal hit rate at 1x, 4x, 16x"  # name of the gate of stationarity (`lengths`)
COPIES: Final = "requests in copied sessions"  # name of the gate of `copies`


class Value(NamedTuple):
    """A gate's measure; None where it does not apply. `why` gives the reason, also of infinity."""

    value: float | None
    why: str = ""


class Gate(NamedTuple):
    """`bar` None: told, and never failed. `statistic` is how the value is computed, in words.

    `measure` computes it of two analyses, of the source and of the other; None: it takes more than these.
    """

    name: str
    group: str
    statistic: str
    bar: float | None
    measure: "Callable[[Analysis, Analysis], Value] | None" = None


_Of: TypeAlias = Callable[[Analysis], Floats]
_Measure: TypeAlias = Callable[[Analysis, Analysis], Value]


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
    return {gate.name: gate.measure(a, b) for gate in GATES if gate.measure is not None}


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


# Measures. `what` names the values where there are none.


def lacking_value(what: str, one: float, other: float) -> Value | None:
    """The value where not both have any; `one` and `other` are how many the source and the other have."""
    if one and other:
        return None
    if not one and not other:
        return Value(None, f"neither has {what}")
    return Value(math.inf, f"only the {'source' if one else 'other'} has {what}")


def _of_samples(what: str, of: _Of, distance: Callable[[Floats, Floats], float]) -> _Measure:
    def measure(a: Analysis, b: Analysis) -> Value:
        one, other = of(a), of(b)
        return lacking_value(what, len(one), len(other)) or Value(distance(one, other))

    return measure


def _of_numbers(what: str, of: Callable[[Analysis], int]) -> _Measure:
    def measure(a: Analysis, b: Analysis) -> Value:
        return lacking_value(what, of(a), of(b)) or Value(relative(of(a), of(b)))

    return measure


def _of_bins(
    bin_s: float, of: Callable[[Counts], float], distance: Callable[[float, float], float]
) -> _Measure:
    def measure(a: Analysis, b: Analysis) -> Value:
        if bin_s not in a.counts:
            return Value(None, f"the source has fewer than 8 bins of {bin_s:g} s")
        if bin_s not in b.counts:
            return Value(math.inf, f"only the source has 8 bins of {bin_s:g} s")
        one = of(a.counts[bin_s])
        if not math.isfinite(one):
            return Value(None, f"counts of the source in bins of {bin_s:g} s never differ")
        return Value(distance(one, of(b.counts[bin_s])))

    return measure


def _of_caches(distance: Callable[[Analysis, Analysis], float]) -> _Measure:
    def measure(a: Analysis, b: Analysis) -> Value:
        num = a.curve.num_references, b.curve.num_references
        return lacking_value("blocks", *num) or Value(distance(a, b))

    return measure


def _curve_errors(a: Analysis, b: Analysis) -> Floats:
    """Differences of hit rates at the same sizes of cache: the source's, in blocks."""
    return np.abs(a.mrc_hits - b.hits_at(a.mrc_sizes))


def _second_order(a: Analysis, b: Analysis) -> Value:
    """Mean difference of the rank correlations that the source has; what the other can't tell counts as 0."""
    if not a.second_order:
        return Value(None, "the source tells no correlations")
    apart = [abs(value - b.second_order.get(name, 0.0)) for name, value in a.second_order.items()]
    return Value(sum(apart) / len(apart))


def _depth_and_width(a: Analysis, b: Analysis) -> Value:
    num = len(a.branch_depths), len(b.branch_depths)
    return lacking_value("branches", *num) or Value(
        emd(a.branch_depths, a.branch_widths, b.branch_depths, b.branch_widths)
    )


# Gates.


def _ks(name: str, group: str, what: str, of: _Of, bar: float | None) -> Gate:
    return Gate(f"{name} KS", group, "two-sample KS", bar, _of_samples(what, of, ks))


def _ks_and_w1(
    name: str, group: str, what: str, of: _Of, *, bars: tuple[float, float]
) -> Iterator[Gate]:
    yield _ks(name, group, what, of, bars[0])
    statistic = "W1 / mean of the source"
    yield Gate(f"{name} W1", group, statistic, bars[1], _of_samples(what, of, w1_share))


def _gates() -> Iterator[Gate]:
    group, bars = "lengths", (0.05, 0.10)
    yield from _ks_and_w1("ISL", group, "requests", lambda a: a.isl, bars=bars)
    yield from _ks_and_w1("OSL", group, "requests", lambda a: a.osl, bars=bars)
    yield from _ks_and_w1("new tokens", group, "requests", lambda a: a.new_tokens, bars=bars)
    group = "arrivals"
    yield _ks("gaps between arrivals", group, "gaps", lambda a: a.gaps_s, 0.05)
    statistic = "relative difference of variance / mean of counts"
    for bin_s in BINS_S:
        measure = _of_bins(bin_s, lambda counts: counts.dispersion, relative)
        yield Gate(f"dispersion {bin_s:g} s", group, statistic, 0.25, measure)
    statistic = "difference of lag-1 autocorrelation of counts"
    for bin_s in BINS_S:
        measure = _of_bins(bin_s, lambda counts: counts.autocorrelation, lambda x, y: y - x)
        yield Gate(f"autocorrelation {bin_s:g} s", group, statistic, 0.1, measure)
    group = "reuse"
    where = "difference of hit rates at 8 sizes of cache (the source's)"
    measure = _of_caches(lambda a, b: float(_curve_errors(a, b).mean()))
    yield Gate("LRU curve, mean", group, f"mean {where}", 0.02, measure)
    measure = _of_caches(lambda a, b: float(_curve_errors(a, b).max()))
    yield Gate("LRU curve, worst", group, f"largest {where}", 0.05, measure)
    statistic = "difference of the shares of blocks that an endless cache holds"
    measure = _of_caches(lambda a, b: b.curve.ideal - a.curve.ideal)
    yield Gate("ideal hit rate", group, statistic, None, measure)
    what, bars = "requests that find anything", (0.05, 0.15)
    yield from _ks_and_w1(
        "reuse gap, requests", group, what, lambda a: a.reuse_gap_requests, bars=bars
    )
    yield from _ks_and_w1("reuse gap, seconds", group, what, lambda a: a.reuse_gap_s, bars=bars)
    yield _ks("hit depth", group, "requests", lambda a: a.hit_depth, None)
    group = "tree"
    yield _ks("branch width", group, "branches", lambda a: a.branch_widths, 0.10)
    measure = _of_numbers("branches", lambda a: len(a.branch_widths))
    yield Gate("branch count", group, "relative difference", 0.15, measure)
    yield _ks("branch depth", group, "branches", lambda a: a.branch_depths, 0.10)
    measure = _of_numbers("roots", lambda a: a.roots)
    yield Gate("roots", group, "relative difference", 0.25, measure)
    statistic = "earth mover's distance between histograms, in doublings"
    yield Gate("branch depth and width", group, statistic, None, _depth_and_width)
    group = "sessions"
    yield _ks("turns per session", group, group, lambda a: a.sessions.turns_per_session, 0.10)
    yield _ks("children per spawn", group, "spawns", lambda a: a.family.children_per_spawn, 0.10)
    yield _ks("live siblings", group, "siblings", lambda a: a.family.live_siblings, 0.10)
    yield _ks("join wait", group, "joins", lambda a: a.family.join_wait_s, 0.10)
    statistic = "difference of means (share of blocks)"
    measure = _of_samples(
        "spawns", lambda a: a.family.shared_with_parent, lambda x, y: float(y.mean() - x.mean())
    )
    yield Gate("shared with the parent", group, statistic, 0.02, measure)
    statistic = "mean difference of rank correlations inside and between sessions"
    yield Gate("second order", group, statistic, None, _second_order)
    statistic = "widest difference of the three, after the first fifth of the source's length"
    yield Gate(DRIFT, "length", statistic, 0.02)
    statistic = "share of requests in long sessions with lengths of one of the source"
    yield Gate(COPIES, group, statistic, None)


GATES: Final = tuple(_gates())
"""In the order in which they are shown."""
