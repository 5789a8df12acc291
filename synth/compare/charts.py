"""Figures that lay traces over each other: the source in ink, what was compared with it in colour."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from mallee.figures.charts import Line, draw_cdf
from mallee.figures.style import BLUE, GREEN, INK, ORANGE, Look, new_figure, plain_log_ticks, styled
from mallee.synth.analysis.analysis import Analysis
from mallee.traces.numbers import Floats, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE: Final = (7.8, 4.2)  # inches, of figures with two panels
SOURCE: Final = "source"  # its name in figures
_SOURCE: Final = Look(INK, "-", "o")
_OTHERS: Final = (
    Look(BLUE, (0, (5, 1.5)), "s"),
    Look(ORANGE, (0, (2, 1)), "D"),
    Look(GREEN, (0, (5, 1.5, 1, 1.5)), "^"),
)

Traces = Mapping[str, Analysis]
"""By name, the source first; of a model one seed."""


def figures_of(traces: Traces) -> dict[str, "Figure"]:
    """Every figure that the source gives, by the name of its file."""
    source = next(iter(traces.values()))
    found = {"lengths": lengths_figure(traces)}
    if len(source.gaps_s):
        found["arrivals"] = arrivals_figure(traces)
    if source.curve.num_references:
        found["cache"] = cache_figure(traces)
    if len(source.reuse_gap_s):
        found["reuse"] = reuse_figure(traces)
    if len(source.branch_widths):
        found["tree"] = tree_figure(traces)
    if len(source.turns_per_session) > 1:
        found["sessions"] = sessions_figure(traces)
    return found


@styled
def lengths_figure(traces: Traces) -> "Figure":
    """Prompts, what is new in them, answers."""
    figure = new_figure(10.5, 4.2)
    axes = figure.subplots(1, 3, sharey=True)
    _cdf(axes[0], traces, lambda a: a.isl, "Prompt", "tokens")
    _cdf(axes[1], traces, lambda a: a.new_tokens, "New in the prompt", "tokens")
    _cdf(axes[2], traces, lambda a: a.osl, "Answer", "tokens")
    for other in axes[1:]:
        other.set_ylabel("")
    _legend_below(figure)
    return figure


@styled
def arrivals_figure(traces: Traces) -> "Figure":
    """Gaps, and how much more than by chance counts vary."""
    figure = new_figure(*_WIDE)
    left, right = figure.subplots(1, 2)
    _cdf(left, traces, lambda a: a.gaps_s, "Gaps between arrivals", "seconds")
    left.set_ylabel("gaps (%)")
    bins = list(next(iter(traces.values())).dispersion)
    places = np.arange(len(bins))
    heights = [[each.dispersion.get(b, np.nan) for b in bins] for each in traces.values()]
    _bars(right, traces, places, heights)
    if bins:
        right.axhline(1.0, color=INK, linewidth=1, linestyle=(0, (1, 2)))
        right.set_ylim(0.5 * min(1.0, float(np.nanmin(heights))))
    right.set_xticks(places, [f"{bin_s:g} s" for bin_s in bins])
    right.set_title("Variance / mean of counts")
    right.set_xlabel("counted in")
    _legend_below(figure)
    return figure


@styled
def cache_figure(traces: Traces) -> "Figure":
    """LRU hit rates at every size up to all of the source's blocks; marked where they are compared."""
    figure = new_figure()
    axes = figure.subplots()
    source = next(iter(traces.values()))
    sizes = np.unique(np.geomspace(1, source.num_blocks, 200).round())
    for i, (name, analysis) in enumerate(traces.items()):
        look = _look(i)
        axes.plot(
            sizes, 100 * analysis.hits_at(sizes), color=look.color, linestyle=look.dash, label=name
        )
        at = source.mrc_sizes
        axes.plot(at, 100 * analysis.hits_at(at), look.marker, color=look.color)
    axes.set_xscale("log")
    plain_log_ticks(axes, "x")
    axes.set_ylim(bottom=0)
    axes.set_title("LRU hit rate by cache size")
    axes.set_xlabel(f"cache (blocks of {source.block_size} tokens)")
    axes.set_ylabel("blocks hit (%)")
    _source_below(axes)
    axes.legend(loc="upper left")
    return figure


