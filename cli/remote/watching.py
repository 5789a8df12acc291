"""A look at a running service, taken and drawn again and again until Ctrl-C."""

import time
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from mallee.protocol.errors import MalleeError

IntervalOption = Annotated[float, typer.Option(min=0.1, help="Between two looks.")]

T = TypeVar("T")


def watch(
    take: Callable[[], T],
    draw: Callable[[T, T | None], RenderableType],
    interval_s: float,
    console: Console,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Fill the terminal with `draw(this look, the one before)`; anything else gets one look.

    A look that fails is told above the last one, and the next is tried. Raises what the first look raises.
    """
    seen = take()
    if not console.is_terminal:
        console.print(draw(seen, None))
        return
    with Live(draw(seen, None), console=console, screen=True, auto_refresh=False) as view:
        try:
            while True:
                sleep(interval_s)
                try:
                    before, seen = seen, take()
                except MalleeError as error:
                    told = Text(str(error), style="red")
                    view.update(Group(told, draw(seen, None)), refresh=True)
                else:
                    view.update(draw(seen, before), refresh=True)
        except KeyboardInterrupt:
            return
