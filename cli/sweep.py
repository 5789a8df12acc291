"""`mallee sweep` and `mallee figures`: many fleets in virtual time, and what they say."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from mallee.cli.options import above_0, check_out
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.mocker.report.pool import Done
    from mallee.mocker.report.sweep import Fleet, Sweep

_HEAD = (
    *("engines", "policy", "blocks", "TTFT p50 ms", "p90 ms", "p99 ms", "ITL p50 ms", "in time"),
    *("good/s", "hit rate", "busy"),
)

Processes = Annotated[
    int | None, typer.Option(help="Replays at the same time; as many as cores by default.")
]
Timing = Annotated[
    str, typer.Option(help="Name of a device and model, or a file of `mallee profile`.")
]
Requests = Annotated[int | None, typer.Option(help="Replay only so many requests.")]
Speedup = Annotated[float, typer.Option(help="Arrivals come so much faster.")]
Seed = Annotated[int, typer.Option(help="Same seed, same results.")]


def sweep(
    trace: Annotated[Path, typer.Argument(help="Requests: .jsonl or .csv, plain or .gz.")],
    engines: Annotated[str, typer.Option(help="Numbers of engines, with commas.")] = "2,4,8",
    policy: Annotated[
        str, typer.Option(help="kv, round_robin, random, least_loaded, prefix, dynamo; commas.")
    ] = "kv,round_robin",
    blocks: Annotated[str, typer.Option(help="KV blocks of each engine, with commas.")] = "16384",
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block; as an id of the trace by default.")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="Of file: mooncake, agentic, sessions, trees, azure; or auto.")
    ] = "auto",
    timing: Timing = "h200-llama-3.1-8b-fp8",
    speedup: Speedup = 1.0,
    id_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an id of the trace; by default as its rows tell.")
    ] = None,
    requests: Requests = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="First token in time.")] = 2000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Mean gap between tokens in time.")] = 50.0,
    good_share: Annotated[
        float, typer.Option(help="Share of requests in time that makes a fleet big enough.")
    ] = 0.95,
    seed: Seed = 0,
    processes: Processes = None,
    out: Annotated[
        Path | None, typer.Option(help="Write sweep.html, .csv, .json and pareto.png here.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line of stdout is one JSON object.")
    ] = False,
) -> None:
    """Replay a trace on every fleet of engines x policy x blocks; print those that nobody beats."""
    from mallee.mocker.replay.config import ReplayConfig
    from mallee.mocker.report.sweep import Grid
    from mallee.mocker.report.sweep import sweep as run
    from mallee.traces.read import read_workload

    check_out(out)
    _positive("requests", requests)
    _positive("id-tokens", id_tokens)
    make = partial(read_workload, trace, kind=kind, limit=requests, seed=seed, id_tokens=id_tokens)
    id_tokens = make().id_tokens  # what is wrong with the file is said once, before anything starts
    grid = Grid(_numbers("engines", engines), _words("policy", policy), _numbers("blocks", blocks))
    base = ReplayConfig(
        block_size=_positive("block-size", block_size) or 0,
        timing=timing,
        speedup=speedup,
        slo_ttft_s=above_0("slo-ttft-ms", slo_ttft_ms) * 1e-3,
        slo_itl_s=above_0("slo-itl-ms", slo_itl_ms) * 1e-3,
        seed=seed,
    ).validate()
    base.load_timing(base.block_tokens(id_tokens))
    total = len(grid.configs(base))
    with _progress("fleets", total) as on_done:
        found = run(
            make,
            base,
            grid,
            processes=_processes(processes),
            good_share=good_share,
            on_done=on_done,
        )
    _show(found, as_json=as_json)
    if out is not None:
        from mallee.mocker.report.write_sweep import write_sweep

        _say_written(write_sweep(found, out))
    if as_json:
        sys.stdout.write(json.dumps(found.as_json(), allow_nan=False) + "\n")
    if all(fleet.run is None for fleet in found.fleets):
        raise ConfigError("every replay failed; the table says why")


def figures(
    out: Annotated[Path, typer.Option(help="Folder for the PNGs, figures.html, figures.json.")],
    trace: Annotated[
        Path | None, typer.Option(help="Requests; without it sessions are made up.")
    ] = None,
    requests: Requests = None,
    engines: Annotated[int, typer.Option(min=1, help="Engines of the first two figures.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, help="KV blocks of each, in the first.")] = 2048,
    timing: Timing = "h200-llama-3.1-8b-fp8",
    speedup: Speedup = 1.0,
    seed: Seed = 0,
    processes: Processes = None,
) -> None:
    """Draw TTFT by policy, hit rate by cache size and the spill of fan-outs."""
    from mallee.mocker.report.scenes import Conditions, all_jobs, make_figures
    from mallee.traces.made import sessions_workload
    from mallee.traces.read import read_workload
    from mallee.traces.workload import Workload

    check_out(out)
    _positive("requests", requests)
    make: Callable[[], Workload]
    if trace is None:
        make = partial(sessions_workload, requests or 2000, seed=seed)
    else:
        make = partial(read_workload, trace, limit=requests or 4000, seed=seed)
        make()
    conditions = Conditions(
        engines=engines, blocks=blocks, timing=timing, speedup=speedup, seed=seed
    )
    with _progress("replays", len(all_jobs(make, conditions))) as on_done:
        made = make_figures(make, out, conditions, processes=_processes(processes), on_done=on_done)
    _say_written(made.paths)


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


def _positive(name: str, given: int | None) -> int | None:
    if given is not None and given < 1:
        raise ConfigError(f"--{name}={given}: give at least 1, or leave it out")
    return given


def _processes(given: int | None) -> int:
    return _positive("processes", given) or len(os.sched_getaffinity(0))


@contextmanager
def _progress(what: str, total: int) -> "Iterator[Callable[[int, Done], None]]":
    """Counts on a terminal's stderr what is done. SIGTERM ends the processes of the pool too."""
    from rich.console import Console

    console = Console(stderr=True)
    done = 0
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with console.status(f"0 of {total} {what}") as status:

        def count(index: int, outcome: "Done") -> None:
            nonlocal done
            done += 1
            status.update(f"{done} of {total} {what}")

        try:
            yield count
        finally:
            signal.signal(signal.SIGTERM, before)


