"""Writes a comparison down: one JSON object, figures, a page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mallee.figures.files import as_json, made_folder
from mallee.figures.page import Picture, Table, Tile, render
from mallee.figures.style import require_matplotlib
from mallee.protocol.errors import ConfigError
from mallee.synth.analysis.charts import SOURCE, pictures_of
from mallee.synth.compare.report import Report
from mallee.synth.compare.table import cell, counts, shown

_CAPTIONS: Final = {
    "lengths": "New in a prompt is what no earlier prompt begins with, block by block.",
    "arrivals": "Rates over time, and gaps.",
    "cache": "Plain LRU caches, by exact stack distances. Marked are the sizes that are compared: 0.5, 1,"
    " 2, 5, 10, 20, 40 and 80 % of the source's distinct blocks.",
    "reuse": "Of requests that hit: since the last request that used the deepest block they hit.",
    "tree": "Nodes of the prefix tree with two children and more.",
    "sessions": "By the traces' own ids, or by threads that are found in their prompts.",
    "dispersion": "Counts of Poisson arrivals have a variance of one mean at every width (dotted).",
    "hierarchy": "Threads that calls spawn, and the time until they are joined.",
    "forks": "Of requests that fork others.",
}


def write_comparison(report: Report, out_dir: Path | str) -> list[Path]:
    """compare.json, a PNG for each figure and compare.html in `out_dir`; their paths.

    The folder is made if need be, files of these names are replaced. Raises ConfigError if it can't
    be written to, or if matplotlib is missing.
    """
    require_matplotlib()
    folder = made_folder(out_dir)
    data, page = folder / "compare.json", folder / "compare.html"
    traces = {SOURCE: report.source.analysis()}
    traces |= {name: samples[0].analysis for name, samples in report.samples.items()}
    try:
        data.write_bytes(as_json(report.as_data()))
        pictures = dict(pictures_of(traces, _CAPTIONS, folder))
        page.write_text(_page(report, list(pictures.values())), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: can't be written to ({error.strerror})") from error
    return [data, *pictures, page]


def _page(report: Report, pictures: list[Picture]) -> str:
    return render(
        report.title,
        " ".join(report.notes()),
        list(_tiles(report)),
        pictures,
        list(_tables(report)),
    )


def _tiles(report: Report) -> Iterator[Tile]:
    for name, each in report.compared.items():
        count = counts(each)
        yield Tile(
            f"{count['pass']} of {count['pass'] + count['fail']}", f"gates that {name} passes"
        )


def _tables(report: Report) -> Iterator[Table]:
    """One for each group of gates."""
    found = report.applicable()
    head = ("", "bar", *report.compared, *(f"noise: {name}" for name in report.noises))
    for group in dict.fromkeys(row.gate.group for row in found):
        rows = [row for row in found if row.gate.group == group]
        yield Table(
            group.capitalize(),
            head,
            [
                (
                    row.gate.name,
                    "-" if row.gate.bar is None else f"{row.gate.bar:g}",
                    *(cell(each) for each in row.cells),
                    *(shown(None if each is None else each.value) for each in row.noises),
                )
                for row in rows
            ],
            note="; ".join(dict.fromkeys(row.gate.statistic for row in rows)),
            best=frozenset(i for i, row in enumerate(rows) if row.fails),
        )
