"""Streams that go on at another backend: what the client has, the request for the rest, and the splice.

A stream is kept as it came, and parsed only once its backend is lost, or says that its engine failed. What
the client got is a part of the next backend's prompt then, so that its answer is the rest; its events get the
name of the first answer, and usage of the whole. Where nothing was drawn yet, the request is asked again as
it is.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from mallee.actors.front.http.messages import Line

MOST_KEPT_NBYTES: Final = 1 << 20  # of one answer
MOST_HELD_NBYTES: Final = 64 << 10  # of an event that is not whole
DATA: Final = b"data:"
DONE: Final = b"[DONE]"
GAP: Final = b"\n\n"
OTHER_GAP: Final = b"\r\n\r\n"  # of servers whose streams are passed on as they come
_ERROR: Final = re.compile(rb'(?:\A|(?<=\n\n))data: ?\{"error":[^\n]*')
DEFAULT_COMPLETION: Final = 16  # tokens, where max_tokens is absent: OpenAI's and vLLM's
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
# What their answers need is not in the text that the client has.
_WHOLE: Final = (
    *(
        "logprobs",
        "top_logprobs",
        "echo",
        "suffix",
        "best_of",
        "use_beam_search",
        "prompt_logprobs",
    ),
    *(
        "include_stop_str_in_output",
        "structured_outputs",
        "prompt_embeds",
        "continue_final_message",
    ),
    *("kv_transfer_params", "functions", "function_call"),
)

Body: TypeAlias = dict[str, Any]
Encode: TypeAlias = Callable[[str], Sequence[int] | None]


class Sent(NamedTuple):
    """The part of a stream that its client has."""

    first: Body | None  # its first event
    texts: list[str]  # by event
    drawn: list[int]  # tokens of each, at least
    ids: list[int] | None  # None: some event does not tell them
    lags: bool  # tokens were drawn whose text is to come
    has_role: bool
    is_finished: bool
    has_usage: bool
    oddity: str  # something that is no text; empty: there is none


class Continuation(NamedTuple):
    """The request for the rest of an answer, and how its events become the first answer's."""

    body: bytes
    splice: "Splice"


def is_stream(path: bytes, status: int, lines: Sequence[Line]) -> bool:
    """Whether an answer may be a stream that can go on."""
    values = {name: value for name, value, _ in lines}
    is_sse = values.get(b"content-type", b"").startswith(b"text/event-stream")
    is_plain = b"content-encoding" not in values and b"content-length" not in values
    return (
        status == 200 and is_sse and is_plain and path.partition(b"?")[0].endswith(b"/completions")
    )


class Room:
    """Memory for what is kept of all streams."""

    def __init__(self, most_nbytes: int) -> None:
        self.most_nbytes = most_nbytes
        self.num_kept = 0  # bytes


class Stream:
    """The events of one answer on their way to the client, whole ones only."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._kept: list[bytes] | None = []  # None: there is no room for it
        self._nbytes = 0
        self._held = b""
        self._is_loose = False  # it is passed on as it comes
        self.splice: Splice | None = None
        self.fault = b""
        """The event by which the backend said that its engine failed; nothing after it counts."""

    def take(self, data: bytes, *, ends: bool) -> bytes:
        """The bytes that go on now, up to a `fault`. Raises ValueError for an event that can't be spliced."""
        if self._is_loose:
            return data
        if self._held:
            data, self._held = self._held + data, b""
        if OTHER_GAP in data:
            if self.splice is not None:
                raise ValueError("its events end otherwise than those before")
            self._is_loose = True
            self.forget()
            return data
        if not ends and not data.endswith(GAP):
            at = data.rfind(GAP) + len(GAP) if GAP in data else 0
            if len(data) - at <= MOST_HELD_NBYTES:
                data, self._held = data[:at], data[at:]
            elif self.splice is not None:
                raise ValueError("an event is too long")
            else:
                self._is_loose = True
                self.forget()
        if b'{"error":' in data and (found := _ERROR.search(data)) and _is_fault(found[0]):
            data, self.fault = data[: found.start()], found[0] + GAP
        if self.splice is not None:
            data = self.splice.take(data)
        if self._kept is not None:
            self._kept.append(data)
            self._nbytes += len(data)
            self._room.num_kept += len(data)
            if self._nbytes > MOST_KEPT_NBYTES or self._room.num_kept > self._room.most_nbytes:
                self.forget()
        return data

    def forget(self) -> None:
        """Keep nothing of it any more."""
        self._room.num_kept -= self._nbytes
        self._nbytes, self._kept = 0, None

    def lost(self) -> bytes | None:
        """All that the client has of it, now that its backend is lost; None: that is not known."""
        self._held, self.splice = b"", None
        return None if self._kept is None else b"".join(self._kept)


