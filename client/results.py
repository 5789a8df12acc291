"""What the SDK hands out: events while they stream, branches when they are done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mallee.client.errors import ApiError, StreamBroken, from_body


@dataclass(frozen=True, slots=True)
class BranchEvent:
    """New text of one branch. The last event of a branch has `finish_reason` and the fields after."""

    index: int
    text: str
    finish_reason: str | None
    worker: str | None
    capsule: str | None
    cached_tokens: int | None
    prefill_tokens: int | None
    logprobs: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Branch:
    """One branch's answer so far; complete once `finish_reason` is set. Times are the client's.

    `logprobs`: if they were asked for, the server's lists, added up over the chunks.
    `ttft_ms` runs from sending the request to the branch's first text (or its end, if it has none).
    """

    index: int
    text: str = ""
    finish_reason: str | None = None
    worker: str | None = None
    capsule: str | None = None
    cached_tokens: int | None = None
    prefill_tokens: int | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)

    def take(self, event: BranchEvent, elapsed_ms: float) -> None:
        """Add one event that arrived `elapsed_ms` after the request was sent."""
        if self.ttft_ms is None:
            self.ttft_ms = elapsed_ms
        self.total_ms = elapsed_ms
        self.text += event.text
        for name, values in (event.logprobs or {}).items():
            if values is not None:
                self.logprobs.setdefault(name, []).extend(values)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.worker = event.worker
            self.capsule = event.capsule
            self.cached_tokens = event.cached_tokens
            self.prefill_tokens = event.prefill_tokens


class CapsuleData(msgspec.Struct, frozen=True, kw_only=True):
    """The server's description of a capsule. Fields that only its creation reports may be None."""

    id: str
    worker: str
    tokens: int
    model: str
    created: int
    prefill_tokens: int | None = None
    cached_tokens: int | None = None


class StreamReader:
    """Data of server-sent events in, branch events out; knows when the stream has really ended."""

    __slots__ = ("_url", "is_done")

    def __init__(self, url: str) -> None:
        self._url = url
        self.is_done = False

    def read(self, data: str) -> list[BranchEvent]:
        """The events in one `data:`. Raises the server's error, or StreamBroken for nonsense."""
        if data == "[DONE]":
            self.is_done = True
            return []
        try:
            body = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise StreamBroken(self._url, f"unreadable event: {error}") from error
        if isinstance(body, Mapping) and "error" in body:
            raise from_body(body, 200)
        return choice_events(body)

    def end(self) -> None:
        """The connection closed. Raises StreamBroken unless the end mark was seen."""
        if not self.is_done:
            raise StreamBroken(self._url, "no end mark")


def choice_events(body: Any) -> list[BranchEvent]:
    """The choices of a completion, a chat completion or one of their chunks, as events."""
    events = []
    for choice in body.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or part.get("content") or ""
        ours = choice.get("mallee") or {}
        finish = choice.get("finish_reason")
        if not text and finish is None:
            continue  # a role, or a sign of life
        events.append(
            BranchEvent(
                choice["index"],
                text,
                finish,
                ours.get("worker"),
                ours.get("capsule"),
                ours.get("cached_tokens"),
                ours.get("prefill_tokens"),
                choice.get("logprobs"),
            )
        )
    return events


def fork_body(branches: Sequence[Any] | int, params: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON body of a fork: n branches, or one per suffix (text, token ids, or messages)."""
    body: dict[str, Any] = {"stream": True, **params}
    if isinstance(branches, int):
        body["n"] = branches
    else:
        body["suffixes"] = list(branches)
    return body


def prompt_body(
    prompt: Any, messages: Sequence[Mapping[str, Any]] | None, params: Mapping[str, Any]
) -> dict[str, Any]:
    """A body with either a prompt or messages. Raises ValueError for both or neither."""
    if (prompt is None) == (messages is None):
        raise ValueError("give either prompt or messages")
    body = {k: v for k, v in params.items() if v is not None}
    if messages is not None:
        body["messages"] = list(messages)
    else:
        body["prompt"] = prompt
    return body


def json_of(raw: bytes, status: int) -> Any:
    """The decoded body. Raises ApiError if it is not JSON."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ApiError(f"HTTP {status} with an unreadable body", http_status=status) from error


def convert_capsule(body: object) -> CapsuleData:
    """Raises ApiError if `body` does not describe a capsule."""
    try:
        return msgspec.convert(body, CapsuleData)
    except msgspec.ValidationError as error:
        raise ApiError(f"not a capsule: {error}", http_status=200) from error


def need_capsule(branch: Branch | None, index: int) -> str:
    """The capsule that a branch left. Raises ValueError if there is none (yet)."""
    if branch is None or branch.capsule is None:
        raise ValueError(f"branch {index} has not ended, or left no capsule: it can't be forked")
    return branch.capsule


def raise_for(body: object, status: int) -> None:
    """Raise the server's error if `status` says it is one."""
    if status >= 400:
        raise from_body(body, status)
