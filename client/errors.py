"""What can go wrong on the client's side, and how the server's errors come back with their type.

MalleeError (mallee.protocol.errors)
|- ApiError           the server refused or failed; types of its own tree where it named one
|- ConnectionFailed   nobody answers at this address
`- StreamBroken       a stream ended before its end
"""

from collections.abc import Mapping
from typing import Any

from mallee.protocol.errors import MalleeError, type_of


class ApiError(MalleeError):
    """The server's answer was an error that has no type here. `http_status` is the answer's."""

    code = "api_error"

    @property
    def http_status(self) -> int:
        return int(self.fields.get("http_status", 500))


class ConnectionFailed(MalleeError):
    code = "connection_failed"

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"no answer from {url} ({reason}); is `mallee serve` running there?",
            url=url,
            reason=reason,
        )


class StreamBroken(MalleeError):
    """The stream ended without its end mark; texts received so far stay with their branches."""

    code = "stream_broken"

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"the stream from {url} broke off ({reason}); send the request again",
            url=url,
            reason=reason,
        )


def from_body(body: object, http_status: int) -> MalleeError:
    """The error in an OpenAI-shaped `body`, with the server's own type if its code is known."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        return ApiError(f"HTTP {http_status} without a readable error", http_status=http_status)
    code, message = str(error.get("code")), str(error.get("message"))
    fields: dict[str, Any] = {"http_status": http_status, "param": error.get("param")}
    known = type_of(code) or ApiError
    return known.with_message(message, **fields)
