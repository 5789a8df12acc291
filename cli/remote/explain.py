"""`mallee explain`: why requests went where they went, and how they fared."""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mallee.cli.options import JsonOption
from mallee.cli.remote.service import DEFAULT_URL, UrlOption, ask


def add_to(cli: typer.Typer) -> None:
    cli.command()(explain)


def explain(
    request: Annotated[
        str | None, typer.Argument(help="The id of an answer; by default the last decisions.")
    ] = None,
    url: UrlOption = DEFAULT_URL,
    limit: Annotated[int, typer.Option(min=1, max=128, help="So many decisions.")] = 16,
    candidates: Annotated[int, typer.Option(min=1, max=4096, help="Workers of each.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Tell why requests went to their workers: the prices, in milliseconds, and the answer's course.

    Example: mallee explain req_4f1c --candidates 8
    """
    named = {} if request is None else {"request": request}
    params: dict[str, Any] = {"limit": limit, "candidates": candidates, **named}
    body = ask("GET", url, "/v1/router/explain", **params)
    if as_json:
        sys.stdout.write(json.dumps(body) + "\n")
        return
    console = Console(highlight=False)
    if not (body["data"] or "life" in body):
        console.print("no decision yet: the service has answered nothing, or forks alone")
    for decision in body["data"]:
        _print_decision(console, decision)
    if "life" in body:
        _print_life(console, body["life"])


def _print_decision(console: Console, decision: dict[str, Any]) -> None:
    console.print(
        f"[bold]{escape(decision['request'])}[/] went to [green]{escape(decision['worker'])}[/]"
        f" ({escape(decision['reason'])}): {decision['prompt_tokens']} tokens,"
        f" {decision['num_candidates']} workers could take it",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("worker")
    for name in ("cached", "pulled", "queued", "prefill", "decode", "fetch", "pull", "price"):
        table.add_column(name, justify="right")
    for each in decision["candidates"]:
        prices = [
            each.get(f"{part}_s") for part in ("queued", "prefill", "decode", "fetch", "pull")
        ]
        table.add_row(
            each["worker"],
            *(str(each["overlap_blocks"]), str(each["pulled_blocks"])),
            *map(_ms, prices),
            _ms(each["total"]),
            style="green" if each["worker"] == decision["worker"] else None,
        )
    console.print(table)
    if (spill := decision.get("spill")) is not None:
        told = ", ".join(f"{n} {_ms(v)}" for n, v in spill.items() if n != "how")
        console.print(f"a part of a fan-out: {escape(spill['how'])} ({told})")
    if (pull := decision.get("pull")) is not None:
        console.print(f"pulls {pull['blocks']} blocks ({escape(pull['reason'])})")


def _print_life(console: Console, life: dict[str, Any]) -> None:
    cache = life["cache"]
    if cache is not None:
        missed = f", missed because {cache['reason']}" if cache["reason"] else ""
        console.print(f"its prompt was served as {escape(cache['served'])}{escape(missed)}")
    table = Table(box=None, pad_edge=False)
    for name in ("branch", "state", "worker", "prompt"):
        table.add_column(name)
    for name in ("cached", "computed", "tokens", "tokens/s", "first token", "end"):
        table.add_column(name, justify="right")
    for index, each in enumerate(life["branches"]):
        speed = each["tokens_per_s"]
        table.add_row(
            *(str(index), each["state"], each["worker"] or "", each["prompt"] or ""),
            *(str(each[f"{name}_tokens"]) for name in ("cached", "prefill", "output")),
            "" if speed is None else f"{speed:.0f}",
            *(_ms(each["first_token_s"]), _ms(each["end_s"])),
        )
    console.print(table)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
