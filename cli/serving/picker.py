"""The command `mallee picker`: the endpoint picker of a pool of vLLM pods, behind Envoy."""

import asyncio
import signal
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.settings import parsed_assignment, read_settings
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.actors.epp.config import PickerConfig

_NEEDED = ("grpc", "google.protobuf", "tokenizers", "jinja2", "nats", "pydantic", "yaml", "httpx")


def add_to(cli: typer.Typer) -> None:
    cli.command()(picker)


def picker(
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file of settings: docs/picker.md.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="One setting by its dotted key; may be repeated."
        ),
    ] = None,
    listen: Annotated[str | None, typer.Option(help="Address of the gRPC service.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id with the pods' tokenizer.")
    ] = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(help="A pod, as ip:port; may be repeated.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="InferencePool whose pods are followed.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Its namespace.")] = None,
    events_port: Annotated[
        int | None, typer.Option(help="Port of the pods' KV events over ZeroMQ.")
    ] = None,
    nats_url: Annotated[
        str | None, typer.Option(help="Broker by which pickers share their bookings.")
    ] = None,
) -> None:
    """Pick vLLM pods for Envoy: the endpoint picker of the Gateway API inference extension."""
    _require_extra(wants_events=events_port is not None)
    options: dict[str, Any] = {
        "listen": listen,
        "model": model,
        "endpoints": tuple(endpoint) if endpoint else None,
        "pool": pool,
        "namespace": namespace,
        "events_port": events_port,
        "nats_url": nats_url,
    }
    asyncio.run(_serve(make_picker_config(config, set_, options)))


def make_picker_config(
    file: Path | None, assignments: list[str] | None, options: dict[str, Any]
) -> "PickerConfig":
    """Settings of `file`, then `--set`, then options that are given. Raises ConfigError."""
    from pydantic import ValidationError

    from mallee.actors.config import problems, put
    from mallee.actors.epp.config import PickerConfig

    values: dict[str, Any] = dict(read_settings(file)) if file else {}
    for assignment in assignments or ():
        put(values, *parsed_assignment(assignment))
    values |= {name: value for name, value in options.items() if value is not None}
    try:
        made = PickerConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{key}{text}" for key, text in problems(error))) from None
    if made.events_port is not None:
        _require_extra(wants_events=True)
    return made


def _require_extra(*, wants_events: bool) -> None:
    """Raises ConfigError that names the remedy if packages are missing."""
    needed = (*_NEEDED, "zmq") if wants_events else _NEEDED
    missing = [name for name in needed if find_spec(name.partition(".")[0]) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not installed: run `pip install 'mallee[epp]'` for the picker",
            missing=missing,
        )


async def _serve(config: "PickerConfig") -> None:
    """Serve until SIGINT or SIGTERM."""
    from mallee.actors.epp.picker import Picker

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: task.cancelling() or task.cancel()
        )
    with suppress(asyncio.CancelledError):
        async with Picker(config) as picker:
            host = config.listen.rpartition(":")[0]
            Console(stderr=True).print(
                f"[bold]mallee[/] picks endpoints at [bold]{escape(host)}:{picker.server.port}[/]"
                "  (Ctrl-C ends)"
            )
            await picker.wait()
