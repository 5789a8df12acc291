"""`mallee top`: the fleet as it is now, again and again."""

import json
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from mallee.cli.options import JsonOption
from mallee.cli.remote.fleet import Sample, ask_fleet, draw, take
from mallee.cli.remote.service import DEFAULT_URL, SaltOption, UrlOption, ask
from mallee.cli.remote.watching import IntervalOption, watch


def add_to(cli: typer.Typer) -> None:
    cli.command()(top)


def top(
    url: UrlOption = DEFAULT_URL,
    interval_s: IntervalOption = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show workers, sessions, cache, load and requests of a running service, live in a terminal.

    Keys 1 to 5 choose the pane. Of the workers, `prefill` are prompt tokens that wait to be computed,
    `cached` blocks of KV that others can share. Where there is no terminal the workers are printed once.

    Example: mallee top --url http://gateway:8000 --interval-s 5
    """
    console = Console()
    if as_json:
        answers = ask_fleet(url)
        gauges = Sample.of(0.0, answers).gauges()
        told = {"health": answers.health, "workers": answers.workers, **gauges}
        sys.stdout.write(json.dumps(told) + "\n")
    elif once:
        console.print(draw(take(url), {}))
    elif _has_screen(console):
        _show_screen(url, interval_s, cache_salt)
    else:
        watch(
            lambda: take(url),
            lambda sample, before: draw(sample, sample.rates(before)),
            interval_s,
            console,
        )


def _has_screen(console: Console) -> bool:
    """Whether keys can be read and a whole screen drawn, by standard error as textual does."""
    are_terminals = all(each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr))
    return are_terminals and not console.is_dumb_terminal


def _show_screen(url: str, interval_s: float, cache_salt: str | None) -> None:
    from mallee.cli.remote.screen.app import Top  # textual: a quarter of a second
    from mallee.cli.remote.screen.asking import LiveService

    ask("GET", url, "/health")  # an address without a service ends here, and not on the screen
    api_key = os.environ.get("MALLEE_API_KEY")
    app = Top(LiveService(url, api_key=api_key, cache_salt=cache_salt), interval_s=interval_s)
    app.run()
    if app.return_code:
        raise typer.Exit(app.return_code)
