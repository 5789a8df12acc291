"""Figures that compare replays: distributions, curves over a parameter, frontiers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from mallee.figures.style import INK, Look, look_of, new_figure, plain_log_ticks, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CDF_POINTS = 400  # of a line; more are not seen


class Line(NamedTuple):
    """A named line. For distributions `y` is empty and `x` are the values."""

    name: str
    x: npt.NDArray[np.float64]
    y: npt.NDArray[np.float64] = np.empty(0)
    look: Look | None = None


@styled
def cdf_figure(lines: Sequence[Line], *, title: str, xlabel: str) -> "Figure":
    """Share of requests at or below each value; logarithmic, since waits spread over decades."""
    figure = new_figure()
    axes = figure.subplots()
    draw_cdf(axes, lines)
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    return figure


def draw_cdf(axes: "Axes", lines: Sequence[Line]) -> None:
    """The distributions of the lines' x; values below or at 0 count as the smallest positive one."""
    shares = np.linspace(0.0, 1.0, _CDF_POINTS)
    for line in lines:
        values = line.x[np.isfinite(line.x)]
        if not len(values):
            continue
        positive = values[values > 0]
        least = float(positive.min()) if len(positive) else 1e-3
        at = np.maximum(np.quantile(values, shares), least)
        _plot(axes, line, at, 100 * shares)
    axes.set_xscale("log")
    plain_log_ticks(axes, "x")
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 25, 50, 75, 90, 100])
    axes.set_ylabel("requests (%)")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower right")


@styled
def curves_figure(
    lines: Sequence[Line],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    log_y: bool = False,
    ceiling: tuple[float, str] | None = None,
) -> "Figure":
    """y over x by line, x in doublings. `ceiling`: a bound drawn across, with its name."""
    figure = new_figure()
    axes = figure.subplots()
    for line in lines:
        _plot(axes, line, line.x, line.y, marker=True)
    if ceiling is not None:
        value, name = ceiling
        axes.axhline(value, color=INK, linewidth=1, linestyle=(0, (1, 2)))
        axes.text(0.01, value, f"{name}\n", transform=axes.get_yaxis_transform(), va="center")
    doublings(axes, np.unique(np.concatenate([line.x for line in lines])))
    if log_y:
        axes.set_yscale("log")
        plain_log_ticks(axes, "y")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(loc="best")
    return figure


def doublings(axes: "Axes", values: npt.NDArray[np.float64]) -> None:
    """x in doublings, with exactly these values on it."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,.10g}" for value in values])
    axes.xaxis.set_minor_locator(NullLocator())


def _plot(
    axes: "Axes",
    line: Line,
    x: npt.NDArray[np.float64],
    y: npt.NDArray[np.float64],
    *,
    marker: bool = False,
) -> None:
    look = line.look or look_of(line.name)
    axes.plot(
        x,
        y,
        label=line.name.replace("_", " "),
        zorder=3 - 0.01 * len(axes.lines),  # the first line, which the figure is about, on top
        color=look.color,
        linestyle=look.dash,
        marker=look.marker if marker else "",
    )
