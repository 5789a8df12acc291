"""The service that commands ask, as options, and its client.

The key is `MALLEE_API_KEY` of the environment: on a command line every process could read it.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import typer

from mallee.client.sync import Mallee

DEFAULT_URL: Final = "http://127.0.0.1:8000"
TIMEOUT_S: Final = 10.0

UrlOption: TypeAlias = Annotated[
    str, typer.Option("--url", envvar="MALLEE_URL", help="The service, as clients reach it.")
]
LimitOption: TypeAlias = Annotated[int, typer.Option("--limit", min=1, help="At most so many.")]


def open_client(url: str, *, timeout: float = 120.0) -> Mallee:
    """Raises InvalidParameter for an address without http://."""
    return Mallee(url, api_key=os.environ.get("MALLEE_API_KEY"), timeout=timeout)


@dataclass(frozen=True, slots=True)
class Service:
    """A service, and the salt of what is asked of it."""

    url: UrlOption = DEFAULT_URL
    cache_salt: Annotated[str | None, typer.Option(help="The salt that the capsules have.")] = None

    def open(self) -> Mallee:
        """Raises InvalidParameter, as `open_client`."""
        return open_client(self.url)
