"""`mallee sweep` and `mallee figures`: many fleets in virtual time, as tables and figures."""

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.mocker.fleet import FleetOptions
from mallee.cli.options import (
    DEFAULT_TIMING,
    POLICIES,
    JsonOption,
    KindOption,
    RequestsOption,
    SeedOption,
    SessionsOption,
    SpeedupOption,
    TimingOption,
    TraceArgument,
    check_out,
    command_of,
    count,
    kv_tokens_of,
    with_groups,
)
from mallee.cli.output import grid, print_json, say_written
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.mocker.sweeps.pool import Done
    from mallee.mocker.sweeps.sweep import Fleet, Origin, Sweep

ProcessesOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--processes", help="Replays at the same time; as many as cores by default."),
]


@with_groups
def sweep(
    ctx: typer.Context,
    trace: TraceArgument,
    engines: Annotated[str, typer.Option(help="Numbers of engines, with commas.")] = "2,4,8",
    policy: Annotated[str, typer.Option(help=f"With commas: {POLICIES}")] = "cost,round_robin",
    kv_tokens: Annotated[
        str | None,
        typer.Option(
            help="KV memory of each engine, in tokens, with commas; by default what its device holds."
        ),
    ] = None,
    good_share: Annotated[
        float, typer.Option(help="Share of requests in time that makes a fleet big enough.")
    ] = 0.95,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, help="Replay each fleet with so many seeds; more than 1: from --seed + 1."
        ),
    ] = 1,
    processes: ProcessesOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for sweep.html, .csv, .json and pareto.png.")
    ] = None,
    as_json: JsonOption = False,
    *,
    fleet: FleetOptions,
) -> None:
    """Replay a trace on every fleet of engines, policy and KV memory; print the undominated ones.

    With several seeds figures are medians, with the interval that the median of all seeds lies in.
    Exit status 1 if requests failed on every fleet.

    Example: mallee sweep trace.jsonl --engines 2,4,8 --policy cost,round_robin
    """
    from mallee.mocker.sweeps.sweep import Grid
    from mallee.mocker.sweeps.sweep import sweep as run

    check_out(out)
    seed = fleet.seed
    tried = range(seed + 1, seed + 1 + seeds) if seeds > 1 else (seed,)
    makes = {each: fleet.reading(trace, each) for each in tried}
    rooms = (
        [kv_tokens_of(fleet.timing, None, fleet.engines_per_device)]
        if kv_tokens is None
        else _numbers("kv-tokens", kv_tokens)
    )
    fleets = Grid(_numbers("engines", engines), _words("policy", policy), rooms)
    base = fleet.config()
    # Read here too: faults of the file show before a process starts.
    size = base.block_tokens(makes[tried[0]]().id_tokens)
    base.load_timing()
    with _progress("replays", len(makes) * len(fleets.configs(base, size))) as on_done:
        found = run(
            makes,
            base,
            fleets,
            processes=_processes(processes),
            good_share=good_share,
            on_done=on_done,
        )
    if not any(each.runs for each in found.fleets):
        raise ConfigError(f"every replay failed; the first: {found.fleets[0].error}")
    _show(found, as_json=as_json)
    if out is not None:
        from mallee.figures.replays.write_sweep import write_sweep

        found = replace(found, origin=_origin(command_of(ctx), trace))
        say_written(write_sweep(found, out))
    if as_json:
        print_json(found.as_json())
    if all(map(_failed, found.fleets)):
        raise typer.Exit(1)