def _is_fault(event: bytes) -> bool:
    """Whether an event tells of a fault of its server, and not of the request's."""
    try:
        return int(msgspec.json.decode(event[len(DATA) :])["error"]["code"]) >= 500
    except (msgspec.DecodeError, TypeError, KeyError, ValueError):
        return False


def continuation(path: str, raw: bytes, kept: bytes, encode: Encode) -> Continuation | str:
    """The request for the rest of an answer; or why there is none. `encode`: of the model's tokenizer.

    An empty reason: the answer is whole, but for its end.
    """
    try:
        body = msgspec.json.decode(raw)
        sent = _sent(kept)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError, AttributeError):
        return "the request or an event of its answer is not understood"
    if not isinstance(body, dict) or body.get("stream") is not True:
        return "it is no stream that was asked for"
    if body.get("n") not in (None, 1):
        return "it has several choices"
    options = body.get("stream_options")
    if sent.is_finished:
        wants_usage = isinstance(options, dict) and options.get("include_usage")
        return "its usage was not sent yet" if wants_usage and not sent.has_usage else ""
    if sent.oddity:
        return f"it has {sent.oddity}"
    if sent.texts or (sent.lags and sent.ids):
        is_chat = path.partition("?")[0].endswith("/chat/completions")
        found = _asked_for_rest(body, sent, encode, is_chat=is_chat)
        if isinstance(found, str):
            return found
        body, num_drawn, owed = found
    else:
        num_drawn, owed = 0, ""
    # Penalties count what was drawn, not the prompt; past an end some of it is no text.
    others = ("presence_penalty", "frequency_penalty", *(("ignore_eos",) if not sent.ids else ()))
    is_exact = body.get("temperature") == 0 and not any(body.get(name) for name in others)
    splice = Splice(sent, num_drawn, owed, is_resampled=bool(sent.texts) and not is_exact)
    return Continuation(msgspec.json.encode(body), splice)


def _sent(kept: bytes) -> Sent:
    """Raises what a parser raises for events that are no completion's."""
    first: Body | None = None
    texts: list[str] = []
    drawn: list[int] = []  # by event
    ids: list[int] | None = []
    has_role = is_finished = has_usage = False
    oddity = ""
    for event in kept.split(GAP):
        if not event.startswith(DATA) or (data := event[len(DATA) :].strip()) == DONE:
            continue
        chunk = msgspec.json.decode(data)
        first = first or chunk
        usage = chunk.get("usage")
        has_usage = has_usage or bool(usage)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta")
            has_role = has_role or bool(delta and delta.get("role"))
            text = (choice.get("text") if delta is None else delta.get("content")) or ""
            for name, value in (delta or {}).items():
                if value and name not in ("role", "content"):
                    oddity = name
            is_finished = is_finished or choice.get("finish_reason") is not None
            tokens = choice.get("token_ids")
            if delta and delta.get("role") and not text:
                continue  # the first chunk of a chat, before any token
            texts.append(text)
            drawn.append(len(tokens) if tokens else 1)
            ids = None if ids is None or tokens is None else ids + tokens
        if "error" in chunk:
            oddity = "an error"
    lags = bool(texts) and not texts[-1]
    while texts and not texts[-1]:
        texts.pop()
        drawn.pop()
    return Sent(
        first=first,
        texts=texts,
        drawn=drawn,
        ids=ids,
        lags=lags,
        has_role=has_role,
        is_finished=is_finished,
        has_usage=has_usage,
        oddity=oddity,
    )


