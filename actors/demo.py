"""`mallee demo`: one document, five questions; forked from one capsule, then asked plainly.

Both halves go through the real service on this machine over HTTP, as any client's requests do. The
plain half gives each request its own cache salt, so that each finds every worker cold: what a server
does that knows neither forks nor this document.
"""

import socket
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.table import Table

from mallee.actors.config import AppConfig
from mallee.actors.demo_text import DOCUMENT, QUESTIONS
from mallee.actors.local import LocalStack
from mallee.client import Mallee
from mallee.client.view import live


def run_demo(model: str, *, workers: int, max_tokens: int, quiet: bool) -> dict[str, Any]:
    """Start a service, run both halves, stop it. Returns {"fork": ..., "plain": ...} (see `_half`).

    With `quiet` nothing is printed. Times include HTTP and are the client's.
    """
    console = Console(quiet=quiet)
    config = AppConfig.model_validate({"model": model, "workers": workers})
    stack = LocalStack(config, port=_free_port())
    waiting = console.status(f"starting NATS, Ray, a gateway and {workers} workers of {model} ...")
    begin = time.perf_counter()
    with waiting if not quiet else nullcontext():
        stack.__enter__()
    try:
        console.print(f"service ready in {time.perf_counter() - begin:.1f} s at {stack.base_url}\n")
        with Mallee(stack.base_url) as client:
            _warm_up(client, workers)
            fork = _forked(client, max_tokens, console)
            plain = _plain(client, max_tokens, console)
    finally:
        stack.close()
    console.print(_table(fork, plain))
    return {"fork": fork, "plain": plain}
