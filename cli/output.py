"""Output of commands: an object for programs, texts and tables for people, and errors."""

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table


def print_json(body: object) -> None:
    """One object in a line of stdout, which is the last that a command with --json prints."""
    sys.stdout.write(json.dumps(msgspec.to_builtins(body), allow_nan=False) + "\n")


def answer(body: object, told: RenderableType, *, as_json: bool) -> None:
    """A command's result on stdout: `body` for programs, `told` for people. A text is printed as it is."""
    if as_json:
        print_json(body)
    elif isinstance(told, str):
        sys.stdout.write(f"{told}\n")
    else:
        Console(highlight=False).print(told)


def grid(
    head: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    *,
    right: Collection[str] = (),
    whole: Collection[str] = (),
    **options: Any,
) -> Table:
    """A table without lines. Columns of `right` stand to the right, those of `whole` are not wrapped.

    `options` are those of rich's table.
    """
    table = Table(**{"box": None, "pad_edge": False, **options})
    for name in head:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=name in whole)
    for row in rows:
        table.add_row(*row)
    return table


def say_written(paths: Iterable[Path]) -> None:
    for path in paths:
        typer.echo(f"wrote {path}", err=True)


def print_error(text: str) -> None:
    for line in text.splitlines():
        Console(stderr=True).print(f"[red]error:[/] {escape(line)}", soft_wrap=True)


def fail(message: str) -> NoReturn:
    """End with one line and status 2."""
    print_error(message)
    raise typer.Exit(2)
