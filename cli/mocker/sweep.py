"""`mallee sweep`: many fleets in virtual time, as tables and figures."""

import hashlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.mocker.fleet import FleetOptions
from mallee.cli.options import (
    POLICIES,
    JsonOption,
    TraceArgument,
    check_out,
    command_of,
    count,
    with_groups,
)
from mallee.cli.output import grid, print_json, say_written
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.mocker.sweeps.pool import Done
    from mallee.mocker.sweeps.sweep import Fleet, Origin, Sweep

_SWEPT: Final = ("workers", "mock.engines_per_worker", "routing.policy")  # by sweep's own options
N = TypeVar("N", int, float)


@with_groups
def sweep(
    ctx: typer.Context,
    trace: TraceArgument,
    engines: Annotated[
        str,
        typer.Option(
            help="Numbers of engines, with commas; FIRST..LAST: the fewest of them that are enough, by"
            " bisection."
        ),
    ] = "2,4,8",
    policy: Annotated[str, typer.Option(help=f"With commas: {POLICIES}")] = "cost,round_robin",
    timing: Annotated[
        str | None,
        typer.Option(help="Devices and models, or files of `mallee profile`, with commas."),
    ] = None,
    kv_tokens: Annotated[
        str | None,
        typer.Option(
            help="KV memory of each engine, in tokens, with commas; by default what its device holds."
        ),
    ] = None,
    speedup: Annotated[
        str, typer.Option(help="Divides the times between arrivals; several with commas.")
    ] = "1",
    good_share: Annotated[
        float, typer.Option(help="Share of requests in time that makes a fleet big enough.")
    ] = 0.95,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, help="Replay each fleet with so many seeds; more than 1: from --seed + 1."
        ),
    ] = 1,
    processes: Annotated[
        int | None, typer.Option(help="Replays at the same time; as many as cores by default.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for sweep.html, .csv, .json and pareto.png. An interrupted sweep goes on there."
        ),
    ] = None,
    as_json: JsonOption = False,
    *,
    fleet: FleetOptions,
) -> None:
    """Replay a trace on every fleet of engines, policy, timing, KV memory and load; print the undominated.

    Options win over --set, and --set over the file of --config. With several seeds figures are medians, with
    the interval that the median of all seeds lies in.
    Exit status 1 if requests failed on every fleet.

    Example: mallee sweep trace.jsonl --engines 2,4,8 --policy cost,round_robin
    """
    from mallee.mocker.sweeps.sweep import Grid
    from mallee.mocker.sweeps.sweep import sweep as run
    from mallee.mocker.sweeps.trials import Trials

    check_out(out)
    numbers, bisects = _engines(engines)
    rooms = [] if kv_tokens is None else _numbers("kv-tokens", kv_tokens, int)
    fleets = Grid(numbers, _words("policy", policy), rooms, bisects)
    room = rooms[0] if rooms else None
    timings: list[str | None] = [None] if timing is None else [*_words("timing", timing)]
    bases = [
        fleet.replay_config(each, room, speedup=speed, engines=max(numbers))
        for each in timings
        for speed in _numbers("speedup", speedup, float)
    ]
    seed = bases[0].seed
    tried = range(seed + 1, seed + 1 + seeds) if seeds > 1 else (seed,)
    makes = {each: fleet.reading(trace, each) for each in tried}
    workload = makes[tried[0]]()
    rows = fleets.configs(bases, workload.id_tokens)
    for base in bases:
        base.load_timing()  # faults of the files show before a process starts
    fleet.show(workload, *itertools.chain(*rows), swept=_SWEPT)
    origin = _origin(command_of(ctx), trace)
    trials = None
    if out is not None:
        read_as = (fleet.kind, fleet.id_tokens, fleet.sessions_per_hour)
        trials = Trials(out / "trials.jsonl", f"{origin[1:]} {read_as}")
    with _progress(len(makes) * len(rows) * fleets.most_replays) as on_done:
        found = run(
            makes,
            bases,
            fleets,
            processes=count("processes", processes) or len(os.sched_getaffinity(0)),
            good_share=good_share,
            on_done=on_done,
            trials=trials,
        )
    if trials is not None and trials.num_found:
        say = f"{trials.num_found} replays are those of an earlier sweep, in {out}/trials.jsonl"
        Console(stderr=True, highlight=False).print(escape(say), soft_wrap=True)
    if not any(each.runs for each in found.fleets):
        raise ConfigError(f"every replay failed; the first: {found.fleets[0].error}")
    _show(found, as_json=as_json)
    if out is not None:
        from mallee.figures.replays.write_sweep import write_sweep

        found = replace(found, origin=origin)
        say_written(write_sweep(found, out))
    if as_json:
        print_json(found.as_json())
    if all(map(_failed, found.fleets)):
        raise typer.Exit(1)


