"""`mallee replay`: a trace on a modelled fleet, in virtual time."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mallee.cli.mocker.fleet import FleetOptions
from mallee.cli.options import (
    POLICIES,
    TIMING,
    JsonOption,
    SpeedupOption,
    TraceArgument,
    check_file,
    check_out,
    with_groups,
)
from mallee.cli.output import grid, print_json, say_written

if TYPE_CHECKING:
    from mallee.mocker.replay.result import Result


@with_groups
def replay(
    trace: TraceArgument,
    engines: Annotated[
        int | None, typer.Option(help="Workers, each with a cache of its own; 4 by default.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help=f"cost by default; {POLICIES}")] = None,
    timing: Annotated[str | None, TIMING] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(help="KV memory of each worker, in tokens; by default what its device holds."),
    ] = None,
    speedup: SpeedupOption = 1.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html, requests.csv and figures.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="File for requests.csv alone, a row for each request.")
    ] = None,
    as_json: JsonOption = False,
    *,
    fleet: FleetOptions,
) -> None:
    """Replay a trace on real routers and schedulers in front of modelled devices.

    Options win over --set, and --set over the file of --config. Exit status 1 if a request failed or never
    ended.

    Example: mallee replay trace.jsonl --engines 8 --policy cost
    """
    from mallee.mocker.replay.run import replay as run

    config = fleet.replay_config(timing, kv_tokens, engines=engines, policy=policy, speedup=speedup)
    check_out(out)
    if csv is not None:
        check_file(csv)
    workload = fleet.reading(trace, config.seed)()
    fleet.show(workload, config)
    with Console(stderr=True).status("replaying ..."):
        result = run(workload, config)
    _show(result, as_json=as_json)
    if as_json:
        found = {**result.summary, "by_class": result.by_class, "conditions": result.conditions}
        print_json(found)
        sys.stdout.flush()  # whatever becomes of the files
    _write(result, out, csv)
    if result.summary["lost"] or result.summary["errors"]:
        raise typer.Exit(1)


def _write(result: "Result", out: Path | None, csv: Path | None) -> None:
    from mallee.figures.replays.write import write_csv, write_report

    if csv is not None:
        write_csv(result, csv)
        say_written([csv])
    if out is not None:
        say_written(write_report(result, out))


def _show(result: "Result", *, as_json: bool) -> None:
    summary, conditions = result.summary, result.conditions
    console = Console(stderr=as_json, highlight=False)
    console.print(
        f"[bold]{escape(conditions['trace'])}[/]: {summary['requests']} requests,"
        f" {conditions['engines']} engines, {conditions['policy']}, KV for {conditions['kv_tokens']:,}"
        f" tokens in blocks of {conditions['block_size']}, {conditions['timing']}"
    )
    console.print(_times(summary))
    console.print(_rest(summary))
    for code, num in summary["errors"].items():
        console.print(f"[red]failed:[/] {num} with {code}; {escape(summary['reasons'][code])}")
    if summary["lost"]:
        why = "no worker was left to take them, or their steps never end"
        console.print(f"[red]lost:[/] {summary['lost']} requests never ended: {why}")


def _times(summary: dict[str, Any]) -> Table:
    rows = []
    for name in ("ttft", "itl", "e2e", "queue"):
        values = summary[f"{name}_ms"]
        rows.append((name, *("-" if x is None else f"{x:,.1f}" for x in values.values())))
    numbers = ("p50", "p90", "p99", "mean")
    return grid(("milliseconds", *numbers), rows, right=numbers)


def _rest(summary: dict[str, Any]) -> Table:
    used = summary["utilisation"]["mean"]
    rows = (
        ("hit rate", f"{summary['hit_rate']:.1%}"),
        ("prefix copies", f"{summary['prefix_copies']:.2f}"),
        ("goodput", f"{summary['goodput_per_s']:.2f} requests/s"),
        ("tokens out", f"{summary['output_tokens_per_s']:,.0f} /s"),
        ("workers busy", "-" if used is None else f"{used:.0%}"),
        ("evictions", f"{summary['evictions']:,}"),
        ("virtual time", f"{summary['duration_s']:,.1f} s"),
        (
            "simulated in",
            f"{summary['wall_s']:.2f} s ({summary['requests_per_s']:,.0f} requests/s)",
        ),
        ("digest", summary["digest"]),
    )
    return grid(("figure", "value"), rows, show_header=False)
