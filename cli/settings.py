"""Settings of a service from a file, from `--set` and from options; `mallee settings`."""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mallee.cli.options import JsonOption
from mallee.cli.output import answer
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.runtime.config import AppConfig, Settings

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
S = TypeVar("S", bound="Settings")
DEFAULT_MODEL = "smollm2"
APP_PATH = "mallee.actors.app:app"


def make_config(
    file: Path | None,
    assignments: Sequence[str] | None,
    options: Mapping[str, tuple[str, object]],
    base: Mapping[str, object] | None = None,
) -> "AppConfig":
    """The service's settings: as `layered`, on `base` by dotted keys. Raises ConfigError."""
    from mallee.runtime.config import AppConfig, put

    values: dict[str, Any] = {"model": DEFAULT_MODEL}
    for key, value in (base or {}).items():
        put(values, key, value)
    return layered(AppConfig, values, file, assignments, options)


def layered(
    schema: type[S],
    values: dict[str, Any],
    file: Path | None,
    assignments: Sequence[str] | None,
    options: Mapping[str, tuple[str, object]],
) -> S:
    """Settings of `values`, then `file`, then `--set`, then options, each over the ones before.

    `options` maps names of options to the setting's dotted key and the value, None if not given.
    Raises ConfigError naming the option or the key, and what it takes.
    """
    from pydantic import ValidationError

    from mallee.runtime.config import problems, put

    _update(values, read_settings(file) if file else {})
    for assignment in assignments or ():
        put(values, *parsed_assignment(assignment))
    given = {name: option for name, option in options.items() if option[1] is not None}
    for key, value in given.values():
        put(values, key, value)
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        names = {key: name for name, (key, _) in given.items()}
        lines = [names.get(key, key) + sentence for key, sentence in problems(error, schema)]
        raise ConfigError("\n".join(lines)) from error


def read_settings(file: Path) -> dict[str, Any]:
    """The file's settings, not yet checked. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: no YAML: {error}") from error
    return parse_yaml(text, str(file))


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """The mapping that `text` is. Raises ConfigError, also for a key that is given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's own takes the last of equal keys without a word."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
            for number, key in enumerate(keys):
                if key in keys[:number]:
                    line = node.value[number][0].start_mark.line + 1
                    raise ConfigError(f"{source}: line {line}: `{key}` is given twice")
            return super().construct_mapping(node, deep)

    try:
        values = yaml.load(text, Loader)  # noqa: S506 # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: give settings as `key: value`")
    return values


def _update(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Put `more` over `values`, section by section."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _update(values[key], value)
        else:
            values[key] = value


def parsed_assignment(assignment: str) -> tuple[str, object]:
    """Key and value of a `--set`. Raises ConfigError."""
    import yaml

    key, equals, text = assignment.partition("=")
    if not (key and equals):
        raise ConfigError(f"--set {assignment}: give KEY=VALUE, as routing.policy=dynamo")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {assignment}: {text!r} is no YAML value") from error


def settings(
    nats_permissions: Annotated[
        str | None,
        typer.Option(
            metavar="FLEET[/STORE]",
            help="Print the accounts that a NATS server of yours needs for that fleet, and that store.name,"
            " instead.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List every setting with its default, as docs/configure.md does.

    Example: mallee settings --json
    """
    if nats_permissions is None:
        answer({"settings": list(rows())}, document().rstrip(), as_json=as_json)
        return
    from mallee.runtime.bus.accounts import authorization

    fleet, _, store = nats_permissions.partition("/")
    passwords = {"gateway": "$GATEWAYS_PASSWORD", "worker": "$WORKERS_PASSWORD"}
    text = authorization(fleet, store=store or None, **passwords)
    answer({"fleet": fleet, "authorization": text}, text.rstrip(), as_json=as_json)


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
    from mallee.runtime.config import AppConfig, sections

    inside = sections()
    parts = [_HEAD, "## Top level", _table(AppConfig, without=inside)]
    for name, section in inside.items():
        title = (section.__doc__ or "").splitlines()[0]
        parts += [f"## `{name}`", title, _table(section)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def rows() -> Iterator[dict[str, Any]]:
    """Every setting by its dotted key; `schema` is JSON Schema's, with the default unless it is required."""
    from mallee.runtime.config import AppConfig, sections

    inside = sections()
    pages: dict[str, type[Settings]] = {"": AppConfig, **inside}
    for prefix, section in pages.items():
        for name, field in section.model_json_schema()["properties"].items():
            if prefix or name not in inside:
                schema = {key: value for key, value in field.items() if key != "description"}
                key = f"{prefix}.{name}" if prefix else name
                yield {
                    "key": key,
                    "required": "default" not in field,
                    "schema": schema,
                    "description": field["description"],
                }


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
