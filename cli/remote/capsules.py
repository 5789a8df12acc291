"""`mallee capsules`: those of a running service listed, counted, deleted, and carried to another as files."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, cast

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from mallee.cli.options import JsonOption, with_groups
from mallee.cli.output import answer, grid
from mallee.cli.remote.service import LimitOption, Service
from mallee.client.calls import Wanted
from mallee.client.files import Progress as Told
from mallee.protocol.errors import ConfigError

CapsuleArgument = Annotated[str, typer.Argument(help="Its id.")]

group = typer.Typer(
    name="capsules",
    help="List, count, delete, prune, export and import capsules of a running service.",
    no_args_is_help=True,
)


@dataclass(frozen=True, slots=True)
class Filter:
    """The capsules that are meant: those that all given options mean."""

    request: Annotated[str | None, typer.Option(help="Those that this answer left.")] = None
    pinned: Annotated[
        bool | None, typer.Option("--pinned/--unpinned", help="Those that are kept, or not.")
    ] = None
    tier: Annotated[
        str | None, typer.Option(help="Those in a tier: device, host, disk or none.")
    ] = None
    min_age_s: Annotated[float | None, typer.Option(help="Those that are at least so old.")] = None

    def wanted(self) -> Wanted:
        """Without options that are not given."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return cast(Wanted, given)


@group.command("list")
@with_groups
def list_capsules(
    service: Service, meant: Filter, limit: LimitOption = 100, as_json: JsonOption = False
) -> None:
    """List your capsules by id.

    Example: mallee capsules list --pinned --tier host
    """
    with service.open() as client:
        listed = client.capsules(cache_salt=service.cache_salt, **meant.wanted())
        found = [each.data for each in islice(listed, limit)]
    kept = {True: "yes", False: "no"}
    rows = (
        (
            each.id,
            str(each.tokens),
            each.worker or "",
            kept.get(each.pinned, ""),
            each.tier or "",
        )
        for each in found
    )
    table = grid(("capsule", "tokens", "worker", "kept", "tier"), rows, whole=("capsule",))
    answer({"capsules": found}, table, as_json=as_json)


@group.command()
@with_groups
def count(service: Service, meant: Filter, as_json: JsonOption = False) -> None:
    """Count your capsules and their tokens.

    Example: mallee capsules count --tier disk
    """
    with service.open() as client:
        found = client.count_capsules(cache_salt=service.cache_salt, **meant.wanted())
    unknown = f" ({found.unknown} more did not say)" if found.unknown else ""
    told = f"{found.count} capsules of {found.tokens} tokens{unknown}"
    answer(found, told, as_json=as_json)


@group.command()
@with_groups
def delete(
    service: Service,
    meant: Filter,
    is_all: Annotated[bool, typer.Option("--all", help="Every one of yours.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete your capsules that all given options mean, or --all of them.

    Example: mallee capsules delete --unpinned --min-age-s 3600
    """
    wanted = meant.wanted()
    if not (wanted or is_all):
        raise ConfigError("say which capsules to delete, or give --all")
    with service.open() as client:
        num = client.delete_capsules(all=is_all, cache_salt=service.cache_salt, **wanted)
    answer({"deleted": num}, f"{num} deleted", as_json=as_json)


@group.command()
@with_groups
def prune(capsule: CapsuleArgument, service: Service, as_json: JsonOption = False) -> None:
    """End all that went on from a capsule, and release the capsules that this left; it stays itself.

    Example: mallee capsules prune req_4f.0
    """
    with service.open() as client:
        ended = client.capsule(capsule, cache_salt=service.cache_salt).prune()
    body = {"capsule": capsule, "requests": ended}
    answer(body, f"{len(ended)} requests ended", as_json=as_json)


@group.command()
@with_groups
def export(
    capsule: CapsuleArgument,
    file: Annotated[Path, typer.Argument(help="The file to write, whole or not at all.")],
    service: Service,
    as_json: JsonOption = False,
) -> None:
    """Write a capsule to FILE: text, state and KV. It holds the conversation: keep it as such.

    Example: mallee capsules export req_4f.0 night.capsule
    """
    with service.open() as client, _bar("exporting", is_shown=not as_json) as told:
        held = client.capsule(capsule, cache_salt=service.cache_salt)
        nbytes = held.export(file, progress=told)
    body = {"capsule": capsule, "file": str(file), "bytes": nbytes}
    answer(body, f"{file}: {nbytes} bytes", as_json=as_json)


@group.command("import")
@with_groups
def import_capsule(
    file: Annotated[Path, typer.Argument(help="A file that an export has written.", exists=True)],
    service: Service,
    ttl_s: Annotated[
        float | None, typer.Option(help="Seconds that it is kept without being used.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a capsule of FILE, at a service with the same model; its id is printed.

    Example: mallee capsules import night.capsule --ttl-s 3600
    """
    salt = service.cache_salt
    with service.open() as client, _bar("importing", is_shown=not as_json) as told:
        made = client.import_capsule(file, ttl_s=ttl_s, cache_salt=salt, progress=told)
    came = made.data.imported
    body = {"capsule": made.id, "tokens": made.tokens, **msgspec.to_builtins(came)}
    parts = f"{came.fetched_tokens} fetched, {came.computed_tokens} computed"
    answer(body, f"{made.id}\n{made.tokens} tokens: {parts}", as_json=as_json)


@contextmanager
def _bar(verb: str, *, is_shown: bool) -> Iterator[Told]:
    """A bar of bytes on the terminal's error stream, if that is one."""
    console = Console(stderr=True)
    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    is_disabled = not (is_shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=is_disabled) as progress:
        task = progress.add_task(verb, total=None)

        def told(nbytes: int, total: int | None) -> None:
            progress.update(task, completed=nbytes, total=total)

        yield told
