"""`mallee demo`: five questions about one document, forked from one capsule, then asked plainly; a search.

All of it goes through the real service on this machine over HTTP. The plain half is what servers with
prefix caches do behind a round robin: question i finds what question i - w has left, of w servers. A cache
salt for each server keeps their caches apart, and those of the fork half.
"""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mallee.cli.demo.search import search_table, searched, verdict
from mallee.cli.demo.text import DOCUMENT, QUESTIONS
from mallee.cli.options import JsonOption, ModelOption, require_serve_extra
from mallee.cli.output import fail, grid, print_json
from mallee.cli.serving.signals import catch_signals, until_interrupted
from mallee.protocol.errors import ModelNotFound

if TYPE_CHECKING:
    from mallee.client import Branch, Mallee

WIDE = 135
TRAINING = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_hybrid.py"
ENDINGS = 3  # of one answer, that is gone back into
SYSTEM = "You answer questions about a text, briefly and from the text alone.\n\n" + DOCUMENT


def demo(
    model: ModelOption = "smollm2",
    workers: Annotated[int, typer.Option(min=1, help="Engines, each with its own KV cache.")] = 2,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Length of each answer to the five questions.")
    ] = 48,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the service up afterwards, until Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fork five questions over one document, ask the same plainly, go back in one answer, and search.

    Example: mallee demo --max-tokens 32
    """
    if keep and as_json:
        fail("--keep with --json: give one of them, the object comes when the service has ended")
    require_serve_extra()
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # Ray's messages, if any
        report = run_demo(model, workers=workers, max_tokens=max_tokens, keep=keep, quiet=as_json)
    if as_json:
        print_json(report)


def run_demo(
    model: str, *, workers: int, max_tokens: int, keep: bool, quiet: bool
) -> dict[str, Any]:
    """Start a service, run the demo, stop it. Returns {"fork", "plain": halves, "rewind", "search": ways}.

    A half is {"branches": [{"worker", "cached_tokens", "prefill_tokens", "ttft_ms", "total_ms",
    "text"}], "affinity", "total_ms", "prefill_ms"}. Times are the client's, HTTP included; the fork
    half's `total_ms` includes its `prefill_ms`. `affinity` is the share of branches on the worker that
    served most of them. "rewind" is {"at", "endings", "prefill_tokens", "ttft_ms"}: the token of an answer
    to go on from, how often, and what these took in all. `ways` are those of `searched`. With `keep` the
    service is stopped by a signal only. With `quiet` nothing is printed.
    """
    from mallee.actors.local import LocalStack
    from mallee.runtime.addresses import free_port
    from mallee.runtime.config import AppConfig

    console = Console(quiet=quiet)
    make_model(model, Console(stderr=True, quiet=quiet))
    config = AppConfig(model=model, workers=workers)
    stack = LocalStack(config, port=free_port())
    what = f"starting NATS, Ray, a gateway and {workers} workers of {model} (the first time converts it)"
    begin = time.perf_counter()
    with nullcontext() if quiet else console.status(what):
        stack.start()
    try:
        console.print(f"ready in {time.perf_counter() - begin:.1f} s at {stack.base_url}\n")
        report = _measured(stack.base_url, console, workers=workers, max_tokens=max_tokens)
        if keep:
            _keep_up(stack.base_url, console, config.drain_s)
    finally:
        stack.close()
    return report


def make_model(model: str, console: Console) -> None:
    """Train tiny-hybrid if it is asked for the first time. Raises ModelNotFound: that failed."""
    from mallee.worker.model.loading.source import TINY_HYBRID, resolve_model

    if model != TINY_HYBRID:
        return
    try:
        resolve_model(model)
    except ModelNotFound:
        if not TRAINING.is_file():  # no checkout; the error tells where it is
            raise
        console.print(
            f"{model} is trained first, this once, on the text of this checkout: 5 M parameters, five to"
            f" ten minutes on two cores that are free. [bold]{TRAINING}[/] does it:"
        )
        command = [sys.executable, str(TRAINING)]
        if status := subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise ModelNotFound(
                f"training {model!r} ended with status {status}", model=model
            ) from None


def _measured(base_url: str, console: Console, *, workers: int, max_tokens: int) -> dict[str, Any]:
    """The report of `run_demo`, printed as it grows."""
    from mallee.client import Mallee

    with Mallee(base_url) as client:
        _warm_up(client, workers)
        fork, rewind = _forked(client, max_tokens, console)
        plain = _plain(client, max_tokens, workers, console)
        # Eight columns of figures leave no room for the questions on a narrow terminal: number them.
        numbers = [str(i + 1) for i in range(len(QUESTIONS))]
        labels = QUESTIONS if console.width >= WIDE else numbers
        console.print(_table(fork, plain, labels))
        console.print(_summary(fork, plain, rewind), highlight=False)
        search = _search(client, console)
    return {"fork": fork, "plain": plain, "rewind": rewind, "search": search}


def _search(client: "Mallee", console: Console) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTIONS[0]},
    ]
    console.print(
        f"\n[bold]search[/]: likely answers to {QUESTIONS[0]!r}, from one capsule;"
        " the score is a token's probability, the geometric mean"
    )
    with client.prefill(messages=messages, add_generation_prompt=True) as capsule:
        ways = searched(client, capsule.id)
    console.print(search_table(ways))
    console.print(verdict(ways))
    return ways


def _keep_up(base_url: str, console: Console, drain_s: float) -> None:
    """Return at the first signal."""
    catch_signals()
    body = {"prompt": "Trees branch because", "policy": {"type": "beam", "depth": 4}}
    asking = (
        f"curl {base_url}/v1/search -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
    with until_interrupted(console, drain_s):
        console.print(
            f"\nthe service stays up at [bold]{base_url}[/] until Ctrl-C, its page at"
            f" [bold]{base_url}/ui[/]; try:"
        )
        for line in (asking, f"mallee chat --url {base_url}"):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        threading.Event().wait()


def _warm_up(client: "Mallee", workers: int) -> None:
    """One short request a worker, so that neither half pays for first-time initialisation."""
    streams = [client.stream("Hello", max_tokens=2, cache_salt=f"warm-{i}") for i in range(workers)]
    for stream in streams:
        stream.wait()


def _forked(
    client: "Mallee", max_tokens: int, console: Console
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fork half, and other endings of its first answer."""
    from mallee.client.view import live

    begin = time.perf_counter()
    with client.prefill(messages=[{"role": "system", "content": SYSTEM}]) as capsule:
        prefill_ms = _since(begin)
        console.print(
            f"[bold]fork[/]: {capsule.tokens} tokens computed once on {capsule.worker}"
            f" in {prefill_ms:.0f} ms; {len(QUESTIONS)} branches go on from there"
        )
        messages = [[{"role": "user", "content": each}] for each in QUESTIONS]
        branches = capsule.fork(messages=messages, max_tokens=max_tokens, temperature=0.0)
        title = f"capsule {capsule.id} on {capsule.worker}, {capsule.tokens} tokens"
        done = live(branches, title, labels=QUESTIONS, console=console)
        total_ms = _since(begin)
        rewind = _rewound(done[0], max_tokens)
    return _half(done, total_ms, prefill_ms), rewind


