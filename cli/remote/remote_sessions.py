"""`mallee sessions`: those of a running service listed, shown as trees, and closed."""

import sys
from contextlib import suppress
from itertools import islice
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mallee.cli.options import JsonOption, print_json
from mallee.cli.remote.forest import drawn
from mallee.cli.remote.service import (
    DEFAULT_URL,
    LimitOption,
    SaltOption,
    UrlOption,
    open_client,
)
from mallee.cli.remote.watching import IntervalOption, watch
from mallee.client import Mallee, NotFound, SessionTree

NameArgument = Annotated[str, typer.Argument(help="The session's name.")]


def add_to(cli: typer.Typer) -> None:
    group = typer.Typer(
        help="List, show and close sessions of a running service.", no_args_is_help=True
    )
    group.command("list")(list_sessions)
    group.command("show")(show)
    group.command("close")(close)
    cli.add_typer(group, name="sessions")


def list_sessions(
    url: UrlOption = DEFAULT_URL,
    limit: LimitOption = 100,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """List your sessions by name.

    Example: mallee sessions list --limit 20
    """
    with open_client(url) as client:
        found = list(islice(client.sessions(cache_salt=cache_salt), limit))
    if as_json:
        print_json({"sessions": found})
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("session", no_wrap=True, overflow="fold")
    for name in ("parent", "capsules", "running"):
        table.add_column(name)
    for each in found:
        table.add_row(each.id, each.parent or "", str(each.capsules), str(each.running))
    Console(markup=False).print(table)


def show(
    name: Annotated[str | None, typer.Argument(help="A session; by default all.")] = None,
    url: UrlOption = DEFAULT_URL,
    limit: LimitOption = 100,
    live: Annotated[bool, typer.Option("--live", help="Look again until Ctrl-C.")] = False,
    interval_s: IntervalOption = 1.0,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a session, or all of them, as trees of capsules.

    Example: mallee sessions show bug-7 --live
    """
    console = Console(highlight=False)
    with open_client(url) as client:
        if as_json:
            found = taken(client, name, limit, cache_salt)
            print_json({"sessions": found} if name is None else found[0])
        elif live:
            watch(lambda: taken(client, name, limit, cache_salt), drawn, interval_s, console)
        else:
            console.print(drawn(taken(client, name, limit, cache_salt)))


def taken(
    client: Mallee, name: str | None, limit: int, cache_salt: str | None
) -> list[SessionTree]:
    """The session of that name, or the first `limit`. One that is closed meanwhile is left out."""
    if name is not None:
        return [client.session(name, cache_salt=cache_salt).show()]
    found = []
    for each in islice(client.sessions(cache_salt=cache_salt), limit):
        with suppress(NotFound):
            found.append(client.session(each.id, cache_salt=cache_salt).show())
    return found


def close(
    name: NameArgument,
    url: UrlOption = DEFAULT_URL,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Release a session's capsules, end its requests and forget it.

    Example: mallee sessions close bug-7
    """
    with open_client(url) as client:
        closed = client.session(name, cache_salt=cache_salt).close()
    if as_json:
        print_json(closed)
        return
    left = f", {closed.left} left with silent workers" if closed.left else ""
    sys.stdout.write(f"{closed.released} released{left}, {closed.cancelled} requests ended\n")
