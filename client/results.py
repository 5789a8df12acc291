"""Answers of the server as values: events while they stream, branches as they grow; no I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import msgspec

from mallee.client.errors import ApiError, NoCapsule, NotParsed, StreamBroken, from_body
from mallee.client.sse import DONE
from mallee.protocol.api.capsules import NewCapsule
from mallee.protocol.api.shared import WeightVersions
from mallee.protocol.errors import MalleeError

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, all its branches together.

    Prediction tokens are those that were drafted; None where the server drafted none.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model calls. `arguments`: JSON, as the model wrote it; parts of it in events.

    Without an id and a name it is more of the last call's arguments.
    """

    id: str
    name: str
    arguments: str


_AT_END: Final = (  # of a choice's `mallee`: what a branch has once it has ended
    *("worker", "capsule", "boundary", "kept", "cached_tokens", "prefill_tokens"),
    *("completion_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"),
    *("weight_version", "resampled"),
)


@dataclass(frozen=True, slots=True)
class BranchEvent:
    """New text, reasoning or calls of one branch. Its last event has `finish_reason` and the fields after."""

    index: int
    text: str
    finish_reason: str | None
    worker: str | None
    capsule: str | None
    cached_tokens: int | None
    prefill_tokens: int | None
    logprobs: Mapping[str, Any] | None = None
    boundary: int | None = None
    kept: str | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    injected: tuple[Mapping[str, int], ...] = ()  # `tokens` of its text, `at` how many before
    score: float | None = None
    score_error: str = ""
    completion_tokens: int | None = None
    ended_by: str | None = None  # of a budget or of conditions
    error: MalleeError | None = None
    weight_version: WeightVersions | None = None
    resampled: bool | None = None  # its worker was lost, and it went on by other draws
    token_ids: Sequence[int] = ()  # as `BranchState`
    prompt_token_ids: Sequence[int] | None = None  # the first of its branch has them


