"""`mallee capsule export` and `import`: a capsule goes from one service to another as a file.

The key is `MALLEE_API_KEY` of the environment: on a command line every process could read it.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from mallee.cli.options import JsonOption
from mallee.cli.workers import UrlOption
from mallee.client.files import Progress as Told
from mallee.client.sync import Mallee

SaltOption = Annotated[
    str | None, typer.Option("--cache-salt", help="The salt that the capsule has, or is to have.")
]


def add_to(cli: typer.Typer) -> None:
    group = typer.Typer(help="Export a capsule to a file; import one.", no_args_is_help=True)
    group.command("export")(export)
    group.command("import")(import_capsule)
    cli.add_typer(group, name="capsule")


def export(
    capsule: Annotated[str, typer.Argument(help="Its id.")],
    file: Annotated[Path, typer.Argument(help="The file to write, whole or not at all.")],
    url: UrlOption = "http://127.0.0.1:8000",
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a capsule to FILE: text, state and KV. It holds the conversation: keep it as such."""
    with _client(url) as client, _bar("exporting", is_shown=not as_json) as told:
        nbytes = client.capsule(capsule, cache_salt=cache_salt).export(file, progress=told)
    if as_json:
        sys.stdout.write(
            json.dumps({"capsule": capsule, "file": str(file), "bytes": nbytes}) + "\n"
        )
    else:
        sys.stdout.write(f"{file}: {nbytes} bytes\n")


def import_capsule(
    file: Annotated[Path, typer.Argument(help="A file that an export has written.", exists=True)],
    url: UrlOption = "http://127.0.0.1:8000",
    ttl_s: Annotated[
        float | None, typer.Option("--ttl-s", help="Seconds that it is kept without being used.")
    ] = None,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a capsule of FILE, at a service with the same model; its id is printed."""
    with _client(url) as client, _bar("importing", is_shown=not as_json) as told:
        made = client.import_capsule(file, ttl_s=ttl_s, cache_salt=cache_salt, progress=told)
    came = dict(made.data.imported or {})
    if as_json:
        sys.stdout.write(json.dumps({"capsule": made.id, "tokens": made.tokens, **came}) + "\n")
        return
    fetched, computed = came.get("fetched_tokens", 0), came.get("computed_tokens", 0)
    sys.stdout.write(f"{made.id}\n{made.tokens} tokens: {fetched} fetched, {computed} computed\n")


def _client(url: str) -> Mallee:
    return Mallee(url, api_key=os.environ.get("MALLEE_API_KEY"))


@contextmanager
def _bar(verb: str, *, is_shown: bool) -> Iterator[Told]:
    """A bar of bytes on the terminal's error stream, if that is one."""
    console = Console(stderr=True)
    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not (is_shown and console.is_terminal),
    ) as progress:
        task = progress.add_task(verb, total=None)

        def told(nbytes: int, total: int | None) -> None:
            progress.update(task, completed=nbytes, total=total)

        yield told
