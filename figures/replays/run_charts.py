"""Figures of one replay: how long requests took, when, what was computed, how workers shared it."""

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from mallee.figures.charts import Line, draw_cdf
from mallee.figures.style import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    Look,
    new_figure,
    plain_log_ticks,
    styled,
)
from mallee.figures.text import time_unit
from mallee.mocker.replay.records import Columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mallee.mocker.replay.result import Result

Floats = npt.NDArray[np.float64]

_TIMES: Final = 60  # points over the length of a replay
_FEW_WORKERS: Final = 64

_TTFT = Look(BLUE, "-", "")
_WHOLE = Look(ORANGE, (0, (5, 1.5)), "")


def run_figures(result: "Result") -> dict[str, "Figure"]:
    """Every figure of one replay, by the name of its file."""
    return {
        "latency": latency_figure(result),
        "over_time": over_time_figure(result),
        "tokens": tokens_figure(result),
        "workers": workers_figure(result),
    }


@styled
def latency_figure(result: "Result") -> "Figure":
    """Distributions of requests' waits: for a worker, for the first token, for the last."""
    columns = result.columns
    figure = new_figure()
    axes = figure.subplots()
    draw_cdf(
        axes,
        [
            Line("first token", 1000 * (columns.first_s - columns.arrival_s), _TTFT),
            Line("last token", 1000 * (columns.end_s - columns.arrival_s), _WHOLE),
        ],
    )
    axes.set(title="How long requests wait", xlabel="since arrival (ms)")
    return figure


@styled
def over_time_figure(result: "Result") -> "Figure":
    """Time to first token by time of arrival, above how many requests are under way."""
    columns = result.columns
    figure = new_figure()
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    edges = time_edges(columns)
    middle, unit = _in_unit((edges[1:] + edges[:-1]) / 2)
    ttft = 1000 * (columns.first_s - columns.arrival_s)
    for share, look, name in ((0.5, _TTFT, "median"), (0.9, _WHOLE, "90 of 100")):
        y = binned_quantile(columns.arrival_s, ttft, edges, share)
        above.plot(middle, y, color=look.color, linestyle=look.dash, label=name)
    above.set_yscale("log")
    above.set_ylabel("first token (ms)")
    low, high = above.get_ylim()
    above.set_ylim(low, high * (high / low) ** 0.2)  # room for the legend
    plain_log_ticks(above, "y")
    above.legend(loc="upper left", ncols=2)
    above.set_title("First tokens and load over time")
    running = running_at(columns, edges)
    below.fill_between(_in_unit(edges)[0], running, color=GREEN, alpha=0.25, linewidth=0)
    below.plot(_in_unit(edges)[0], running, color=GREEN, linewidth=1.3)
    below.set_ylim(bottom=0)
    below.set(ylabel="under way", xlabel=f"virtual time ({unit})")
    return figure


@styled
def tokens_figure(result: "Result") -> "Figure":
    """Prompt tokens found in caches and computed, over time."""
    columns = result.columns
    figure = new_figure()
    axes = figure.subplots()
    edges = time_edges(columns)
    widths = np.diff(edges)
    cached = binned_sum(columns.arrival_s, columns.cached_tokens, edges) / widths / 1000
    computed = binned_sum(columns.arrival_s, columns.computed_tokens, edges) / widths / 1000
    middle, unit = _in_unit((edges[1:] + edges[:-1]) / 2)
    axes.stackplot(
        middle,
        computed,
        cached,
        labels=["computed", "found in a cache"],
        colors=[RED, BLUE],
        alpha=0.75,
        linewidth=0,
    )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", ncols=2)
    axes.set_ylim(0, 1.2 * max(float((cached + computed).max(initial=0.0)), 1e-9))
    axes.set_title("Prompt tokens, by where they came from")
    axes.set_ylabel("thousand tokens a second")
    axes.set_xlabel(f"virtual time ({unit})")
    return figure


@styled
def workers_figure(result: "Result") -> "Figure":
    """Tokens that each worker computed and found cached, the busiest first."""
    from matplotlib.ticker import MaxNLocator

    columns = result.columns
    num = max(1, len(result.workers), int(columns.worker.max(initial=0)) + 1)
    there = columns.worker >= 0
    where = columns.worker[there]
    computed = np.bincount(where, columns.computed_tokens[there], num) / 1e6
    cached = np.bincount(where, columns.cached_tokens[there], num) / 1e6
    order = np.argsort(-(computed + cached), kind="stable")
    figure = new_figure()
    axes = figure.subplots()
    ranks = np.arange(1, num + 1)
    names, colors = ("computed", "in its cache"), (RED, BLUE)
    if num <= _FEW_WORKERS:
        below = np.zeros(num)
        for name, color, tokens in zip(names, colors, (computed, cached), strict=True):
            axes.bar(ranks, tokens[order], bottom=below, color=color, alpha=0.75, label=name)
            below = tokens[order]
        axes.grid(visible=False, axis="x")
    else:
        heights = (computed[order], cached[order])
        axes.stackplot(ranks, *heights, labels=names, colors=colors, alpha=0.75, linewidth=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper right", ncols=2)
    axes.set_ylim(0, 1.2 * max(float((cached + computed).max()), 1e-9))
    axes.set_title("Prompt tokens by worker")
    axes.set_xlabel("workers, the busiest first")
    axes.set_ylabel("million tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


# Sums over time


def time_edges(columns: Columns) -> Floats:
    """The replay's time in equal parts."""
    begin = float(np.min(columns.arrival_s, initial=np.inf))
    end = float(np.nanmax(columns.end_s, initial=-np.inf))
    if not np.isfinite(begin) or not end > begin:
        begin = begin if np.isfinite(begin) else 0.0
        end = begin + 1.0
    return np.linspace(begin, end, _TIMES + 1)


def binned_sum(at: Floats, values: npt.NDArray[np.int64], edges: Floats) -> Floats:
    """Sums of the values that lie in each part."""
    sums: Floats = np.histogram(at, bins=edges, weights=values.astype(np.float64))[0]
    return sums


def binned_quantile(at: Floats, values: Floats, edges: Floats, share: float) -> Floats:
    """The quantile of each part's values, NaN where it has none."""
    place = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(edges) - 2)
    found = np.full(len(edges) - 1, np.nan)
    known = np.isfinite(values)
    for part in np.unique(place[known]):
        found[part] = np.quantile(values[known & (place == part)], share)
    return found


def running_at(columns: Columns, times: Floats) -> Floats:
    """Requests that had arrived and not ended, at each time."""
    begun = np.searchsorted(np.sort(columns.arrival_s), times, side="right")
    ends = np.sort(columns.end_s[np.isfinite(columns.end_s)])
    return (begun - np.searchsorted(ends, times, side="right")).astype(np.float64)


def _in_unit(times_s: Floats) -> tuple[Floats, str]:
    """Seconds, minutes or hours, by the length of the time."""
    size, unit = time_unit(float(times_s.max(initial=0.0)))
    return times_s / size, unit
