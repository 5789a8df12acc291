"""`mallee sessions`: those of a running service listed, shown as trees, and closed."""

import json
import sys
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from mallee.cli.options import JsonOption
from mallee.cli.remote.service import DEFAULT_URL, SaltOption, UrlOption, open_client
from mallee.client.sessions import SessionData, SessionNode, SessionTree

MAX_PAGE: Final = 100  # of the server

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
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 100,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """List your sessions by name.

    Example: mallee sessions list --limit 20
    """
    found: list[SessionData] = []
    with open_client(url) as client:
        while len(found) < limit:
            size = min(MAX_PAGE, limit - len(found))
            after = found[-1].id if found else None
            page = client.sessions(after=after, limit=size, cache_salt=cache_salt)
            found += page
            if len(page) < size:
                break
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


def show(
    name: NameArgument,
    url: UrlOption = DEFAULT_URL,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a session as a tree of capsules.

    Example: mallee sessions show bug-7
    """
    with open_client(url) as client:
        found = client.session(name, cache_salt=cache_salt)
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(found)) + "\n")
        return
    Console(highlight=False).print(drawn(found))


def drawn(session: SessionTree) -> Tree:
    """A session's capsules, each below the one that it continues."""
    below = f", below {session.parent}" if session.parent else ""
    root = Tree(f"{session.id}{below}")
    places: dict[str, Tree] = {}
    for node in session.nodes:
        above = places.get(node.parent or "", root)
        places[node.capsule] = above.add(_words(node))
    for child in session.children:
        root.add(f"session {child}")
    return root


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
        closed = client.close_session(name, cache_salt=cache_salt)
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(closed)) + "\n")
        return
    left = f", {closed.left} left with silent workers" if closed.left else ""
    sys.stdout.write(f"{closed.released} released{left}, {closed.cancelled} requests ended\n")


def _words(node: SessionNode) -> str:
    kept = " pinned" if node.pinned else ""
    where = (node.tier or "held") if node.held else "gone"
    return f"{node.capsule}  {node.tokens} tokens, {where}{kept}"