@styled
def reuse_figure(traces: Traces) -> "Figure":
    """How long after its last use a prefix is used again."""
    figure = new_figure(*_WIDE)
    left, right = figure.subplots(1, 2, sharey=True)
    _cdf(left, traces, lambda a: a.reuse_gap_s, "Time since last use", "seconds")
    _cdf(right, traces, lambda a: a.reuse_gap_requests, "Requests since last use", "requests")
    left.set_ylabel("requests that hit (%)")
    right.set_ylabel("")
    _legend_below(figure)
    return figure


@styled
def tree_figure(traces: Traces) -> "Figure":
    """Branches by width and by depth, in doublings."""
    figure = new_figure(*_WIDE)
    left, right = figure.subplots(1, 2)
    _doublings(left, traces, lambda a: a.branch_widths, "Branches by width", "children")
    unit = "requests" if next(iter(traces.values())).forks is not None else "blocks"
    _doublings(
        right, traces, lambda a: a.branch_depths, "Branches by depth", f"{unit} from the root"
    )
    _legend_below(figure)
    return figure


@styled
def sessions_figure(traces: Traces) -> "Figure":
    """Requests of a session."""
    figure = new_figure()
    axes = figure.subplots()
    _cdf(axes, traces, lambda a: a.turns_per_session, "Sessions", "requests of a session")
    axes.set_ylabel("sessions (%)")
    return figure


def _cdf(
    axes: "Axes", traces: Traces, of: Callable[[Analysis], Floats], title: str, xlabel: str
) -> None:
    looks = list(enumerate(traces.items()))
    lines = [Line(name, of(each), look=_look(i)) for i, (name, each) in looks]
    draw_cdf(axes, lines[::-1])  # the first is drawn on top
    _source_below(axes)
    axes.set_title(title)
    axes.set_xlabel(xlabel)


def _source_below(axes: "Axes") -> None:
    """The source as a broad band under lines that would else hide it, or hide behind it."""
    for line in axes.lines:
        if line.get_label() == SOURCE:
            line.set(linewidth=5.0, alpha=0.3, zorder=1)
    if axes.get_legend() is not None:
        _legend(axes)


def _legend(axes: "Axes") -> None:
    handles, labels = _in_order(axes)
    axes.legend(handles, labels, loc="lower right")


def _in_order(axes: "Axes") -> tuple[list[Any], list[str]]:
    """Handles and labels of a legend, the source first."""
    handles, labels = axes.get_legend_handles_labels()
    return (handles, labels) if labels[0] == SOURCE else (handles[::-1], labels[::-1])


def _doublings(
    axes: "Axes", traces: Traces, of: Callable[[Analysis], Floats], title: str, xlabel: str
) -> None:
    """How many values lie between one power of two and the next."""
    places = [np.log2(np.maximum(of(each), 1)).astype(np.int64) for each in traces.values()]
    least = min(int(each.min(initial=1 << 30)) for each in places if len(each))
    most = max(int(each.max(initial=0)) for each in places)
    powers = np.arange(least, most + 1)
    counts = [np.bincount(each, minlength=most + 1)[least:] for each in places]
    _bars(axes, traces, powers, counts)
    step = -(-len(powers) // 8)
    axes.set_xticks(powers[::step], [f"{2**power:,}" for power in powers[::step].tolist()])
    axes.set_ylim(bottom=0.7)
    axes.set_title(title)
    axes.set_xlabel(f"{xlabel}, from")
    axes.set_ylabel("branches")


def _bars(axes: "Axes", traces: Traces, places: Ints, heights: Sequence[npt.ArrayLike]) -> None:
    """A bar of each trace at each place, on a logarithmic scale."""
    width = 0.84 / len(traces)
    for i, (name, each) in enumerate(zip(traces, heights, strict=True)):
        at = places + width * (i - (len(traces) - 1) / 2)
        axes.bar(at, each, width=0.9 * width, color=_look(i).color, label=name)
    axes.set_yscale("log")
    plain_log_ticks(axes, "y")
    axes.grid(visible=False, axis="x")


def _look(place: int) -> Look:
    return _SOURCE if place == 0 else _OTHERS[(place - 1) % len(_OTHERS)]


def _legend_below(figure: "Figure") -> None:
    """One legend for panels that show the same traces."""
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is not None:
            legend.remove()
    handles, labels = _in_order(figure.axes[0])
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
