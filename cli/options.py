"""What the commands of the command line share."""

from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from mallee.protocol.errors import ConfigError

POLICIES = "cost, dynamo, round_robin, random, least_loaded or prefix_only."


def check_out(out: Path | None, file: Path | None = None) -> None:
    """What would stop the writing of a folder or a file stops the command before hours of work.

    Raises ConfigError.
    """
    if out is not None:
        from mallee.figures.files import made_folder
        from mallee.figures.style import require_matplotlib

        require_matplotlib()
        made_folder(out)
    if file is not None:
        is_new = not file.exists()
        try:
            file.open("a").close()
            if is_new:
                file.unlink()
        except OSError as error:
            raise ConfigError(f"{file}: can't be written ({error.strerror})") from error


def check_listening(host: str, api_key: str | None) -> None:
    """End with status 2 if other machines could reach the service without a key."""
    if host not in ("127.0.0.1", "localhost", "::1") and not api_key:
        fail(f"--host {host} listens beyond this machine: give --api-key too")


def at_least_0(name: str, given: float) -> float:
    """Raises ConfigError naming the option."""
    if not 0.0 <= given < float("inf"):
        raise ConfigError(f"--{name}={given:g}: give 0 or more")
    return given


def above_0(name: str, given: float) -> float:
    """Raises ConfigError naming the option."""
    if not 0.0 < given < float("inf"):
        raise ConfigError(f"--{name}={given:g}: give more than 0")
    return given


def print_error(text: str) -> None:
    Console(stderr=True).print(f"[red]error:[/] {escape(text)}", soft_wrap=True)


def fail(message: str) -> NoReturn:
    """End with one line and status 2."""
    print_error(message)
    raise typer.Exit(2)