@dataclass(slots=True, repr=False)
class BranchState:
    """One branch's answer so far; complete once `finish_reason` is set. Times are the client's.

    `ttft_ms` runs from sending the request to the branch's first event: text, reasoning, a call, or its end.
    `text` has neither the reasoning nor the calls.
    `logprobs`: if they were requested, the server's lists, added up over the chunks.
    `usage` is the request's, all its branches together; None until the last of them has ended. `boundary`
    counts the tokens of `capsule`; `kept` says whether it was pinned, if that was asked for. Of the
    prediction tokens, those that were drafted for it, some were drawn; None where none were drafted.
    `score`: the last that a critic or a verifier gave it; `score_error`: the last failure of a verifier.
    With `return_token_ids`: `prompt_token_ids` are all tokens before it, `token_ids` its own, with the one
    that ended it, which is not in its text and capsule. `weight_version`: of the weights, at start and end.
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
    request_id: str | None = None
    usage: Usage | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    boundary: int | None = None
    kept: str | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    injected: list[Mapping[str, int]] = field(default_factory=list)
    score: float | None = field(default=None, compare=False)
    score_error: str = ""
    completion_tokens: int | None = None
    weight_version: WeightVersions | None = None
    resampled: bool | None = None  # its worker was lost, and it went on by other draws
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    form: Any = field(default=None, compare=False)  # the Pydantic model of its `response_format`

    @property
    def token_logprobs(self) -> list[float]:
        """The log-probabilities that were requested, one for each of `token_ids`."""
        if "content" in self.logprobs:
            return [entry["logprob"] for entry in self.logprobs["content"]]
        return self.logprobs.get("token_logprobs", [])

    @property
    def parsed(self) -> Any:
        """Its text as a value of the Pydantic model that was its `response_format`. Raises NotParsed."""
        if self.form is None:
            raise NotParsed(self.index, "its response_format was no Pydantic model; give one")
        if self.finish_reason != "stop":
            ended = f"it ended with {self.finish_reason!r}" if self.finish_reason else "it runs"
            raise NotParsed(self.index, f"{ended}; wait for it, and give max_tokens enough for it")
        try:
            return self.form.model_validate_json(self.text)
        except ValueError as error:
            raise NotParsed(self.index, str(error)) from error

    def take(self, event: BranchEvent, elapsed_ms: float) -> None:
        """Add one event that arrived `elapsed_ms` after the request was sent."""
        if self.ttft_ms is None:
            self.ttft_ms = elapsed_ms
        self.total_ms = elapsed_ms
        self.text += event.text
        self.reasoning += event.reasoning
        for call in event.tool_calls:
            if call.id:
                self.tool_calls.append(call)
            else:
                last = self.tool_calls[-1]
                self.tool_calls[-1] = replace(last, arguments=last.arguments + call.arguments)
        self.injected += event.injected
        self.token_ids += event.token_ids
        if self.prompt_token_ids is None and event.prompt_token_ids is not None:
            self.prompt_token_ids = [*event.prompt_token_ids]
        for name, values in (event.logprobs or {}).items():
            if values is not None:
                self.logprobs.setdefault(name, []).extend(values)
        if event.finish_reason is not None:
            for name in ("finish_reason", "score_error", *_AT_END):
                setattr(self, name, getattr(event, name))
            if event.score is not None:
                self.score = event.score

    def need_capsule(self) -> str:
        """The capsule that the branch left. Raises NoCapsule."""
        if self.capsule is None:
            raise NoCapsule(self.index, self.finish_reason)
        return self.capsule

    def need_request(self) -> str:
        """The request that it is a branch of."""
        assert self.request_id is not None, "it was not begun"
        return self.request_id

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= 60 else self.text[:59] + "…"
        names = ("finish_reason", "worker", "capsule", "cached_tokens", "prefill_tokens")
        values = ((name, getattr(self, name)) for name in names)
        known = "".join(f", {name}={value!r}" for name, value in values if value is not None)
        return f"{type(self).__name__}({self.index}, {shown!r}{known})"


class CapsuleState:
    """A capsule as the server has told of it, and the client that asks for it."""

    def __init__(
        self, client: Any, data: NewCapsule, *, is_open: bool, cache_salt: str | None = None
    ) -> None:
        self._client = client
        self._cache_salt = cache_salt
        self.id = data.id
        self.worker = data.worker
        self.tokens = data.tokens
        self.model = data.model
        self.prefill_tokens, self.cached_tokens = (
            num if isinstance(num, int) else None
            for num in (data.prefill_tokens, data.cached_tokens)
        )
        self.is_open = is_open
        self.data = data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, worker={self.worker!r}, tokens={self.tokens})"


class StreamReader:
    """Reads the data of server-sent events; knows when the stream has really ended."""

    __slots__ = ("_prompt_ids", "_url", "is_done", "request_id", "usage")

    def __init__(self, url: str) -> None:
        self._url = url
        self.is_done = False
        self.request_id: str | None = None
        self.usage: Usage | None = None
        self._prompt_ids: Sequence[int] | None = None  # of all branches

    def read(self, data: str) -> list[BranchEvent]:
        """The branch events in one `data:`. Raises the server's error, or StreamBroken for nonsense."""
        if data == DONE:
            self.is_done = True
            return []
        body = event_body(data, self._url)
        self.request_id = body.get("id", self.request_id)
        if body.get("usage"):
            self.usage = _usage(body["usage"])
        self._prompt_ids = body.get("prompt_token_ids", self._prompt_ids)
        return list(choice_events(body, self._prompt_ids))

    def end(self) -> None:
        """The connection closed. Raises StreamBroken unless the end mark was seen."""
        if not self.is_done:
            raise StreamBroken(self._url)


def event_body(data: str, url: str) -> Mapping[str, Any]:
    """The object in an event's `data`. Raises the server's error, or StreamBroken for nonsense."""
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise StreamBroken(url, f"unreadable event: {error}") from error
    if not isinstance(body, Mapping):
        raise StreamBroken(url, "an event is not a JSON object")
    if "error" in body:
        raise from_body(body, 200)
    return body


