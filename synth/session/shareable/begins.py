"""Begins of sessions as tables: the time that each window of begins took, and how uneven windows are."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mallee.synth.core.arrivals import WINDOW_BEGINS, Starts, Turnstile
from mallee.synth.session.shareable.tables import K, TableBuilder, Tables
from mallee.traces.numbers import Floats, Ints


@dataclass(frozen=True, slots=True)
class BeginLaw:
    """Begins of sessions by time and, of a closed population, by places."""

    count: int
    windows_s: Floats  # the time of each window of `WINDOW_BEGINS`, about; the last may have more
    gaps: int  # table: gaps, in mean gaps of their windows
    # of a closed population; `pauses` is -1 where there is none, or too few to tell
    places: int  # clients that begin a session when their last one is over
    opened_s: float  # from the first client's begin to the last's
    num_pauses: int
    pauses: int  # table


def fit_begins(gaps_s: Floats, turnstile: Turnstile | None, builder: TableBuilder) -> BeginLaw:
    """Learn at least `K` gaps. Sums are rounded to a mean gap, so that none of them tells a single begin."""
    windows = _windows(len(gaps_s))
    sums = np.add.reduceat(gaps_s, windows[:-1])
    means = np.repeat(np.maximum(1e-9, sums / np.diff(windows)), np.diff(windows))
    opened_s, pauses_s = np.zeros(1), np.zeros(0)
    if turnstile is not None and len(turnstile.pauses_s) >= K:
        opened_s, pauses_s = turnstile.opened_s, turnstile.pauses_s
    return BeginLaw(
        count=len(gaps_s),
        windows_s=_rounded(sums, WINDOW_BEGINS),
        gaps=builder.add(gaps_s / means),
        places=len(opened_s),
        opened_s=float(_rounded(opened_s[-1] - opened_s[0], 4)),
        num_pauses=len(pauses_s),
        pauses=builder.add(pauses_s),
    )


def _rounded(values_s: Floats | np.float64, parts: int) -> Floats:
    """Times to so many parts of their logarithm."""
    logs = np.rint(parts * np.log(np.maximum(values_s, 1e-9))) / parts
    return np.where(values_s > 0, np.exp(logs), 0.0)


def draw_begins(
    law: BeginLaw, tables: Tables, rng: np.random.Generator
) -> tuple[Starts, Turnstile | None]:
    """As many begins as were learned; the gaps of each window add up to the time it took."""
    gaps = np.zeros(law.count)
    for window_s, (low, high) in zip(law.windows_s, pairwise(_windows(law.count)), strict=True):
        drawn = np.maximum(0.0, tables.spread_out(law.gaps, high - low, rng))
        drawn += not drawn.any()
        gaps[low:high] = drawn * window_s / drawn.sum()
    if law.pauses < 0:
        return Starts(0.0, gaps), None
    pauses_s = np.maximum(0.0, tables.spread_out(law.pauses, law.num_pauses, rng))
    return Starts(0.0, gaps), Turnstile(np.linspace(0.0, law.opened_s, law.places), pauses_s)


def _windows(count: int) -> Ints:
    cuts = np.arange(0, count, WINDOW_BEGINS)
    if len(cuts) > 1 and count - cuts[-1] < K:
        cuts = cuts[:-1]
    return np.append(cuts, count)
