"""`mallee keys`: make API keys, and check a file of them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mallee.cli.options import JsonOption, one_of, require_serve_extra
from mallee.cli.output import answer, print_json
from mallee.protocol.errors import ConfigError

group = typer.Typer(
    name="keys", help="Make API keys for `http.keys_file`; check such a file.", no_args_is_help=True
)


@group.command()
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
    as_json: JsonOption = False,
) -> None:
    """Print a new key, which is told this once, and the entry for the file of keys.

    The key goes to stderr, the entry to stdout. With --json one object holds both: keep it as a secret.

    Example: mallee keys new alice --tenant acme >> keys.yaml
    """
    require_serve_extra(is_mocked=True)
    import yaml

    from mallee.gateway.access.keys import Role, new_key, parse

    one_of("role", role, Role)
    made = new_key(name, role, tenant)  # type: ignore[arg-type] # one of them
    entry = yaml.safe_dump([made.entry], sort_keys=False)
    parse(f"keys:\n{entry}", "the new entry")
    if as_json:
        print_json({"key": made.token, "entry": made.entry})
        return
    sys.stderr.write(f"{made.token}\n")
    sys.stdout.write(entry)


@group.command()
def check(
    file: Annotated[Path, typer.Argument(help="A file for `http.keys_file`.")],
    as_json: JsonOption = False,
) -> None:
    """Check a file of keys; exit 1 with its faults.

    Example: mallee keys check keys.yaml
    """
    require_serve_extra(is_mocked=True)
    from mallee.gateway.access.keys import read_file

    try:
        found = read_file(file)
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"file": str(file), "right": False, "faults": [str(error)]})
        raise typer.Exit(1) from error
    body = {"file": str(file), "right": True, "keys": [each.name for each in found]}
    answer(body, f"{file}: right, {len(found)} keys", as_json=as_json)
