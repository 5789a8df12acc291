"""Figures of one trace: lengths, arrivals, reuse, the cache curve, its tree."""

from typing import TYPE_CHECKING, Final

import numpy as np

from mallee.figures.charts import Line, draw_cdf
from mallee.figures.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    RED,
    Look,
    new_figure,
    plain_log_ticks,
    styled,
)
from mallee.figures.text import percent
from mallee.synth.analysis.analysis import Analysis
from mallee.synth.analysis.session_charts import forks_figure, hierarchy_figure, sessions_figure
from mallee.traces.numbers import Floats, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_DEPTHS: Final = 60  # bars over the depth of a tree
_TIMES: Final = 120  # points over the length of a trace
_WIDE: Final = (7.8, 4.6)  # inches, of figures with two panels

_FIRST = Look(BLUE, "-", "o")
_SECOND = Look(ORANGE, (0, (5, 1.5)), "")
_THIRD = Look(GREEN, (0, (2, 1)), "")


def figures_of(analysis: Analysis) -> dict[str, "Figure"]:
    """Every figure that the trace gives, by the name of its file."""
    found = {"lengths": lengths_figure(analysis)}
    if analysis.duration_s > 0:
        found["arrivals"] = arrivals_figure(analysis)
    if analysis.dispersion:
        found["dispersion"] = dispersion_figure(analysis)
    if analysis.num_blocks:
        found["cache"] = cache_figure(analysis)
        found["tree"] = tree_figure(analysis)
    if len(analysis.reuse_gap_requests) and analysis.forks is None:
        found["reuse"] = reuse_figure(analysis)
    if len(analysis.turns_per_session) < analysis.num_requests and analysis.forks is None:
        found["sessions"] = sessions_figure(analysis)
    if len(analysis.join_wait_s) and analysis.forks is None:
        found["hierarchy"] = hierarchy_figure(analysis)
    if analysis.forks is not None:
        found["forks"] = forks_figure(analysis.forks)
    return found


@styled
def lengths_figure(analysis: Analysis) -> "Figure":
    """Tokens of prompts, of what is new in them, and of answers."""
    figure = new_figure()
    axes = figure.subplots()
    draw_cdf(
        axes,
        [
            Line("prompt", analysis.isl, look=_FIRST),
            Line("new in the prompt", analysis.new_tokens, look=_SECOND),
            Line("answer", analysis.osl, look=_THIRD),
        ],
    )
    axes.legend(loc="best")
    axes.set_title("Tokens of a request")
    axes.set_xlabel("tokens")
    return figure


