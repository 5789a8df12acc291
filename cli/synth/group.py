"""The groups of commands `mallee synth` and `mallee trace`."""

import typer

from mallee.cli.synth.analyze import analyze
from mallee.cli.synth.compare import compare
from mallee.cli.synth.convert import convert
from mallee.cli.synth.generate import generate
from mallee.cli.synth.reading import reads_traces

group = typer.Typer(
    name="synth",
    help="Analyse traces of requests, and generate traces that behave like them.",
    no_args_is_help=True,
)
for _command in (analyze, generate, compare):
    group.command()(reads_traces(_command))

traces = typer.Typer(
    name="trace",
    help="Turn traces of other programs into Mallee's, and back.",
    no_args_is_help=True,
)
traces.command()(convert)


@traces.callback()
def _traces() -> None:
    """Keeps the command's name, which a group of one would drop."""
