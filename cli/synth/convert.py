"""`mallee trace convert`: a trace of one format as one of another."""

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import (
    KINDS,
    BlockSizeOption,
    IdTokensOption,
    JsonOption,
    RequestsOption,
    SeedOption,
    SessionsOption,
    count,
    one_of,
)
from mallee.cli.output import print_json
from mallee.cli.synth.reading import counting, print_problems, waiting
from mallee.protocol.errors import ConfigError

_TO: Final = {"mallee": "agentic", "mooncake": "mooncake", "aiperf": "dag", "weka": "weka"}


def convert(
    trace: Annotated[Path, typer.Argument(metavar="IN", help="Requests, plain, .gz or .zst.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A file, -, or of weka a new folder.")],
    kind: Annotated[str, typer.Option("--from", help=KINDS)] = "auto",
    columns: Annotated[
        str | None,
        typer.Option(
            help="A table's: timestamp_ms=ts,input=in,output=out,session=user,ids=hashes."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            help="mallee keeps everything; mooncake is an open loop (aiperf: mooncake_trace); aiperf is"
            " text of many turns (dag-jsonl); weka is a folder of sessions."
        ),
    ] = "mallee",
    requests: RequestsOption = None,
    id_tokens: IdTokensOption = None,
    block_size: BlockSizeOption = None,
    sessions_per_hour: SessionsOption = 240.0,
    seed: SeedOption = 0,
    strict: Annotated[bool, typer.Option("--strict", help="A malformed line is an error.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a trace in another format, by time; malformed lines are named and left out.

    Example: mallee trace convert burstgpt.csv trace.jsonl
    """
    from mallee.traces.files.problems import Problems
    from mallee.traces.read import read_workload
    from mallee.traces.write import write_workload

    if columns is not None and kind != "auto":
        raise ConfigError(f"--columns and --from={kind}: columns make a table; leave out --from")
    format = _TO[str(one_of("to", to, _TO))]
    problems = Problems()
    workload = read_workload(
        trace,
        kind=columns or kind,
        limit=count("requests", requests),
        spread_ticks=False,
        id_tokens=count("id-tokens", id_tokens),
        seed=seed,
        sessions_per_hour=sessions_per_hour,
        problems=None if strict else problems,
        sorts=True,
    )
    with waiting(f"converting {trace.name} ...") as shown:
        counted = counting(workload, shown, "converted")
        written = write_workload(
            counted, out, format=format, block_size=count("block-size", block_size)
        )
    print_problems(trace, problems)
    told = f"{workload.kind} to {to}: {written.summary()}"
    note = f"; {workload.note}" if workload.note else ""
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold]{escape(str(out))}[/]: {escape(told + note)}", soft_wrap=True)
    if as_json:
        counts = msgspec.to_builtins(written)
        print_json(
            {"kind": workload.kind, "to": to, "note": workload.note, **counts}
            | {"skipped": problems.num_skipped, "mended": problems.num_mended}
        )
