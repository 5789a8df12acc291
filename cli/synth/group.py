"""The group of commands `mallee synth`."""

import typer

from mallee.cli.synth import analyze, compare, generate

synth = typer.Typer(
    name="synth",
    help="Analyse traces of requests, and generate traces that behave like them.",
    no_args_is_help=True,
)

for _module in (analyze, generate, compare):
    _module.add_to(synth)


def add_to(cli: typer.Typer) -> None:
    """Add the group `synth` to `cli`."""
    cli.add_typer(synth)
