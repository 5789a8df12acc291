"""`mallee synth compare`: how well a trace, or a model of it, agrees with its source."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mallee.cli.options import JsonOption, check_out, count, one_of
from mallee.cli.output import grid, print_json, say_written
from mallee.cli.synth.reading import (
    Reading,
    open_source,
    print_problems,
    require_requests,
    rule_of,
    waiting,
)
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.synth.compare.fits import Reading as Readings
    from mallee.synth.compare.fits import Sample
    from mallee.synth.compare.report import Report
    from mallee.traces.files.problems import Problems
    from mallee.traces.workload import Workload

_MODELS: Final = {"tree": ("tree",), "session": ("session",), "both": ("tree", "session")}


class _File(NamedTuple):
    """A trace file to be read, perhaps several times."""

    reading: "Readings"
    path: Path
    problems: "Problems"


def compare(
    source: Annotated[Path, typer.Argument(help="The trace that the other should be like.")],
    other: Annotated[Path | None, typer.Argument(help="The other trace.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Instead of another trace: tree, session or both, fitted to the source."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Samples of a model; the table has medians.")] = 8,
    replay: Annotated[
        bool, typer.Option(help="Replay both on a mocked fleet; takes most of the time.")
    ] = True,
    replay_requests: Annotated[int, typer.Option(help="Replay the first so many.")] = 2000,
    lengths: Annotated[
        bool, typer.Option(help="Check a model at 4 and 16 times the length, too.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Write compare.html, compare.json and figures here.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="End with status 1 if a gate fails.")
    ] = False,
    as_json: JsonOption = False,
    *,
    reading: Reading,
) -> None:
    """Check a trace, or models of it, against every gate, beside what chance alone would do.

    Example: mallee synth compare trace.jsonl --model session
    """
    if (other is None) == (model is None):
        raise ConfigError(
            "compare with what? give a second trace, or --model tree, session or both"
        )
    models = () if model is None else _MODELS[str(one_of("model", model, _MODELS))]
    count("seeds", seeds)
    count("replay-requests", replay_requests)
    check_out(out)
    files = [_open(path, reading) for path in (source, other) if path is not None]
    with waiting("") as shown:
        requests = replay_requests if replay else 0
        report = _compared(
            files, models, seeds, requests, lengths, lambda what: shown.update(escape(what))
        )
    for file in files:
        print_problems(file.path, file.problems)
    _show(report, as_json=as_json)
    if out is not None:
        say_written(report.write(out))
    if as_json:
        print_json(report.as_data())
    if check and report.num_failed:
        raise typer.Exit(1)


def _open(path: Path, options: Reading) -> _File:
    from mallee.synth.compare.fits import Reading as Readings

    first, problems = open_source(path, options)

    def make(seed: int) -> "Workload":
        if seed == options.read_seed:
            return first
        return open_source(path, replace(options, read_seed=seed))[0]

    readings = Readings(make, options.block_size, rule_of(options), options.read_seed)
    return _File(readings, path, problems)


def _compared(
    files: list[_File],
    models: tuple[str, ...],
    seeds: int,
    replay_requests: int,
    with_lengths: bool,
    step: Callable[[str], None],
) -> "Report":
    """One file against models of it, or against another file."""
    from mallee.cli.synth.replays import replay
    from mallee.synth.compare.fits import compare_model, compare_workload, noises, source_of
    from mallee.synth.compare.report import Report
    from mallee.synth.fit import fit

    replayer = replay if replay_requests else None
    step(f"reading {files[0].path.name}" + (" and finding a fleet for it" if replayer else ""))
    source = source_of(files[0].reading, replayer, requests=replay_requests)
    require_requests(files[0].path, len(source.trace), files[0].problems)
    step("comparing the source with itself")
    noise = noises(source)
    samples: dict[str, list[Sample]] = {}
    for name in models:
        step(f"learning the {name} model")
        learned = fit(source.trace, name)
        samples[f"{name} model"] = []
        for seed in range(1, seeds + 1):
            step(f"{name} model, seed {seed} of {seeds}")
            sample = compare_model(source, learned, seed, with_lengths=with_lengths)
            samples[f"{name} model"].append(sample)
    for file in files[1:]:
        step(f"comparing {file.path.name}")
        workload = file.reading.make(file.reading.seed)
        samples[file.path.name] = [compare_workload(source, workload)]
    return Report(source, noise, samples)


def _show(report: "Report", *, as_json: bool) -> None:
    console = Console(stderr=as_json, highlight=False)
    console.print(f"[bold]{escape(report.title)}[/]")
    console.print(_table(report))
    for line in report.notes():
        console.print(escape(line), style="dim")


def _table(report: "Report") -> Table:
    head = [escape(name) for name in report.table.head]
    rows = (tuple(map(_coloured, row.texts())) for row in report.table.rows)
    table = grid(head, rows, right=[name for name in head if name != "gate"])
    for name, column in zip(report.table.head, table.columns, strict=True):
        if name.startswith("noise: "):
            column.style = "dim"
    return table


def _coloured(text: str) -> str:
    if "FAIL" not in text:
        return text
    return f"[yellow]{text}[/]" if text.endswith("~") else f"[red]{text}[/]"
