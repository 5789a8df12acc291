"""Figures of one trace, or of several laid over each other: lengths, arrivals, reuse, tree, sessions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from mallee.figures.charts import Line, draw_cdf
from mallee.figures.page import Picture
from mallee.figures.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    Look,
    new_figure,
    plain_log_ticks,
    save_png,
    styled,
    to_svg,
)
from mallee.figures.text import percent
from mallee.synth.analysis.analysis import Analysis
from mallee.traces.numbers import Floats, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Traces: TypeAlias = Mapping[str, Analysis]
"""By name; of several the first is the source, which is drawn in ink."""

SOURCE: Final = "source"
_TIMES: Final = 120  # points over the length of a trace
_LOOKS: Final = (
    Look(BLUE, (0, (5, 1.5)), "s"),
    Look(ORANGE, (0, (2, 1)), "D"),
    Look(GREEN, (0, (5, 1.5, 1, 1.5)), "^"),
)
_RELATIONS: Final = ("extends", "rolls_back", "diverges", "resets", "returns")
_Of: TypeAlias = Callable[[Analysis], Floats]


def figures_of(traces: Traces) -> dict[str, "Figure"]:
    """Every figure that the first trace gives, by the name of its file."""
    first = next(iter(traces.values()))
    has_turns = len(first.turns_per_session) < first.num_requests and first.forks is None
    wanted: dict[str, tuple[bool, Callable[[Traces], Figure]]] = {
        "lengths": (True, lengths_figure),
        "arrivals": (first.duration_s > 0, arrivals_figure),
        "dispersion": (bool(first.dispersion), dispersion_figure),
        "cache": (first.num_blocks > 0, cache_figure),
        "tree": (first.num_blocks > 0, tree_figure),
        "reuse": (len(first.reuse_gap_requests) > 0 and first.forks is None, reuse_figure),
        "sessions": (has_turns, sessions_figure),
        "hierarchy": (len(first.join_wait_s) > 0 and first.forks is None, hierarchy_figure),
        "forks": (first.forks is not None, forks_figure),
    }
    return {name: draw(traces) for name, (is_there, draw) in wanted.items() if is_there}


def pictures_of(
    traces: Traces, captions: Mapping[str, str], folder: Path
) -> Iterator[tuple[Path, Picture]]:
    """Every figure as a PNG in `folder`, and as a picture of a page. Raises OSError."""
    for name, figure in figures_of(traces).items():
        path = folder / f"{name}.png"
        save_png(figure, path)
        title = figure.axes[0].get_title(loc="left")
        yield path, Picture(to_svg(figure), title, captions[name])


@styled
def lengths_figure(traces: Traces) -> "Figure":
    """Tokens of prompts, of their new part, and of answers."""
    figure, axes = _panels(3)
    _cdf(axes[0], traces, lambda a: a.isl, "Prompt", "tokens")
    _cdf(axes[1], traces, lambda a: a.new_tokens, "New in the prompt", "tokens")
    _cdf(axes[2], traces, lambda a: a.osl, "Answer", "tokens")
    return _finished(figure)


@styled
def arrivals_figure(traces: Traces) -> "Figure":
    """Rate over time, and gaps."""
    figure, (left, right) = _panels(2)
    first = next(iter(traces.values()))
    size, unit = _time_unit(first.duration_s)
    for i, (name, each) in enumerate(traces.items()):
        at_s = np.concatenate([[0.0], np.cumsum(each.gaps_s)])
        counts, edges = np.histogram(at_s, bins=min(_TIMES, max(8, len(at_s) // 8)))
        left.stairs(counts / np.diff(edges), edges / size, color=_look(i).color, label=name)
    what = "requests" if first.forks is None else "trees"
    left.set_title(f"Arrivals of {what} over time")
    left.set_xlabel(f"time ({unit})")
    left.set_ylabel(f"{what}/s")
    left.set_ylim(bottom=0)
    _cdf(right, traces, lambda a: a.gaps_s, "Gaps between arrivals", "seconds", "gaps")
    return _finished(figure)


@styled
def dispersion_figure(traces: Traces) -> "Figure":
    """Dispersion of counts of arrivals against chance, and correlation of neighbours."""
    figure, (left, right) = _panels(2)
    bins = list(next(iter(traces.values())).dispersion)
    places = np.arange(len(bins))
    heights = [[each.dispersion.get(b, np.nan) for b in bins] for each in traces.values()]
    _bars(left, traces, places, heights)
    left.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    left.set_yscale("log")
    shown = np.array(heights)[np.array(heights) > 0]
    left.set_ylim(0.5 * min(1.0, shown.min(initial=1.0)), 3.0 * max(1.0, shown.max(initial=1.0)))
    plain_log_ticks(left, "y")
    left.set_title("Variance / mean of counts")
    related = [[each.autocorrelation.get(b, 0.0) for b in bins] for each in traces.values()]
    _bars(right, traces, places, np.nan_to_num(related).tolist())
    right.axhline(0.0, color=INK, linewidth=0.8)
    right.set_title("Correlation with the next count")
    for axes in (left, right):
        axes.set_xticks(places, [f"{bin_s:g} s" for bin_s in bins])
        axes.set_xlabel("counted in")
    return _finished(figure)


@styled
def cache_figure(traces: Traces) -> "Figure":
    """LRU hit rate at every cache size; marked at the sizes that are compared."""
    figure, (axes,) = _panels(1)
    first = next(iter(traces.values()))
    sizes = np.unique(np.geomspace(1, max(1, first.num_blocks), 200).round())
    for i, (name, each) in enumerate(traces.items()):
        label = "plain LRU" if len(traces) == 1 else name
        look = _look(i)
        axes.plot(
            sizes, 100 * each.hits_at(sizes), color=look.color, linestyle=look.dash, label=label
        )
        axes.plot(
            first.mrc_sizes, 100 * each.hits_at(first.mrc_sizes), look.marker, color=look.color
        )
    if len(traces) == 1:
        engine = 100 * first.engine_curve.hits_at(sizes)
        axes.plot(
            sizes, engine, color=ORANGE, linestyle=(0, (5, 1.5)), label="ends of prompts first"
        )
        axes.axhline(100 * first.curve.ideal, color=INK, linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(
            f"nothing evicted: {percent(first.curve.ideal)}",
            (0.01, 100 * first.curve.ideal),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, 4),
            textcoords="offset points",
        )
    axes.set_xscale("log")
    plain_log_ticks(axes, "x")
    axes.set_ylim(0, max(5.0, min(108.0, 115 * first.curve.ideal)))
    axes.set_title("LRU hit rate by cache size")
    axes.set_xlabel(f"cache (blocks of {first.block_size} tokens)")
    axes.set_ylabel("blocks hit (%)")
    axes.legend(loc="center left")
    return figure


@styled
def reuse_figure(traces: Traces) -> "Figure":
    """Time and requests between two uses of a prefix."""
    figure, (left, right) = _panels(2)
    _cdf(left, traces, lambda a: a.reuse_gap_s, "Time since last use", "seconds")
    _cdf(right, traces, lambda a: a.reuse_gap_requests, "Requests since last use", "requests")
    return _finished(figure)


@styled
def tree_figure(traces: Traces) -> "Figure":
    """Branches of the tree by width and by depth, in doublings."""
    figure, (left, right) = _panels(2)
    unit = "blocks" if next(iter(traces.values())).forks is None else "requests"
    _doublings(left, traces, lambda a: a.branch_widths, "Branches by width", "children")
    _doublings(
        right, traces, lambda a: a.branch_depths, "Branches by depth", f"{unit} from the root"
    )
    return _finished(figure)


@styled
def sessions_figure(traces: Traces) -> "Figure":
    """Lengths of sessions, and relations of turns to the ones before."""
    figure, (left, right) = _panels(2)
    _cdf(
        left, traces, lambda a: a.turns_per_session, "Requests of a session", "requests", "sessions"
    )
    heights = [
        [100 * getattr(a.relations, name) / max(1, a.relations.total) for name in _RELATIONS]
        for a in traces.values()
    ]
    places = np.arange(len(_RELATIONS))
    _bars(right, traces, places, heights)
    right.set_xticks(places, [name.replace("_", " ") for name in _RELATIONS])
    right.set_title("Relation of a turn to the one before")
    right.set_ylabel("turns (%)")
    return _finished(figure)


@styled
def hierarchy_figure(traces: Traces) -> "Figure":
    """Threads that a call spawns, and the time until they are joined."""
    figure, (left, right) = _panels(2)
    _doublings(
        left, traces, lambda a: a.children_per_spawn, "Threads that a call spawns", "threads"
    )
    _cdf(right, traces, lambda a: a.spawn_wait_s, "From spawn to join", "seconds", "joins")
    return _finished(figure)


@styled
def forks_figure(traces: Traces) -> "Figure":
    """Forks of a request, and depth of leaves."""
    figure, (left, right) = _panels(2)
    empty = np.empty(0)
    _doublings(
        left,
        traces,
        lambda a: empty if a.forks is None else a.forks.widths,
        "Forks of a request that has any",
        "forks",
    )
    _doublings(
        right,
        traces,
        lambda a: empty if a.forks is None else a.forks.leaf_depths,
        "Depth of leaves",
        "requests from the root",
    )
    return _finished(figure)


def _panels(num: int) -> "tuple[Figure, list[Axes]]":
    figure = new_figure(*{1: (6.4, 4.2), 2: (7.8, 4.4), 3: (10.5, 4.2)}[num])
    return figure, list(np.atleast_1d(figure.subplots(1, num)))


def _look(place: int) -> Look:
    return _LOOKS[(place - 1) % len(_LOOKS)] if place else Look(INK, "-", "o")


def _cdf(
    axes: "Axes", traces: Traces, of: _Of, title: str, xlabel: str, what: str = "requests"
) -> None:
    lines = [Line(name, of(each), look=_look(i)) for i, (name, each) in enumerate(traces.items())]
    draw_cdf(axes, lines[::-1])  # the first is drawn on top
    for line in axes.lines if len(traces) > 1 else []:
        if line.get_label() == SOURCE:  # a broad band under lines that would hide it
            line.set(linewidth=5.0, alpha=0.3, zorder=1)
    axes.set_title(title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(f"{what} (%)")


def _doublings(axes: "Axes", traces: Traces, of: _Of, title: str, xlabel: str) -> None:
    """Number of values between one power of two and the next."""
    powers = [np.log2(np.maximum(of(each), 1)).astype(np.int64) for each in traces.values()]
    most = max(int(each.max(initial=0)) for each in powers)
    counts = [np.bincount(each, minlength=most + 1).tolist() for each in powers]
    places = np.arange(most + 1)
    _bars(axes, traces, places, counts)
    step = -(-len(places) // 8)
    axes.set_xticks(places[::step], [f"{2**power:,}" for power in places[::step].tolist()])
    if any(map(any, counts)):
        axes.set_yscale("log")
        plain_log_ticks(axes, "y")
        axes.set_ylim(bottom=0.7)
    axes.set_title(title)
    axes.set_xlabel(f"{xlabel}, from")


def _bars(axes: "Axes", traces: Traces, places: Ints, heights: Sequence[Sequence[float]]) -> None:
    """A bar of each trace at each place."""
    width = 0.84 / len(traces)
    for i, (name, each) in enumerate(zip(traces, heights, strict=True)):
        at = places + width * (i - (len(traces) - 1) / 2)
        axes.bar(at, each, width=0.9 * width, color=_look(i).color, label=name)
    axes.grid(visible=False, axis="x")


def _finished(figure: "Figure") -> "Figure":
    """One legend for panels that show the same traces; none for a single trace."""
    for axes in figure.axes:
        legend: Any = axes.get_legend()
        if legend is not None:
            legend.remove()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _time_unit(duration_s: float) -> tuple[float, str]:
    """Seconds, minutes or hours, whichever reads well."""
    for limit, size, unit in ((300.0, 1.0, "s"), (3 * 3600.0, 60.0, "min")):
        if duration_s <= limit:
            return size, unit
    return 3600.0, "h"
