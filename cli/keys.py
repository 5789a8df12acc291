"""`mallee keys`: make API keys, and check a file of them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mallee.cli.options import one_of, require_serve_extra


def add_to(cli: typer.Typer) -> None:
    group = typer.Typer(help="Make API keys for `http.keys_file`; check such a file.")
    group.command("new")(new)
    group.command("check")(check)
    cli.add_typer(group, name="keys", no_args_is_help=True)


def new(
    name: Annotated[str, typer.Argument(help="The key's name, for the file alone.")],
    role: Annotated[
        str,
        typer.Option(
            help="client; proxy: may name its requests' tenants; operator: sees the fleet."
        ),
    ] = "client",
    tenant: Annotated[
        str | None, typer.Option(help="The owner of what it makes; the key's name by default.")
    ] = None,
) -> None:
    """Print a new key, which is told this once, and the entry for the file of keys."""
    require_serve_extra(is_mocked=True)
    import yaml

    from mallee.actors.access.keys import Role, new_key, parse

    one_of("role", role, Role)
    made = new_key(name, role, tenant)  # type: ignore[arg-type] # one of them
    entry = yaml.safe_dump([made.entry], sort_keys=False)
    parse(f"keys:\n{entry}", "the new entry")
    sys.stderr.write(f"{made.token}\n")
    sys.stdout.write(entry)


def check(file: Annotated[Path, typer.Argument(help="A file for `http.keys_file`.")]) -> None:
    """Check a file of keys; exit 2 with its faults."""
    require_serve_extra(is_mocked=True)
    from mallee.actors.access.keys import read_file

    found = read_file(file)
    sys.stdout.write(f"{file}: right, {len(found)} keys\n")
