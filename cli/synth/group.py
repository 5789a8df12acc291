"""The group of commands `mallee synth`."""

import typer

from mallee.cli.synth.analyze import analyze
from mallee.cli.synth.compare import compare
from mallee.cli.synth.generate import generate
from mallee.cli.synth.reading import reads_traces

group = typer.Typer(
    name="synth",
    help="Analyse traces of requests, and generate traces that behave like them.",
    no_args_is_help=True,
)
for _command in (analyze, generate, compare):
    group.command()(reads_traces(_command))
