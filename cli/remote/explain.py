"""`mallee explain`: why requests went where they went, and how they fared."""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from mallee.cli.options import JsonOption
from mallee.cli.remote.course import Explained, course_parts, decision_parts, read
from mallee.cli.remote.service import DEFAULT_URL, UrlOption, ask


def add_to(cli: typer.Typer) -> None:
    cli.command()(explain)


def explain(
    request: Annotated[
        str | None, typer.Argument(help="The id of an answer; by default the last decisions.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    limit: Annotated[int, typer.Option(min=1, max=128, help="So many decisions.")] = 16,
    candidates: Annotated[int, typer.Option(min=1, max=4096, help="Workers of each.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Tell why requests went to their workers: the prices, in milliseconds, and the answer's course.

    Example: mallee explain req_4f1c --candidates 8
    """
    named = {} if request is None else {"request": request}
    params: dict[str, Any] = {"limit": limit, "candidates": candidates, **named}
    body = ask("GET", url, "/v1/router/explain", **params)
    if as_json:
        sys.stdout.write(json.dumps(body) + "\n")
        return
    console = Console(highlight=False)
    found = read(body, Explained)
    if not found.data and found.life is None:
        console.print("no decision yet: the service has answered nothing, or forks alone")
    parts = [part for decision in found.data for part in decision_parts(decision)]
    parts += [] if found.life is None else course_parts(found.life)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
