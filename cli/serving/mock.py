"""The command `mallee mock`: a fleet of mocked engines behind an OpenAI endpoint, in one command."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import POLICIES, HostOption, NatsOption, PortOption, require_serve_extra
from mallee.cli.serving.signals import until_signal
from mallee.cli.settings import ConfigFile, SetOptions, make_config
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.runtime.config import AppConfig

DEFAULT_ENGINES = 16


def mock(
    engines: Annotated[
        int | None, typer.Option(min=1, help="Mocked engines, each a worker; 16 by default.")
    ] = None,
    config: ConfigFile = None,
    set_: SetOptions = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    model: Annotated[
        str | None,
        typer.Option(help="As of `mallee serve`; only tokenizer and config.json are used."),
    ] = None,
    timing: Annotated[
        str | None, typer.Option(help="Name of a device and model, or a file of `mallee profile`.")
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(min=0, help="Divides every duration; 0: nothing takes time.")
    ] = None,
    startup_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds until an engine is there.")
    ] = None,
    jitter: Annotated[
        float | None, typer.Option(min=0, help="Sigma of a lognormal factor on each step.")
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV memory of each engine, in tokens.")
    ] = None,
    host_kv_tokens: Annotated[
        int | None, typer.Option(min=0, help="KV tokens in host memory, for each engine.")
    ] = None,
    disk_kv_tokens: Annotated[
        int | None, typer.Option(min=0, help="KV tokens on disk, for each engine.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a KV block.")] = None,
    policy: Annotated[str | None, typer.Option(help=POLICIES)] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that share the engines; 1 by default.")
    ] = None,
    fleet: Annotated[str | None, typer.Option(help="Name in the broker's subjects.")] = None,
    nats_url: NatsOption = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the jitter.")] = None,
) -> None:
    """Serve an OpenAI API whose engines take time instead of computing; everything else is real.

    Example: mallee mock --engines 8 --speedup 10
    """
    require_serve_extra(is_mocked=True)
    from mallee.actors.mock.process import run
    from mallee.runtime.telemetry import logs

    wanted = engines or DEFAULT_ENGINES
    each, rest = divmod(wanted, processes or 1)
    if rest:
        raise ConfigError(f"--engines {wanted} can't be shared evenly by --processes {processes}")
    settings = make_config(
        config,
        set_,
        {
            "--model": ("model", model),
            "--processes": ("workers", processes),
            "--engines": ("mock.engines_per_worker", each if engines else None),
            "--timing": ("mock.timing", timing),
            "--speedup": ("mock.speedup", speedup),
            "--startup-s": ("mock.startup_s", startup_s),
            "--jitter": ("mock.jitter", jitter),
            "--seed": ("mock.seed", seed),
            "--kv-tokens": ("engine.kv_tokens", kv_tokens),
            "--host-kv-tokens": ("mock.host_kv_tokens", host_kv_tokens),
            "--disk-kv-tokens": ("mock.disk_kv_tokens", disk_kv_tokens),
            "--block-size": ("engine.block_size", block_size),
            "--policy": ("routing.policy", policy),
            "--fleet": ("fleet", fleet),
            "--nats-url": ("nats_url", nats_url),
        },
        base={
            "engine.kind": "mock",
            "mock.engines_per_worker": each,
            "telemetry.log_level": "warning",  # a terminal has no use for each worker that joins
        },
    )
    if engines is not None and settings.num_workers != engines:
        raise ConfigError(
            f"--engines {engines}, but the settings have workers={settings.workers}: give"
            f" --processes {settings.workers} too"
        )
    logs.set_up(
        settings.telemetry.log_level, settings.telemetry.log_format, process="gateway", name="g0"
    )
    run(until_signal(_serve(settings, host, port)))


async def _serve(config: "AppConfig", host: str, port: int) -> None:
    from mallee.actors.mock.stack import MockStack

    async with MockStack(config, host=host, port=port) as stack:
        processes = ", ".join(str(child.pid) for child in stack.children.values())
        Console(stderr=True).print(
            f"[bold]mallee[/] mocks {config.num_workers} engines of {escape(config.model)} at"
            f" [bold]{stack.base_url}/v1[/], its page at {stack.base_url}/ui, broker"
            f" {stack.nats_url}, engines in processes {processes}  (Ctrl-C ends)"
        )
        await stack.wait()
