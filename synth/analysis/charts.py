"""Figures of one trace, or of several laid over each other: lengths, arrivals, reuse, tree, sessions."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from mallee.figures.charts import Line, draw_cdf
from mallee.figures.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    Look,
    new_figure,
    plain_log_ticks,
    styled,
)
from mallee.figures.text import percent, time_unit
from mallee.synth.analysis.analysis import Analysis
from mallee.synth.analysis.arrivals import Counts
from mallee.synth.analysis.sessions import RELATIONS
from mallee.traces.numbers import Floats, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Traces: TypeAlias = Mapping[str, Analysis]
"""By name; of several the first is the source, which is drawn in ink."""
_Of: TypeAlias = Callable[[Analysis], Floats]
_Panel: TypeAlias = "Callable[[Axes, Traces], None]"

SOURCE: Final = "source"
_TIMES: Final = 120  # points over the length of a trace
_DOTS: Final = (0, (1, 2))
_LOOKS: Final = (
    Look(BLUE, (0, (5, 1.5)), "s"),
    Look(ORANGE, (0, (2, 1)), "D"),
    Look(GREEN, (0, (5, 1.5, 1, 1.5)), "^"),
)
_SIZES: Final = {1: (6.4, 4.2), 2: (7.8, 4.4), 3: (10.5, 4.2)}  # inches, by number of panels


class _Chart(NamedTuple):
    """Panels beside each other, drawn of traces for the first of which `applies`."""

    caption: str
    applies: Callable[[Analysis], bool]
    panels: Sequence[_Panel]


@styled
def figures_of(traces: Traces) -> "dict[str, tuple[Figure, str]]":
    """Every figure that the first trace gives, and its caption, by the name of its file."""
    first = next(iter(traces.values()))
    found = {}
    for name, chart in _CHARTS.items():
        if chart.applies(first):
            figure = new_figure(*_SIZES[len(chart.panels)])
            for axes, draw in zip(
                np.atleast_1d(figure.subplots(1, len(chart.panels))), chart.panels, strict=True
            ):
                draw(axes, traces)
            if len(chart.panels) > 1:
                _share_legend(figure)
            found[name] = figure, chart.caption
    return found


def _share_legend(figure: "Figure") -> None:
    """One legend for panels that show the same traces; none for a single trace."""
    for axes in figure.axes:
        legend: Any = axes.get_legend()
        if legend is not None:
            legend.remove()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _look(place: int) -> Look:
    return _LOOKS[(place - 1) % len(_LOOKS)] if place else Look(INK, "-", "o")


def _cdf(title: str, xlabel: str, of: _Of, what: str = "requests") -> _Panel:
    """Distributions."""

    def draw(axes: "Axes", traces: Traces) -> None:
        lines = [Line(name, of(each), _look(i)) for i, (name, each) in enumerate(traces.items())]
        draw_cdf(axes, lines[::-1])  # the first is drawn on top
        for line in axes.lines if len(traces) > 1 else []:
            if line.get_label() == SOURCE:  # a broad band under lines that would hide it
                line.set(linewidth=5.0, alpha=0.3, zorder=1)
        axes.set(title=title, xlabel=xlabel, ylabel=f"{what} (%)")

    return draw


def _doublings(title: str, xlabel: str, of: _Of) -> _Panel:
    """Number of values between one power of two and the next."""

    def draw(axes: "Axes", traces: Traces) -> None:
        powers = [np.log2(np.maximum(of(each), 1)).astype(np.int64) for each in traces.values()]
        places = np.arange(1 + max(int(each.max(initial=0)) for each in powers))
        counts = [np.bincount(each, minlength=len(places)).tolist() for each in powers]
        _bars(axes, traces, places, counts)
        step = -(-len(places) // 8)
        axes.set_xticks(places[::step], [f"{2**power:,}" for power in places[::step].tolist()])
        if any(map(any, counts)):
            axes.set_yscale("log")
            plain_log_ticks(axes, "y")
            axes.set_ylim(bottom=0.7)
        axes.set(title=title, xlabel=f"{xlabel}, from")

    return draw


def _bars(axes: "Axes", traces: Traces, places: Ints, heights: Sequence[Sequence[float]]) -> None:
    """A bar of each trace at each place."""
    width = 0.84 / len(traces)
    for i, (name, each) in enumerate(zip(traces, heights, strict=True)):
        at = places + width * (i - (len(traces) - 1) / 2)
        axes.bar(at, each, width=0.9 * width, color=_look(i).color, label=name)
    axes.grid(visible=False, axis="x")


def _rate(axes: "Axes", traces: Traces) -> None:
    first = next(iter(traces.values()))
    size, unit = time_unit(first.duration_s)
    for i, (name, each) in enumerate(traces.items()):
        at_s = np.concatenate([[0.0], np.cumsum(each.gaps_s)])
        counts, edges = np.histogram(at_s, bins=min(_TIMES, max(8, len(at_s) // 8)))
        axes.stairs(counts / np.diff(edges), edges / size, color=_look(i).color, label=name)
    what = "requests" if first.forks is None else "trees"
    axes.set(title=f"Arrivals of {what} over time", xlabel=f"time ({unit})", ylabel=f"{what}/s")
    axes.set_ylim(bottom=0)


def _counts(axes: "Axes", traces: Traces, of: Callable[[Counts], float], missing: float) -> Floats:
    """A bar for each width of the first trace's bins; their heights."""
    bins = list(next(iter(traces.values())).counts)
    nothing = Counts(missing, missing)
    heights = [[of(each.counts.get(b, nothing)) for b in bins] for each in traces.values()]
    _bars(axes, traces, np.arange(len(bins)), heights)
    axes.set_xticks(np.arange(len(bins)), [f"{bin_s:g} s" for bin_s in bins])
    axes.set_xlabel("counted in")
    return np.array(heights)


