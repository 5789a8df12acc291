"""Begins of sessions as tables: the time that each window of begins took, and how uneven windows are."""

from dataclasses import dataclass

import numpy as np

from mallee.synth.core.arrivals import WINDOW_BEGINS, Starts
from mallee.synth.session.shareable.tables import Cells, K
from mallee.traces.numbers import Floats, Ints


@dataclass(frozen=True, slots=True)
class BeginLaw:
    """Begins of sessions by time. A closed population is told as one that begins at the same rate."""

    windows_s: Floats  # the time of each window of `WINDOW_BEGINS`, about; the last may have more
    gaps: Cells  # gaps, in mean gaps of their windows


def fit_begins(gaps_s: Floats) -> BeginLaw:
    """Learn at least `K` gaps. Sums are rounded to a mean gap, so that none of them tells a single begin."""
    windows = _windows(len(gaps_s))
    sums_s = np.maximum(1e-9, np.bincount(windows, gaps_s))
    means_s = (sums_s / np.bincount(windows))[windows]
    return BeginLaw(
        windows_s=np.exp(np.rint(WINDOW_BEGINS * np.log(sums_s)) / WINDOW_BEGINS),
        gaps=Cells.fit(np.zeros(len(gaps_s), np.int64), (gaps_s / means_s)[:, None]),
    )


def draw_begins(law: BeginLaw, rng: np.random.Generator) -> Starts:
    """As many begins as were learned; the gaps of each window add up to the time it took."""
    count = int(law.gaps.counts.sum())
    windows = _windows(count)
    gaps = np.maximum(0.0, law.gaps.spread_out(0, count, rng)[:, 0])
    gaps += (np.bincount(windows, gaps) == 0)[windows]
    return Starts(0.0, gaps * (law.windows_s / np.bincount(windows, gaps))[windows])


def _windows(count: int) -> Ints:
    """The window of each gap; one of fewer than `K` at the end belongs to that before."""
    windows = np.arange(count, dtype=np.int64) // WINDOW_BEGINS
    return np.minimum(windows, max(0, (count - K) // WINDOW_BEGINS))
