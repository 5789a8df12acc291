"""The command `mallee picker`: the endpoint picker of a pool of vLLM pods, behind Envoy."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.serving.fronts import (
    EventsPortOption,
    FrontFile,
    NamespaceOption,
    NatsUrlOption,
    PoolOption,
    TokenizerOption,
    make_front_config,
    require_front,
)
from mallee.cli.serving.signals import until_signal
from mallee.cli.settings import SetOptions

if TYPE_CHECKING:
    from mallee.actors.front.picker.config import PickerConfig

_NEEDED = ("grpc", "google.protobuf")


def picker(
    config: FrontFile = None,
    set_: SetOptions = None,
    listen: Annotated[str | None, typer.Option(help="Address of the gRPC service.")] = None,
    model: TokenizerOption = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(help="A pod, as ip:port; may be repeated.")
    ] = None,
    pool: PoolOption = None,
    namespace: NamespaceOption = None,
    events_port: EventsPortOption = None,
    nats_url: NatsUrlOption = None,
) -> None:
    """Pick vLLM pods for Envoy: the endpoint picker of the Gateway API inference extension.

    Example: mallee picker --model Qwen/Qwen3-8B --endpoint 10.0.0.7:8000
    """
    require_front("picker", _NEEDED, wants_events=events_port is not None)
    from mallee.actors.front.picker.config import PickerConfig

    options = {
        "--listen": ("listen", listen),
        "--model": ("model", model),
        "--endpoint": ("endpoints", tuple(endpoint) if endpoint else None),
        "--pool": ("pool", pool),
        "--namespace": ("namespace", namespace),
        "--events-port": ("events_port", events_port),
        "--nats-url": ("nats_url", nats_url),
    }
    made = make_front_config(PickerConfig, "picker", config, set_, options)
    asyncio.run(until_signal(_serve(made)))


async def _serve(config: "PickerConfig") -> None:
    from mallee.actors.front.picker.picker import Picker

    async with Picker(config) as picker:
        host = config.listen.rpartition(":")[0]
        Console(stderr=True).print(
            f"[bold]mallee[/] picks endpoints at [bold]{escape(host)}:{picker.server.port}[/]"
            "  (Ctrl-C ends)"
        )
        await picker.wait()