def figures(
    out: Annotated[Path, typer.Option(help="Folder for the PNGs, figures.html, figures.json.")],
    trace: Annotated[
        Path | None, typer.Option(help="Requests; without it sessions are made up.")
    ] = None,
    kind: KindOption = "auto",
    requests: RequestsOption = None,
    engines: Annotated[int, typer.Option(min=1, help="Engines of the first two figures.")] = 4,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="KV memory of each, in tokens, but in the second; by default what its device holds.",
        ),
    ] = None,
    timing: TimingOption = DEFAULT_TIMING,
    speedup: SpeedupOption = 1.0,
    sessions_per_hour: SessionsOption = 240.0,
    seed: SeedOption = 0,
    processes: ProcessesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw TTFT by policy, hit rate by cache size and the spill of fan-outs.

    Example: mallee figures --out figures
    """
    from mallee.figures.replays.scenes import Conditions, all_jobs, make_figures
    from mallee.traces.made import sessions_workload
    from mallee.traces.read import read_workload
    from mallee.traces.workload import Workload

    check_out(out)
    count("requests", requests)
    make: Callable[[], Workload]
    if trace is None:
        make = partial(sessions_workload, requests or 2000, seed=seed)
    else:
        make = partial(
            read_workload,
            trace,
            kind=kind,
            limit=requests or 4000,
            seed=seed,
            sessions_per_hour=sessions_per_hour,
        )
        make()
    room = kv_tokens_of(timing, kv_tokens)
    conditions = Conditions(
        engines=engines,
        kv_tokens=room,
        fan_tokens=room,
        timing=timing,
        speedup=speedup,
        seed=seed,
    )
    with _progress("replays", len(all_jobs(make, conditions))) as on_done:
        made = make_figures(make, out, conditions, processes=_processes(processes), on_done=on_done)
    say_written(made.paths)
    if as_json:
        print_json(made.data)


def _origin(command: str, trace: Path) -> "Origin":
    """The command, and what it depends on."""
    from mallee.mocker.sweeps.sweep import Origin

    with trace.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    versions = {name: version(name) for name in ("mallee", "numpy", "numba")}
    return Origin(command, digest, {**versions, "python": python_version()})


def _numbers(name: str, given: str) -> list[int]:
    """Raises ConfigError naming the option."""
    try:
        values = [int(part) for part in _words(name, given)]
    except ValueError as error:
        raise ConfigError(f"--{name}={given}: give whole numbers, with commas") from error
    if min(values) < 1:
        raise ConfigError(f"--{name}={given}: give numbers of at least 1")
    return values


def _words(name: str, given: str) -> list[str]:
    words = [part.strip() for part in given.split(",") if part.strip()]
    if not words:
        raise ConfigError(f"--{name}={given!r}: give at least one")
    return words


def _processes(given: int | None) -> int:
    return count("processes", given) or len(os.sched_getaffinity(0))


@contextmanager
def _progress(what: str, total: int) -> "Iterator[Callable[[int, Done], None]]":
    """Counts finished replays on stderr. SIGTERM ends the processes of the pool too."""
    console = Console(stderr=True)
    done = 0
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with console.status(f"0 of {total} {what}") as status:

        def note(index: int, outcome: "Done") -> None:
            nonlocal done
            done += 1
            status.update(f"{done} of {total} {what}")

        try:
            yield note
        finally:
            signal.signal(signal.SIGTERM, before)


def _show(found: "Sweep", *, as_json: bool) -> None:
    from mallee.figures.replays.write_sweep import HEAD, about_seeds, advice, cells

    file = sys.stderr if as_json else sys.stdout
    # Into a file as wide as needed, on a terminal as wide as it is.
    console = Console(file=file, width=None if file.isatty() else 160, highlight=False)
    conditions = found.conditions
    console.print(
        f"[bold]{escape(conditions['trace'])}[/]: {conditions['requests']:,} requests on"
        f" {len(found.fleets)} fleets, {conditions['timing']}; * is the frontier"
    )
    rows = []
    for fleet in found.fleets:
        shown = cells(fleet) if fleet.runs else (*cells(fleet)[:3], "failed")
        rows.append(("*" if fleet.on_frontier else "", *shown))
    head = ("", *HEAD)
    console.print(grid(head, rows, right=head, whole=head))
    for fleet in found.fleets:
        if failed := _failed(fleet):
            name = f"{fleet.engines} engines, {fleet.policy}, KV for {fleet.kv_tokens:,} tokens"
            console.print(f"[red]failed:[/] {name}: {escape(failed)}")
    if about := about_seeds(found):
        console.print(about)
    console.print(advice(found))


def _failed(fleet: "Fleet") -> str:
    """The first reason of failed replays or requests, "" if none failed."""
    for run in fleet.runs.values():
        if failed := sum(run.summary["errors"].values()):
            return f"{failed} requests; {next(iter(run.summary['reasons'].values()))}"
        if lost := run.summary["lost"]:
            return f"{lost} requests never ended"
    return fleet.error