def _dispersion(axes: "Axes", traces: Traces) -> None:
    heights = _counts(axes, traces, lambda each: each.dispersion, np.nan)
    axes.axhline(1.0, color=INK, linewidth=1, linestyle=_DOTS)
    axes.set_yscale("log")
    shown = heights[heights > 0]
    axes.set_ylim(0.5 * min(1.0, shown.min(initial=1.0)), 3.0 * max(1.0, shown.max(initial=1.0)))
    plain_log_ticks(axes, "y")
    axes.set_title("Variance / mean of counts")


def _autocorrelation(axes: "Axes", traces: Traces) -> None:
    _counts(axes, traces, lambda each: float(np.nan_to_num(each.autocorrelation)), 0.0)
    axes.axhline(0.0, color=INK, linewidth=0.8)
    axes.set_title("Correlation with the next count")


def _caches(axes: "Axes", traces: Traces) -> None:
    """LRU hit rate at every cache size; marked at the sizes that are compared."""
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
    ideal = 100 * first.curve.ideal
    if len(traces) == 1:
        engine = 100 * first.engine_curve.hits_at(sizes)
        axes.plot(
            sizes, engine, color=ORANGE, linestyle=(0, (5, 1.5)), label="ends of prompts first"
        )
        axes.axhline(ideal, color=INK, linewidth=1, linestyle=_DOTS)
        axes.annotate(
            f"nothing evicted: {percent(first.curve.ideal)}",
            (0.01, ideal),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, 4),
            textcoords="offset points",
        )
    axes.set_xscale("log")
    plain_log_ticks(axes, "x")
    axes.set_ylim(0, max(5.0, min(108.0, 1.15 * ideal)))
    axes.set_title("LRU hit rate by cache size")
    axes.set_xlabel(f"cache (blocks of {first.block_size} tokens)")
    axes.set_ylabel("blocks hit (%)")
    axes.legend(loc="center left")


