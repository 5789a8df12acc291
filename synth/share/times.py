"""When sessions begin, as a table of rates: how long each window of begins took, and how bursty it was."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.arrivals import WINDOW_BEGINS, Starts, Turnstile
from mallee.synth.share.tables import K, TableBuilder, Tables, normal_cdf, scores_in
from mallee.traces.numbers import Floats, Ints

_STEEPEST: Final = 16.0
_HALVINGS: Final = 24
_MOST_PARTS: Final = 8  # of windows by rate, and of those by unevenness


@dataclass(frozen=True, slots=True)
class TimesLaw:
    """Gaps of some number of begins, window by window."""

    count: int
    windows_s: Floats  # how long each window of `WINDOW_BEGINS` took, about; the last may have more
    unevenness: Floats  # squared deviation of each window's gaps from their mean, over its square
    table: Ints  # of each window: a table of gaps in windows like it
    tie: float  # correlation of a gap's score with the next one's
    tables: Tables


@dataclass(frozen=True, slots=True)
class TurnstileLaw:
    """Of clients that have one session after another."""

    places: int
    opened: TimesLaw | None  # None of fewer than `K` places: all are taken at once
    pauses: int  # how many
    tables: Tables  # one of the pauses


def fit_times(gaps_s: Floats, rng: np.random.Generator) -> TimesLaw:
    """Learns at least `K` gaps."""
    windows = _windows(len(gaps_s))
    sizes = np.diff(windows)
    sums = np.add.reduceat(gaps_s, windows[:-1])
    means = sums / sizes
    relative = gaps_s / np.repeat(np.maximum(means, 1e-12), sizes)
    unevenness = np.add.reduceat((relative - 1.0) ** 2, windows[:-1]) / sizes
    everywhere = np.zeros(len(sums), np.int64)
    by_rate = _parted(everywhere, means, min(_MOST_PARTS, len(sums) // 16))
    of_window = _parted(by_rate, unevenness, min(_MOST_PARTS, len(sums) // _MOST_PARTS // 4))
    of_gap = np.repeat(of_window, sizes)
    builder = TableBuilder()
    for each in range(int(of_window.max()) + 1):
        builder.add(gaps_s[of_gap == each])
    scores = scores_in(of_gap, gaps_s, rng)
    tie = float(np.mean(scores[1:] * scores[:-1])) if len(scores) > 10 * K else 0.0
    tie = float(np.clip(tie, -0.95, 0.95))
    return TimesLaw(len(gaps_s), _rounded(sums), unevenness, of_window, tie, builder.build())


def _rounded(windows_s: Floats) -> Floats:
    """To about a mean gap: exactly added up, gaps would tell when single sessions began."""
    known = windows_s > 0
    steps = np.rint(WINDOW_BEGINS * np.log(np.where(known, windows_s, 1.0)))
    return np.where(known, np.exp(steps / WINDOW_BEGINS), 0.0)


def _parted(parts: Ints, values: Floats, num: int) -> Ints:
    """Each of `parts` cut into `num` by rank of the values, about equal in size."""
    num = max(1, num)
    order = np.lexsort((values, parts))
    counts = np.bincount(parts)
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    return parts * num + rank * num // counts[parts]


def draw_gaps(law: TimesLaw, rng: np.random.Generator) -> Floats:
    """As many gaps as were learned; those of each window add up to what it took."""
    noise = rng.standard_normal(law.count)
    scores = np.empty(law.count)
    score = 0.0
    keeps = np.sqrt(1.0 - law.tie**2)
    for i, each in enumerate(noise.tolist()):
        score = law.tie * score + (keeps if i else 1.0) * each
        scores[i] = score
    shares = normal_cdf(scores)
    gaps = np.empty(law.count)
    windows = _windows(law.count)
    for i, (low, high) in enumerate(zip(windows[:-1].tolist(), windows[1:].tolist(), strict=True)):
        ranks = np.argsort(np.argsort(shares[low:high], kind="stable"), kind="stable")
        even = (ranks + rng.random(high - low)) / (high - low)
        drawn = np.maximum(0.0, law.tables.draw(np.full(high - low, law.table[i]), even))
        gaps[low:high] = _adding_up(drawn, float(law.windows_s[i]), float(law.unevenness[i]))
    return gaps


def _adding_up(gaps: Floats, total: float, unevenness: float) -> Floats:
    """`gaps` of a sum and variance; short ones stay as they are where long ones can make up for them."""
    is_long = gaps >= gaps.mean()
    of_long = total - float(gaps[~is_long].sum())
    found = gaps.copy()
    if of_long <= 0 or gaps.max() <= 0:
        return (
            found * (total / gaps.sum())
            if gaps.sum() > 0
            else np.full_like(gaps, total / len(gaps))
        )
    long = gaps[is_long] / gaps.max()
    squares = (unevenness + 1.0) * total**2 / len(gaps) - float((gaps[~is_long] ** 2).sum())
    low, high = 0.0, _STEEPEST  # the power of long gaps that makes the variance
    for _ in range(_HALVINGS):
        power = (low + high) / 2
        tried = long**power * (of_long / (long**power).sum())
        low, high = (power, high) if (tried**2).sum() < squares else (low, power)
    found[is_long] = tried
    return found


def _windows(count: int) -> Ints:
    """Where windows begin and end: aligned to those that begins are exchanged in."""
    cuts = np.arange(0, count, WINDOW_BEGINS)
    if len(cuts) > 1 and count - cuts[-1] < K:
        cuts = cuts[:-1]
    return np.append(cuts, count)


def draw_starts(law: TimesLaw, rng: np.random.Generator) -> Starts:
    return Starts(0.0, draw_gaps(law, rng))


def fit_turnstile_law(turnstile: Turnstile | None, rng: np.random.Generator) -> TurnstileLaw | None:
    """None if there is none, or too few sessions to tell."""
    if turnstile is None:
        return None
    opened, pauses = turnstile.opened_s, turnstile.pauses_s
    if len(pauses) < K:  # then the first one's waits at each place are told with them
        pauses = np.concatenate([pauses, opened - opened[0]])
    if len(pauses) < K:
        return None
    builder = TableBuilder()
    builder.add(pauses)
    gaps = np.diff(opened, append=opened[-1])
    law = fit_times(gaps, rng) if len(opened) >= K else None
    return TurnstileLaw(len(opened), law, len(pauses), builder.build())


def draw_turnstile(law: TurnstileLaw | None, rng: np.random.Generator) -> Turnstile | None:
    if law is None:
        return None
    opened = np.zeros(law.places)
    if law.opened is not None:
        gaps = draw_gaps(law.opened, rng)
        opened = np.cumsum(gaps) - gaps
    pauses = np.maximum(0.0, law.tables.spread_out(0, law.pauses, rng))
    return Turnstile(opened, pauses)
