"""Dashboards drawn from a running Prometheus: every panel where Grafana puts it, by the file that it reads.

No Grafana draws them: lines, colours and letters are matplotlib's. Queries, places, units, limits and names
of series are the file's own.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bench.boards.prometheus import Prometheus, Sample
from mallee.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED, SKY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN_IN: Final = 0.58  # of the grid
LINE_IN: Final = 0.33
DPI: Final = 80
STEP_S: Final = 2.0
RATE: Final = "20s"
NUM_NAMED: Final = 6  # series of a panel that its legend has room for
COLORS: Final = (GREEN, BLUE, ORANGE, PINK, SKY, RED, GREY, "#8a6d3b", "#5b3f8c", "#2f6b5e")
BACK: Final = "#f4f5f5"


class Span(NamedTuple):
    """The time that is drawn, in seconds since the epoch."""

    begin: float
    end: float


def fill(expression: str, variables: dict[str, str]) -> str:
    """`expression` with the values of a dashboard's variables, as Grafana puts them in."""
    return re.sub(r"\$(\w+)", lambda match: variables[match[1]].replace("\\", "\\\\"), expression)


def values_of(server: Prometheus, board: Any, **given: str) -> dict[str, str]:
    """All values of each variable of a dashboard's file. Raises AssertionError if one has none."""
    found = dict(given)
    for variable in board["templating"]["list"]:
        if variable["type"] != "query":
            continue
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
        assert asked is not None, variable["definition"]
        labels = {each.labels[asked[2]] for each in server.query(fill(asked[1], found))}
        assert labels, f"{board['uid']}: no value of {variable['name']}"
        found[variable["name"]] = "(" + "|".join(sorted(map(re.escape, labels))) + ")"
    return found


def draw(server: Prometheus, board: Any, span: Span, path: Path) -> None:
    """Draw the dashboard of a file as it was over `span`."""
    from matplotlib.figure import Figure

    panels = board["panels"]
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) + 2
    figure = Figure(figsize=(24 * COLUMN_IN, lines * LINE_IN), facecolor=BACK)
    variables = values_of(
        server, board, __rate_interval=RATE, __range=f"{span.end - span.begin:.0f}s"
    )
    figure.text(0.01, 1 - 0.9 / lines, board["title"], fontsize=15, weight="bold", color=INK)
    figure.text(0.16, 1 - 0.9 / lines, board["description"], fontsize=9, color=GREY)
    for panel in panels:
        place = panel["gridPos"]
        x, top = place["x"] / 24, 1 - (place["y"] + 2) / lines
        width, height = place["w"] / 24, place["h"] / lines
        if panel["type"] == "row":
            figure.text(
                0.008, top - 0.75 / lines, panel["title"], fontsize=11, weight="bold", color=INK
            )
            continue
        box = (x + 0.003, top - height + 0.15 / lines, width - 0.006, height - 0.3 / lines)
        back = figure.add_axes(box, facecolor="white")
        back.set_xticks([])
        back.set_yticks([])
        for spine in back.spines.values():
            spine.set_color("#dcdee0")
        found = [_named(server, target, variables, span) for target in panel["targets"]]
        series = sorted((each for some in found for each in some), key=_size, reverse=True)
        _PANELS[panel["type"]](back, panel, series)
    figure.savefig(path, dpi=DPI)
    _shrink(path)


class _Series(NamedTuple):
    """A line: seconds since the begin of the picture, and values."""

    name: str
    values: list[tuple[float, float]]


def _size(series: _Series) -> float:
    """Its largest value: the order of legends."""
    return max((value for _, value in series.values if not math.isnan(value)), default=-1.0)


def _named(server: Prometheus, target: Any, variables: dict[str, str], span: Span) -> list[_Series]:
    """The series of one query, under the names that its legend gives them."""
    expression = fill(target["expr"], variables)
    found = (
        server.query(expression)
        if target["instant"]
        else server.query_range(expression, span.begin, span.end, STEP_S)
    )
    return [
        _Series(
            _name(target["legendFormat"], each),
            [(time - span.begin, value) for time, value in each.values],
        )
        for each in found
    ]


def _name(legend: str, sample: Sample) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: sample.labels.get(match[1], ""), legend)


def _title(axes: "Axes", panel: Any) -> None:
    axes.text(
        *(0.02, 0.97 if panel["type"] != "stat" else 0.93, panel["title"]),
        transform=axes.transAxes,
        fontsize=8,
        weight="bold",
        va="top",
        color=INK,
    )


def _draw_stat(axes: "Axes", panel: Any, series: list[_Series]) -> None:
    _title(axes, panel)
    defaults = panel["fieldConfig"]["defaults"]
    numbers = [value for _, value in series[0].values if not math.isnan(value)] if series else []
    if not numbers:
        axes.text(0.5, 0.4, "No data", transform=axes.transAxes, ha="center", color=GREY)
        return
    last = numbers[-1]
    color = _color(last, defaults["thresholds"]["steps"])
    trend = axes.inset_axes((0, 0, 1, 0.35))
    trend.fill_between(range(len(numbers)), numbers, color=color, alpha=0.2, lw=0)
    trend.set_ylim(0, (max(numbers) or 1) * 1.05)
    trend.axis("off")
    text = shown(last, defaults["unit"])
    axes.text(
        0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=17, color=color
    )


