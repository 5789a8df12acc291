"""`mallee sessions`: those of a running service listed, shown as trees, and closed."""

import json
import sys
from contextlib import suppress
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from mallee.cli.options import JsonOption
from mallee.cli.remote.forest import drawn
from mallee.cli.remote.service import DEFAULT_URL, SaltOption, UrlOption, open_client
from mallee.cli.remote.watching import IntervalOption, watch
from mallee.client import Mallee, NotFound
from mallee.client.sessions import SessionData, SessionTree

MAX_PAGE: Final = 100  # of the server

LimitOption = Annotated[int, typer.Option("--limit", min=1, help="At most so many.")]
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
        found = listed(client, limit, cache_salt)
    if as_json:
        sys.stdout.write(json.dumps({"sessions": msgspec.to_builtins(found)}) + "\n")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("session", no_wrap=True, overflow="fold")
    for name in ("parent", "capsules", "running"):
        table.add_column(name)
    for each in found:
        table.add_row(each.id, each.parent or "", str(each.capsules), str(each.running))
    Console().print(table)


def listed(client: Mallee, limit: int, cache_salt: str | None) -> list[SessionData]:
    """The first sessions by name, page by page."""
    found: list[SessionData] = []
    while len(found) < limit:
        size = min(MAX_PAGE, limit - len(found))
        after = found[-1].id if found else None
        page = client.sessions(after=after, limit=size, cache_salt=cache_salt)
        found += page
        if len(page) < size:
            break
    return found


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
            told = {"sessions": found} if name is None else found[0]
            sys.stdout.write(json.dumps(msgspec.to_builtins(told)) + "\n")
        elif live:
            watch(
                lambda: taken(client, name, limit, cache_salt),
                drawn,
                interval_s,
                console,
            )
        else:
            console.print(drawn(taken(client, name, limit, cache_salt)))


def taken(
    client: Mallee, name: str | None, limit: int, cache_salt: str | None
) -> list[SessionTree]:
    """The session of that name, or the first `limit`. One that is closed meanwhile is left out."""
    if name is not None:
        return [client.session(name, cache_salt=cache_salt).show()]
    found = []
    for each in listed(client, limit, cache_salt):
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
        sys.stdout.write(json.dumps(msgspec.to_builtins(closed)) + "\n")
        return
    left = f", {closed.left} left with silent workers" if closed.left else ""
    sys.stdout.write(f"{closed.released} released{left}, {closed.cancelled} requests ended\n")
