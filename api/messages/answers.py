"""Anthropic's answers: a message of content blocks in one body, or its events."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from mallee.api.answers import Envelope, UsageCounter, extras
from mallee.api.deltas import CallDelta, TextDelta, TokenBytes
from mallee.api.jobs import Plan
from mallee.api.messages.errors import anthropic_error
from mallee.api.messages.reading import input_of
from mallee.api.messages.requests import FIVE_MINUTES_S
from mallee.api.messages.signatures import signature_of
from mallee.gateway.requests.lives import verdict_body
from mallee.gateway.requests.meter import outcome_of
from mallee.protocol.api.messages import (
    AnthropicBegun,
    AnthropicMessage,
    AnthropicUsage,
    CacheCreation,
)
from mallee.protocol.errors import MalleeError

_encoder: Final = msgspec.json.Encoder()


def named_event(body: dict[str, Any]) -> bytes:
    """`body` as an event of its type."""
    return f"event: {body['type']}\ndata: ".encode() + _encoder.encode(body) + b"\n\n"


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The shape of one request's answer. `keep_s`: its prompt's tokens are retained, if not 0."""

    keep_s: float = 0.0
    is_clamped: bool = False  # the window ends before its max_tokens
    shows_thinking: bool = True
    diagnoses: bool = False

    def begin_whole(
        self, plan: Plan, token_bytes: TokenBytes | None, *, names_workers: bool
    ) -> "WholeMessage":
        return WholeMessage(self, names_workers=names_workers)

    def begin_stream(
        self, plan: Plan, token_bytes: TokenBytes | None, envelope: Envelope, *, names_workers: bool
    ) -> "MessageWriter":
        return MessageWriter(self, envelope, names_workers=names_workers)

    def usage(self, counter: UsageCounter, last: TextDelta | None) -> AnthropicUsage:
        """Input tokens in three parts: computed, found in the cache, computed and retained."""
        prompt, cached, completion = counter.counts
        is_refused = last is not None and last.retained and outcome_of(last.retained) == "refused"
        created = prompt - cached if self.keep_s and not is_refused else 0
        is_short = self.keep_s <= FIVE_MINUTES_S
        return AnthropicUsage(
            input_tokens=prompt - cached - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached,
            cache_creation=CacheCreation(
                ephemeral_5m_input_tokens=created if is_short else 0,
                ephemeral_1h_input_tokens=0 if is_short else created,
            ),
            output_tokens=completion,
        )

    def stop(self, last: TextDelta, *, has_calls: bool) -> dict[str, Any]:
        """`stop_reason` and `stop_sequence`."""
        if last.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
        reason = "end_turn"
        if last.finish == "length":
            reason = "model_context_window_exceeded" if self.is_clamped else "max_tokens"
        elif last.finish == "cancelled":
            reason = "pause_turn"  # another client has pruned it; it can be gone on with
        elif last.finish == "budget":
            reason = "max_tokens"
        elif has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def extras(self, last: TextDelta, *, names_workers: bool) -> dict[str, Any]:
        """Fields beside Anthropic's own, and the reason of a miss in its words."""
        found: dict[str, Any] = {"mallee": extras(last, names_workers=names_workers)}
        if self.diagnoses and last.verdict is not None:
            found["diagnostics"] = _diagnostics(verdict_body(last.verdict))
        return found


def _diagnostics(verdict: dict[str, Any]) -> dict[str, Any] | None:
    reason = verdict.get("cache_miss_reason")
    if verdict["status"] == "cache_hit":
        return None
    missed = verdict["cache_missed_tokens"]
    known = reason["type"] if reason is not None else "unavailable"
    body = {"type": known}
    if known != "unavailable":
        body["cache_missed_input_tokens"] = missed
    return {"cache_miss_reason": body}


