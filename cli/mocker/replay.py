"""`mallee replay`: a trace on a modelled fleet, in virtual time."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mallee.cli.mocker.fleet import FleetOptions
from mallee.cli.options import (
    POLICIES,
    JsonOption,
    TraceArgument,
    above_0,
    at_least_0,
    check_file,
    check_out,
    count,
    kv_tokens_of,
    with_groups,
)
from mallee.cli.output import grid, print_json, say_written
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.mocker.replay.result import Result
    from mallee.mocker.tiers import TierConfig


@with_groups
def replay(
    trace: TraceArgument,
    engines: Annotated[int, typer.Option(help="Workers, each with a cache of its own.")] = 4,
    policy: Annotated[str, typer.Option(help=POLICIES)] = "cost",
    kv_tokens: Annotated[
        int | None,
        typer.Option(help="KV memory of each worker, in tokens; by default what its device holds."),
    ] = None,
    event_lag: Annotated[
        float, typer.Option(help="Milliseconds until a worker's events reach the routers.")
    ] = 0.0,
    max_step_tokens: Annotated[int, typer.Option(help="Tokens of one step of a worker.")] = 8192,
    max_tokens: Annotated[int | None, typer.Option(help="Cut answers to so many tokens.")] = None,
    prefill_engines: Annotated[
        int | None, typer.Option(help="Of the engines, so many only compute prompts.")
    ] = None,
    migrate: Annotated[
        bool, typer.Option(help="Workers pull KV from each other where that takes less time.")
    ] = False,
    host_kv_tokens: Annotated[
        int, typer.Option(help="KV tokens in host memory, for each worker.")
    ] = 0,
    disk_kv_tokens: Annotated[int, typer.Option(help="KV tokens on disk, for each worker.")] = 0,
    retain_s: Annotated[
        float, typer.Option(help="Seconds that sessions want their text retained after its use.")
    ] = 0.0,
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(
            help="Bytes of a token's KV, where KV moves; by default those of the timing's model."
        ),
    ] = None,
    state_bytes: Annotated[
        int, typer.Option(help="Bytes of the states of a text, of a model with recurrent layers.")
    ] = 0,
    link_gb_s: Annotated[float, typer.Option(help="GB/s of KV from worker to worker.")] = 25.0,
    shared_reads: Annotated[
        bool, typer.Option(help="Rows read the blocks that they share once (tree attention).")
    ] = True,
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

    Exit status 1 if a request failed or never ended.

    Example: mallee replay trace.jsonl --engines 8 --policy cost
    """
    from mallee.mocker.links import LinkConfig
    from mallee.mocker.replay.run import replay as run

    timing = fleet.timing
    moves = bool(prefill_engines or migrate or host_kv_tokens or disk_kv_tokens)
    kv_bytes = _kv_bytes(timing, count("kv-bytes-per-token", kv_bytes_per_token), are_needed=moves)
    config = replace(
        fleet.config(),
        engines=engines,
        policy=policy,
        kv_tokens=kv_tokens_of(timing, kv_tokens, fleet.engines_per_device),
        event_lag_s=at_least_0("event-lag", event_lag) * 1e-3,
        max_step_tokens=max_step_tokens,
        max_requests=count("requests", fleet.requests) or 0,
        max_output_tokens=count("max-tokens", max_tokens) or 0,
        prefill_engines=count("prefill-engines", prefill_engines) or 0,
        can_migrate=migrate,
        state_nbytes=int(at_least_0("state-bytes", state_bytes)),
        link=LinkConfig(bytes_s=above_0("link-gb-s", link_gb_s) * 1e9, token_nbytes=kv_bytes),
        tiers=_tiers(host_kv_tokens, disk_kv_tokens, kv_bytes),
        retain_s=at_least_0("retain-s", retain_s),
        shared_reads=shared_reads,
        seed=fleet.seed,
    ).validate()
    check_out(out)
    if csv is not None:
        check_file(csv)
    read = fleet.reading(trace, fleet.seed)
    with Console(stderr=True).status("replaying ..."):
        result = run(read(), config)
    _show(result, as_json=as_json)
    if as_json:
        found = {**result.summary, "by_class": result.by_class, "conditions": result.conditions}
        print_json(found)
        sys.stdout.flush()  # whatever becomes of the files
    _write(result, out, csv)
    if result.summary["lost"] or result.summary["errors"]:
        raise typer.Exit(1)


def _kv_bytes(timing: str, given: int | None, *, are_needed: bool) -> int:
    """Bytes of a token's KV: as given, or of the timing's model. Raises ConfigError."""
    from mallee.mocker.links import TOKEN_NBYTES
    from mallee.mocker.timing.profiles import kv_room

    found = given or kv_room(timing).token_nbytes
    if are_needed and not found:
        raise ConfigError(
            f"--timing {timing} does not say what a token's KV takes, and KV moves: give"
            " --kv-bytes-per-token"
        )
    return found or TOKEN_NBYTES


def _tiers(host_tokens: int, disk_tokens: int, token_nbytes: int) -> "TierConfig | None":
    from mallee.mocker.tiers import TierConfig

    if not host_tokens and not disk_tokens:
        return None
    return TierConfig(host_tokens, disk_tokens, token_nbytes=token_nbytes)


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
