"""`mallee demo`: five questions about one document, forked from one capsule, then asked plainly.

Both halves go through the real service on this machine over HTTP. Each request of the plain half has a
cache salt of its own, so that it finds every worker cold, as on a server that doesn't know forks.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mallee.cli.demo.text import DOCUMENT, QUESTIONS
from mallee.cli.options import JsonOption, ModelOption, require_serve_extra

if TYPE_CHECKING:
    from mallee.client import Branch, Mallee

WIDE = 135
SYSTEM = "You answer questions about a text, briefly and from the text alone.\n\n" + DOCUMENT


def add_to(cli: typer.Typer) -> None:
    cli.command()(demo)


def demo(
    model: ModelOption = "smollm2",
    workers: Annotated[int, typer.Option(min=1, help="Engines, each with its own KV cache.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 48,
    as_json: JsonOption = False,
) -> None:
    """Fork five questions over one document; then ask the same five plainly, and compare.

    Example: mallee demo --max-tokens 32
    """
    require_serve_extra()
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # Ray's messages, if any
        report = run_demo(model, workers=workers, max_tokens=max_tokens, quiet=as_json)
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")


def run_demo(model: str, *, workers: int, max_tokens: int, quiet: bool) -> dict[str, Any]:
    """Start a service, run both halves, stop it. Returns {"fork": half, "plain": half}.

    A half is {"branches": [{"worker", "cached_tokens", "prefill_tokens", "ttft_ms", "total_ms",
    "text"}], "affinity", "total_ms", "prefill_ms"}. Times are the client's, HTTP included; the fork
    half's `total_ms` includes its `prefill_ms`. `affinity` is the share of branches on the worker that
    served most of them. With `quiet` nothing is printed.
    """
    from mallee.actors.addresses import free_port
    from mallee.actors.config import AppConfig
    from mallee.actors.local import LocalStack
    from mallee.client import Mallee

    console = Console(quiet=quiet)
    config = AppConfig(model=model, workers=workers)
    stack = LocalStack(config, port=free_port())
    what = f"starting NATS, Ray, a gateway and {workers} workers of {model} (the first time converts it)"
    begin = time.perf_counter()
    with nullcontext() if quiet else console.status(what):
        stack.start()
    try:
        console.print(f"ready in {time.perf_counter() - begin:.1f} s at {stack.base_url}\n")
        with Mallee(stack.base_url) as client:
            _warm_up(client, workers)
            fork = _forked(client, max_tokens, console)
            plain = _plain(client, max_tokens, console)
    finally:
        stack.close()
    # Eight columns of figures leave no room for the questions on a narrow terminal: number them.
    labels = QUESTIONS if console.width >= WIDE else [str(i + 1) for i in range(len(QUESTIONS))]
    console.print(_table(fork, plain, labels))
    console.print(_summary(fork, plain))
    return {"fork": fork, "plain": plain}


def _warm_up(client: "Mallee", workers: int) -> None:
    """One short request a worker, so that neither half pays for first-time initialisation."""
    streams = [client.stream("Hello", max_tokens=2, cache_salt=f"warm-{i}") for i in range(workers)]
    for stream in streams:
        stream.wait()


def _forked(client: "Mallee", max_tokens: int, console: Console) -> dict[str, Any]:
    from mallee.client.view import live

    begin = time.perf_counter()
    with client.prefill(messages=[{"role": "system", "content": SYSTEM}]) as capsule:
        prefill_ms = _since(begin)
        console.print(
            f"[bold]fork[/]: {capsule.tokens} tokens computed once on {capsule.worker}"
            f" in {prefill_ms:.0f} ms; {len(QUESTIONS)} branches go on from there"
        )
        suffixes = [{"messages": [{"role": "user", "content": q}]} for q in QUESTIONS]
        branches = capsule.fork(suffixes, max_tokens=max_tokens, temperature=0.0)
        title = f"capsule {capsule.id} on {capsule.worker}, {capsule.tokens} tokens"
        done = live(branches, title, labels=QUESTIONS, console=console)
        total_ms = _since(begin)
    return _half(done, total_ms, prefill_ms)


def _plain(client: "Mallee", max_tokens: int, console: Console) -> dict[str, Any]:
    from mallee.client import Mallee

    console.print(
        "\n[bold]plain[/]: the same five requests, each with the whole text, workers cold"
    )
    begin = time.perf_counter()

    def ask(index: int) -> "Branch":
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTIONS[index]},
        ]
        with Mallee(client.base_url) as own:
            stream = own.stream(
                messages=messages,
                max_tokens=max_tokens,
                temperature=0.0,
                cache_salt=f"cold-{index}",
            )
            return stream.wait()[0]

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        done = list(pool.map(ask, range(len(QUESTIONS))))
    return _half(done, _since(begin), None)


def _half(
    branches: Sequence["Branch"], total_ms: float, prefill_ms: float | None
) -> dict[str, Any]:
    workers = Counter(branch.worker for branch in branches)
    return {
        "branches": [
            {
                "worker": branch.worker,
                "cached_tokens": branch.cached_tokens,
                "prefill_tokens": branch.prefill_tokens,
                "ttft_ms": _rounded(branch.ttft_ms),
                "total_ms": _rounded(branch.total_ms),
                "text": branch.text,
            }
            for branch in branches
        ],
        "affinity": max(workers.values()) / len(branches),
        "total_ms": _rounded(total_ms),
        "prefill_ms": _rounded(prefill_ms),
    }


def _table(fork: dict[str, Any], plain: dict[str, Any], labels: Sequence[str]) -> Table:
    title = "the same five questions, forked and plain"
    table = Table(title=title, title_justify="left", padding=(0, 0), collapse_padding=True)
    table.add_column("#" if len(labels[0]) == 1 else "question", no_wrap=True)
    for half in ("fork", "plain"):
        for column in ("worker", "cached", "computed", "TTFT ms"):
            table.add_column(f"{half}\n{column}", justify="right", no_wrap=True)
    for question, *pair in zip(labels, fork["branches"], plain["branches"], strict=True):
        cells = [
            cell
            for branch in pair
            for cell in (
                branch["worker"],
                str(branch["cached_tokens"]),
                str(branch["prefill_tokens"]),
                f"{branch['ttft_ms']:.0f}",
            )
        ]
        table.add_row(question, *cells)
    return table


def _summary(fork: dict[str, Any], plain: dict[str, Any]) -> str:
    computed = [sum(b["prefill_tokens"] for b in half["branches"]) for half in (fork, plain)]
    cached = fork["branches"][0]["cached_tokens"]
    return (
        f"fork : {fork['total_ms'] / 1000:.1f} s in all ({fork['prefill_ms'] / 1000:.1f} s of it the"
        f" shared prefill), {cached + computed[0]} prompt tokens computed,"
        f" affinity {fork['affinity']:.2f}\n"
        f"plain: {plain['total_ms'] / 1000:.1f} s in all, {computed[1]} prompt tokens computed"
    )


def _since(begin: float) -> float:
    return 1000 * (time.perf_counter() - begin)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
