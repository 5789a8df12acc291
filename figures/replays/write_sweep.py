"""Writes a sweep down: JSON, a CSV row for each replay, the figure of its frontier, a page."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from mallee.figures.files import made_folder
from mallee.figures.page import Facts, Page, Table, Tile, write_page
from mallee.figures.replays.sweep_charts import pareto_figure
from mallee.figures.replays.write import facts
from mallee.figures.style import require_matplotlib
from mallee.figures.text import milliseconds, number, percent
from mallee.mocker.sweeps.sweep import FIGURES, Fleet, Sweep, interval_of
from mallee.protocol.errors import ConfigError

CSV_COLUMNS: Final = (
    *("trace", "engines", "policy", "kv_tokens", "timing", "speedup", "seed", *FIGURES, "digest"),
    *("on_frontier", "is_best", "error"),
)
_CELLS: Final[dict[str, tuple[str, Callable[[float], str], bool]]] = {
    "ttft_p50_ms": ("TTFT p50", milliseconds, True),
    "ttft_p90_ms": ("TTFT p90", milliseconds, True),
    "ttft_p99_ms": ("TTFT p99", milliseconds, True),
    "itl_p50_ms": ("ITL p50", milliseconds, False),
    "slo_share": ("within limits", percent, True),
    "goodput_per_s": ("goodput", lambda value: number(value, "/s"), True),
    "hit_rate": ("hit rate", percent, False),
    "utilisation": ("busy", percent, False),
    "gpu_hours": ("GPU-hours", number, False),
}
"""Head of a figure, how it is shown, and whether its interval is."""


def write_sweep(sweep: Sweep, out_dir: Path | str) -> list[Path]:
    """sweep.csv, sweep.json, pareto.png and sweep.html in `out_dir`; their paths. Raises ConfigError."""
    require_matplotlib()
    rows = made_folder(out_dir) / "sweep.csv"
    try:
        with rows.open("w", newline="", encoding="utf-8") as file:
            out = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
            out.writeheader()
            trace = sweep.conditions.get("trace", "")
            out.writerows({"trace": trace} | row for row in sweep.trials())
    except OSError as error:
        raise ConfigError(f"{rows}: can't be written ({error.strerror})") from error
    return [rows, *write_page(out_dir, "sweep", sweep.as_json(), _page(sweep))]


def head(sweep: Sweep) -> tuple[str, ...]:
    """Heads of `cells`."""
    loads = ("timing", "speedup") if len(sweep.loads) > 1 else ()
    return ("engines", "policy", "KV tokens", *loads, *(head for head, _, _ in _CELLS.values()))


def cells(sweep: Sweep, fleet: Fleet) -> tuple[str, ...]:
    """A fleet as text, by `head`; one that failed has its error in place of figures."""
    cost: tuple[str, ...] = (number(fleet.engines), fleet.policy, f"{fleet.kv_tokens:,}")
    if len(sweep.loads) > 1:
        cost = (*cost, fleet.timing, f"{fleet.speedup:g}")
    if not fleet.runs:
        return (*cost, fleet.error, *[""] * (len(_CELLS) - 1))
    return (*cost, *(_cell(fleet, name) for name in _CELLS))


def _cell(fleet: Fleet, name: str) -> str:
    """The median, and below it the interval if seeds differ."""
    _, show, has_interval = _CELLS[name]
    median, low, high = fleet.spread(name)
    if not has_interval or low == high:
        return show(median)
    first, last = show(low), show(high)
    unit = " " + last.rpartition(" ")[2]
    return f"{show(median)}\n{first.removesuffix(unit)} to {last}"


def advice(sweep: Sweep) -> str:
    """A sentence for each timing and speedup that names the fleet to buy."""
    limits = (
        f"first tokens within {milliseconds(sweep.conditions.get('slo_ttft_ms'))} and gaps within"
        f" {milliseconds(sweep.conditions.get('slo_itl_ms'))} for"
        f" {100 * sweep.good_share:g} % of requests"
    )
    if len(sweep.seeds) > 1:
        limits += f", also at the low end over {len(sweep.seeds)} seeds"
    if len(sweep.loads) == 1:
        return _advice(sweep, sweep.loads[0], limits)
    lines = ((load, _advice(sweep, load, limits)) for load in sweep.loads)
    return "\n".join(f"{timing}, speedup {speed:g}: {line}" for (timing, speed), line in lines)


def _advice(sweep: Sweep, load: tuple[str, float], limits: str) -> str:
    """Says that fewer engines are not enough only if fewer were tried."""
    best = sweep.smallest_good(load)
    if best is None:
        return f"No fleet here gives {limits}."
    fleet = f"{best.engines} engine{'s' if best.engines > 1 else ''}"
    fleet += f" with KV for {best.kv_tokens:,} tokens and policy {best.policy}"
    fewer = sweep.most_too_few(best)
    if not fewer and best.engines > 1:
        return f"{fleet} give {limits}. No fewer were tried: fewer may do."
    untried = best.engines - fewer - 1
    between = f" ({untried} numbers between were not tried)" if untried > 1 else ""
    if untried == 1:
        between = f" ({fewer + 1} was not tried)"
    return f"{fleet} are enough{f', {fewer} are not{between}' if fewer else ''}: {limits}."


def about_seeds(sweep: Sweep) -> str:
    """A sentence on the seeds, "" of a single one."""
    if len(sweep.seeds) == 1:
        return ""
    if sweep.leaves_nothing_to_chance:
        return "All seeds gave the same: this trace leaves nothing to chance."
    _, confidence = interval_of(len(sweep.seeds))
    return (
        f"Medians of {len(sweep.seeds)} seeds; the median of all seeds lies between the figures below in"
        f" {100 * confidence:.3g} % of cases."
    )


def _page(sweep: Sweep) -> Page:
    best = [sweep.smallest_good(load) for load in sweep.loads]
    enough = [number(fleet.engines) for fleet in best if fleet is not None]
    share = max((f.spread("slo_share").median for f in sweep.fleets if f.runs), default=None)
    tiles = [
        Tile(number(len(sweep.fleets)), "fleets tried"),
        Tile(number(len(sweep.frontier)), "on the frontier"),
        Tile(", ".join(enough) or "-", "engines are enough"),
        Tile(percent(share), "of requests within the limits, at best"),
    ]
    caption = (
        "Each line is a policy and a cache size; thicker lines have more cache, bars are intervals over the"
        " seeds. Rings: fleets that no other beats in TTFT or goodput without more engines or more KV"
        " memory. Dotted: the share aimed at."
    )
    is_best = frozenset(i for i, fleet in enumerate(sweep.fleets) if fleet.on_frontier)
    sections: list[Table | Facts] = [
        _table(sweep, "The frontier", sweep.frontier, note=about_seeds(sweep)),
        _table(sweep, "All fleets", sweep.fleets, best=is_best),
        Facts("Conditions", facts({**sweep.conditions, "seeds": sweep.seeds})),
    ]
    if sweep.origin is not None:
        sections.append(
            Facts("Reproduce: equal digests in sweep.csv", facts(sweep.origin._asdict()))
        )
    title = f"Fleets for {sweep.conditions.get('trace', 'a workload')}"
    return Page(title, advice(sweep), tiles, {"pareto": (pareto_figure(sweep), caption)}, sections)


def _table(sweep: Sweep, title: str, fleets: Sequence[Fleet], **more: Any) -> Table:
    return Table(title, head(sweep), [cells(sweep, fleet) for fleet in fleets], **more)
