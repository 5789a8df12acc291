"""`mallee replay`: a trace on a made-up fleet, in virtual time."""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from mallee.cli.options import above_0, at_least_0, check_file, check_out
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mallee.mocker.replay.config import ReplayConfig
    from mallee.mocker.replay.result import Result
    from mallee.mocker.replay.tiers import TierConfig

_TIMES = ("ttft_ms", "itl_ms", "e2e_ms", "queue_ms")


def replay(
    trace: Annotated[Path, typer.Argument(help="Requests: .jsonl or .csv, plain or .gz.")],
    engines: Annotated[int, typer.Option(help="Workers, each with a cache of its own.")] = 4,
    policy: Annotated[
        str, typer.Option(help="kv, round_robin, random, least_loaded, prefix or dynamo.")
    ] = "kv",
    blocks: Annotated[int, typer.Option(help="KV blocks of each worker.")] = 16_384,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block; as an id of the trace by default.")
    ] = None,
    timing: Annotated[
        str, typer.Option(help="Name of a device and model, or a file of `mallee profile`.")
    ] = "h200-llama-3.1-8b-fp8",
    speedup: Annotated[float, typer.Option(help="Arrivals come so much faster.")] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(help="Keep so many requests under way; ignore arrival times.")
    ] = None,
    gateways: Annotated[int, typer.Option(help="Router replicas.")] = 1,
    event_lag: Annotated[
        float, typer.Option(help="Milliseconds until routers hear of a worker's events.")
    ] = 0.0,
    max_rows: Annotated[int, typer.Option(help="Branches that a worker runs at once.")] = 256,
    max_step_tokens: Annotated[int, typer.Option(help="Tokens of one step of a worker.")] = 8192,
    kind: Annotated[
        str,
        typer.Option(
            help="mooncake, agentic, bailian, sessions, trees, dag or azure; auto: as it looks."
        ),
    ] = "auto",
    id_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an id of the trace; by default as its rows tell.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Replay only so many requests.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Cut answers to so many tokens.")] = None,
    open_loop: Annotated[
        bool, typer.Option(help="Arrival times count, whatever requests wait for others.")
    ] = False,
    slo_ttft_ms: Annotated[float, typer.Option(help="First token in time.")] = 2000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Mean gap between tokens in time.")] = 50.0,
    faults: Annotated[
        Path | None, typer.Option(help="JSON list of what goes wrong, and when.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same digest.")] = 0,
    prefill_engines: Annotated[
        int | None, typer.Option(help="Of the engines, so many only compute prompts.")
    ] = None,
    migrate: Annotated[
        bool, typer.Option(help="Fan-outs may leave for workers that pull their prefix.")
    ] = False,
    host_blocks: Annotated[int, typer.Option(help="KV blocks in host memory, a worker.")] = 0,
    disk_blocks: Annotated[int, typer.Option(help="KV blocks on disk, a worker.")] = 0,
    kv_bytes_per_token: Annotated[
        int, typer.Option(help="Bytes of KV that a token takes, where KV moves.")
    ] = 131_072,
    link_gb_s: Annotated[float, typer.Option(help="GB/s of KV from worker to worker.")] = 25.0,
    shared_reads: Annotated[
        bool, typer.Option(help="Rows read the blocks that they share once (tree attention).")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Write report.html, requests.csv and figures here.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write one row for each request here.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line of stdout is one JSON object.")
    ] = False,
) -> None:
    """Replay a trace on real routers and schedulers in front of modelled devices."""
    from mallee.mocker.replay.config import ReplayConfig
    from mallee.mocker.replay.faults import load_faults
    from mallee.mocker.replay.run import replay as run
    from mallee.mocker.replay.tiers import LinkConfig
    from mallee.traces.read import read_workload

    kv_bytes = _count("kv-bytes-per-token", kv_bytes_per_token)
    config = ReplayConfig(
        engines=engines,
        policy=policy,
        blocks=blocks,
        block_size=_count("block-size", block_size),
        timing=timing,
        speedup=speedup,
        concurrency=_count("concurrency", concurrency),
        keeps_order=not open_loop,
        gateways=gateways,
        event_lag_s=at_least_0("event-lag", event_lag) * 1e-3,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        max_requests=_count("requests", requests),
        max_output_tokens=_count("max-tokens", max_tokens),
        slo_ttft_s=above_0("slo-ttft-ms", slo_ttft_ms) * 1e-3,
        slo_itl_s=above_0("slo-itl-ms", slo_itl_ms) * 1e-3,
        faults=() if faults is None else load_faults(faults),
        prefill_engines=_count("prefill-engines", prefill_engines),
        can_migrate=migrate,
        tiers=_tiers(host_blocks, disk_blocks, kv_bytes),
        link=LinkConfig(bytes_s=above_0("link-gb-s", link_gb_s) * 1e9, token_nbytes=kv_bytes),
        shared_reads=shared_reads,
        seed=seed,
    ).validate()
    check_out(out)
    if csv is not None:
        check_file(csv)
    id_tokens = _count("id-tokens", id_tokens) or None
    with _waiting():
        workload = read_workload(trace, kind=kind, seed=seed, limit=requests, id_tokens=id_tokens)
        result = run(workload, config)
    _show(result, config, as_json=as_json)
    _write(result, out, csv)
    if as_json:
        told = {**result.summary, "by_class": result.by_class, "conditions": result.conditions}
        sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
    if result.summary["lost"] or not _some_worked(result):
        raise typer.Exit(1)


