"""`mallee synth`: what traces are like, and traces like them."""

import typer

from mallee.cli.synth import compare, generate

synth = typer.Typer(
    name="synth",
    help="Analyse traces of requests, and generate traces that behave like them.",
    no_args_is_help=True,
)


generate.add_to(synth)
compare.add_to(synth)


def add_to(cli: typer.Typer) -> None:
    """`synth` is a group of commands of `cli`."""
    cli.add_typer(synth)