def _asked_for_rest(
    body: Body, sent: Sent, encode: Encode, *, is_chat: bool
) -> tuple[Body, int, str] | str:
    """The request for what follows the text, its tokens, and the white space that comes once more."""
    for name in _WHOLE:
        if body.get(name) not in (None, False):
            return f"it has {name}"
    kind = body.get("response_format")
    if isinstance(kind, dict) and kind.get("type") != "text":
        return "it has response_format"
    text, owed, ids = "".join(sent.texts), "", sent.ids
    drawn = list(zip(sent.texts, sent.drawn, strict=True))
    if is_chat:
        # Templates trim messages: the white space at the end is drawn again.
        messages, whole = body.get("messages"), text
        text = text.rstrip()
        owed = whole[len(text) :]
        while drawn and not drawn[-1][0].strip():
            drawn.pop()
        if not text or not isinstance(messages, list):
            return "it has no text yet that a template keeps"
        if body.get("add_generation_prompt") is False:
            return "it has add_generation_prompt"
        more: Body = {
            "messages": [*messages, {"role": "assistant", "content": text}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
    else:
        prompt: Any = body.get("prompt")
        choice = ((sent.first or {}).get("choices") or [{}])[0]
        if ids is not None and not isinstance(prompt, list):
            prompt = choice.get("prompt_token_ids") or prompt
        if isinstance(prompt, str):
            more = {"prompt": prompt + text}
        elif isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
            rest = ids or encode(text)
            if rest is None:
                return "its prompt is token ids, and the answer tells none"
            more = {"prompt": [*prompt, *rest]}
        else:
            return "its prompt is neither text nor token ids"
    if ids and (owed or sent.lags or body.get("stop")):
        return "its text lags behind its token ids"
    if ids is not None:
        num_drawn = len(ids)
    else:  # one event may have several tokens, or none of its own where text is held back for a stop
        num_drawn = sum(num for each, num in drawn if each or not body.get("stop"))
        num_drawn = max(num_drawn, len(encode(text) or ()))
    if not is_chat and "max_tokens" not in body:
        more["max_tokens"] = max(1, DEFAULT_COMPLETION - num_drawn)
    for name in (*_LIMITS, "min_tokens"):
        if isinstance(body.get(name), int):
            more[name] = max(name != "min_tokens", body[name] - num_drawn)
    return {**body, **more}, num_drawn, owed


class Splice:
    """Makes a continuation's events those of the first answer."""

    def __init__(self, sent: Sent, num_drawn: int, owed: str, *, is_resampled: bool) -> None:
        first = sent.first or {}
        self._names: Body = {
            name: first[name] for name in ("id", "created", "model") if name in first
        }
        self._has_begun = sent.first is not None
        self._has_role = sent.has_role
        self._num_drawn = num_drawn
        self._owed = owed
        self.is_resampled = self._must_tell = is_resampled

    def take(self, data: bytes) -> bytes:
        """Whole events."""
        events = data.split(GAP)
        rest = events.pop()
        return b"".join(self._event(event) for event in events) + rest

    def _event(self, event: bytes) -> bytes:
        """Raises ValueError for one that is none of a completion."""
        data = event[len(DATA) :].strip()
        if not event.startswith(DATA) or data == DONE:
            return event + GAP
        try:
            chunk = msgspec.json.decode(data)
            is_wanted = self._rewrite(chunk)
        except (msgspec.DecodeError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"an event is not understood: {error}") from error
        return b"data: %b\n\n" % msgspec.json.encode(chunk) if is_wanted else b""

    def _rewrite(self, chunk: Body) -> bool:
        """Whether there is something in it for the client."""
        chunk.update(self._names)
        if self._has_begun:
            chunk.pop("prompt_token_ids", None)
        usage = chunk.get("usage")
        if usage:
            self._count(usage)
        is_wanted = bool(usage) or "error" in chunk
        for choice in chunk.get("choices") or ():
            if self._has_begun:
                choice.pop("prompt_token_ids", None)
            delta = choice.get("delta")
            if delta is not None and self._has_role:
                delta.pop("role", None)
            held, name = (choice, "text") if delta is None else (delta, "content")
            text = held.get(name)
            if text and self._owed:
                held[name] = text = self._without_owed(text)
            more = (value for key, value in (delta or {}).items() if key != name)
            if text or any(more) or choice.get("finish_reason") or choice.get("token_ids"):
                is_wanted = True
                if self._must_tell:
                    choice["mallee"] = {"resampled": True}
                    self._must_tell = False
        return is_wanted

    def _without_owed(self, text: str) -> str:
        """Without the white space that the client has."""
        at = 0
        while at < len(text) and at < len(self._owed) and text[at] == self._owed[at]:
            at += 1
        self._owed = self._owed[at:] if at == len(text) else ""
        return text[at:]

    def _count(self, usage: Body) -> None:
        drawn = self._num_drawn
        usage["prompt_tokens"] = max(0, usage.get("prompt_tokens", 0) - drawn)
        usage["completion_tokens"] = usage.get("completion_tokens", 0) + drawn
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