def _some_worked(result: "Result") -> bool:
    return bool(sum(result.summary["errors"].values()) < result.summary["requests"])


def _tiers(host_blocks: int, disk_blocks: int, token_nbytes: int) -> "TierConfig | None":
    from mallee.mocker.replay.tiers import TierConfig

    if not host_blocks and not disk_blocks:
        return None
    return TierConfig(host_blocks, disk_blocks, token_nbytes=token_nbytes).validate()


def _waiting() -> AbstractContextManager[Any]:
    """Something that moves, where somebody looks."""
    from rich.console import Console

    return Console(stderr=True).status("replaying ...") if sys.stderr.isatty() else nullcontext()


def _write(result: "Result", out: Path | None, csv: Path | None) -> None:
    from mallee.mocker.report.write import write_csv, write_report

    if csv is not None:
        write_csv(result, csv)
        sys.stderr.write(f"wrote {csv}\n")
    if out is not None:
        for path in write_report(result, out):
            sys.stderr.write(f"wrote {path}\n")


def _count(name: str, given: int | None) -> int:
    """0 for an option that was not given. Raises ConfigError for less than 1."""
    if given is not None and given < 1:
        raise ConfigError(f"--{name}={given}: give at least 1, or leave it out")
    return given or 0


def _show(result: "Result", config: "ReplayConfig", *, as_json: bool) -> None:
    from rich.console import Console

    summary, conditions = result.summary, result.conditions
    console = Console(stderr=as_json, highlight=False)
    console.print(
        f"[bold]{escape(conditions['trace'])}[/]: {summary['requests']} requests, {config.engines} engines,"
        f" {config.policy}, {config.blocks} blocks of {conditions['block_size']},"
        f" {conditions['timing']}"
    )
    console.print(_times(summary))
    console.print(_rest(summary))
    if summary["errors"] or summary["lost"]:
        for code, count in summary["errors"].items():
            console.print(
                f"[red]failed:[/] {count} with {code}; {escape(summary['reasons'][code])}"
            )
        if summary["lost"]:
            why = "no worker was left to take them, or their steps take for ever"
            console.print(f"[red]lost:[/] {summary['lost']} requests never ended: {why}")


def _times(summary: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("milliseconds", box=None, pad_edge=False)
    for name in ("p50", "p90", "p99", "mean"):
        table.add_column(name, justify="right")
    for row in _TIMES:
        values = summary[row]
        shown = ["-" if values[k] is None else f"{values[k]:,.1f}" for k in values]
        table.add_row(row.removesuffix("_ms").replace("_", " "), *shown)
    return table


def _rest(summary: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    used = summary["utilisation"]["mean"]
    for name, value in (
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
    ):
        table.add_row(name, value)
    return table


def add_to(cli: typer.Typer) -> None:
    """`replay` is a command of `cli`."""
    cli.command()(replay)
