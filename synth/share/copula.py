"""How the marks of steps hang together: a Gaussian copula with a memory.

Normal scores of a step's marks are the sum of a part that the line keeps (slow sessions stay slow) and one
that changes, of which a share goes on to the next step. Both have correlations of their own between
marks. What is kept is learned from steps of a line that are far apart.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mallee.synth.share.tables import K
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

_OWN: Final = 50 * K  # steps of a kind that has correlations of its own
_LAGGED: Final = 10 * K
_MOST_CARRIED: Final = 0.95  # or scores would not come back
_FAR: Final = (4, 8, 16)  # steps apart, where only the line itself still ties marks


@dataclass(frozen=True, slots=True)
class Copula:
    """Each [kinds, marks, marks]; a matrix makes scores of independent ones."""

    line: Floats  # the part that a line keeps
    first: Floats  # the part that changes, at a line's first step
    carry: Floats  # what of that part goes on to the next step
    noise: Floats  # what comes new to it

    @property
    def variance(self) -> Floats:
        """Of each kind's marks [kinds, marks]."""
        found: Floats = (self.line**2).sum(-1) + (self.first**2).sum(-1)
        return found


def fit_copula(
    scores: Floats, kind: Ints, previous: Ints, line: Int32s, position: Int32s
) -> Copula:
    """Learns from `scores` [steps, marks]; of those whose kind is below 0, nothing. -1: no step before.

    Kinds of few steps have the correlations of all.
    """
    order = np.lexsort((position, line))
    found = []
    for each in range(int(kind.max()) + 1):
        mine = (kind == each) & (previous >= 0)
        if mine.sum() < _OWN:
            mine = (kind >= 0) & (previous >= 0)
        found.append(_parts(scores, mine, previous, line, order))
    return Copula(*(np.stack(column) for column in zip(*found, strict=True)))


def _parts(
    scores: Floats, mine: Bools, previous: Ints, line: Int32s, order: Ints
) -> tuple[Floats, Floats, Floats, Floats]:
    """Products over lags = what the line keeps + what decays from step to step."""
    num = scores.shape[1]
    none = np.zeros((num, num))
    which = np.flatnonzero(mine)
    if len(which) < K:
        return none, np.eye(num), none, np.eye(num)
    whole = _proper(_products(scores, which, which))
    fars: list[Floats] = []
    for lag in _FAR:
        one, other = order[:-lag], order[lag:]
        is_pair = mine[one] & mine[other] & (line[one] == line[other])
        if is_pair.sum() >= _OWN:
            fars.append(_products(scores, one[is_pair], other[is_pair]))
    kept = _proper(np.stack(fars).mean(0), least=0.0) if fars else none
    changing = _proper(whole - kept, least=0.02)
    carry: Floats = none
    later = which[mine[previous[which]]]
    if len(later) >= _LAGGED:
        carry = (_products(scores, later, previous[later]) - kept) @ np.linalg.inv(changing)
        largest = float(np.abs(np.linalg.eigvals(carry)).max())
        carry = carry * min(1.0, _MOST_CARRIED / max(1e-9, largest))
    noise = _proper(changing - carry @ changing @ carry.T)
    return _root(kept), _root(changing), carry, _root(noise)


def _products(scores: Floats, one: Ints, other: Ints) -> Floats:
    found: Floats = scores[one].T @ scores[other] / len(one)
    return found


def _proper(matrix: npt.NDArray[Any], *, least: float = 1e-6) -> Floats:
    """The nearest symmetric matrix of that kind that is positive definite, about."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    found: Floats = ((vectors * np.maximum(values, least)) @ vectors.T).astype(np.float64)
    return found


def _root(matrix: Floats) -> Floats:
    root: Floats = np.linalg.cholesky(matrix + 1e-9 * np.eye(len(matrix))).astype(np.float64)
    return root
