"""Options that the routers in front of others' engines share, and what these need installed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias, TypeVar

import typer

from mallee.cli.options import require_packages
from mallee.cli.settings import layered

if TYPE_CHECKING:
    from mallee.actors.front.config import FrontConfig

F = TypeVar("F", bound="FrontConfig")

FrontFile: TypeAlias = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings, as the docs list them.")
]
TokenizerOption: TypeAlias = Annotated[
    str | None, typer.Option("--model", help="Folder or hub id with the servers' tokenizer.")
]
PoolOption: TypeAlias = Annotated[
    str | None, typer.Option("--pool", help="InferencePool whose pods are followed.")
]
NamespaceOption: TypeAlias = Annotated[
    str | None, typer.Option("--namespace", help="Its namespace.")
]
EventsPortOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--events-port", help="Port of the servers' KV events over ZeroMQ."),
]
NatsUrlOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--nats-url", help="Broker by which several share their bookings."),
]
_EXTRAS: Final = {"picker": "epp", "router": "router"}
_NEEDED: Final = ("httptools", "tokenizers", "jinja2", "nats", "pydantic", "yaml", "httpx")


def make_front_config(
    schema: type[F],
    command: str,
    file: Path | None,
    assignments: Sequence[str] | None,
    options: Mapping[str, tuple[str, object]],
) -> F:
    """As `layered`, and what the settings need is installed. Raises ConfigError."""
    made = layered(schema, {}, file, assignments, options)
    if made.events_port is not None:
        require_front(command, (), wants_events=True)
    return made


def require_front(command: str, needed: Sequence[str], *, wants_events: bool) -> None:
    """Raises ConfigError that names the remedy if packages are missing."""
    packages = (*_NEEDED, *needed, *(("zmq",) if wants_events else ()))
    require_packages(packages, f"`pip install 'mallee[{_EXTRAS[command]}]'` for the {command}")
