"""Settings of a service from a file, from `--set` and from options; the page that lists them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.actors.config import AppConfig

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of settings, as `args` in serve.yaml."),
]
SetOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting by its dotted key, as routing.policy=dynamo; may be repeated.",
    ),
]
DEFAULT_MODEL = "smollm2"


def make_config(
    file: Path | None,
    assignments: Sequence[str] | None,
    options: Mapping[str, tuple[str, object]],
    base: Mapping[str, object] | None = None,
) -> "AppConfig":
    """Settings of `base`, then `file`, then `--set`, then options, each over the ones before.

    `options` maps names of options to the setting's dotted key and the value, None if not given.
    Raises ConfigError naming the option or the key, and what it takes.
    """
    from pydantic import ValidationError

    from mallee.actors.config import AppConfig, problems, put

    values: dict[str, Any] = {"model": DEFAULT_MODEL}
    for key, value in (base or {}).items():
        put(values, key, value)
    _update(values, read_settings(file) if file else {})
    for assignment in assignments or ():
        put(values, *_parsed(assignment))
    given = {name: option for name, option in options.items() if option[1] is not None}
    for key, value in given.values():
        put(values, key, value)
    try:
        return AppConfig.model_validate(values)
    except ValidationError as error:
        names = {key: name for name, (key, _) in given.items()}
        lines = [names.get(key, key) + sentence for key, sentence in problems(error)]
        raise ConfigError("\n".join(lines)) from error


def read_settings(file: Path) -> dict[str, Any]:
    """The file's settings, not yet checked. Raises ConfigError."""
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: can't be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: give settings as `key: value`")
    return values


def _update(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put `more` over `values`, section by section."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _update(values[key], value)
        else:
            values[key] = value


def _parsed(assignment: str) -> tuple[str, object]:
    import yaml

    key, equals, text = assignment.partition("=")
    if not (key and equals):
        raise ConfigError(f"--set {assignment}: give KEY=VALUE, as routing.policy=dynamo")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {assignment}: {text!r} is no YAML value") from error
