"""Options that the routers in front of others' engines share, and what these need installed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from mallee.cli.options import require_packages
from mallee.cli.settings import SetOptions, layered

if TYPE_CHECKING:
    from mallee.actors.front.config import FrontConfig

F = TypeVar("F", bound="FrontConfig")


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """The options of both; those but `config` and `set_` are settings of the same name."""

    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings, as the docs list them.")
    ] = None
    set_: SetOptions = None
    listen: Annotated[str | None, typer.Option(help="Address of the service.")] = None
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id with the servers' tokenizer.")
    ] = None
    pool: Annotated[str | None, typer.Option(help="InferencePool whose pods are followed.")] = None
    namespace: Annotated[str | None, typer.Option(help="Its namespace.")] = None
    events_port: Annotated[
        int | None, typer.Option(help="Port of the servers' KV events over ZeroMQ.")
    ] = None
    nats_url: Annotated[
        str | None, typer.Option(help="Broker by which several share their bookings.")
    ] = None


_EXTRAS: Final = {"picker": "epp", "router": "router"}
_NEEDED: Final = ("httptools", "tokenizers", "jinja2", "nats", "pydantic", "yaml", "httpx")


def make_front_config(
    schema: type[F], command: str, front: FrontOptions, own: Mapping[str, tuple[str, object]]
) -> F:
    """The settings by all layers, with the command's `own` options. Raises ConfigError."""
    shared = [each.name for each in fields(front) if each.name not in ("config", "set_")]
    given: dict[str, tuple[str, object]] = {
        f"--{name.replace('_', '-')}": (name, getattr(front, name)) for name in shared
    }
    made = layered(schema, {}, front.config, front.set_, given | dict(own))
    if made.events_port is not None:
        require_front(command, ("zmq",))
    return made


def require_front(command: str, needed: Sequence[str]) -> None:
    """Raises ConfigError that names the remedy if packages are missing."""
    packages = (*_NEEDED, *needed)
    require_packages(packages, f"`pip install 'mallee[{_EXTRAS[command]}]'` for the {command}")
