"""Distributions as figures, in the same form for replays and for traces."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from mallee.figures.style import Look, plain_log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CDF_POINTS = 400  # of a line; more are not seen


class Line(NamedTuple):
    """A named distribution, by its values."""

    name: str
    values: npt.NDArray[np.float64]
    look: Look


def draw_cdf(axes: "Axes", lines: Sequence[Line]) -> None:
    """The share of values at or below each; logarithmic, since waits spread over decades.

    Values below or at 0 count as the smallest positive one.
    """
    shares = np.linspace(0.0, 1.0, _CDF_POINTS)
    for line in lines:
        values = line.values[np.isfinite(line.values)]
        if not len(values):
            continue
        positive = values[values > 0]
        least = float(positive.min()) if len(positive) else 1e-3
        axes.plot(
            np.maximum(np.quantile(values, shares), least),
            100 * shares,
            label=line.name.replace("_", " "),
            zorder=3 - 0.01 * len(axes.lines),  # the first line, which the figure is about, on top
            color=line.look.color,
            linestyle=line.look.dash,
        )
    axes.set_xscale("log")
    plain_log_ticks(axes, "x")
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 25, 50, 75, 90, 100])
    axes.set_ylabel("requests (%)")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower right")
