"""Begins of sessions as tables: the time that each window of begins took, and gaps of windows like it."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from mallee.synth.core.arrivals import WINDOW_BEGINS, Starts, Turnstile
from mallee.synth.session.shareable.tables import K, TableBuilder, Tables
from mallee.traces.numbers import Floats, Ints

_MOST_PARTS: Final = 8  # of windows, by rate


@dataclass(frozen=True, slots=True)
class TimesLaw:
    """Gaps of some number of begins."""

    count: int
    windows_s: Floats  # the time of each window of `WINDOW_BEGINS`, about; the last may have more
    table: Ints  # of each window: gaps in windows of about its rate
    tables: Tables


@dataclass(frozen=True, slots=True)
class TurnstileLaw:
    """Clients that begin a session when their last one is over."""

    places: int
    opened_s: float  # from the first client's begin to the last's
    pauses: int
    tables: Tables  # one, of the pauses


def fit_times(gaps_s: Floats) -> TimesLaw:
    """Learn at least `K` gaps. Sums are rounded to a mean gap, so that none of them tells a single begin."""
    windows = _windows(len(gaps_s))
    sizes = np.diff(windows)
    sums = np.add.reduceat(gaps_s, windows[:-1])
    parts = max(1, min(_MOST_PARTS, len(sums) // 4))
    rank = np.argsort(np.argsort(sums / sizes, kind="stable"), kind="stable")
    table = rank * parts // len(sums)
    builder = TableBuilder()
    for each in range(parts):
        builder.add(gaps_s[np.repeat(table, sizes) == each])
    steps = np.rint(WINDOW_BEGINS * np.log(np.maximum(sums, 1e-9))) / WINDOW_BEGINS
    return TimesLaw(len(gaps_s), np.where(sums > 0, np.exp(steps), 0.0), table, builder.build())


def draw_starts(law: TimesLaw, rng: np.random.Generator) -> Starts:
    """As many begins as were learned; the gaps of each window add up to the time it took."""
    gaps = np.zeros(law.count)
    windows = _windows(law.count).tolist()
    for i, (low, high) in enumerate(pairwise(windows)):
        drawn = np.maximum(0.0, law.tables.spread_out(int(law.table[i]), high - low, rng))
        total = float(law.windows_s[i])
        gaps[low:high] = drawn * total / drawn.sum() if drawn.any() else total / (high - low)
    return Starts(0.0, gaps)


def _windows(count: int) -> Ints:
    cuts = np.arange(0, count, WINDOW_BEGINS)
    if len(cuts) > 1 and count - cuts[-1] < K:
        cuts = cuts[:-1]
    return np.append(cuts, count)


def fit_turnstile_law(turnstile: Turnstile | None) -> TurnstileLaw | None:
    """None if there is none, or too few pauses to tell."""
    if turnstile is None or len(turnstile.pauses_s) < K:
        return None
    opened = turnstile.opened_s
    span_s = float(opened[-1] - opened[0])
    rounded_s = float(np.exp(np.rint(4 * np.log(span_s)) / 4)) if span_s > 0 else 0.0
    builder = TableBuilder()
    builder.add(turnstile.pauses_s)
    return TurnstileLaw(len(opened), rounded_s, len(turnstile.pauses_s), builder.build())


def draw_turnstile(law: TurnstileLaw | None, rng: np.random.Generator) -> Turnstile | None:
    if law is None:
        return None
    pauses = np.maximum(0.0, law.tables.spread_out(0, law.pauses, rng))
    return Turnstile(np.linspace(0.0, law.opened_s, law.places), pauses)
