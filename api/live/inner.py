"""Requests that come inside of another: each runs through the whole app, with the headers of the outer one.

So each has its own check of the key, its own place in the key's limits, and is counted by itself.
"""

import asyncio
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from mallee.api.entry.middleware import INNER
from mallee.protocol.errors import InvalidParameter

# Of the outer request's body or connection, not of its sender.
_OWN_HEADERS: Final = frozenset(
    (
        *(b"connection", b"content-encoding", b"content-length", b"content-type", b"expect"),
        *(b"idempotency-key", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
MAX_PATH: Final = 1024  # characters


class InnerAnswer(NamedTuple):
    """A whole answer; `body` is JSON as it came."""

    status: int
    body: msgspec.Raw


async def answer_of(
    outer: HTTPConnection, method: str, path: str, body: Any, idempotency_key: str
) -> InnerAnswer:
    """Run a request to its end. Cancelled, it is cancelled as if its client had gone.

    Raises what the app raises once its answer has begun.
    """
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    parts: list[bytes] = []
    status = 0

    async def gone() -> Message:
        return await asyncio.shield(never)

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await run_inner(outer, method, path, body, idempotency_key, gone=gone, send=send)
    return InnerAnswer(status, msgspec.Raw(b"".join(parts) or b"null"))


async def run_inner(
    outer: HTTPConnection,
    method: str,
    path: str,
    body: Any,
    idempotency_key: str,
    *,
    gone: Receive,
    send: Send,
) -> None:
    """Run a request, whose client has gone once `gone` returns. Raises as `answer_of`."""
    raw = b"" if body is None else msgspec.json.encode(body)
    messages: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await gone()

    await outer.app(_scope(outer, method, path, raw, idempotency_key), receive, send)


def check_path(
    path: str, beginnings: tuple[str, ...], endings: tuple[str, ...], *, param: str
) -> None:
    """Raises InvalidParameter unless `path` begins as one of `beginnings` and ends as none of `endings`."""
    bare = unquote(path.partition("?")[0])
    is_plain = path.isascii() and path.isprintable() and len(path) <= MAX_PATH and "#" not in path
    if not is_plain or not bare.startswith(beginnings) or bare.endswith(endings):
        known = ", ".join(f"{each}..." for each in beginnings)
        raise InvalidParameter(
            param, path, f"give a path of {known} whose answer is JSON, with its query"
        )


def _scope(
    outer: HTTPConnection, method: str, path: str, raw: bytes, idempotency_key: str
) -> Scope:
    headers = [
        (name, value)
        for name, value in outer.scope["headers"]
        if name not in _OWN_HEADERS and not name.startswith(b"sec-websocket-")
    ]
    headers.append((b"content-length", str(len(raw)).encode()))
    if raw:
        headers.append((b"content-type", b"application/json"))
    if idempotency_key:
        headers.append((b"idempotency-key", idempotency_key.encode("latin-1", "replace")))
    root = outer.scope.get("root_path", "")
    bare, _, query = f"{root}{path}".partition("?")
    return {
        "type": "http",
        "asgi": outer.scope["asgi"],
        "http_version": "1.1",
        "method": method,
        "scheme": "https" if outer.url.scheme in ("https", "wss") else "http",
        "path": unquote(bare),
        "raw_path": bare.encode(),
        "query_string": query.encode(),
        "root_path": root,
        "headers": headers,
        "client": outer.scope.get("client"),
        "server": outer.scope.get("server"),
        INNER: True,
    }
