"""The figure of a sweep: time to first token and goodput by engines, and the fleets that none dominates."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from mallee.figures.style import INK, look_of, new_figure, plain_log_ticks, styled
from mallee.mocker.sweeps.sweep import Fleet, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTHS: Final = (1.0, 1.7, 2.4, 3.1, 3.8)  # of lines, by KV memory


@styled
def pareto_figure(sweep: Sweep) -> "Figure":
    """TTFT and goodput over engines: a line for each policy and cache size, rings on the frontier."""
    figure = new_figure(9.6, 4.2)
    left, right = figure.subplots(1, 2)
    _draw(left, sweep.fleets, "ttft_p90_ms", 1.0)
    left.set_yscale("log")
    plain_log_ticks(left, "y")
    left.set_title("First token, 90 of 100 requests (ms)")
    _draw(right, sweep.fleets, "slo_share", 100.0)
    right.set_ylim(0, 103)
    right.set_title("Requests within the limits (%)")
    right.axhline(100 * sweep.good_share, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    ring = left.plot([], [], "o", markersize=10, markerfacecolor="none", markeredgecolor=INK)[0]
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        [*handles, ring],
        [*labels, "frontier"],
        loc="outside lower center",
        ncols=min(5, len(labels) + 1),
    )
    return figure


def _draw(axes: "Axes", fleets: Sequence[Fleet], name: str, times: float) -> None:
    """A figure of the fleets, so many times as large, over engines; bars are intervals."""
    from matplotlib.ticker import NullLocator

    spreads = {id(fleet): times * np.array(fleet.spread(name)) for fleet in fleets if fleet.runs}
    drawn = [
        fleet for fleet in fleets if id(fleet) in spreads and np.isfinite(spreads[id(fleet)]).all()
    ]
    sizes = sorted({fleet.kv_tokens for fleet in fleets})
    loads = {fleet.load for fleet in fleets}
    groups = itertools.groupby(
        sorted(drawn, key=lambda f: (f.policy != "cost", f.policy, *f.rivals, f.engines)),
        key=lambda f: f.rivals,
    )
    for (timing, speedup, policy, kv_tokens), members in groups:
        known = list(members)
        label = policy if len(sizes) == 1 else f"{policy}, {kv_tokens:,} tokens"
        if len(loads) > 1:
            label += f", {timing}, speedup {speedup:g}"
        median, low, high = np.array([spreads[id(fleet)] for fleet in known]).T
        look = look_of(policy)
        axes.errorbar(
            [fleet.engines for fleet in known],
            median,
            (median - low, high - median) if (high > low).any() else None,
            color=look.color,
            linestyle=look.dash,
            marker=look.marker,
            capsize=3,
            linewidth=_WIDTHS[min(sizes.index(kv_tokens) + (len(sizes) == 1), len(_WIDTHS) - 1)],
            label=label,
        )
    best = [fleet for fleet in drawn if fleet.on_frontier]
    axes.plot(
        [fleet.engines for fleet in best],
        [spreads[id(fleet)][0] for fleet in best],
        linestyle="",
        marker="o",
        markersize=10,
        markerfacecolor="none",
        markeredgecolor=INK,
        markeredgewidth=1.1,
    )
    tried = sorted({fleet.engines for fleet in fleets})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tried, [f"{engines:,}" for engines in tried])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("engines")
