"""`mallee workers`: the workers of a running service, and the drain of one."""

from typing import Annotated

import typer
from rich.markup import escape

from mallee.cli.options import JsonOption
from mallee.cli.output import answer, grid
from mallee.cli.remote.fleet import used
from mallee.cli.remote.service import DEFAULT_URL, TIMEOUT_S, UrlOption, open_client

group = typer.Typer(name="workers", help="List the workers of a running service; drain one.")


@group.callback(invoke_without_command=True)
def list_by_default(
    context: typer.Context, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False
) -> None:
    if context.invoked_subcommand is None:
        list_workers(url, as_json)


@group.command("list")
def list_workers(url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """List the workers: life, state, rows, queue and KV use.

    Example: mallee workers list --json
    """
    with open_client(url, timeout=TIMEOUT_S) as client:
        workers = client.workers()
    rows = (
        (
            *(each.worker, each.incarnation, each.state, str(each.rows), str(each.waiting)),
            *(f"{used(each):.0%}", f"{each.lease_age_s:.1f} s", escape(each.address)),
        )
        for each in workers
    )
    head = ("worker", "life", "state", "rows", "queue", "KV in use", "last lease", "address")
    table = grid(head, rows)
    answer({"workers": workers}, table, as_json=as_json)


@group.command()
def drain(
    name: Annotated[str, typer.Argument(help="The worker, as `mallee workers` lists it.")],
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Have a worker take nothing new, finish or hand over what it has, and leave.

    Example: mallee workers drain w1
    """
    with open_client(url, timeout=TIMEOUT_S) as client:
        client.drain_worker(name)
    body = {"worker": name, "object": "worker.draining"}
    answer(body, f"{name} drains", as_json=as_json)
