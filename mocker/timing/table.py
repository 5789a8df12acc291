"""Tables over one or two axes: made monotone, then interpolated between their points.

Between points the logarithm of the time is linear in the logarithm of each axis, so that power laws
are met exactly and the relative error is small everywhere. Outside a value is that of the nearest edge.
Noisy measurements are first made monotone by isotonic regression (pool adjacent violators), along both
axes by turns with Dykstra's corrections, which leads to the nearest monotone table in least squares of
the logarithms. A table that is monotone already stays as it is, exactly.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.protocol.errors import ConfigError

Floats: TypeAlias = npt.NDArray[np.float64]

_ROUNDS = 200
_TOLERANCE = 1e-12


class Axis:
    """Increasing points, and where a value lies between them on a logarithmic scale.

    An axis that begins at 0 is scaled as log(1 + x / its second point): linear near 0.
    Raises ConfigError naming the axis and the value that is wrong.
    """

    __slots__ = ("_at", "points", "unit")

    def __init__(self, name: str, points: Sequence[float]) -> None:
        self.points = checked(name, points, least=0.0)
        for i, (before, after) in enumerate(zip(self.points, self.points[1:], strict=False)):
            if after <= before:
                raise ConfigError(f"{name}[{i + 1}]={after:g} after {before:g}: must increase")
        self.unit = 0.0
        if self.points[0] == 0:
            self.unit = self.points[1] if len(self.points) > 1 else 1.0
        self._at = [self._scale(point) for point in self.points]

    def __len__(self) -> int:
        return len(self.points)

    def locate(self, value: float) -> tuple[int, float]:
        """The point at or before `value`, and how far it is on to the next, from 0 to below 1."""
        points = self.points
        if value <= points[0]:
            return 0, 0.0
        if value >= points[-1]:
            return len(points) - 1, 0.0
        i = bisect_right(points, value) - 1
        at = self._at
        return i, (self._scale(value) - at[i]) / (at[i + 1] - at[i])

    def _scale(self, value: float) -> float:
        return log2(1.0 + value / self.unit) if self.unit else log2(value)


@dataclass(frozen=True, slots=True)
class Table:
    """Seconds over two axes. `seconds[i][j]` belongs to points i of `first` and j of `second`."""

    first: Axis
    second: Axis
    seconds: tuple[tuple[float, ...], ...]
    _logs: tuple[tuple[float, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        logs = tuple(tuple(log2(value) for value in row) for row in self.seconds)
        object.__setattr__(self, "_logs", logs)

    @classmethod
    def fitted(
        cls, name: str, first: Axis, second: Axis, seconds: Sequence[Sequence[float]]
    ) -> "Table":
        """The monotone table nearest to `seconds`. Raises ConfigError naming what is wrong."""
        if len(seconds) != len(first):
            raise ConfigError(f"{name}: {len(seconds)} rows, its axis has {len(first)} points")
        rows = []
        for i, row in enumerate(seconds):
            if len(row) != len(second):
                raise ConfigError(f"{name}[{i}]: {len(row)} values, its axis has {len(second)}")
            rows.append(checked(f"{name}[{i}]", row, above=0.0))
        array = np.array(rows)
        if (np.diff(array, axis=0) < 0).any() or (np.diff(array, axis=1) < 0).any():
            array = np.exp2(monotone(np.log2(array)))
        return cls(first, second, tuple(tuple(row) for row in array.tolist()))

    def __call__(self, x: float, y: float) -> float:
        i, s = self.first.locate(x)
        j, t = self.second.locate(y)
        if not s and not t:
            return self.seconds[i][j]
        low = self._log_at(i, j, t)
        return float(2.0 ** (low + s * (self._log_at(i + 1, j, t) - low) if s else low))

    def curve(self, x: float) -> list[float]:
        """log2 of the seconds at `x` over the points of the second axis."""
        i, s = self.first.locate(x)
        low = self._logs[i]
        if not s:
            return list(low)
        return [a + s * (b - a) for a, b in zip(low, self._logs[i + 1], strict=True)]

    def _log_at(self, i: int, j: int, t: float) -> float:
        row = self._logs[i]
        return row[j] + t * (row[j + 1] - row[j]) if t else row[j]


def checked(
    name: str, values: Sequence[float], *, least: float | None = None, above: float | None = None
) -> tuple[float, ...]:
    """`values` as floats. Raises ConfigError naming the first that can't be, or that there is none."""
    if not len(values):
        raise ConfigError(f"{name}=[]: give at least one value")
    found = tuple(float(value) for value in values)
    for i, value in enumerate(found):
        if not -np.inf < value < np.inf:
            raise ConfigError(f"{name}[{i}]={value}: must be a finite number")
        if least is not None and value < least:
            raise ConfigError(f"{name}[{i}]={value:g}: must be {least:g} or more")
        if above is not None and value <= above:
            raise ConfigError(f"{name}[{i}]={value:g}: must be more than {above:g}")
    return found


def monotone(values: Floats) -> Floats:
    """The array nearest to `values` [n] or [n, m] that does not fall along any axis."""
    if values.ndim == 1:
        return _pooled(values)
    fitted = values.copy()
    corrections = [np.zeros_like(values), np.zeros_like(values)]
    for _ in range(_ROUNDS):
        before = fitted
        for axis, correction in enumerate(corrections):
            wanted = fitted + correction
            fitted = np.apply_along_axis(_pooled, axis, wanted)
            corrections[axis] = wanted - fitted
        if np.abs(fitted - before).max() < _TOLERANCE:
            break
    # What is left of violations is tiny: the running maximum removes it.
    return np.maximum.accumulate(np.maximum.accumulate(fitted, axis=0), axis=1)


def _pooled(values: Floats) -> Floats:
    """Pool adjacent violators: neighbours that fall are replaced by their mean."""
    means: list[float] = []
    sizes: list[int] = []
    for value in values.tolist():
        means.append(value)
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, size = means.pop(), sizes.pop()
            total = sizes[-1] + size
            means[-1] = (means[-1] * sizes[-1] + mean * size) / total
            sizes[-1] = total
    return np.repeat(means, sizes)
