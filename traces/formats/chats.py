"""Chats as text: ShareGPT's conversations, and the requests of OpenAI's API from logs and batch files.

A token is a word or a mark, as in `dag`, but where a log has the usage: then lengths are the usage's, and
an id stands for as many words as its tokens had in the first such request. Text is equal by its words.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from mallee.traces.files.lines import TraceFile
from mallee.traces.formats.dag_calls import ANSWER_TOKENS, Texts, words_of
from mallee.traces.formats.dag_lines import Conversation, Message, Turn
from mallee.traces.formats.tables import Table

_TIMES: Final = ("timestamp", "created_at", "created", "time")
_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_BY_MODEL: Final = ("gpt", "assistant", "chatgpt", "bing", "bard")


class Shared(msgspec.Struct):
    """One conversation of ShareGPT; messages have `from` and `value`."""

    conversations: list[dict[str, str | None]]
    id: str | int = ""


_shared: Final = msgspec.json.Decoder(Shared)
_object: Final = msgspec.json.Decoder(dict[str, Any])


def unroll_shared(file: TraceFile, number: int, line: bytes) -> Iterator[Conversation]:
    """A conversation whose turns end with the answers. Raises CodecError if there is no answer."""
    shared = file.decode(number, line, _shared)
    turns: list[Turn] = []
    asked: list[Message] = []
    for said in shared.conversations:
        by, text = said.get("from") or "", said.get("value") or ""
        if by not in _BY_MODEL:
            asked.append(Message(by, text))
        elif asked:
            turns.append(Turn(asked, max_tokens=max(1, len(words_of(text)))))
            asked = []
    if not turns:
        raise file.bad(number, f"no answer: none is from {', '.join(_BY_MODEL)}", "conversations")
    yield Conversation(str(shared.id or f"line {number}"), turns)


class Requests:
    """Unrolls logged requests to rows: bodies, lines of batches (also their output), pairs with answers."""

    def __init__(self, table: Table, id_tokens: int) -> None:
        self._table = table
        self._size = id_tokens
        self._texts: Texts | None = None

    def __call__(self, file: TraceFile, number: int, line: bytes) -> Iterator[dict[str, Any]]:
        entry = file.decode(number, line, _object)
        request = _within(entry, "request", "body") or entry
        answer = _within(entry, "response", "body")
        usage = answer.get("usage") or entry.get("usage") or {}
        try:
            words, replied = _words(request, answer)
        except (ValueError, msgspec.ValidationError) as error:
            raise file.bad(number, error, "messages") from error
        tokens = usage.get("prompt_tokens", usage.get("input_tokens", len(words)))
        limit = next((request[name] for name in _LIMITS if request.get(name)), ANSWER_TOKENS)
        output = usage.get("completion_tokens", usage.get("output_tokens", replied or limit))
        if not tokens:
            raise file.bad(number, "neither messages, prompt, input nor usage: no request", "")
        if self._texts is None:
            self._texts = Texts(max(1, round(self._size * (len(words) or tokens) / tokens)))
        given = entry | {k: v for k, v in answer.items() if k in _TIMES and k not in entry}
        row = self._table.row(
            file,
            number,
            {
                "timestamp": next((given[name] for name in _TIMES if given.get(name)), None),
                "input_length": tokens,
                "output_length": output,
                "session_id": entry.get("session_id"),
            },
        )
        yield row | {"hash_ids": self._texts.ids(words)[: -(-tokens // self._size)]}


def _within(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    """The innermost object behind `names`, each of which may be left out; {} if none is there."""
    found: dict[str, Any] = {}
    for name in names:
        inner = (found or entry).get(name)
        found = inner if isinstance(inner, dict) else found
    return found


def _words(request: dict[str, Any], answer: dict[str, Any]) -> tuple[list[str], int]:
    """Words of the prompt, and how many the answer has. Raises ValueError for other parts than text."""
    asked = request.get("messages") or request.get("prompt") or request.get("input") or []
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    messages = msgspec.convert(asked, list[Message])
    replies = [
        msgspec.convert(c["message"], Message)
        for c in answer.get("choices") or ()
        if c.get("message")
    ]
    if messages and messages[-1].role == "assistant" and not answer:
        replies = [messages.pop()]
    if system := request.get("instructions"):
        messages.insert(0, Message("system", system))
    words = [word for message in messages for word in words_of(message.text())]
    return words, sum(len(words_of(reply.text())) for reply in replies[:1])
