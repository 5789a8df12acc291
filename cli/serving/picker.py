"""The command `mallee picker`: the endpoint picker of a pool of vLLM pods, behind Envoy."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import with_groups
from mallee.cli.serving.fronts import FrontOptions, make_front_config, require_front
from mallee.cli.serving.signals import until_signal

if TYPE_CHECKING:
    from mallee.actors.front.picker.config import PickerConfig


@with_groups
def picker(
    front: FrontOptions,
    *,
    endpoint: Annotated[
        list[str] | None, typer.Option(help="A pod, as ip:port; may be repeated.")
    ] = None,
) -> None:
    """Pick vLLM pods for Envoy: the endpoint picker of the Gateway API inference extension.

    Example: mallee picker --model Qwen/Qwen3-8B --endpoint 10.0.0.7:8000
    """
    require_front("picker", ("grpc", "google.protobuf"))
    from mallee.actors.front.picker.config import PickerConfig

    own = {"--endpoint": ("endpoints", tuple(endpoint) if endpoint else None)}
    made = make_front_config(PickerConfig, "picker", front, own)
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
