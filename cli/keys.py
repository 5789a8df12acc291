"""`mallee keys`: make API keys, and check a file of them."""

import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mallee.cli.options import JsonOption, one_of, require_serve_extra
from mallee.cli.output import answer, print_json
from mallee.protocol.errors import ConfigError

group = typer.Typer(
    name="keys", help="Make API keys for `http.keys_file`; check such a file.", no_args_is_help=True
)
Limit: TypeAlias = Annotated[
    int | None, typer.Option(help="Limit of all gateways together; none by default.")
]


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
    into: Annotated[
        Path | None,
        typer.Option(
            help="File of keys that takes the entry, made with mode 600 if there is none."
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="End of the key, as 2027-01-01T00:00:00Z; by default none.")
    ] = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    max_running: Limit = None,
    max_branches: Limit = None,
    max_capsules: Limit = None,
    max_capsule_tokens: Limit = None,
    weight: Annotated[float | None, typer.Option(help="Share of its tenant; 1 by default.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a new key, which is told this once, and the entry for the file of keys; --into puts it there.

    The key goes to stderr, the entry to stdout. With --json one object holds both: keep it as a secret.

    Example: mallee keys new alice --tenant acme --into keys.yaml --requests-per-minute 600
    """
    require_serve_extra(is_mocked=True)
    from mallee.gateway.access.keys import Role, add_to, new_key, text_of

    one_of("role", role, Role)
    made = new_key(
        name,
        role,  # type: ignore[arg-type] # one of them
        tenant,
        expires=expires,
        weight=weight,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_running=max_running,
        max_branches=max_branches,
        max_capsules=max_capsules,
        max_capsule_tokens=max_capsule_tokens,
    )
    entry = text_of(made.entry)
    if into is not None:
        add_to(into, made.entry)
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