def _rewound(answer: "Branch", max_tokens: int) -> dict[str, Any]:
    """Go on from the middle of `answer` in other ways: no server of prefixes has its KV by that name."""
    assert answer.boundary is not None
    assert answer.completion_tokens is not None
    drawn = answer.completion_tokens // 2
    endings = answer.fork(
        ENDINGS, at=answer.boundary - drawn, max_tokens=max_tokens, temperature=1.0, seed=1
    ).wait()
    return {
        "at": answer.completion_tokens - drawn,
        "endings": len(endings),
        "prefill_tokens": sum(each.prefill_tokens or 0 for each in endings),
        "ttft_ms": _rounded(max(each.ttft_ms or 0.0 for each in endings)),
    }


def _plain(client: "Mallee", max_tokens: int, workers: int, console: Console) -> dict[str, Any]:
    from mallee.client import Mallee

    console.print(
        f"\n[bold]plain[/]: the same five requests, each with the whole text, to {workers} prefix caches"
        " in turn, as round robin sends them"
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
                cache_salt=f"server-{index % workers}",
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
    first = "#" if len(labels[0]) == 1 else "question"
    columns = ("worker", "cached", "computed", "TTFT ms")
    head = (first, *(f"{half}\n{name}" for half in ("fork", "plain") for name in columns))
    rows = zip(labels, map(_cells, fork["branches"]), map(_cells, plain["branches"]), strict=True)
    title = "the same five questions, forked and plain"
    cells = ((label, *forked, *alone) for label, forked, alone in rows)
    return grid(head, cells, right=head[1:], whole=head, title=title, title_justify="left")


def _cells(branch: dict[str, Any]) -> tuple[str, ...]:
    counts = (str(branch["cached_tokens"]), str(branch["prefill_tokens"]))
    return (branch["worker"], *counts, f"{branch['ttft_ms']:.0f}")


def _summary(fork: dict[str, Any], plain: dict[str, Any], rewind: dict[str, Any]) -> str:
    computed = [sum(b["prefill_tokens"] for b in half["branches"]) for half in (fork, plain)]
    cached = fork["branches"][0]["cached_tokens"]
    return (
        f"fork : {fork['total_ms'] / 1000:.1f} s in all ({fork['prefill_ms'] / 1000:.1f} s of it the"
        f" shared prefill), {cached + computed[0]} prompt tokens computed,"
        f" affinity {fork['affinity']:.2f}\n"
        f"plain: {plain['total_ms'] / 1000:.1f} s in all, {computed[1]} prompt tokens computed (round robin"
        " under prefix caching)\n"
        f"rewind: {rewind['endings']} other endings from token {rewind['at']} of the first answer:"
        f" {rewind['prefill_tokens']} prompt tokens computed, first tokens within {rewind['ttft_ms']:.0f} ms"
    )


def _since(begin: float) -> float:
    return 1000 * (time.perf_counter() - begin)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
