"""`mallee workers`: the workers of a running service, and the drain of one."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mallee.cli.options import JsonOption, print_json
from mallee.cli.remote.fleet import used
from mallee.cli.remote.service import DEFAULT_URL, TIMEOUT_S, UrlOption, open_client


def add_to(cli: typer.Typer) -> None:
    group = typer.Typer(help="List the workers of a running service; drain one.")
    group.callback(invoke_without_command=True)(list_by_default)
    group.command("list")(list_workers)
    group.command("drain")(drain)
    cli.add_typer(group, name="workers")


def list_by_default(
    context: typer.Context,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    if context.invoked_subcommand is None:
        list_workers(url, as_json)


def list_workers(
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """List the workers: life, state, rows, queue and KV use.

    Example: mallee workers list --json
    """
    with open_client(url, timeout=TIMEOUT_S) as client:
        workers = client.workers()
    if as_json:
        print_json({"workers": workers})
        return
    table = Table("worker", "life", "state", "rows", "queue", "KV in use", "last lease", "address")
    for each in workers:
        cells = (each.worker, each.incarnation, each.state, str(each.rows), str(each.waiting))
        lease = f"{each.lease_age_s:.1f} s"
        table.add_row(*cells, f"{used(each):.0%}", lease, escape(each.address))
    Console().print(table)


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
    if as_json:
        print_json({"worker": name, "object": "worker.draining"})
    else:
        sys.stdout.write(f"{name} drains\n")
