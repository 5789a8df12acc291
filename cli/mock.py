"""The command `mallee mock`: a fleet of mocked engines behind an OpenAI endpoint, in one command."""

import asyncio
import signal
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.extras import require_serve_extra
from mallee.cli.options import fail, make_config

if TYPE_CHECKING:
    from mallee.actors.config import AppConfig

_OPTIONS = {  # of settings
    "workers": "processes",
    "engines_per_worker": "engines",
    "num_blocks": "blocks",
    **{f"mock_{name}": name for name in ("timing", "speedup", "jitter", "seed")},
    "mock_startup_s": "startup",
}


def add_to(cli: typer.Typer) -> None:
    cli.command()(mock)


def mock(
    engines: Annotated[int, typer.Option(min=1, help="Mocked engines, each a worker.")] = 16,
    http: Annotated[int, typer.Option(min=1, max=65535, help="Port of the API.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback unless told.")] = (
        "127.0.0.1"
    ),
    model: Annotated[
        str, typer.Option(help="Whose tokenizer and config.json are used: as of `mallee serve`.")
    ] = "smollm2",
    timing: Annotated[
        str | None, typer.Option(help="What steps take: a profile's name, or a file of one.")
    ] = None,
    speedup: Annotated[
        float, typer.Option(min=0, help="Of the timing; 0: nothing takes time.")
    ] = 1,
    startup: Annotated[
        float | None, typer.Option(min=0, help="Seconds before an engine is there.")
    ] = None,
    jitter: Annotated[
        float | None, typer.Option(min=0, help="Of steps: sigma of a lognormal factor of mean 1.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="KV blocks of each engine.")] = 16_384,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    policy: Annotated[str, typer.Option(help="Of routing: see serve.yaml.")] = "cost",
    processes: Annotated[int, typer.Option(min=1, help="That share the engines.")] = 1,
    fleet: Annotated[str, typer.Option(help="Name in the broker's subjects.")] = "default",
    nats_url: Annotated[
        str | None, typer.Option(help="A broker to use; by default one is started on loopback.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of jitter.")] = 0,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MALLEE_API_KEY", help="Bearer token that clients must send."),
    ] = None,
) -> None:
    """Serve an OpenAI API whose engines take time instead of computing; everything else is real."""
    require_serve_extra(is_mocked=True)
    from mallee.actors.mock.process import run

    if host not in ("127.0.0.1", "localhost", "::1") and not api_key:
        fail(f"--host {host} listens beyond this machine: give --api-key too")
    if engines % processes:
        fail(f"--engines {engines} can't be shared evenly by --processes {processes}")
    values: dict[str, object] = {
        "model": model,
        "engine": "mock",
        "workers": processes,
        "engines_per_worker": engines // processes,
        "mock_speedup": speedup,
        "mock_startup_s": startup,
        "mock_jitter": jitter,
        "mock_seed": seed,
        "num_blocks": blocks,
        "block_size": block_size,
        "policy": policy,
        "fleet": fleet,
        "nats_url": nats_url,
        "api_key": api_key,
    }
    if timing is not None:
        values["mock_timing"] = timing
    run(_serve(make_config(values, _OPTIONS), host, http))


async def _serve(config: "AppConfig", host: str, port: int) -> None:
    from mallee.actors.mock.stack import MockStack

    console = Console(stderr=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stack = MockStack(config, host=host, port=port)
    stopping = asyncio.ensure_future(stop.wait())
    starting = asyncio.ensure_future(stack.start())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    try:
        if stopping.done():
            starting.cancel()
            await asyncio.wait((starting,))
            return
        await starting
        console.print(
            f"[bold]mallee[/] mocks {config.num_workers} engines of {escape(config.model)} at"
            f" [bold]{stack.base_url}/v1[/], broker {stack.nats_url}  (Ctrl-C ends)"
        )
        running = asyncio.ensure_future(stack.wait())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        running.cancel()
    finally:
        stopping.cancel()
        await stack.close()