def choice_events(
    body: Mapping[str, Any], prompt_ids: Sequence[int] | None = None
) -> Iterator[BranchEvent]:
    """The choices of a completion, a chat completion or one of their chunks, as events.

    `prompt_ids`: tokens before all choices.
    """
    for choice in body.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or part.get("content") or ""
        ours = choice.get("mallee") or {}
        finish = choice.get("finish_reason")
        reasoning = part.get("reasoning_content") or ""
        tool_calls = tuple(map(_tool_call, part.get("tool_calls") or ()))
        logprobs = choice.get("logprobs")
        has_chances = any((logprobs or {}).values())
        injected = tuple(ours.get("injected") or ())
        token_ids, suffix = choice.get("token_ids") or (), choice.get("suffix_token_ids")
        own_ids = choice.get("prompt_token_ids", prompt_ids)
        if suffix is not None:
            own_ids = [*(prompt_ids or ()), *suffix]
        shown = text or reasoning or tool_calls or has_chances or injected or token_ids
        at_end = {name: ours.get(name) for name in _AT_END}
        if (versions := at_end["weight_version"]) is not None:
            at_end["weight_version"] = read_as(versions, WeightVersions)
        if not shown and suffix is None and finish is None:
            continue  # a role, or a sign of life
        yield BranchEvent(
            index=choice["index"],
            text=text,
            finish_reason=finish,
            logprobs=logprobs,
            reasoning=reasoning,
            tool_calls=tool_calls,
            injected=injected,
            score=ours.get("score"),
            score_error=ours.get("score_error") or "",
            ended_by=ours.get("ended_by"),
            error=from_body(ours, 200) if "error" in ours else None,
            token_ids=token_ids,
            prompt_token_ids=own_ids,
            **at_end,
        )


def told_wait_s(headers: Mapping[str, str]) -> float | None:
    """The seconds of `Retry-After`, if it says seconds."""
    told = headers.get("retry-after", "")
    return float(told[:9]) if told.isdecimal() else None


def read_answer(status: int, raw: bytes, url: str, headers: Mapping[str, str]) -> Any:
    """The decoded body. Raises the server's error, or ApiError if it is not JSON."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ApiError(_unreadable(status, raw, url), http_status=status) from error
    if status >= 400:
        raise from_body(body, status, told_wait_s(headers))
    return body


def read_health(status: int, raw: bytes, url: str) -> dict[str, Any]:
    """The service's account of itself; "unavailable" with a reason if no service answered."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return {"status": "unavailable", "reason": _unreadable(status, raw, url)}
    if isinstance(body, dict) and "status" in body:
        return body
    return {"status": "unavailable", "reason": f"HTTP {status} from {url}: not Mallee's answer"}


def read_as(body: object, kind: type[S]) -> S:
    """An answer's body as a value. Raises ApiError if it is no such answer."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise ApiError(f"not a {kind.__name__}: {error}", http_status=200) from error


def _tool_call(body: Mapping[str, Any]) -> ToolCall:
    function = body["function"]
    return ToolCall(body.get("id") or "", function.get("name") or "", function["arguments"])


def _usage(body: Mapping[str, Any]) -> Usage:
    details = body.get("prompt_tokens_details") or {}
    completion = body.get("completion_tokens_details") or {}
    return Usage(
        body.get("prompt_tokens", 0),
        body.get("completion_tokens", 0),
        details.get("cached_tokens", 0),
        completion.get("accepted_prediction_tokens"),
        completion.get("rejected_prediction_tokens"),
    )


def _unreadable(status: int, raw: bytes, url: str) -> str:
    """Ray's proxy answers in plain text while no gateway runs behind it."""
    text = " ".join(raw[:200].decode("utf-8", "replace").split())
    return (
        f"HTTP {status} without JSON from {url} ({text!r}): the service is starting or stopping,"
        " or another program has this address"
    )
