"""A response's body and events, as the text of its answer comes."""

from typing import Any, Final

import msgspec
import xxhash
from msgspec import to_builtins
from msgspec.structs import replace

from mallee.api.answers import UsageCounter, extras
from mallee.api.deltas import (
    CallDelta,
    TextDelta,
    TokenBytes,
    TokenChance,
    chat_logprobs,
)
from mallee.api.errors import AnswerTooLarge
from mallee.api.jobs import MAX_CHANCES
from mallee.api.responses.items import sealed
from mallee.api.responses.requests import LOGPROBS, SEALED
from mallee.api.responses.tools import (
    InputText,
    Shown,
    arguments_of,
    dropped,
    full_name,
    offered,
    shown_tools,
)
from mallee.api.text.conversation import Message, ToolCall, is_object, sound_arguments
from mallee.protocol.api.responses import Response, ResponseRequest
from mallee.protocol.errors import MalleeError

_ENDS: Final = {
    "stop": "completed",
    "condition": "completed",  # its client's own, as a stop string
    "length": "incomplete",
    "budget": "incomplete",
    "cancelled": "cancelled",
}
_encoder = msgspec.json.Encoder()


def failed(body: Response, error: MalleeError) -> Response:
    """The body of a response that ends by `error`."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    told = {"code": code, "message": error.client_message}
    return replace(body, status="failed", error=told)


def ending(body: Response, number: int) -> dict[str, Any]:
    """The last event of a response, which is over and had `number` others."""
    kind = "incomplete" if body.status == "cancelled" else body.status
    return {"type": f"response.{kind}", "sequence_number": number, "response": body}


def sse(body: dict[str, Any]) -> bytes:
    """One event of a stream, which is named by its type."""
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(body) + b"\n\n"


def opening(
    asked: ResponseRequest,
    name: str,
    created: int,
    model: str,
    *,
    tools: list[dict[str, Any]],
    conversation: str | None,
) -> Response:
    """The body of a response that has begun."""
    text = asked.text or {}
    return Response(
        id=name,
        created_at=created,
        status="queued" if asked.background else "in_progress",
        background=asked.background,
        conversation=None if conversation is None else {"id": conversation},
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        max_tool_calls=asked.max_tool_calls,
        model=model,
        parallel_tool_calls=asked.parallel_tool_calls,
        previous_response_id=asked.previous_response_id,
        prompt_cache_key=asked.prompt_cache_key or None,
        reasoning={"effort": None, "summary": None, **(asked.reasoning or {})},
        safety_identifier=asked.safety_identifier or None,
        store=asked.store,
        temperature=asked.temperature,
        text={**text, "format": text.get("format") or {"type": "text"}},
        tool_choice=asked.tool_choice or "auto",
        tools=[_declared(tool) for tool in tools],
        top_logprobs=asked.top_logprobs,
        top_p=asked.top_p,
        truncation=asked.truncation,
        user=asked.user or None,
        metadata=asked.metadata or {},
    )


def _declared(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == "namespace":
        return {"description": "", **tool}
    if tool["type"] == "custom":
        return {"description": None, "format": {"type": "text"}, **tool}
    return {"strict": None, "description": None, "parameters": None, **tool}


class Writer:
    """Takes the deltas of one answer; gives events, and at last the body."""

    def __init__(
        self,
        body: ResponseRequest,
        begun: Response,
        token_bytes: TokenBytes,
        *,
        names_workers: bool,
    ) -> None:
        self.body = begun
        self._token_bytes = token_bytes if LOGPROBS in body.include else None
        self._seals = SEALED in body.include
        self._names_workers = names_workers
        self._shown = shown_tools(offered(body.tools))
        self._dropped = dropped(body.tools)
        self._input: InputText | None = None  # of the custom call that is open
        self._number = 0  # of the next event
        self._kind = ""  # of the item that is open
        self._texts: list[str] = []  # of it
        self._logprobs: list[dict[str, Any]] = []
        self._chances: list[TokenChance] = []  # of text that is held back
        self._num_chances = 0
        self._uncounted = self.reasoning_tokens = 0

    @property
    def num_events(self) -> int:
        """Up to now."""
        return self._number

    @property
    def shown(self) -> Response:
        """The body as it is now."""
        return replace(self.body, output=[*self.output])

    @property
    def output(self) -> list[dict[str, Any]]:
        return self.body.output

    def begin(self) -> list[dict[str, Any]]:
        events = [self._about("response.created")]
        if self.body.status == "queued":
            events.append(self._about("response.queued"))
            self.body = replace(self.body, status="in_progress")
        return [*events, self._about("response.in_progress")]

    def add(self, delta: TextDelta) -> list[dict[str, Any]]:
        """The events of a delta, without the end's. Raises AnswerTooLarge."""
        events: list[dict[str, Any]] = []
        self._count(delta)
        calls = delta.calls
        if calls and not calls[0].id:
            events += self._arguments(calls[0].arguments)
            calls = calls[1:]
        if delta.reasoning:
            events += [*self._opened("reasoning"), self._reasoning(delta.reasoning)]
        if delta.text:
            events += [*self._opened("message"), self._text(delta.text)]
        for call in calls:
            events += [*self._close("completed"), self._open_call(call)]
            events += self._arguments(call.arguments)
        return events

    def finish(self, last: TextDelta) -> list[dict[str, Any]]:
        """The events after which the output is whole."""
        events: list[dict[str, Any]] = []
        if not self._kind and not any(i["type"] != "reasoning" for i in self.output):
            events += self._open("message")
        is_whole = _ENDS.get(last.finish or "stop") == "completed"
        return [*events, *self._close("completed" if is_whole else "incomplete")]

    def end(self, last: TextDelta, usage: UsageCounter, more: dict[str, Any], now: int) -> None:
        """Have the body say how it ended, after `finish`."""
        status = _ENDS.get(last.finish or "stop", "failed")
        told = {**to_builtins(extras(last, names_workers=self._names_workers)), **more}
        if self._dropped:
            told["dropped_tools"] = self._dropped
        self._settle(
            status,
            usage,
            mallee=told,
            completed_at=now if status == "completed" else None,
            # OpenAI's only word for an answer that was to be no longer; `ended_by` has ours.
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
        )

    def fail(self, error: MalleeError, usage: UsageCounter | None) -> list[dict[str, Any]]:
        """The events of an end by `error`, without the last."""
        events = self._close("incomplete")
        self._settle("failed", usage)
        self.body = failed(self.body, error)
        return events

    def cancel(self, usage: UsageCounter | None) -> list[dict[str, Any]]:
        """The events of an end by its client, without the last."""
        events = self._close("incomplete")
        self._settle("cancelled", usage)
        return events

    def not_stored(self, error: MalleeError) -> None:
        """Have the body say that it is not stored, though it was to be."""
        told = {**(self.body.mallee or {}), "not_stored": error.client_message}
        self.body = replace(self.body, store=False, mallee=told)

    def answer(self) -> tuple[Message, ...]:
        """The messages that the output is."""
        text, reasoning, calls = "", "", []
        for item in self.output:
            match item["type"]:
                case "message":
                    text += item["content"][0]["text"]
                case "reasoning":
                    reasoning += item["content"][0]["text"]
                case "function_call":
                    calls.append(_call(item, sound_arguments(item["arguments"])))
                case "custom_tool_call":
                    calls.append(_call(item, arguments_of(item["input"])))
        return (Message("assistant", text, reasoning, tuple(calls)),)

    def _settle(self, status: str, usage: UsageCounter | None, **more: Any) -> None:
        counts = None if usage is None else self._usage(usage)
        self.body = replace(self.body, status=status, usage=counts, **more)

    def _usage(self, usage: UsageCounter) -> dict[str, Any]:
        prompt, cached, completion = usage.counts
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": prompt + completion,
        }

    def _count(self, delta: TextDelta) -> None:
        self._uncounted += delta.num_tokens
        if delta.text or delta.calls:
            self._uncounted = 0
        elif delta.reasoning:
            self.reasoning_tokens += self._uncounted
            self._uncounted = 0
        if self._token_bytes is None:
            return
        self._num_chances += sum(1 + len(chance.top) for chance in delta.chances)
        if self._num_chances > MAX_CHANCES:
            raise AnswerTooLarge(self._num_chances, MAX_CHANCES)
        self._chances += delta.chances
        if not delta.text and (delta.reasoning or delta.calls):
            self._chances.clear()

    def _taken_logprobs(self) -> list[dict[str, Any]]:
        if self._token_bytes is None:
            return []
        found: list[dict[str, Any]] = chat_logprobs(self._chances, self._token_bytes)["content"]
        self._chances.clear()
        self._logprobs += found
        return found

    # Items

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _about(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=self.shown)

    def _id(self, prefix: str) -> str:
        seed = f"{self.body.id}.{len(self.output)}"
        return f"{prefix}_{xxhash.xxh3_128_hexdigest(seed.encode())}"

    def _item_place(self) -> dict[str, Any]:
        """Of the open item."""
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _place(self) -> dict[str, Any]:
        """Of the open part."""
        return {**self._item_place(), "content_index": 0}

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        self.output.append(item)
        index = len(self.output) - 1
        return self._event("response.output_item.added", output_index=index, item={**item})

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        self.output[-1] = item
        index = len(self.output) - 1
        return self._event("response.output_item.done", output_index=index, item=item)

    def _open(self, kind: str) -> list[dict[str, Any]]:
        self._kind, self._texts, self._logprobs = kind, [], []
        item: dict[str, Any]
        if kind == "message":
            item = {"id": self._id("msg"), "type": kind, "status": "in_progress"}
            item |= {"role": "assistant", "content": []}
        else:
            item = {"id": self._id("rs"), "type": kind, "status": "in_progress"}
            item |= {"summary": [], "content": []}
        added = self._added(item)
        part = self._part("")
        return [added, self._event("response.content_part.added", **self._place(), part=part)]

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": [*self._logprobs],
        }

    def _opened(self, kind: str) -> list[dict[str, Any]]:
        """The events by which an item of that kind is open."""
        return [] if self._kind == kind else [*self._close("completed"), *self._open(kind)]

    def _reasoning(self, text: str) -> dict[str, Any]:
        self._texts.append(text)
        return self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _text(self, text: str) -> dict[str, Any]:
        self._texts.append(text)
        place, logprobs = self._place(), self._taken_logprobs()
        return self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)

    def _close(self, status: str) -> list[dict[str, Any]]:
        """End the open item, if there is one."""
        if not self._kind:
            return []
        text = "".join(self._texts)
        if self._kind == "call":
            return self._close_call()
        part, place = self._part(text), self._place()
        item = {**self.output[-1], "status": status, "content": [part]}
        if self._kind == "message":
            done = self._event(
                "response.output_text.done", **place, text=text, logprobs=[*self._logprobs]
            )
        else:
            done = self._event("response.reasoning_text.done", **place, text=text)
            if self._seals:
                item["encrypted_content"] = sealed(text)
        self._kind = ""
        return [
            done,
            self._event("response.content_part.done", **place, part=part),
            self._done(item),
        ]

    # Calls

    def _open_call(self, call: CallDelta) -> dict[str, Any]:
        shown = self._shown.get(call.name) or Shown(call.name)
        self._kind, self._texts = "call", []
        self._input = InputText() if shown.is_custom else None
        item = {
            "id": self._id("ctc" if shown.is_custom else "fc"),
            "type": "custom_tool_call" if shown.is_custom else "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": shown.name,
            "input" if shown.is_custom else "arguments": "",
        }
        return self._added({**item, "namespace": shown.namespace} if shown.namespace else item)

    def _arguments(self, text: str) -> list[dict[str, Any]]:
        """The events of more of the open call's arguments."""
        if self._input is None:
            return [self._call_delta("function_call_arguments", text)]
        found = self._input.feed(text)
        return [self._call_delta("custom_tool_call_input", found)] if found else []

    def _call_delta(self, kind: str, text: str) -> dict[str, Any]:
        self._texts.append(text)
        return self._event(f"response.{kind}.delta", **self._item_place(), delta=text)

    def _close_call(self) -> list[dict[str, Any]]:
        """A call that broke off or broke is incomplete."""
        events: list[dict[str, Any]] = []
        if self._input is not None:
            if rest := self._input.end():
                events.append(self._call_delta("custom_tool_call_input", rest))
            text = "".join(self._texts)
            status = "completed" if self._input.is_whole else "incomplete"
            item = {**self.output[-1], "status": status, "input": text}
            kind, named = "custom_tool_call_input", {"input": text}
        else:
            text = "".join(self._texts)
            status = "completed" if is_object(text) else "incomplete"
            item = {**self.output[-1], "status": status, "arguments": text}
            kind, named = "function_call_arguments", {"name": item["name"], "arguments": text}
        self._kind = ""
        done = self._event(f"response.{kind}.done", **self._item_place(), **named)
        return [*events, done, self._done(item)]


def _call(item: dict[str, Any], arguments: str) -> ToolCall:
    return ToolCall(item["call_id"], full_name(item.get("namespace", ""), item["name"]), arguments)
