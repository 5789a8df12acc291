"""`mallee explain`: why requests went where they went, and how they fared."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mallee.cli.options import JsonOption
from mallee.cli.output import print_json
from mallee.cli.remote.course import course_parts, decision_parts
from mallee.cli.remote.service import DEFAULT_URL, TIMEOUT_S, UrlOption, open_client


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
    with open_client(url, timeout=TIMEOUT_S) as client:
        found = client.explain(request, limit=limit, candidates=candidates)
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False)
    if not (found.data or found.life):
        console.print("no decision yet: the service has answered nothing, or forks alone")
    parts = [part for decision in found.data for part in decision_parts(decision)]
    parts += course_parts(found.life) if found.life else []
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