def _draw_lines(axes: "Axes", panel: Any, series: list[_Series]) -> None:
    from matplotlib.ticker import MultipleLocator

    _title(axes, panel)
    plot = axes.inset_axes((0.13, 0.34, 0.84, 0.52))
    defaults = panel["fieldConfig"]["defaults"]
    stacks = defaults["custom"]["stacking"]["mode"] == "normal"
    if not any(not math.isnan(value) for each in series for _, value in each.values):
        plot.text(0.5, 0.5, "No data", transform=plot.transAxes, ha="center", color=GREY)
    elif stacks:
        times = sorted({time for each in series for time, _ in each.values})
        rows = [_aligned(each, times) for each in series]
        plot.stackplot(times, rows, colors=_colors(series), alpha=0.55, lw=0)
    else:
        for each, color in zip(series, _colors(series), strict=True):
            plot.plot(*_broken(each), color=color, lw=1.1)
    _, high = plot.get_ylim()
    for step in defaults["thresholds"]["steps"][1:]:
        if defaults["custom"]["thresholdsStyle"]["mode"] == "dashed" and step["value"] <= 2 * high:
            plot.axhline(step["value"], color=step["color"], ls="--", lw=0.8)
            high = max(high, 1.1 * step["value"])
    plot.set_ylim(0, defaults.get("max", high) * 1.02 or 1)
    unit = defaults["unit"]
    plot.yaxis.set_major_formatter(lambda value, _: shown(value, unit))
    plot.xaxis.set_major_locator(MultipleLocator(30))
    plot.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    plot.set_xlim(left=0)
    plot.locator_params(axis="y", nbins=4)
    plot.tick_params(labelsize=6.5, length=2, color="#c7cacd", labelcolor="#555")
    plot.grid(color="#e6e8ea", lw=0.5)
    for side in ("top", "right", "left", "bottom"):
        plot.spines[side].set_visible(False)
    _legend(axes, series, unit)


def _legend(axes: "Axes", series: list[_Series], unit: str) -> None:
    """Names with their last values, in two columns; those beyond the room as their number."""
    colors = _colors(series)
    for i, (each, color) in enumerate(zip(series[:NUM_NAMED], colors, strict=False)):
        last = next((v for _, v in reversed(each.values) if not math.isnan(v)), math.nan)
        x, y = 0.03 + 0.48 * (i % 2), 0.2 - 0.075 * (i // 2)
        text = f"{each.name[:34]}  {shown(last, unit)}"
        axes.text(x, y, "■", transform=axes.transAxes, fontsize=6.5, color=color)
        axes.text(x + 0.035, y, text, transform=axes.transAxes, fontsize=6.5, color="#444")
    if len(series) > NUM_NAMED:
        more = f"and {len(series) - NUM_NAMED} more"
        axes.text(0.85, 0.02, more, transform=axes.transAxes, fontsize=6, color=GREY)


def _draw_bars(axes: "Axes", panel: Any, series: list[_Series]) -> None:
    _title(axes, panel)
    plot = axes.inset_axes((0.2, 0.08, 0.6, 0.74))
    defaults = panel["fieldConfig"]["defaults"]
    numbers = [each.values[-1][1] for each in series]
    steps = defaults["thresholds"]["steps"]
    rows = range(len(series))
    plot.barh(rows, numbers, color=[_color(value, steps) for value in numbers])
    plot.set_yticks(rows, [each.name for each in series])
    for i, value in enumerate(numbers):
        plot.text(value, i, " " + shown(value, defaults["unit"]), va="center", fontsize=8)
    plot.set_xticks([])
    plot.tick_params(labelsize=8, length=0)
    for side in ("top", "right", "bottom"):
        plot.spines[side].set_visible(False)


_PANELS: Final[dict[str, Callable[["Axes", Any, list[_Series]], None]]] = {
    "stat": _draw_stat,
    "timeseries": _draw_lines,
    "bargauge": _draw_bars,
}


def _broken(series: _Series) -> tuple[list[float], list[float]]:
    """Times and values, with a break where there are none for a while."""
    times, values = [], []
    for time, value in series.values:
        if times and time - times[-1] > 1.5 * STEP_S:
            times.append(time)
            values.append(math.nan)
        times.append(time)
        values.append(value)
    return times, values


def _aligned(series: _Series, times: list[float]) -> list[float]:
    found = {time: value for time, value in series.values if not math.isnan(value)}
    return [found.get(time, 0.0) for time in times]


def _colors(series: list[_Series]) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(series))]


def _color(value: float, steps: list[Any]) -> str:
    """The colour of the last step that `value` has reached."""
    names = {"green": GREEN, "orange": ORANGE, "red": RED}
    reached = [step for step in steps if step["value"] is None or value >= step["value"]]
    return names[reached[-1]["color"]]


def shown(value: float, unit: str) -> str:
    """`value` in a unit of Grafana's."""
    if math.isnan(value):
        return "-"
    match unit:
        case "s" if value < 1:
            return f"{1000 * value:.3g} ms"
        case "s":
            return f"{value:.3g} s"
        case "percentunit":
            return f"{100 * value:.4g} %"
        case "bool_on_off":
            return "On" if value else "Off"
        case "bytes" | "Bps":
            power = min(int(math.log(value, 1024)), 4) if value >= 1 else 0
            suffix = "/s" if unit == "Bps" else ""
            return f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}{suffix}"
    after = {"reqps": " req/s", "ops": " /s"}.get(unit, unit.removeprefix("suffix:"))
    after = "" if unit in ("short", "none") else after
    return f"{value / 1000:.3g}k{after}" if abs(value) >= 10_000 else f"{value:.4g}{after}"


def _shrink(path: Path) -> None:
    """Few colours are enough: a quarter of the bytes."""
    from PIL import Image  # comes with matplotlib

    with Image.open(path) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)
