"""Requests that come inside of another: each runs through the whole app, with the headers of the outer one.

So each has its own check of the key, its own place in the key's limits, and is counted by itself.
"""

import asyncio
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import Message, Scope

# Of the outer request's body or connection, not of its sender.
_OWN_HEADERS: Final = frozenset(
    (
        *(b"connection", b"content-encoding", b"content-length", b"content-type", b"expect"),
        *(b"idempotency-key", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)


class InnerAnswer(NamedTuple):
    """A whole answer; `body` is JSON as it came."""

    status: int
    body: msgspec.Raw


async def answer_of(outer: HTTPConnection, path: str, body: dict[str, Any]) -> InnerAnswer:
    """POST `body` to its end. Cancelled, it is cancelled as if its client had gone.

    Raises what the app raises once its answer has begun.
    """
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    raw = msgspec.json.encode(body)
    messages: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]
    parts: list[bytes] = []
    status = 0

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.shield(never)

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await outer.app(_scope(outer, path, raw), receive, send)
    return InnerAnswer(status, msgspec.Raw(b"".join(parts) or b"null"))


def _scope(outer: HTTPConnection, path: str, raw: bytes) -> Scope:
    headers = [each for each in outer.scope["headers"] if each[0] not in _OWN_HEADERS]
    headers.append((b"content-length", str(len(raw)).encode()))
    headers.append((b"content-type", b"application/json"))
    path = f"{outer.scope.get('root_path', '')}{path}"
    return {
        "type": "http",
        "asgi": outer.scope["asgi"],
        "http_version": "1.1",
        "method": "POST",
        "scheme": outer.url.scheme,
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": outer.scope.get("root_path", ""),
        "headers": headers,
        "client": outer.scope.get("client"),
        "server": outer.scope.get("server"),
    }
