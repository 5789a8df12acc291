"""`mallee up`: a cluster of several nodes on this machine."""

import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mallee.cli.options import HostOption, PortOption, require_serve_extra
from mallee.cli.output import print_error
from mallee.cli.serving.signals import catch_signals, until_interrupted
from mallee.cli.settings import ConfigFile, SetOptions, make_config
from mallee.protocol.errors import ConfigError, MalleeError

if TYPE_CHECKING:
    from mallee.runtime.config import AppConfig
    from mallee.testing.nodes.stack import NodesStack

_TICK_S = 0.25
_MAX_NODES = 64


def up(
    nodes: Annotated[
        int, typer.Option(min=1, max=_MAX_NODES, help="Ray nodes, each with a NATS server.")
    ] = 3,
    model: Annotated[
        str | None, typer.Option(help="As of `mallee serve`; smollm2 is the default.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Engines; by default one for each node.")
    ] = None,
    gateways: Annotated[
        int | None, typer.Option(min=1, help="Gateways; by default two, if there are two nodes.")
    ] = None,
    config: ConfigFile = None,
    set_: SetOptions = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    loopback: Annotated[
        bool,
        typer.Option("--loopback", help="Nodes share this machine's loopback, without namespaces."),
    ] = False,
) -> None:
    """Start several nodes on this machine, as a cluster: Ray, a NATS cluster, gateways, workers, one entry.

    Each node has a network namespace, where root or user namespaces are to be had. A node that ends is
    started again. SIGHUP reads --config again and rolls the service to it.

    Example: mallee up --nodes 3 --model smollm2
    """
    require_serve_extra()

    def settings() -> "AppConfig":
        return make_config(
            config,
            set_,
            {
                "--model": ("model", model),
                "--workers": ("workers", workers),
                "--gateways": ("gateways", gateways),
            },
            {"workers": nodes, "gateways": min(2, nodes)},
        )

    console = Console(stderr=True)
    made = settings()
    catch_signals()
    stack = _stack(made, nodes, host, port, console, in_namespaces=not loopback)
    reload = threading.Event()
    signal.signal(signal.SIGHUP, lambda number, frame: reload.set())
    with console.status(f"starting {nodes} nodes of {escape(made.model)} ..."):
        stack.start()
    _print_places(console, made, stack)
    try:
        with until_interrupted(console, made.drain_s):
            _serve(stack, settings, reload, console)
    finally:
        stack.close()


def _stack(
    config: "AppConfig",
    nodes: int,
    host: str,
    port: int,
    console: Console,
    *,
    in_namespaces: bool,
) -> "NodesStack":
    """The nodes, not yet started; in a network of their own if that can be had.

    Enters it by starting this program again, in place.
    """
    from mallee.runtime.addresses import listener
    from mallee.testing.nodes import network
    from mallee.testing.nodes.folders import clear_abandoned
    from mallee.testing.nodes.stack import NodesStack, check

    inherited = network.entered()
    if inherited is None:
        check(config, nodes, host)
        for sentence in clear_abandoned():
            console.print(escape(sentence))
        found = listener(host, port)
        cause = network.obstacle() if in_namespaces else "--loopback"
        if cause is None:
            network.enter(found)
        found.close()
        console.print(f"the nodes share this machine's loopback ({escape(cause)})")
    return NodesStack(
        config,
        nodes,
        listener=inherited,
        host=host,
        port=port,
        tell=lambda sentence: console.print(escape(sentence), soft_wrap=True),
    )


def _print_places(console: Console, config: "AppConfig", stack: "NodesStack") -> None:
    nodes = stack.nodes
    console.print(
        f"[bold]mallee[/] serves {escape(config.model)} at [bold]{stack.base_url}/v1[/] on {len(nodes)}"
        " nodes  (Ctrl-C ends)",
        soft_wrap=True,
    )
    for node in nodes:
        role = ", Ray's head" if node.is_head else ""
        console.print(
            f"  node {node.number}: {node.address}, process {stack.pid(node)}, NATS"
            f" {node.server.url}{role}",
            soft_wrap=True,
        )


def _serve(
    stack: "NodesStack",
    settings: Callable[[], "AppConfig"],
    reload: threading.Event,
    console: Console,
) -> None:
    """Until interrupted."""
    while True:
        try:
            stack.watch()
        except ConfigError as error:
            print_error(f"a node does not come back: {error}")
        if reload.wait(_TICK_S):
            reload.clear()
            try:
                stack.deploy(settings())
                console.print("the new settings are served")
            except MalleeError as error:
                print_error(f"the old settings go on: {error}")
