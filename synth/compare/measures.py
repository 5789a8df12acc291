"""Functions that measure one thing of two analyses, of the source and of the other trace."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from mallee.synth.analysis.analysis import Analysis
from mallee.synth.compare.distances import emd, relative
from mallee.traces.numbers import Floats


class Value(NamedTuple):
    """A gate's measure; None where it does not apply. `why` gives the reason, also of infinity."""

    value: float | None
    why: str = ""


Measure: TypeAlias = Callable[[Analysis, Analysis], Value]


def lacking_value(what: str, one: float, other: float) -> Value | None:
    """The value where not both have any; `one` and `other` are how many the source and the other have."""
    if one and other:
        return None
    if not one and not other:
        return Value(None, f"neither has {what}")
    return Value(math.inf, f"only the {'source' if one else 'other'} has {what}")


def sampled(
    what: str, of: Callable[[Analysis], Floats], distance: Callable[[Floats, Floats], float]
) -> Measure:
    """`what` names the values where there are none."""

    def measure(a: Analysis, b: Analysis) -> Value:
        one, other = of(a), of(b)
        why = lacking_value(what, len(one), len(other))
        return Value(distance(one, other)) if why is None else why

    return measure


def binned(name: str, bin_s: float, distance: Callable[[float, float], float]) -> Measure:
    def measure(a: Analysis, b: Analysis) -> Value:
        one: float | None = getattr(a, name).get(bin_s)
        other: float | None = getattr(b, name).get(bin_s)
        if one is None:
            return Value(None, f"the source has fewer than 8 bins of {bin_s:g} s")
        if other is None:
            return Value(math.inf, f"only the source has 8 bins of {bin_s:g} s")
        if not math.isfinite(one):
            return Value(None, f"counts of the source in bins of {bin_s:g} s never differ")
        return Value(distance(one, other))

    return measure


def counted(what: str, count: Callable[[Analysis], float]) -> Measure:
    """The relative difference of a number of things."""

    def measure(a: Analysis, b: Analysis) -> Value:
        one, other = count(a), count(b)
        why = lacking_value(what, one, other)
        return Value(relative(one, other)) if why is None else why

    return measure


def curve(pick: Callable[[Floats], float]) -> Measure:
    """Hit rates of both at the same sizes of cache: the source's, in blocks."""

    def measure(a: Analysis, b: Analysis) -> Value:
        why = lacking_value("blocks", a.curve.num_references, b.curve.num_references)
        if why is not None:
            return why
        return Value(pick(np.abs(a.mrc_hits - b.hits_at(a.mrc_sizes))))

    return measure


def means(what: str, of: Callable[[Analysis], Floats]) -> Measure:
    """The difference of means."""
    return sampled(what, of, lambda one, other: float(other.mean() - one.mean()))


def second_order(a: Analysis, b: Analysis) -> Value:
    """Mean difference of the rank correlations that the source has; what the other can't tell counts as 0."""
    if not a.second_order:
        return Value(None, "the source tells no correlations")
    apart = [abs(value - b.second_order.get(name, 0.0)) for name, value in a.second_order.items()]
    return Value(sum(apart) / len(apart))


def ideal_hit(a: Analysis, b: Analysis) -> Value:
    why = lacking_value("blocks", a.curve.num_references, b.curve.num_references)
    return Value(b.ideal_hit - a.ideal_hit) if why is None else why


def depth_and_width(a: Analysis, b: Analysis) -> Value:
    why = lacking_value("branches", len(a.branch_depths), len(b.branch_depths))
    if why is not None:
        return why
    return Value(emd(a.branch_depths, a.branch_widths, b.branch_depths, b.branch_widths))
