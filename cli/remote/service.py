"""The service that commands ask, as options, and its client.

The key is `MALLEE_API_KEY` of the environment: on a command line every process could read it.
"""

import os
from typing import Annotated, TypeAlias

import typer

from mallee.client.sync import Mallee

DEFAULT_URL = "http://127.0.0.1:8000"

UrlOption: TypeAlias = Annotated[
    str, typer.Option("--url", envvar="MALLEE_URL", help="The service, as clients reach it.")
]
SaltOption: TypeAlias = Annotated[
    str | None, typer.Option("--cache-salt", help="The salt that the capsules have.")
]


def open_client(url: str, *, timeout_s: float = 120.0) -> Mallee:
    """Raises InvalidParameter for an address without http://."""
    return Mallee(url, api_key=os.environ.get("MALLEE_API_KEY"), timeout_s=timeout_s)
