"""`mallee top`: the fleet as it is now, again and again."""

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from mallee.cli.options import JsonOption
from mallee.cli.output import answer
from mallee.cli.remote.fleet import draw, take
from mallee.cli.remote.service import DEFAULT_URL, TIMEOUT_S, UrlOption, open_client
from mallee.cli.remote.watching import IntervalOption, watch


def top(
    url: UrlOption = DEFAULT_URL,
    interval_s: IntervalOption = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show workers, cache, load and requests of a running service, live in a terminal.

    Keys 1 to 4 choose the pane. Of the workers, `prefill` are prompt tokens that wait to be computed,
    `cached` blocks of KV that others can share. Where there is no terminal the workers are printed once.

    Example: mallee top --url http://gateway:8000 --interval-s 5
    """
    console = Console()
    with open_client(url, timeout=TIMEOUT_S) as client:
        if as_json or once:
            found = take(client)
            body = {"health": found.health, "workers": found.workers, **found.gauges()}
            answer(body, draw(found, {}), as_json=as_json)
        elif _has_screen(console):
            client.health()  # an address without a service ends here, and not on the screen
            _show_screen(url, interval_s)
        else:
            watch(
                lambda: take(client),
                lambda sample, before: draw(sample, sample.rates(before)),
                interval_s,
                console,
            )


def _has_screen(console: Console) -> bool:
    """Whether keys can be read and a whole screen drawn, by standard error as textual does."""
    are_terminals = all(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr))
    return are_terminals and not console.is_dumb_terminal


def _show_screen(url: str, interval_s: float) -> None:
    from mallee.cli.remote.screen.app import Top  # textual: a quarter of a second
    from mallee.cli.remote.screen.asking import LiveService

    api_key = os.environ.get("MALLEE_API_KEY")
    app = Top(LiveService(url, api_key=api_key), interval_s=interval_s)
    app.run()
    if app.return_code:
        raise typer.Exit(app.return_code)
