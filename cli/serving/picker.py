"""The command `mallee picker`: the endpoint picker of a pool of vLLM pods, behind Envoy."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import require_packages
from mallee.cli.serving.signals import until_signal
from mallee.cli.settings import SetOptions, layered

if TYPE_CHECKING:
    from mallee.actors.front.picker.config import PickerConfig

_NEEDED = ("grpc", "google.protobuf", "tokenizers", "jinja2", "nats", "pydantic", "yaml", "httpx")


def picker(
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file of settings: docs/picker.md.")
    ] = None,
    set_: SetOptions = None,
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
    """Pick vLLM pods for Envoy: the endpoint picker of the Gateway API inference extension.

    Example: mallee picker --model Qwen/Qwen3-8B --endpoint 10.0.0.7:8000
    """
    _require_extra(wants_events=events_port is not None)
    options = {
        "--listen": ("listen", listen),
        "--model": ("model", model),
        "--endpoint": ("endpoints", tuple(endpoint) if endpoint else None),
        "--pool": ("pool", pool),
        "--namespace": ("namespace", namespace),
        "--events-port": ("events_port", events_port),
        "--nats-url": ("nats_url", nats_url),
    }
    asyncio.run(until_signal(_serve(make_picker_config(config, set_, options))))


def make_picker_config(
    file: Path | None,
    assignments: Sequence[str] | None,
    options: Mapping[str, tuple[str, object]],
) -> "PickerConfig":
    """As `layered`, and what the settings need is installed. Raises ConfigError."""
    from mallee.actors.front.picker.config import PickerConfig

    made = layered(PickerConfig, {}, file, assignments, options)
    if made.events_port is not None:
        _require_extra(wants_events=True)
    return made


def _require_extra(*, wants_events: bool) -> None:
    """Raises ConfigError that names the remedy if packages are missing."""
    needed = (*_NEEDED, "zmq") if wants_events else _NEEDED
    require_packages(needed, "`pip install 'mallee[epp]'` for the picker")


async def _serve(config: "PickerConfig") -> None:
    from mallee.actors.front.picker.picker import Picker

    async with Picker(config) as picker:
        host = config.listen.rpartition(":")[0]
        Console(stderr=True).print(
            f"[bold]mallee[/] picks endpoints at [bold]{escape(host)}:{picker.server.port}[/]"
            "  (Ctrl-C ends)"
        )
        await picker.wait()
