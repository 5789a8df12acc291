"""Errors in Anthropic's shape on Anthropic's paths, and the id that each answer there has."""

from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import to_builtins
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mallee.api.errors import error_fields
from mallee.protocol.errors import MalleeError

PATH: Final = "/v1/messages"
OVERLOADED: Final = 529

_STATUSES: Final = {503: OVERLOADED}
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def anthropic_body(error: dict[str, Any], status: int) -> dict[str, Any]:
    """OpenAI's `error` object in Anthropic's shape; `param` and `code` stay as extras.

    Of threads the code stands where Anthropic's clients look for it.
    """
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    code = error.get("code") or ""
    details = {"details": {"error_code": code}} if code.startswith("thread_") else {}
    return {"type": "error", "error": {**error, "type": kind, **details}}


def anthropic_error(error: MalleeError) -> dict[str, Any]:
    """The error as a body, or as the data of an event."""
    status = _STATUSES.get(error.status, error.status)
    return anthropic_body(to_builtins(error_fields(error)), status)


class AnthropicErrors:
    """ASGI middleware. Writes refusals on Anthropic's paths in its shape; all answers have `request-id`."""

    def __init__(self, app: ASGIApp, *, new_id: Callable[[], str]) -> None:
        self._app = app
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(f"{PATH}/"):
            await self._app(scope, receive, send)
            return
        request_id = f"req_{self._new_id()}"
        held: Message | None = None  # the head of a refusal, whose body will be another
        parts: list[bytes] = []

        async def shaped(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["request-id"] = request_id
                if message["status"] >= 400 and _is_json(message):
                    held = message
                    return
            elif held is not None and message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    await _send_shaped(held, b"".join(parts), request_id, send)
                return
            await send(message)

        await self._app(scope, receive, shaped)


def _is_json(head: Message) -> bool:
    return MutableHeaders(scope=head).get("content-type") == "application/json"


async def _send_shaped(head: Message, raw: bytes, request_id: str, send: Send) -> None:
    given: int = head["status"]
    status = _STATUSES.get(given, given)
    body = anthropic_body(msgspec.json.decode(raw)["error"], status) | {"request_id": request_id}
    written = msgspec.json.encode(body)
    head["status"] = status
    MutableHeaders(scope=head)["content-length"] = str(len(written))
    await send(head)
    await send({"type": "http.response.body", "body": written})
