"""Bailian's rows (Qwen's usage traces): Mooncake's, but seconds, 16-token ids, and chats with parents.

A chat waits for its parent, and has its parent's session. A parent that is not in the file ended before
the trace began, so its children begin sessions. How long people took is not recorded.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from mallee.traces.files.lines import TraceFile
from mallee.traces.formats.rows import Count, Ids, Some, Time
from mallee.traces.workload import Request

ID_TOKENS: Final = 16


class Chat(msgspec.Struct, gc=False):
    """One request."""

    chat_id: int
    timestamp: Time  # seconds
    input_length: Some
    output_length: Count
    parent_chat_id: int = -1
    type: str = ""
    hash_ids: list[int] = []


decoder: Final = msgspec.json.Decoder(Chat)


def read_bailian(file: TraceFile, id_tokens: int, *, has_hashes: bool) -> Iterator[Request]:
    """Chats as they come. Raises CodecError with line and field."""
    numbers: dict[int, int] = {}
    sessions: dict[int, str] = {}
    ids = Ids(are_hashes=has_hashes)
    known: set[int] = set()

    def read(number: int, line: bytes) -> Chat:
        chat = file.decode(number, line, decoder)
        if chat.chat_id in known:
            raise file.bad(number, f"chat_id {chat.chat_id} is there twice", "chat_id")
        if len(chat.hash_ids) > -(-chat.input_length // id_tokens):
            what = f"{len(chat.hash_ids)} hash_ids of {id_tokens} tokens for an input_length of"
            raise file.bad(number, f"{what} {chat.input_length}", "hash_ids")
        known.add(chat.chat_id)
        return chat

    first_s: float | None = None
    chats = file.by_time(file.read(read), lambda chat: chat.timestamp)
    for number, chat in enumerate(chats):
        first_s = chat.timestamp if first_s is None else first_s
        parent = numbers.get(chat.parent_chat_id)
        numbers[chat.chat_id] = number
        session = str(chat.chat_id) if parent is None else sessions[chat.parent_chat_id]
        sessions[chat.chat_id] = session
        yield Request(
            number=number,
            arrival_s=chat.timestamp - first_s,
            ids=ids.named(chat.hash_ids),
            input_tokens=chat.input_length,
            output_tokens=max(1, chat.output_length),
            session=session,
            cls=chat.type or "turn",
            wait_for=() if parent is None else (parent,),
            name=str(chat.chat_id),
        )
