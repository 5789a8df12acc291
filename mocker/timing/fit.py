"""Coefficients of a closed form from measured passes.

Least squares of the relative error, none of the coefficients below 0. There are five of them at most,
so the best nonnegative ones are found by trying every subset. The largest of two planes is fitted by
turns: each pass goes to the plane that is above at it, then each plane is fitted to its passes, from
several starts (Magnani and Boyd, "Convex piecewise-linear fitting", 2009).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.mocker.timing.closed import ClosedForm, Experts, Plane
from mallee.mocker.timing.model import TimingModel
from mallee.protocol.errors import ConfigError

Floats: TypeAlias = npt.NDArray[np.float64]

_MAX_TURNS = 50
_GOOD = 0.01  # root mean square error that needs no second plane
_WORTH = 0.7  # a second plane must bring the root mean square error below this share


class Prefill(NamedTuple):
    """A measured prefill pass of one chunk."""

    num_new: int
    prefix: int
    seconds: float


class Decode(NamedTuple):
    """A measured decode pass; `context` is summed over the rows."""

    rows: int
    context: float
    seconds: float


class Errors(NamedTuple):
    """Relative errors of predictions, as shares: nearest rank of their sizes, and their mean."""

    median: float
    p95: float
    worst: float
    bias: float
    num_points: int


def fit_closed_form(prefills: Sequence[Prefill], decodes: Sequence[Decode]) -> ClosedForm:
    """The closed form nearest to both. Raises ConfigError if there are too few to tell."""
    for name, points in (("prefills", prefills), ("decodes", decodes)):
        if len(points) < 4:
            raise ConfigError(f"{name}: {len(points)} points: give at least 4")
    at = np.array([(1.0, n, n * (p + 0.5 * n), p) for n, p, _ in prefills])
    base, new, pair, prefix = fit_nonnegative(at, _seconds(prefills)).tolist()
    return ClosedForm(base, new, pair, prefix, fit_planes(decodes))


def fit_experts(prefills: Sequence[Prefill], decodes: Sequence[Decode], share: float) -> Experts:
    """The same for a mixture of experts of which each token needs `share`."""
    at = np.array([(1.0, n, n * (p + 0.5 * n), p, _touched(share, n)) for n, p, _ in prefills])
    base, new, pair, prefix, read = fit_nonnegative(at, _seconds(prefills)).tolist()
    at = np.array([(1.0, rows, context, _touched(share, rows)) for rows, context, _ in decodes])
    *plane, read_decode = fit_nonnegative(at, _seconds(decodes)).tolist()
    return Experts(ClosedForm(base, new, pair, prefix, (Plane(*plane),)), share, read, read_decode)


def fit_planes(decodes: Sequence[Decode]) -> tuple[Plane, ...]:
    """One plane, or two whose largest is much nearer to `decodes`."""
    at = np.array([(1.0, rows, context) for rows, context, _ in decodes])
    seconds = _seconds(decodes)
    one = fit_nonnegative(at, seconds)[None, :]
    if _misfit(at, seconds, one) < _GOOD:
        return (Plane(*one[0].tolist()),)
    two = min(
        (_two_planes(at, seconds, above) for above in _starts(at)),
        key=lambda planes: _misfit(at, seconds, planes),
        default=one,
    )
    best = two if _misfit(at, seconds, two) < _WORTH * _misfit(at, seconds, one) else one
    return tuple(Plane(*plane) for plane in best.tolist())


def fit_nonnegative(at: Floats, seconds: Floats) -> Floats:
    """Coefficients [num_columns] >= 0 that minimize the relative error of at @ them.

    at: [num_points, num_columns], seconds: [num_points], above 0.
    """
    scale = np.maximum(np.abs(at).max(axis=0), np.finfo(np.float64).tiny)
    scaled = at / scale / seconds[:, None]
    ones = np.ones(len(seconds))
    best: Floats = np.zeros(at.shape[1])
    least = float(len(seconds))
    for columns in _subsets(at.shape[1]):
        found = np.linalg.lstsq(scaled[:, columns], ones, rcond=None)[0]
        if (found < 0).any():
            continue
        left = float(((scaled[:, columns] @ found - 1) ** 2).sum())
        if left < least:
            best, least = np.zeros(at.shape[1]), left
            best[list(columns)] = found
    return np.asarray(best / scale)


def errors_of(predicted: Iterable[float], measured: Iterable[float]) -> Errors:
    """The error of `predicted`, relative to `measured`."""
    off = np.array([p / m - 1 for p, m in zip(predicted, measured, strict=True)])
    sizes = np.sort(np.abs(off))
    if not len(sizes):
        raise ConfigError("no points to compare")

    def rank(share: float) -> float:
        return float(sizes[max(0, -(-len(sizes) * int(100 * share) // 100) - 1)])

    return Errors(rank(0.5), rank(0.95), float(sizes[-1]), float(off.mean()), len(sizes))


def prefill_errors(form: TimingModel, points: Sequence[Prefill]) -> Errors:
    return errors_of((form.prefill_s(n, p) for n, p, _ in points), (s for _, _, s in points))


def decode_errors(form: TimingModel, points: Sequence[Decode]) -> Errors:
    return errors_of((form.decode_s(r, c) for r, c, _ in points), (s for _, _, s in points))


def _seconds(points: Sequence[Prefill] | Sequence[Decode]) -> Floats:
    return np.array([point.seconds for point in points])


def _touched(share: float, num_tokens: int) -> float:
    return float(1.0 - (1.0 - share) ** num_tokens)


def _subsets(num_columns: int) -> Iterable[tuple[int, ...]]:
    for size in range(1, num_columns + 1):
        yield from combinations(range(num_columns), size)


def _two_planes(at: Floats, seconds: Floats, above: npt.NDArray[np.bool_]) -> Floats:
    """The best pair of planes [2, 3] on the way from the first share of the points."""
    best, least = np.zeros((2, at.shape[1])), np.inf
    for _ in range(_MAX_TURNS):
        if min(above.sum(), (~above).sum()) < at.shape[1]:
            break
        planes = np.stack(
            [
                fit_nonnegative(at[above], seconds[above]),
                fit_nonnegative(at[~above], seconds[~above]),
            ]
        )
        misfit = _misfit(at, seconds, planes)
        if misfit < least:
            best, least = planes, misfit
        now = at @ planes[0] > at @ planes[1]
        if (now == above).all():
            break
        above = now
    return best


def _starts(at: Floats) -> Iterable[npt.NDArray[np.bool_]]:
    """Shares of the points to begin with: by rows, context and mean context, at three heights."""
    measures: tuple[Callable[[], Floats], ...] = (
        lambda: at[:, 1],
        lambda: at[:, 2],
        lambda: at[:, 2] / at[:, 1],
    )
    for measure in measures:
        values = measure()
        for share in (0.25, 0.5, 0.75):
            yield values > np.quantile(values, share)


def _misfit(at: Floats, seconds: Floats, planes: Floats) -> float:
    """The root mean square of the relative errors of the largest of `planes` [num_planes, 3]."""
    predicted = (at @ planes.T).max(axis=1)
    return float(np.sqrt(((predicted / seconds - 1) ** 2).mean()))
