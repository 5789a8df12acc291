"""Figures of a trace's sessions, and of its trees of forks."""

from typing import TYPE_CHECKING, Final

import numpy as np

from mallee.figures.charts import Line, draw_cdf
from mallee.figures.style import BLUE, GREEN, GREY, ORANGE, RED, Look, new_figure, styled
from mallee.traces.numbers import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mallee.synth.analysis.analysis import Analysis
    from mallee.synth.analysis.forks import Forks
    from mallee.synth.analysis.sessions import Relations

_WIDE: Final = (7.8, 4.6)
_MOST_BARS: Final = 24

_FIRST = Look(BLUE, "-", "")
_SECOND = Look(ORANGE, (0, (5, 1.5)), "")


@styled
def sessions_figure(analysis: "Analysis") -> "Figure":
    """How long sessions are, and how a turn relates to the one before it."""
    figure = new_figure(*_WIDE)
    left, right = figure.subplots(1, 2)
    lines = [Line("session", analysis.turns_per_session, look=_FIRST)]
    if len(analysis.turns_per_line) > len(analysis.turns_per_session):
        lines.append(Line("line of calls", analysis.turns_per_line, look=_SECOND))
    draw_cdf(left, lines)
    left.set_title("Requests of a session")
    left.set_xlabel("requests")
    left.set_ylabel("sessions (%)")
    _draw_relations(right, analysis.relations)
    return figure


def _draw_relations(axes: "Axes", relations: "Relations") -> None:
    names = ("extends", "rolls back", "diverges", "resets", "returns")
    counts = (
        *(relations.extends, relations.rolls_back, relations.diverges, relations.resets),
        relations.returns,
    )
    shares = 100 * np.array(counts) / max(1, relations.total)
    places = np.arange(len(names))[::-1]
    axes.barh(places, shares, color=[BLUE, ORANGE, RED, GREY, GREEN], height=0.6)
    axes.set_yticks(places, names)
    axes.set_xlim(0, 115)
    axes.set_xticks([0, 25, 50, 75, 100])
    for place, share in zip(places.tolist(), shares.tolist(), strict=True):
        axes.annotate(
            f"{share:.2f} %" if share < 10 else f"{share:.1f} %",
            (share, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.grid(visible=False, axis="y")
    axes.set_title("What a turn does with the one before")
    axes.set_xlabel("turns (%)")


@styled
def hierarchy_figure(analysis: "Analysis") -> "Figure":
    """How many lines of calls one call spawns, and how long it takes until they are joined."""
    figure = new_figure(*_WIDE)
    left, right = figure.subplots(1, 2)
    _draw_counts(left, analysis.children_per_spawn, BLUE)
    left.set_title("Lines that a call spawns")
    left.set_xlabel("lines")
    left.set_ylabel("spawns (%)")
    draw_cdf(
        right,
        [
            Line("spawn to join", analysis.spawn_wait_s, look=_FIRST),
            Line("first end to join", analysis.join_wait_s, look=_SECOND),
        ],
    )
    right.set_title("Until they are joined")
    right.set_xlabel("seconds")
    right.set_ylabel("joins (%)")
    return figure


@styled
def forks_figure(forks: "Forks") -> "Figure":
    """How many forks a request has, and how far a depth-first search climbs back."""
    has_climbs = len(forks.backtracks) > 0
    figure = new_figure(*_WIDE)
    left, right = figure.subplots(1, 2)
    _draw_counts(left, forks.widths, BLUE)
    left.set_title("Forks of a request that has any")
    left.set_xlabel("forks")
    left.set_ylabel("requests (%)")
    _draw_counts(right, forks.backtracks if has_climbs else forks.leaf_depths, ORANGE)
    right.set_title("Levels climbed back" if has_climbs else "Depth of leaves")
    right.set_xlabel("levels" if has_climbs else "requests from the root")
    right.set_ylabel("backtracks (%)" if has_climbs else "leaves (%)")
    return figure


def _draw_counts(axes: "Axes", values: "Floats", color: str) -> None:
    """Shares of whole numbers; those beyond what has room are one bar at the end."""
    from matplotlib.ticker import MaxNLocator

    whole = values.astype(np.int64)
    counts = np.bincount(np.minimum(whole, _MOST_BARS))
    shares = 100 * counts[1:] / max(1, len(whole))  # none is 0
    axes.bar(np.arange(1, len(counts)), shares, color=color, width=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if int(whole.max(initial=0)) > _MOST_BARS:
        axes.annotate(
            f"{_MOST_BARS} and more",
            (_MOST_BARS, 100 * counts[-1] / len(whole)),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
        )
    axes.grid(visible=False, axis="x")
