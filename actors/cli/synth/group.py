"""`mallee synth`: what traces are like, and traces like them."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from mallee.actors.cli.parts import check_out
from mallee.actors.cli.synth import compare, generate
from mallee.actors.cli.synth.parts import (
    BlockSizeOption,
    IdTokensOption,
    KeepTicksOption,
    KindOption,
    LimitOption,
    ReadSeedOption,
    RuleOption,
    StrictOption,
    read_source,
    text_console,
    waiting,
    wrong_input_ends,
)

synth = typer.Typer(
    name="synth",
    help="Analyse traces of requests, and generate traces that behave like them.",
    no_args_is_help=True,
)


@synth.command()
def analyze(
    trace: Annotated[Path, typer.Argument(help="Requests: .jsonl or .csv, plain, .gz or .zst.")],
    kind: KindOption = "auto",
    id_tokens: IdTokensOption = None,
    block_size: BlockSizeOption = None,
    rule: RuleOption = "auto",
    limit: LimitOption = None,
    strict: StrictOption = False,
    keep_ticks: KeepTicksOption = False,
    read_seed: ReadSeedOption = 1,
    out: Annotated[
        Path | None, typer.Option(help="Write analysis.html, analysis.json and figures here.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line of stdout is one JSON object.")
    ] = False,
) -> None:
    """Lengths, arrivals, prefix tree, reuse, cache curve, sessions and hierarchy of a trace."""
    from mallee.actors.cli.synth.text import tables
    from mallee.synth.analysis.analysis import analyze as measure
    from mallee.synth.analysis.page import write_analysis
    from mallee.synth.analysis.summary import summary_of

    with wrong_input_ends():
        check_out(out)
        with waiting(f"reading {trace.name} ...") as shown:
            source = read_source(
                trace,
                shown=shown,
                kind=kind,
                id_tokens=id_tokens,
                block_size=block_size,
                rule=rule,
                limit=limit,
                strict=strict,
                keep_ticks=keep_ticks,
                read_seed=read_seed,
            )
            analysis = measure(source.trace)
        problems = {
            "skipped": source.problems.num_skipped,
            "mended": source.problems.num_mended,
        }
        told = {**summary_of(analysis), "note": source.workload.note, "malformed": problems}
        console = text_console(is_error=as_json)
        for table in tables(told, console.width):
            console.print(table)
        if out is not None:
            for path in write_analysis(analysis, told, out):
                sys.stderr.write(f"wrote {path}\n")
    if as_json:
        sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")


generate.add_to(synth)
compare.add_to(synth)


def add_to(cli: typer.Typer) -> None:
    """`synth` is a group of commands of `cli`."""
    cli.add_typer(synth)