def _origin(command: str, trace: Path) -> "Origin":
    """The command, and what it depends on."""
    from mallee.mocker.sweeps.sweep import Origin

    with trace.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    versions = {name: version(name) for name in ("mallee", "numpy", "numba")}
    return Origin(command, digest, {**versions, "python": python_version()})


def _engines(given: str) -> tuple[list[int], bool]:
    """Numbers of engines, and whether to bisect. Raises ConfigError."""
    first, dots, last = given.partition("..")
    if not dots:
        return _numbers("engines", given, int), False
    ends = [each for end in (first, last) for each in _numbers("engines", end, int)]
    if len(ends) != 2 or ends[0] >= ends[1]:
        raise ConfigError(f"--engines={given}: give FIRST..LAST, as 1..32")
    return list(range(ends[0], ends[1] + 1)), True


def _numbers(name: str, given: str, kind: Callable[[str], N]) -> list[N]:
    """Raises ConfigError naming the option."""
    try:
        values = [kind(part) for part in _words(name, given)]
    except ValueError as error:
        raise ConfigError(f"--{name}={given}: give numbers, with commas") from error
    if not all(0 < value < inf for value in values):
        raise ConfigError(f"--{name}={given}: give numbers above 0")
    return values


def _words(name: str, given: str) -> list[str]:
    words = [part.strip() for part in given.split(",") if part.strip()]
    if not words:
        raise ConfigError(f"--{name}={given!r}: give at least one")
    return words


@contextmanager
def _progress(total: int) -> "Iterator[Callable[[int, Done], None]]":
    """Counts finished replays on stderr, off a terminal a line each.

    SIGTERM ends the processes of the pool too.
    """
    console = Console(stderr=True, highlight=False)
    done = 0
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with console.status(f"0 of {total} replays") as status:

        def note(index: int, outcome: "Done") -> None:
            nonlocal done
            done += 1
            said = f"{done} of {total} replays"
            if console.is_terminal:
                status.update(said)
            else:
                console.print(said)

        try:
            yield note
        finally:
            signal.signal(signal.SIGTERM, before)


def _show(found: "Sweep", *, as_json: bool) -> None:
    from mallee.figures.replays.write_sweep import about_seeds, advice, cells, head

    file = sys.stderr if as_json else sys.stdout
    # Into a file as wide as needed, on a terminal as wide as it is.
    console = Console(file=file, width=None if file.isatty() else 240, highlight=False)
    conditions = found.conditions
    console.print(
        f"[bold]{escape(conditions['trace'])}[/]: {conditions['requests']:,} requests on"
        f" {len(found.fleets)} fleets, {conditions['timing']}; * is the frontier"
    )
    rows = []
    for fleet in found.fleets:
        shown = cells(found, fleet)
        if not fleet.runs:
            shown = (*shown[: shown.index(fleet.error)], "failed")
        rows.append(("*" if fleet.on_frontier else "", *shown))
    heads = ("", *head(found))
    console.print(grid(heads, rows, right=heads, whole=heads))
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
