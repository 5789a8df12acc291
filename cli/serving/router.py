"""The command `mallee router`: a reverse proxy in front of your own vLLM servers."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import with_groups
from mallee.cli.serving.fronts import FrontOptions, make_front_config, require_front
from mallee.cli.serving.signals import until_signal

if TYPE_CHECKING:
    from mallee.actors.front.proxy.config import ProxyConfig


@with_groups
def router(
    front: FrontOptions,
    *,
    backends: Annotated[
        str | None,
        typer.Option(help="The servers: URLs or host:port, with commas between them."),
    ] = None,
    backends_file: Annotated[
        str | None, typer.Option(help="A YAML or JSON list of them, read when it changes.")
    ] = None,
    keys_file: Annotated[
        str | None, typer.Option(help="File of API keys, as `mallee keys new` makes it.")
    ] = None,
) -> None:
    """Forward requests to your own vLLM servers, each where its prompt is cached.

    Example: mallee router --backends http://10.0.0.7:8000,http://10.0.0.8:8000
    """
    require_front("router", ("uvloop",))
    from mallee.actors.front.proxy.config import ProxyConfig

    listed = None if backends is None else tuple(filter(None, map(str.strip, backends.split(","))))
    own = {
        "--backends": ("endpoints", listed),
        "--backends-file": ("endpoints_file", backends_file),
        "--keys-file": ("keys_file", keys_file),
    }
    made = make_front_config(ProxyConfig, "router", front, own)
    import uvloop

    from mallee.runtime.telemetry import logs

    logs.set_up("info", "text", process="router", name="router")
    uvloop.run(until_signal(_serve(made)))


async def _serve(config: "ProxyConfig") -> None:
    from mallee.actors.front.proxy.proxy import Proxy

    async with Proxy(config) as proxy:
        host = config.listen.rpartition(":")[0]
        Console(stderr=True).print(
            f"[bold]mallee[/] forwards requests at [bold]http://{escape(host)}:{proxy.port}/v1[/]"
            "  (Ctrl-C ends)"
        )
        await proxy.wait()
