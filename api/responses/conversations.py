"""Conversations: items that grow by each response. The gateway that made one keeps and changes it."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import msgspec

from mallee.api.responses.items import shown
from mallee.api.responses.listing import SharedList
from mallee.api.responses.sharing import END_S, named, packed, request_of, unpacked
from mallee.api.responses.store import Record, ResponseStore, UnknownResponse, num_chars
from mallee.api.text.conversation import MAX_MESSAGES, Conversation
from mallee.gateway.records import SharedRecords
from mallee.protocol.api.responses import ConversationBody
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import (
    CodecError,
    InternalError,
    InvalidParameter,
    LookupIncomplete,
    NotFound,
    Unavailable,
)
from mallee.protocol.ids import RequestId, Scope

log = logging.getLogger(__name__)

ID_PREFIX: Final = "conv_"
_KIND: Final = "conversation"
_CHANGE: Final = "conversation.change"  # the record of a conversation, once it has been changed

Items = list[dict[str, Any]]


class UnknownConversation(NotFound):
    """No such conversation, or one of another scope, or one that was forgotten."""

    code = "conversation_not_found"

    def __init__(self, name: str, param: str | None = None) -> None:
        super().__init__(
            f"conversation {name[:80]!r} is not stored here: it was deleted, forgotten or never was;"
            " make a new one of its items",
            param=param,
        )


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A change of a conversation: other metadata, an item less, items more.

    `answer` is the response that the items are of, `at` the `place` from which it went on.
    """

    metadata: dict[str, str] | None = None
    without: str | None = None
    items: list[dict[str, Any]] = []
    answer: bytes | None = None
    at: tuple[int, str] | None = None


_decode: Final = Decoder(Change, "a conversation's change")


def place(record: Record) -> tuple[int, str]:
    """The end of a conversation, which is the same as long as its items are: ids are never given twice."""
    return len(record.items), record.items[-1]["id"] if record.items else ""


def changed(record: Record, change: Change, answer: Record | None) -> Record:
    """The conversation after `change`; its capsule stays as long as the items that it covers do."""
    found = replace(record)
    if change.metadata is not None:
        found.body = {**record.body, "metadata": change.metadata}
        found.measure()
    if change.without is not None:
        found.items = [item for item in record.items if item["id"] != change.without]
        if len(found.items) < len(record.items):
            found.turn, found.left, found.num_covered = None, None, 0
            found.measure()
    if change.items:
        found.items = [*found.items, *change.items]
        found.num_chars += num_chars(change.items)  # all of it would take long
    if answer is not None and change.at == place(record):
        found.head, found.turn, found.left = answer.head, answer.turn, answer.left
        found.num_covered = len(found.items)
    return found


class Conversations:
    """The conversations of all gateways, of which `store` has those that were made here.

    `new_name(scope)` names requests.
    """

    def __init__(
        self,
        records: SharedRecords,
        store: ResponseStore,
        *,
        new_name: Callable[[Scope], RequestId],
        clock: Callable[[], float],
    ) -> None:
        self._records = records
        self._store = store
        self._new_name = new_name
        self._clock = clock
        self.all = SharedList(records, store, ID_PREFIX, ConversationBody, new_name=new_name)
        records.share(_KIND, self._tell, self._on_forgotten)
        records.share(_CHANGE, self._tell_changed)

    def create(self, scope: Scope, items: Items, metadata: dict[str, str]) -> Record:
        name = named(ID_PREFIX, self._new_name(scope))
        body = {
            "id": name,
            "object": "conversation",
            "created_at": int(self._clock()),
            "metadata": metadata,
        }
        record = Record(name, scope, body, self.with_ids(scope, items), Conversation(()))
        record.measure()
        self._store.keep(record)
        return record

    def with_ids(self, scope: Scope, items: Items) -> Items:
        """Items as a conversation shows them; their ids are ours, or one could come twice."""
        given = [{key: item[key] for key in item if key != "id"} for item in items]
        return shown(given, named("", self._new_name(scope)))

    async def find(self, name: str, scope: Scope, param: str | None = None) -> Record:
        """The conversation as it is now. Raises UnknownConversation, LookupIncomplete."""
        found = self._here(name, scope)
        if found is None and name.startswith(ID_PREFIX):
            raw = await self._records.fetch(_KIND, request_of(name), scope)
            found = self._read(raw, name, scope)
        if found is None:
            raise UnknownConversation(name, param)
        return found

    async def change(self, record: Record, change: Change, answer: Record | None = None) -> Record:
        """The conversation after `change`, made where it is kept. Raises Unavailable, UnknownConversation."""
        if not record.is_copy:
            return self._changed(record.id, record.scope, change, answer)
        if answer is not None:
            change = msgspec.structs.replace(change, answer=packed(answer))
        raw = None
        with suppress(LookupIncomplete):
            raw = await self._records.fetch(
                _CHANGE, request_of(record.id), record.scope, given=encode(change), wait_s=END_S
            )
        found = self._read(raw, record.id, record.scope)
        if found is None:
            raise Unavailable(
                f"the gateway that keeps conversation {record.id} did not say that it has changed it; read it"
                " before you try again"
            )
        return found

    def forget(self, record: Record) -> None:
        """Forget a conversation, wherever it is kept. Its responses stay."""
        self._records.forget(_KIND, request_of(record.id), record.scope)
        self._store.forget(record)

    def _here(self, name: str, scope: Scope) -> Record | None:
        try:
            return self._store.get(name, scope) if name.startswith(ID_PREFIX) else None
        except UnknownResponse:
            return None

    def _changed(self, name: str, scope: Scope, change: Change, answer: Record | None) -> Record:
        record = self._here(name, scope)
        if record is None:
            raise UnknownConversation(name)
        check_room(record, len(change.items), "conversation")
        found = changed(record, change, answer)
        self._store.keep(found)
        return found

    def _read(self, raw: bytes | None, name: str, scope: Scope) -> Record | None:
        if raw is None:
            return None
        try:
            found = unpacked(raw)
        except CodecError as error:
            log.exception("a conversation of another gateway was refused")
            raise LookupIncomplete("the answer of another one can't be read") from error
        if (found.id, found.scope) != (name, scope):
            raise InternalError(
                "another gateway told of another conversation than it was asked for"
            )
        return found

    async def _tell(self, key: str, scope: Scope, _: bytes) -> bytes | None:
        record = self._here(named(ID_PREFIX, key), scope)
        return None if record is None else packed(record)

    async def _tell_changed(self, key: str, scope: Scope, given: bytes) -> bytes | None:
        name = named(ID_PREFIX, key)
        if self._here(name, scope) is None:
            return None
        change = _decode(given)
        answer = None if change.answer is None else unpacked(change.answer)
        return packed(self._changed(name, scope, change, answer))

    def _on_forgotten(self, key: str, scope: Scope) -> None:
        record = self._here(named(ID_PREFIX, key), scope)
        if record is not None:
            self._store.forget(record)


def check_room(record: Record, num_items: int, param: str) -> None:
    """Raises InvalidParameter where so many items more are too many."""
    total = len(record.items) + num_items
    if total > MAX_MESSAGES:
        remedy = f"it would have {total} items, of {MAX_MESSAGES} at most; begin another"
        raise InvalidParameter(param, record.id, remedy)


def pending(record: Record) -> Sequence[dict[str, Any]]:
    """The items after the last answer whose state is known."""
    return record.items[record.num_covered :]
