"""What the commands of the command line share."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.actors.config import AppConfig


def make_config(values: dict[str, object], options: Mapping[str, str] | None = None) -> "AppConfig":
    """Raises ConfigError naming the option and what it takes.

    `options`: of settings whose option has another name.
    """
    from pydantic import ValidationError

    from mallee.actors.config import AppConfig

    try:
        return AppConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # several settings that contradict each other
            raise ConfigError(first["msg"].removeprefix("Value error, ")) from error
        name, *rest = (str(part) for part in first["loc"])
        option = "--" + "-".join(((options or {}).get(name, name), *rest)).replace("_", "-")
        raise ConfigError(f"{option}={first['input']!r}: {first['msg']}") from error


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
