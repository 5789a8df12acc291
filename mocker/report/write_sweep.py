"""Writes a sweep down: JSON, CSV, the figure of its frontier, a page."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mallee.figures.files import as_json, made_folder
from mallee.figures.page import Facts, Picture, Table, Tile, render
from mallee.figures.style import require_matplotlib, save_png, to_svg
from mallee.figures.text import milliseconds, number, percent
from mallee.mocker.report.sweep import COLUMNS, Fleet, Sweep
from mallee.mocker.report.sweep_charts import pareto_figure
from mallee.mocker.report.write import facts
from mallee.protocol.errors import ConfigError

HEAD = (
    *("engines", "policy", "blocks", "TTFT p50", "TTFT p90", "TTFT p99", "ITL p50"),
    *("within limits", "goodput", "hit rate", "busy"),
)


def write_sweep(sweep: Sweep, out_dir: Path | str) -> list[Path]:
    """sweep.json, sweep.csv, pareto.png and sweep.html in `out_dir`; their paths. Raises ConfigError."""
    require_matplotlib()
    folder = made_folder(out_dir)
    names = ("sweep.json", "sweep.csv", "pareto.png", "sweep.html")
    data, rows, picture, page = (folder / name for name in names)
    try:
        data.write_bytes(as_json(sweep.as_json()))
        with rows.open("w", newline="", encoding="utf-8") as file:
            out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            out.writeheader()
            out.writerows(fleet.row() for fleet in sweep.fleets)
        figure = pareto_figure(sweep)
        save_png(figure, picture)
        page.write_text(_page(sweep, to_svg(figure)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: can't be written to ({error.strerror})") from error
    return [data, rows, picture, page]


def cells(fleet: Fleet) -> tuple[str, ...]:
    """A fleet as text, by `HEAD`; one that failed has its error in place of figures."""
    row = fleet.row()
    cost = (number(fleet.engines), fleet.policy, f"{fleet.kv_tokens:,}")
    if fleet.run is None:
        return (*cost, fleet.error, *[""] * (len(HEAD) - 4))
    return (
        *cost,
        *(milliseconds(row[f"ttft_p{share}_ms"]) for share in (50, 90, 99)),
        milliseconds(row["itl_p50_ms"]),
        percent(row["slo_share"]),
        number(row["goodput_per_s"], "/s"),
        percent(row["hit_rate"]),
        percent(row["utilisation"]),
    )


def advice(sweep: Sweep) -> str:
    """A sentence that names the fleet to buy."""
    limits = (
        f"first tokens within {milliseconds(sweep.conditions.get('slo_ttft_ms'))} and gaps within"
        f" {milliseconds(sweep.conditions.get('slo_itl_ms'))} for"
        f" {100 * sweep.good_share:g} % of requests"
    )
    best = sweep.smallest_good
    if best is None:
        return f"No fleet here gives {limits}."
    engines = f"{best.engines} engine{'s' if best.engines > 1 else ''}"
    return f"{engines} with KV for {best.kv_tokens:,} tokens and policy {best.policy} are enough: {limits}."


def _page(sweep: Sweep, svg: str) -> str:
    done = [fleet for fleet in sweep.fleets if fleet.run is not None]
    best = sweep.smallest_good
    tiles = [
        Tile(number(len(sweep.fleets)), "fleets tried"),
        Tile(number(len(sweep.frontier)), "on the frontier"),
        Tile("-" if best is None else number(best.engines), "engines are enough"),
        Tile(
            percent(max((fleet.slo_share for fleet in done), default=None)),
            "of requests within the limits, at best",
        ),
    ]
    caption = (
        "Each line is a policy and a cache size; thicker lines have more cache. Rings: fleets that no"
        " other beats in TTFT or goodput without more engines or more blocks. Dotted: the share aimed at."
    )
    sections: list[Table | Facts] = [
        _table("The frontier", sweep.frontier, frozenset()),
        _table("All fleets", sweep.fleets, _frontier_of(sweep.fleets)),
        Facts("Conditions", facts(sweep.conditions)),
    ]
    title = f"Fleets for {sweep.conditions.get('trace', 'a workload')}"
    return render(title, advice(sweep), tiles, [Picture(svg, title, caption)], sections)


def _frontier_of(fleets: Sequence[Fleet]) -> frozenset[int]:
    return frozenset(i for i, fleet in enumerate(fleets) if fleet.on_frontier)


def _table(title: str, fleets: Sequence[Fleet], best: frozenset[int]) -> Table:
    rows: list[Any] = [cells(fleet) for fleet in fleets]
    return Table(title, HEAD, rows, best=best)
