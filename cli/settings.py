"""Settings of a service from a file, from `--set` and from options; `mallee settings` and `check`."""

import json
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.actors.config import AppConfig, Settings

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
APP_PATH = "mallee.actors.app:app"


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


def add_to(cli: typer.Typer) -> None:
    cli.command("settings")(print_settings)
    cli.command()(check)


def print_settings(
    nats_permissions: Annotated[
        str | None,
        typer.Option(
            metavar="FLEET",
            help="Print the accounts that a NATS server of yours needs for that fleet, instead.",
        ),
    ] = None,
) -> None:
    """List every setting with its default, as docs/configure.md does."""
    if nats_permissions is None:
        sys.stdout.write(document())
        return
    from mallee.actors.bus.accounts import authorization

    sys.stdout.write(
        authorization(nats_permissions, gateway="$GATEWAYS_PASSWORD", worker="$WORKERS_PASSWORD")
    )


def check(
    file: Annotated[Path, typer.Argument(help="serve.yaml, or a file for --config.")],
) -> None:
    """Check a file of settings; exit 1 with a line for each fault."""
    from pydantic import ValidationError

    from mallee.actors.config import AppConfig, problems

    is_right = True
    for name, values in _applications(read_settings(file)):
        try:
            AppConfig.model_validate(values)
        except ValidationError as error:
            is_right = False
            for key, sentence in problems(error):
                sys.stderr.write(f"{file}: {name}{key}{sentence}\n")
    if not is_right:
        raise typer.Exit(1)
    sys.stdout.write(f"{file}: right\n")


def _applications(values: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Prefix for messages, and settings, of Mallee's applications in serve.yaml; or the file's own."""
    if "applications" not in values:
        yield "", values
        return
    found = [
        each
        for each in values["applications"] or ()
        if isinstance(each, dict) and each.get("import_path") == APP_PATH
    ]
    if not found:
        raise ConfigError(f"no application here has import_path: {APP_PATH}")
    for each in found:
        yield f"{each.get('name', 'application')}: ", each.get("args") or {}


_HEAD = """\
# Settings

Printed by `mallee settings`; don't edit.

A deployment is described by one set of settings in sections. They stand under `args` in `serve.yaml`
for `serve deploy`, or alone in a YAML file for `mallee serve --config FILE` and `mallee mock --config
FILE`. `--set key=value` sets one, by its dotted key and with a YAML value; it may be repeated:

    mallee serve --config fleet.yaml --set routing.policy=dynamo --set scheduler.max_rows=64

`--set` wins over the file, and options such as `--workers` over both. Unknown keys are refused with the
nearest name. `mallee check FILE` names what is wrong with a file before it is deployed.
"""


def document() -> str:
    """The page of all settings, in Markdown."""
    from mallee.actors.config import AppConfig, sections

    inside = sections()
    parts = [_HEAD, "## Top level", _table(AppConfig, without=inside)]
    for name, section in inside.items():
        title = (section.__doc__ or "").splitlines()[0]
        parts += [f"## `{name}`", title, _table(section)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(section: "type[Settings]", without: Container[str] = ()) -> str:
    rows = ["| setting | values | default | |", "|---|---|---|---|"]
    for name, field in section.model_json_schema()["properties"].items():
        if name not in without:
            default = f"`{_plain(field['default'])}`" if "default" in field else "required"
            rows.append(f"| `{name}` | {_values(field)} | {default} | {field['description']} |")
    return "\n".join(rows)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _values(field: Mapping[str, Any]) -> str:
    """The type, names to choose from and the range."""
    options = [one for one in field.get("anyOf", [field]) if one["type"] != "null"]
    return ", ".join(_range(one) for one in options)


def _range(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        return "list of " + _range(schema["items"])
    kind = {
        "object": "mapping",
        "boolean": "`true`, `false`",
        "string": "text",
        "integer": "integer",
    }
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    signs = [f"{sign} {schema[key]}" for key, sign in bounds.items() if key in schema]
    return " ".join((kind.get(schema["type"], schema["type"]), *signs))
