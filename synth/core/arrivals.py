"""Begins of sessions: a rate that changes over time, with its bursts.

A renewal process with any one law of gaps (Poisson, gamma, Weibull) fits gaps but never how counts vary over
minutes, which is what fills queues. So the source's gaps themselves are drawn: in short runs, so that
bursts stay, without replacement inside windows of so many begins, so that the rate keeps its course.
Beyond the source's length the course repeats.
"""

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.extras import scipy
from mallee.synth.core.jitter import Ranks
from mallee.traces.numbers import Floats, Ints

WINDOW_BEGINS: Final = 32  # the rate is learned over so many begins
_SILENCE: Final = 20.0  # mean gaps: of independent begins one in 5e8 is longer
_FEWEST: Final = 8  # sessions that a turnstile can be seen in
_RUN_BEGINS: Final = 4.0  # mean length of runs of gaps that stay together


@dataclass(frozen=True, slots=True)
class Starts:
    """Begins of one source: `gaps_s[i]` from begin i to the next; the last leads into the next period."""

    first_s: float
    gaps_s: Floats

    @property
    def period_s(self) -> float:
        """After so long the course of the rate repeats."""
        return float(self.gaps_s.sum())

    @property
    def stretches(self) -> Ints:
        """For each begin the number of its stretch. Between stretches is silence, as before a nightly batch.

        That is no chance: what begins in one stretch doesn't belong into another.
        """
        silent = self.gaps_s[:-1] > _SILENCE * self.gaps_s.mean()
        return np.append(0, np.cumsum(silent))

    def period(self, rng: np.random.Generator) -> Floats:
        """Begins of one period, as many as the source had, increasing, from 0 on."""
        num = len(self.gaps_s)
        if not self.gaps_s[:-1].any():
            # all at once: the gap that leads to the next period stays last
            return np.zeros(num)
        like = Ranks(self.gaps_s)
        gaps = np.empty(num)
        silences = np.flatnonzero(np.diff(self.stretches))  # each is a window of its own, and stays
        cuts = np.concatenate(
            [np.arange(WINDOW_BEGINS, num, WINDOW_BEGINS), silences, silences + 1]
        )
        for rows in np.split(np.arange(num), np.unique(cuts[cuts > 0])):
            near = like.near(_mixed(rows, rng), rng)
            widest = int(near.argmax())  # takes what the window is too long or too short
            near[widest] = max(0.0, near[widest] + float(self.gaps_s[rows].sum() - near.sum()))
            gaps[rows] = near
        begins: Floats = np.cumsum(gaps) - gaps
        return begins

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """`count` begins over as many periods as it takes, increasing, from `first_s` on."""
        num = len(self.gaps_s)
        if not count:
            return np.empty(0)
        periods = [
            self.period(rng) + k * self.period_s + self.first_s for k in range(-(-count // num))
        ]
        return np.concatenate(periods)[:count]


def fit_starts(begins_s: Floats, end_s: float) -> Starts:
    """Learns from sorted begins of a source that ended at `end_s`: the last begin, or the last request.

    Begins at one time alone have no rate to learn: the period is then the source's length, or a second.
    """
    gaps = np.diff(begins_s)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    last = end_s - float(begins_s[-1])
    if not mean:
        last = last or 1.0
    elif not last or last > 10 * mean:  # no more was to come, or what came later began nothing
        last = mean
    return Starts(float(begins_s[0]), np.append(gaps, last))


@dataclass(frozen=True, slots=True)
class Turnstile:
    """Sessions that begin as others end: as many places as were ever taken at once, each with pauses."""

    opened_s: Floats  # when each place is first taken
    pauses_s: Floats  # from the end of a session to the begin of the next at its place

    def opened(self) -> list[tuple[float, bool]]:
        """The places at first: a heap of (free from, whether it was taken before)."""
        return [(at_s, False) for at_s in self.opened_s.tolist()]

    def begins(
        self, places: list[tuple[float, bool]], durations_s: Floats, rng: np.random.Generator
    ) -> Floats:
        """Begins of sessions of these durations, in their order; each takes the place that is free first."""
        pauses = rng.permutation(np.resize(self.pauses_s, len(durations_s))).tolist()
        begins = np.empty(len(durations_s))
        for i, (duration, pause) in enumerate(zip(durations_s.tolist(), pauses, strict=True)):
            free_s, was_taken = heapq.heappop(places)
            begins[i] = free_s + pause if was_taken else free_s
            heapq.heappush(places, (begins[i] + duration, True))
        return begins


def fit_turnstile(begins_s: Floats, ends_s: Floats) -> Turnstile | None:
    """The closed loop of a fixed number of clients, each with one session after another; None if it is none.

    Under independent begins, and from an empty start, the sessions that are live at a begin are Poisson
    with the part of durations that passed since. If as few as ever overlap here are too few for that
    (one in a thousand), begins wait for ends. Live counts are alike for about a session's duration, so
    there are no more of them than durations in the trace.
    """
    num = len(begins_s)
    if num < _FEWEST:
        return None
    durations_s = ends_s - begins_s
    span_s = float(begins_s[-1] - begins_s[0])
    live = np.arange(num) - np.searchsorted(np.sort(ends_s), begins_s)  # began before, less ended
    most = int(live.max())
    if not span_s or not durations_s.any():
        return None
    since_s = begins_s - begins_s[0]
    expected = (
        num / span_s * np.minimum(durations_s[:, None], since_s[None, :: -(-num // 64)]).mean(0)
    )
    poisson = scipy("stats").poisson
    num_apart = min(num, 1.0 + span_s / float(durations_s.mean()))
    if num_apart * float(poisson.logcdf(most, expected).mean()) > np.log(1e-3):
        return None
    free = [float(each) for each in ends_s[: most + 1]]
    heapq.heapify(free)
    pauses = []
    for begin, end in zip(begins_s[most + 1 :].tolist(), ends_s[most + 1 :].tolist(), strict=True):
        pauses.append(max(0.0, begin - heapq.heappop(free)))
        heapq.heappush(free, end)
    return Turnstile(begins_s[: most + 1].copy(), np.array(pauses))


def _mixed(rows: Ints, rng: np.random.Generator) -> Ints:
    """Runs of `rows` in another order."""
    cuts = np.flatnonzero(rng.random(len(rows) - 1) < 1 / _RUN_BEGINS) + 1
    runs = np.split(rows, cuts)
    return np.concatenate([runs[i] for i in rng.permutation(len(runs))])
