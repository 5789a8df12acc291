"""Errors of the SDK, all rooted in MalleeError.

    MalleeError (mallee.protocol.errors)
    |- ApiError           the server refused or failed with a code that has no type of its own
    |- ConnectionFailed   no server answers at this address
    |- StreamBroken       a stream ended before its end
    |- Timeout            nothing came in the time that the client gives, or not all of it
    |- NoCapsule          a branch left no state that could be forked
    |- NotParsed          a branch's text is no value of the model that was asked for
    |- ToolFailed         the function of a graph's node failed
    |- ToolTimeout        it gave no result in time
    |- JournalFailed      the journal of a graph can't be written or read
    `- BadRequest, NotFound, Unavailable, ...   the server's own errors, by their code

An error that came from the server has its HTTP status in `fields["http_status"]`, and in `retry_after_s` the
seconds of its `Retry-After`.
"""

from collections.abc import Mapping
from typing import Any, Final

from mallee.protocol.errors import MalleeError, type_of

NO_END: Final = "it ended without its end mark"


class ApiError(MalleeError):
    """The server answered with an error that has no type here. `http_status` is the answer's."""

    code = "api_error"

    @property
    def http_status(self) -> int:
        return int(self.fields.get("http_status", 500))


class ConnectionFailed(MalleeError):
    """No server answered at `url`."""

    code = "connection_failed"

    def __init__(self, url: str, reason: str) -> None:
        text = f"no answer from {url} ({reason}); is `mallee serve` running there?"
        super().__init__(text, url=url, reason=reason)


class StreamBroken(MalleeError):
    """The stream ended without its end mark; texts received so far stay with their branches.

    Without a `reason` that mark is all that is wrong, as if the connection had been cut.
    """

    code = "stream_broken"

    def __init__(self, url: str, reason: str = NO_END) -> None:
        text = f"the stream from {url} broke off ({reason}); send the request again"
        super().__init__(text, url=url, reason=reason)


class Timeout(MalleeError):
    """`what` after `timeout_s`; `remedy` says what to do."""

    code = "timeout"

    def __init__(self, what: str, timeout_s: float, remedy: str) -> None:
        super().__init__(f"{what} after {timeout_s:g} s; {remedy}", timeout_s=timeout_s)


class NotParsed(MalleeError):
    """The text of branch `index` can't be read as a value."""

    code = "not_parsed"

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"branch {index} has no parsed value: {reason}", index=index)


class NoCapsule(MalleeError):
    """Branch `index` can't be forked: it has not ended, or kept no state."""

    code = "no_capsule"

    def __init__(self, index: int, finish_reason: str | None) -> None:
        if finish_reason is None:
            reason = "it has not ended; wait for it"
        else:
            reason = (
                f"it ended with {finish_reason!r} and left no capsule (a stop string leaves none)"
            )
        super().__init__(
            f"branch {index} can't be forked: {reason}", index=index, finish_reason=finish_reason
        )


class ToolFailed(MalleeError):
    """The function `call` of a graph's node failed, or gave too much."""

    code = "tool_failed"

    def __init__(self, call: str, why: str) -> None:
        super().__init__(f"tool {call!r} failed: {why}", call=call)


class ToolTimeout(MalleeError):
    """The function `call` of a graph's node gave no result in `timeout_s`."""

    code = "tool_timeout"

    def __init__(self, call: str, timeout_s: float) -> None:
        text = (
            f"no result of tool {call!r} came in {timeout_s:g} s; answer sooner, or raise timeout_s"
        )
        super().__init__(text, call=call, timeout_s=timeout_s)


class JournalFailed(MalleeError):
    """The journal of a graph at `path` can't be written or read."""

    code = "journal_failed"

    def __init__(self, path: str, reason: str) -> None:
        text = f"the journal {path!r} failed: {reason}; the graph ends, and what the journal has is not lost"
        super().__init__(text, path=path, reason=reason)


def from_body(body: object, http_status: int, retry_after_s: float | None = None) -> MalleeError:
    """The error in an OpenAI-shaped `body`, with the server's own type if its code is known."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        return ApiError(f"HTTP {http_status} without a readable error", http_status=http_status)
    code, message = str(error.get("code")), str(error.get("message"))
    fields: dict[str, Any] = {"http_status": http_status, "param": error.get("param")}
    if retry_after_s is not None:
        fields["retry_after_s"] = retry_after_s
    known = type_of(code) or ApiError
    return known.with_message(message, **fields)
