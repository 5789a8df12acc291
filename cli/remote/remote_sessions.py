"""`mallee sessions`: those of a running service listed, shown as trees, and closed."""

from contextlib import suppress
from itertools import islice
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import JsonOption, with_groups
from mallee.cli.output import answer, grid
from mallee.cli.remote.forest import drawn
from mallee.cli.remote.service import LimitOption, Service
from mallee.cli.remote.watching import IntervalOption, watch
from mallee.client import Mallee, NotFound, SessionTree

group = typer.Typer(
    name="sessions",
    help="List, show and close sessions of a running service.",
    no_args_is_help=True,
)


@group.command("list")
@with_groups
def list_sessions(service: Service, limit: LimitOption = 100, as_json: JsonOption = False) -> None:
    """List your sessions by name.

    Example: mallee sessions list --limit 20
    """
    with service.open() as client:
        found = list(islice(client.sessions(cache_salt=service.cache_salt), limit))
    rows = (
        (escape(each.id), escape(each.parent or ""), str(each.capsules), str(each.running))
        for each in found
    )
    table = grid(("session", "parent", "capsules", "running"), rows, whole=("session",))
    answer({"sessions": found}, table, as_json=as_json)


@group.command()
@with_groups
def show(
    name: Annotated[str | None, typer.Argument(help="A session; by default all.")] = None,
    *,
    service: Service,
    limit: LimitOption = 100,
    live: Annotated[bool, typer.Option("--live", help="Look again until Ctrl-C.")] = False,
    interval_s: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show a session, or all of them, as trees of capsules.

    Example: mallee sessions show bug-7 --live
    """
    with service.open() as client:

        def take() -> list[SessionTree]:
            return taken(client, name, limit, service.cache_salt)

        if live and not as_json:
            watch(take, drawn, interval_s, Console(highlight=False))
            return
        found = take()
    answer({"sessions": found} if name is None else found[0], drawn(found), as_json=as_json)


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


@group.command()
@with_groups
def close(
    name: Annotated[str, typer.Argument(help="The session's name.")],
    service: Service,
    as_json: JsonOption = False,
) -> None:
    """Release a session's capsules, end its requests and forget it.

    Example: mallee sessions close bug-7
    """
    with service.open() as client:
        closed = client.session(name, cache_salt=service.cache_salt).close()
    left = f", {closed.left} left with silent workers" if closed.left else ""
    told = f"{closed.released} released{left}, {closed.cancelled} requests ended"
    answer(closed, told, as_json=as_json)