@styled
def arrivals_figure(analysis: Analysis) -> "Figure":
    """Requests a second over time, above how much of their prompts had been seen."""
    figure = new_figure()
    has_hits = not np.isnan(analysis.hit_windows).all() and analysis.forks is None
    above, *below = np.atleast_1d(
        figure.subplots(1 + has_hits, 1, sharex=True, height_ratios=[2, 1][: 1 + has_hits])
    )
    at_s = np.concatenate([[0.0], np.cumsum(analysis.gaps_s)])
    counts, edges = np.histogram(at_s, bins=min(_TIMES, max(8, len(at_s) // 8)))
    scale, unit = _time_unit(analysis.duration_s)
    rate = counts / np.diff(edges)
    above.stairs(rate, edges / scale, fill=True, color=BLUE, alpha=0.3)
    above.stairs(rate, edges / scale, baseline=None, color=BLUE, linewidth=1.3)
    above.set_ylim(bottom=0)
    what = "trees" if analysis.forks is not None else "requests"
    above.set_ylabel(f"{what}/s")
    above.set_title(f"Arrivals of {what} over time")
    for axes in below:
        windows = analysis.hit_windows
        places = np.linspace(0, len(at_s), len(windows) + 1).astype(int)[1:] - 1
        axes.plot(at_s[places] / scale, 100 * windows, color=GREEN, linewidth=1.5)
        axes.set_ylim(0, 105)
        axes.set_ylabel("seen before (%)")
    (below[-1] if below else above).set_xlabel(f"time ({unit})")
    return figure


@styled
def dispersion_figure(analysis: Analysis) -> "Figure":
    """How much more counts of arrivals vary than by chance, and for how long rates last."""
    figure = new_figure(*_WIDE)
    left, right = figure.subplots(1, 2)
    names = [f"{width:g} s" for width in analysis.dispersion]
    places = np.arange(len(names))
    values = np.array(list(analysis.dispersion.values()))
    left.bar(places, values, color=BLUE, width=0.6)
    left.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    left.set_yscale("log")
    shown = values[values > 0]
    left.set_ylim(0.5 * min(1.0, shown.min(initial=1.0)), 3.0 * max(1.0, shown.max(initial=1.0)))
    plain_log_ticks(left, "y")
    left.set_title("Variance / mean of counts")
    _label(left, places, values)
    related = np.array(list(analysis.autocorrelation.values()))
    right.bar(places, np.nan_to_num(related), color=ORANGE, width=0.6)
    right.axhline(0.0, color=INK, linewidth=0.8)
    right.set_ylim(1.2 * float(np.nanmin(related, initial=0.0)) - 0.1, 1.12)
    right.set_title("Correlation with the next count")
    _label(right, places, related)
    for axes in (left, right):
        axes.set_xticks(places, names)
        axes.set_xlabel("counted in")
        axes.grid(visible=False, axis="x")
    return figure


def _label(axes: "Axes", places: Ints, values: Floats) -> None:
    """Each bar's value above it."""
    for place, value in zip(places.tolist(), values.tolist(), strict=True):
        if np.isfinite(value):
            text = f"{value:.2f}" if abs(value) < 10 else f"{value:,.0f}"
            up = (0, 3) if value >= 0 else (0, -12)
            axes.annotate(text, (place, value), xytext=up, textcoords="offset points", ha="center")


@styled
def cache_figure(analysis: Analysis) -> "Figure":
    """LRU hit rate at every cache size, and what a cache without end would hit."""
    figure = new_figure()
    axes = figure.subplots()
    curve = analysis.curve
    sizes = np.unique(np.geomspace(1, curve.num_blocks, 200).round())
    axes.plot(sizes, 100 * curve.hits_at(sizes), color=BLUE, label="plain LRU", zorder=3)
    axes.plot(
        sizes,
        100 * analysis.engine_curve.hits_at(sizes),
        color=ORANGE,
        linestyle=(0, (5, 1.5)),
        label="ends of prompts first",
    )
    marks = analysis.mrc_sizes
    axes.plot(marks, 100 * curve.hits_at(marks), "o", color=BLUE, zorder=3)
    ideal = 100 * curve.ideal
    axes.axhline(ideal, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        f"nothing evicted: {percent(curve.ideal)}",
        (0.01, ideal),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 4),
        textcoords="offset points",
    )
    axes.set_xscale("log")
    plain_log_ticks(axes, "x")
    axes.set_ylim(0, max(5.0, min(108.0, 1.15 * ideal)))
    axes.legend(loc="center left")
    axes.set_title("LRU hit rate by cache size")
    axes.set_xlabel(f"cache (blocks of {analysis.block_size} tokens)")
    axes.set_ylabel("blocks hit (%)")
    return figure


@styled
def reuse_figure(analysis: Analysis) -> "Figure":
    """How long after its last use a prefix is used again."""
    from matplotlib.ticker import LogLocator

    figure = new_figure(*_WIDE)
    left, right = figure.subplots(1, 2, sharey=True)
    draw_cdf(left, [Line("", analysis.reuse_gap_s, look=_FIRST)])
    left.set_xlabel("seconds")
    left.set_title("Time since last use")
    draw_cdf(right, [Line("", analysis.reuse_gap_requests, look=_SECOND)])
    right.set_xlabel("requests")
    right.set_title("Requests since last use")
    right.set_ylabel("")
    left.set_ylabel("requests that hit (%)")
    for axes in (left, right):
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
    return figure


@styled
def tree_figure(analysis: Analysis) -> "Figure":
    """Where the prefix tree is wide, and where it branches."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(*_WIDE)
    left, right = figure.subplots(1, 2)
    top = float(analysis.depths.max())
    width = max(1, round(top / _DEPTHS))
    edges = np.arange(0.5, top + width + 0.5, width)
    counts = np.histogram(analysis.depths, edges)[0] / width
    left.stairs(counts, edges, fill=True, color=BLUE, alpha=0.3)
    left.stairs(counts, edges, baseline=None, color=BLUE, linewidth=1.3)
    left.set_yscale("log")
    left.set_ylim(bottom=0.7 * float(counts[counts > 0].min()))
    plain_log_ticks(left, "y")
    left.set_title("Blocks at each depth")
    left.set_xlabel("blocks from the root")
    left.set_ylabel("distinct blocks")
    if len(analysis.branch_widths):
        rng = np.random.default_rng(0)  # points of small whole numbers, moved apart to be seen
        spread = np.exp(rng.uniform(-0.12, 0.12, len(analysis.branch_widths)))
        right.plot(
            analysis.branch_depths,
            analysis.branch_widths * spread,
            "o",
            color=RED,
            markersize=2.5,
            alpha=0.35,
            markeredgewidth=0,
            rasterized=True,
        )
        right.set_yscale("log")
        right.set_ylim(bottom=1.6)
        plain_log_ticks(right, "y")
    is_forks = analysis.forks is not None
    right.set_title("Requests with several forks" if is_forks else "Blocks that several follow")
    right.set_xlabel("requests from the root" if is_forks else "blocks from the root")
    right.set_ylabel("children")
    right.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    return figure


def _time_unit(duration_s: float) -> tuple[float, str]:
    """Seconds, minutes or hours, whatever reads well."""
    for limit, size, unit in ((300.0, 1.0, "s"), (3 * 3600.0, 60.0, "min")):
        if duration_s <= limit:
            return size, unit
    return 3600.0, "h"
