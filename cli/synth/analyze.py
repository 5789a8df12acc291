"""An analysis as tables for a terminal."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mallee.cli.options import JsonOption, check_out
from mallee.cli.output import grid, print_json, say_written
from mallee.cli.synth.reading import Reading, read_source, waiting
from mallee.figures.text import number

if TYPE_CHECKING:
    from mallee.synth.analysis.report import Report

_COLUMNS: Final = ("mean", "p5", "p50", "p90", "p99", "max")
_CURVES: Final = {"hit rate": "hit_rate", "prompts' ends first": "engine_hit_rate"}
_FILE_WIDTH: Final = 100  # of text that goes to no terminal
_WIDE: Final = 92  # columns that two facts beside each other take


def tables(report: "Report", width: int) -> Iterator[Table | str]:
    """The report as tables for a terminal of `width` columns; nothing is cut off from 60 on."""
    yield f"[bold]{escape(report.data['name'])}[/]: {escape(report.about)}"
    quantiles = (
        (name, *(number(values[key]) for key in _COLUMNS))
        for name, values in report.distributions.items()
    )
    yield grid(("", *_COLUMNS), quantiles, right=_COLUMNS)
    if report.caches:
        rates = (
            (f"{100 * each['share']:g} %", *(f"{each[key]:.3f}" for key in _CURVES.values()))
            for each in report.caches
        )
        yield grid(("LRU cache of", *_CURVES), rates, right=_CURVES)
    num = 2 if width >= _WIDE else 1
    for title, pairs in report.facts.items():
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        for _ in range(num):
            table.add_column(min_width=30)
            table.add_column(justify="right", min_width=10)
        for at in range(0, len(pairs), num):
            table.add_row(*chain.from_iterable(pairs[at : at + num]))
        yield f"[bold]{title}[/]"
        yield table


def analyze(
    trace: Annotated[Path, typer.Argument(help="Requests: .jsonl or .csv, plain, .gz or .zst.")],
    out: Annotated[
        Path | None, typer.Option(help="Write analysis.html, analysis.json and figures here.")
    ] = None,
    as_json: JsonOption = False,
    *,
    reading: Reading,
) -> None:
    """Measure lengths, arrivals, prefix tree, reuse, cache curve, sessions and hierarchy of a trace.

    Example: mallee synth analyze trace.jsonl --out analysis
    """
    from mallee.synth.analysis.analysis import analyze as measure
    from mallee.synth.analysis.report import report_of, write_analysis

    check_out(out)
    with waiting(f"reading {trace.name} ...") as shown:
        source = read_source(trace, reading, shown)
        analysis = measure(source.trace)
    problems = {"skipped": source.problems.num_skipped, "mended": source.problems.num_mended}
    report = report_of(analysis, note=source.workload.note, malformed=problems)
    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    for table in tables(report, console.width):
        console.print(table)
    if out is not None:
        say_written(write_analysis(analysis, report, out))
    if as_json:
        print_json(report.data)
