"""`mallee capsules`: those of a running service listed, counted, deleted, and carried to another as files."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, cast

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from mallee.cli.options import JsonOption, print_json
from mallee.cli.remote.service import (
    DEFAULT_URL,
    LimitOption,
    SaltOption,
    UrlOption,
    open_client,
)
from mallee.client.calls import Wanted
from mallee.client.files import Progress as Told
from mallee.protocol.errors import ConfigError

CapsuleArgument = Annotated[str, typer.Argument(help="Its id.")]
RequestOption = Annotated[
    str | None, typer.Option("--request", help="Those that this answer left.")
]
PinnedOption = Annotated[
    bool | None, typer.Option("--pinned/--unpinned", help="Those that are kept, or not.")
]
TierOption = Annotated[
    str | None, typer.Option("--tier", help="Those in a tier: device, host, disk or none.")
]
MinAgeOption = Annotated[
    float | None, typer.Option("--min-age-s", help="Those that are at least so old.")
]


def add_to(cli: typer.Typer) -> None:
    group = typer.Typer(
        help="List, count, delete, prune, export and import capsules of a running service.",
        no_args_is_help=True,
    )
    group.command("list")(list_capsules)
    group.command("count")(count)
    group.command("delete")(delete)
    group.command("prune")(prune)
    group.command("export")(export)
    group.command("import")(import_capsule)
    cli.add_typer(group, name="capsules")


def list_capsules(
    url: UrlOption = DEFAULT_URL,
    request: RequestOption = None,
    pinned: PinnedOption = None,
    tier: TierOption = None,
    min_age_s: MinAgeOption = None,
    limit: LimitOption = 100,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """List your capsules by id.

    Example: mallee capsules list --pinned --tier host
    """
    wanted = _wanted(request, pinned, tier, min_age_s)
    with open_client(url) as client:
        listed = client.capsules(cache_salt=cache_salt, **wanted)
        found = [each.data for each in islice(listed, limit)]
    if as_json:
        print_json({"capsules": found})
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("capsule", no_wrap=True, overflow="fold")
    for name in ("tokens", "worker", "kept", "tier"):
        table.add_column(name)
    for each in found:
        kept = {True: "yes", False: "no"}.get(each.pinned, "")
        table.add_row(each.id, str(each.tokens), each.worker or "", kept, each.tier or "")
    Console().print(table)


def count(
    url: UrlOption = DEFAULT_URL,
    request: RequestOption = None,
    pinned: PinnedOption = None,
    tier: TierOption = None,
    min_age_s: MinAgeOption = None,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count your capsules and their tokens.

    Example: mallee capsules count --tier disk
    """
    wanted = _wanted(request, pinned, tier, min_age_s)
    with open_client(url) as client:
        found = client.count_capsules(cache_salt=cache_salt, **wanted)
    if as_json:
        print_json(found)
        return
    unknown = f" ({found.unknown} more did not say)" if found.unknown else ""
    sys.stdout.write(f"{found.count} capsules of {found.tokens} tokens{unknown}\n")


def delete(
    url: UrlOption = DEFAULT_URL,
    request: RequestOption = None,
    pinned: PinnedOption = None,
    tier: TierOption = None,
    min_age_s: MinAgeOption = None,
    is_all: Annotated[bool, typer.Option("--all", help="Every one of yours.")] = False,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete your capsules that all given options mean, or --all of them.

    Example: mallee capsules delete --unpinned --min-age-s 3600
    """
    wanted = _wanted(request, pinned, tier, min_age_s)
    if not (wanted or is_all):
        raise ConfigError("say which capsules to delete, or give --all")
    with open_client(url) as client:
        num = client.delete_capsules(all=is_all, cache_salt=cache_salt, **wanted)
    if as_json:
        print_json({"deleted": num})
    else:
        sys.stdout.write(f"{num} deleted\n")


def prune(
    capsule: CapsuleArgument,
    url: UrlOption = DEFAULT_URL,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """End all that went on from a capsule, and release the capsules that this left; it stays itself.

    Example: mallee capsules prune req_4f.0
    """
    with open_client(url) as client:
        ended = client.capsule(capsule, cache_salt=cache_salt).prune()
    if as_json:
        print_json({"capsule": capsule, "requests": ended})
    else:
        sys.stdout.write(f"{len(ended)} requests ended\n")


def _wanted(
    request: str | None, pinned: bool | None, tier: str | None, min_age_s: float | None
) -> Wanted:
    given = {"request": request, "pinned": pinned, "tier": tier, "min_age_s": min_age_s}
    return cast(Wanted, {name: value for name, value in given.items() if value is not None})


def export(
    capsule: CapsuleArgument,
    file: Annotated[Path, typer.Argument(help="The file to write, whole or not at all.")],
    url: UrlOption = DEFAULT_URL,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a capsule to FILE: text, state and KV. It holds the conversation: keep it as such.

    Example: mallee capsules export req_4f.0 night.capsule
    """
    with open_client(url) as client, _bar("exporting", is_shown=not as_json) as told:
        nbytes = client.capsule(capsule, cache_salt=cache_salt).export(file, progress=told)
    if as_json:
        print_json({"capsule": capsule, "file": str(file), "bytes": nbytes})
    else:
        sys.stdout.write(f"{file}: {nbytes} bytes\n")


def import_capsule(
    file: Annotated[Path, typer.Argument(help="A file that an export has written.", exists=True)],
    url: UrlOption = DEFAULT_URL,
    ttl_s: Annotated[
        float | None, typer.Option("--ttl-s", help="Seconds that it is kept without being used.")
    ] = None,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a capsule of FILE, at a service with the same model; its id is printed.

    Example: mallee capsules import night.capsule --ttl-s 3600
    """
    with open_client(url) as client, _bar("importing", is_shown=not as_json) as told:
        made = client.import_capsule(file, ttl_s=ttl_s, cache_salt=cache_salt, progress=told)
    came = made.data.imported
    if as_json:
        print_json({"capsule": made.id, "tokens": made.tokens, **msgspec.to_builtins(came)})
        return
    parts = f"{came.fetched_tokens} fetched, {came.computed_tokens} computed"
    sys.stdout.write(f"{made.id}\n{made.tokens} tokens: {parts}\n")


@contextmanager
def _bar(verb: str, *, is_shown: bool) -> Iterator[Told]:
    """A bar of bytes on the terminal's error stream, if that is one."""
    console = Console(stderr=True)
    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not (is_shown and console.is_terminal),
    ) as progress:
        task = progress.add_task(verb, total=None)

        def told(nbytes: int, total: int | None) -> None:
            progress.update(task, completed=nbytes, total=total)

        yield told