def _relations(axes: "Axes", traces: Traces) -> None:
    heights = [
        [100 * a.sessions.relation_share(name) for name in RELATIONS] for a in traces.values()
    ]
    _bars(axes, traces, np.arange(len(RELATIONS)), heights)
    axes.set_xticks(range(len(RELATIONS)), [name.replace("_", " ") for name in RELATIONS])
    axes.set(title="Relation of a turn to the one before", ylabel="turns (%)")


def _forks_of(analysis: Analysis, leaves: bool) -> Floats:
    if analysis.forks is None:
        return np.empty(0)
    return analysis.forks.leaf_depths if leaves else analysis.family.children_per_spawn


def _has_turns(analysis: Analysis) -> bool:
    several = len(analysis.sessions.turns_per_session) < analysis.num_requests
    return several and analysis.forks is None


_CHARTS: Final = {
    "lengths": _Chart(
        "New in a prompt is what no earlier prompt begins with, block by block.",
        lambda a: True,
        (
            _cdf("Prompt", "tokens", lambda a: a.isl),
            _cdf("New in the prompt", "tokens", lambda a: a.new_tokens),
            _cdf("Answer", "tokens", lambda a: a.osl),
        ),
    ),
    "arrivals": _Chart(
        "Arrivals over the trace, and the gaps between them. A fork begins when what it waits for ends:"
        " of requests that fork only the trees arrive.",
        lambda a: a.duration_s > 0,
        (_rate, _cdf("Gaps between arrivals", "seconds", lambda a: a.gaps_s, "gaps")),
    ),
    "dispersion": _Chart(
        "Poisson arrivals have a variance of one mean at every width (dotted) and no correlation. What"
        " rises with the width is a rate that changes.",
        lambda a: bool(a.counts),
        (_dispersion, _autocorrelation),
    ),
    "cache": _Chart(
        "By exact stack distances; the dots are 0.5, 1, 2, 5, 10, 20, 40 and 80 % of the (first trace's)"
        " distinct blocks. Engines evict the ends of prompts first; plain LRU loses their begin.",
        lambda a: a.num_blocks > 0,
        (_caches,),
    ),
    "tree": _Chart(
        "Nodes of the tree with two children and more: blocks, or requests where these fork.",
        lambda a: a.num_blocks > 0,
        (
            _doublings("Branches by width", "children", lambda a: a.branch_widths),
            _doublings("Branches by depth", "nodes from the root", lambda a: a.branch_depths),
        ),
    ),
    "reuse": _Chart(
        "Of requests that hit: since the last request that used the deepest block they hit.",
        lambda a: len(a.reuse_gap_requests) > 0 and a.forks is None,
        (
            _cdf("Time since last use", "seconds", lambda a: a.reuse_gap_s),
            _cdf("Requests since last use", "requests", lambda a: a.reuse_gap_requests),
        ),
    ),
    "sessions": _Chart(
        "By the trace's own ids, or by threads that are found in prompts. A turn extends the one before if"
        " it has all its whole blocks, and rolls back if at least half of them.",
        _has_turns,
        (
            _cdf(
                "Requests of a session",
                "requests",
                lambda a: a.sessions.turns_per_session,
                "sessions",
            ),
            _relations,
        ),
    ),
    "hierarchy": _Chart(
        "A thread ends with its last call's arrival; a call joins what it waits for.",
        lambda a: len(a.family.join_wait_s) > 0 and a.forks is None,
        (
            _doublings(
                "Threads that a call spawns", "threads", lambda a: a.family.children_per_spawn
            ),
            _cdf("From spawn to join", "seconds", lambda a: a.family.spawn_wait_s, "joins"),
        ),
    ),
    "forks": _Chart(
        "Of requests that fork others.",
        lambda a: a.forks is not None,
        (
            _doublings(
                "Forks of a request that has any", "forks", lambda a: _forks_of(a, leaves=False)
            ),
            _doublings(
                "Depth of leaves", "requests from the root", lambda a: _forks_of(a, leaves=True)
            ),
        ),
    ),
}