def _tool_use(call: CallDelta, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


class WholeMessage:
    """Collects an answer of one choice: reasoning, text and calls, in the order in which they came."""

    __slots__ = ("_format", "_last", "_names_workers", "_parts")

    def __init__(self, message_format: MessageFormat, *, names_workers: bool) -> None:
        self._format = message_format
        self._names_workers = names_workers
        self._parts: list[tuple[str, list[Any]]] = []  # of a kind each
        self._last: TextDelta | None = None

    def add(self, delta: TextDelta) -> None:
        for kind, value in _parts_of(delta):
            begins = bool(value.id) if kind == "tool_use" else False
            if begins or not self._parts or self._parts[-1][0] != kind:
                self._parts.append((kind, []))
            self._parts[-1][1].append(value)
        if delta.finish is not None:
            self._last = delta

    def choices(self) -> Iterator[dict[str, Any]]:
        """The content blocks."""
        for kind, values in self._parts:
            if kind == "tool_use":
                arguments = "".join(each.arguments for each in values)
                yield _tool_use(values[0], input_of(arguments))
            elif kind == "text":
                yield {"type": "text", "text": "".join(values)}
            else:
                text, is_shown = "".join(values), self._format.shows_thinking
                yield {
                    "type": "thinking",
                    "thinking": text if is_shown else "",
                    "signature": signature_of(text, is_shown=is_shown),
                }

    def body(self, envelope: Envelope, choices: list[Any], usage: UsageCounter) -> AnthropicMessage:
        assert self._last is not None, "the answer is unfinished"
        has_calls = any(kind == "tool_use" for kind, _ in self._parts)
        return AnthropicMessage(
            id=envelope.id,
            model=envelope.model,
            content=choices,
            usage=self._format.usage(usage, self._last),
            **self._format.stop(self._last, has_calls=has_calls),
            **self._format.extras(self._last, names_workers=self._names_workers),
        )


def _parts_of(delta: TextDelta) -> Iterator[tuple[str, Any]]:
    calls = delta.calls
    if calls and not calls[0].id:
        yield "tool_use", calls[0]  # more of one that began before
        calls = calls[1:]
    if delta.reasoning:
        yield "thinking", delta.reasoning
    if delta.text:
        yield "text", delta.text
    for call in calls:
        yield "tool_use", call


class MessageWriter:
    """The events of an answer of one choice: blocks are begun and ended one after the other."""

    idle: Final = named_event({"type": "ping"})
    __slots__ = (
        *("_envelope", "_format", "_has_begun", "_has_calls", "_index", "_last", "_names_workers"),
        *("_open", "_thoughts"),
    )

    def __init__(
        self, message_format: MessageFormat, envelope: Envelope, *, names_workers: bool
    ) -> None:
        self._format = message_format
        self._envelope = envelope
        self._names_workers = names_workers
        self._has_begun = False
        self._has_calls = False
        self._index = -1  # of the last block
        self._open = ""  # its kind, if it is open
        self._thoughts: list[str] = []  # of a thinking block that is open
        self._last: TextDelta | None = None

    def events(self, delta: TextDelta, usage: UsageCounter) -> bytes:
        found: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            message = AnthropicBegun(
                id=self._envelope.id,
                model=self._envelope.model,
                content=[],
                stop_reason=None,
                stop_sequence=None,
                usage=self._format.usage(usage, None),
            )
            found += [{"type": "message_start", "message": message}, {"type": "ping"}]
        for kind, value in _parts_of(delta):
            if kind == "tool_use":
                self._call(value, found)
            else:
                self._text(kind, value, found)
        if delta.finish is not None:
            self._last = delta
            self._close(found)
        return b"".join(map(named_event, found))

    def end(self, usage: UsageCounter) -> bytes:
        last = self._last
        assert last is not None, "the answer is unfinished"
        ended: dict[str, Any] = {
            "type": "message_delta",
            "delta": self._format.stop(last, has_calls=self._has_calls),
            "usage": self._format.usage(usage, last),
            **self._format.extras(last, names_workers=self._names_workers),
        }
        return named_event(ended) + named_event({"type": "message_stop"})

    def failure(self, error: MalleeError, left: Collection[int]) -> bytes:
        return named_event(anthropic_error(error))

    def _text(self, kind: str, text: str, found: list[dict[str, Any]]) -> None:
        if self._open != kind:
            is_text = kind == "text"
            empty = {"text": ""} if is_text else {"thinking": "", "signature": ""}
            self._begin({"type": kind, **empty}, found)
            self._open = kind
        if kind == "thinking":
            self._thoughts.append(text)
            if not self._format.shows_thinking:
                return
        found.append(self._delta({"type": f"{kind}_delta", kind: text}))

    def _call(self, call: CallDelta, found: list[dict[str, Any]]) -> None:
        if call.id:
            self._has_calls = True
            self._begin(_tool_use(call, {}), found)
            self._open = "tool_use"
        found.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))

    def _begin(self, block: dict[str, Any], found: list[dict[str, Any]]) -> None:
        self._close(found)
        self._index += 1
        found.append({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self, found: list[dict[str, Any]]) -> None:
        if not self._open:
            return
        if self._open == "thinking":
            text, self._thoughts = "".join(self._thoughts), []
            signature = signature_of(text, is_shown=self._format.shows_thinking)
            found.append(self._delta({"type": "signature_delta", "signature": signature}))
        found.append({"type": "content_block_stop", "index": self._index})
        self._open = ""

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
