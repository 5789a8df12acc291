"""The service that commands ask, as options, its client, and answers of paths that are an operator's.

The key is `MALLEE_API_KEY` of the environment: on a command line every process could read it.
"""

import os
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from mallee.client.sync import Mallee
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    import httpx

DEFAULT_URL: Final = "http://127.0.0.1:8000"
TIMEOUT_S: Final = 10.0

UrlOption: TypeAlias = Annotated[
    str, typer.Option("--url", envvar="MALLEE_URL", help="The service, as clients reach it.")
]
SaltOption: TypeAlias = Annotated[
    str | None, typer.Option("--cache-salt", help="The salt that the capsules have.")
]


def open_client(url: str, *, timeout_s: float = 120.0) -> Mallee:
    """Raises InvalidParameter for an address without http://."""
    return Mallee(url, api_key=os.environ.get("MALLEE_API_KEY"), timeout_s=timeout_s)


def ask(method: str, url: str, path: str, **params: str | int) -> dict[str, Any]:
    """The answer. Raises ConfigError with what the service says, or that none is there."""
    answer = _answer(method, url, path, params)
    try:
        body: dict[str, Any] = answer.json()
    except ValueError as error:
        raise ConfigError(f"no service answers at {url} ({error}); give --url") from error
    if answer.is_error and "error" in body:
        raise ConfigError(str(body["error"].get("message", answer.status_code)))
    return body


def ask_text(url: str, path: str) -> str:
    """As `ask`, for an answer that is text."""
    answer = _answer("GET", url, path, {})
    if answer.is_error:
        raise ConfigError(f"{path}: HTTP {answer.status_code}")
    return str(answer.text)


def _answer(method: str, url: str, path: str, params: dict[str, str | int]) -> "httpx.Response":
    import httpx

    api_key = os.environ.get("MALLEE_API_KEY", "")
    headers = {} if not api_key else {"authorization": f"Bearer {api_key}"}
    where = url.rstrip("/").removesuffix("/v1") + path
    try:
        return httpx.request(method, where, params=params, headers=headers, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no service answers at {url} ({error}); give --url") from error