def _show(found: "Sweep", *, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from mallee.mocker.report.write_sweep import advice

    file = sys.stderr if as_json else sys.stdout
    # Into a file as wide as needed, on a terminal as wide as it is.
    console = Console(file=file, width=None if file.isatty() else 120, highlight=False)
    conditions = found.conditions
    if conditions.get("trace"):
        console.print(
            f"[bold]{escape(conditions['trace'])}[/]: {conditions['requests']:,} requests on"
            f" {len(found.fleets)} fleets, {conditions['timing']}; * is the frontier"
        )
    table = Table(box=None, pad_edge=False)
    for head in ("", *_HEAD):
        table.add_column(head, justify="right", no_wrap=True)
    for fleet in found.fleets:
        table.add_row("*" if fleet.on_frontier else "", *_cells(fleet))
    console.print(table)
    for fleet in found.fleets:
        if fleet.run is None:
            name = f"{fleet.engines} engines, {fleet.policy}, {fleet.blocks} blocks"
            console.print(f"[red]failed:[/] {name}: {escape(fleet.error)}")
        elif count := sum(fleet.run.summary["errors"].values()):
            why = next(iter(fleet.run.summary["reasons"].values()))
            name = f"{fleet.engines} engines, {fleet.policy}, {fleet.blocks} blocks"
            console.print(f"[red]failed:[/] {count} requests on {name}; {escape(why)}")
    console.print(advice(found))


def _cells(fleet: "Fleet") -> list[str]:
    row = fleet.row()
    cells = [str(fleet.engines), fleet.policy, f"{fleet.blocks:,}"]
    if fleet.run is None:
        return [*cells, "failed"]
    times = ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "itl_p50_ms")
    cells += ["-" if row[name] is None else f"{row[name]:,.1f}" for name in times]
    cells += ["-" if row["slo_share"] is None else f"{row['slo_share']:.1%}"]
    cells += [f"{row['goodput_per_s']:,.2f}", f"{row['hit_rate']:.1%}"]
    return [*cells, "-" if row["utilisation"] is None else f"{row['utilisation']:.0%}"]


def _say_written(paths: Sequence[Path]) -> None:
    for path in paths:
        sys.stderr.write(f"wrote {path}\n")


def add_to(cli: typer.Typer) -> None:
    """`sweep` and `figures` are commands of `cli`."""
    cli.command()(sweep)
    cli.command()(figures)
