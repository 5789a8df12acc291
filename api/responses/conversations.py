"""Conversations: items that grow by each response. They are in the gateways' store.

The items lie apart from the rest, so that to show or list conversations need not read them. What changes is
put where it was read, and changed again if another was faster.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from mallee.api.entry.pages import Paging
from mallee.api.responses.items import shown
from mallee.api.responses.store import COPIES_NBYTES, State
from mallee.api.text.conversation import MAX_MESSAGES
from mallee.gateway.store.copies import CopiedBucket
from mallee.gateway.store.store import Store
from mallee.protocol.api.responses import ConversationBody
from mallee.protocol.errors import InvalidParameter, NotFound
from mallee.protocol.ids import RequestId, Scope
from mallee.runtime.config import ResponsesSettings

ID_PREFIX: Final = "conv_"
_LAYOUT: Final = 1

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


class Talk(msgspec.Struct, frozen=True, array_like=True):
    """The items of a conversation. `state` is that after an answer which has seen the first `num_covered`."""

    items: Items
    state: State | None = None
    num_covered: int = 0

    @property
    def pending(self) -> Items:
        """The items after the last answer whose state is known."""
        return self.items[self.num_covered :]

    @property
    def place(self) -> tuple[int, str]:
        """Its end, the same as long as the items are: their ids are never given twice."""
        return len(self.items), self.items[-1]["id"] if self.items else ""

    def with_items(self, items: Items) -> "Talk":
        return Talk([*self.items, *items], self.state, self.num_covered)

    def without(self, item: str) -> "Talk":
        rest = [each for each in self.items if each["id"] != item]
        return Talk(rest) if len(rest) < len(self.items) else self

    def with_answer(self, items: Items, state: State, after: "Talk") -> "Talk":
        """With the items of a response that went on from `after`, whose `state` holds if none came since."""
        found = self.with_items(items)
        return Talk(found.items, state, len(found.items)) if self.place == after.place else found


class Conversations:
    """The conversations of all gateways. `new_name(scope)` names requests.

    What reads or changes one raises UnknownConversation and StoreAway.
    """

    def __init__(
        self,
        store: Store,
        settings: ResponsesSettings,
        *,
        new_name: Callable[[Scope], RequestId],
        clock: Callable[[], float],
    ) -> None:
        bounds: Any = {"ttl_s": settings.ttl_s, "max_nbytes": settings.max_mib << 20}
        heads = store.bucket("conversations", ConversationBody, version=_LAYOUT, **bounds)
        talks = store.bucket("items", Talk, version=_LAYOUT, is_json=True, **bounds)
        self._heads = CopiedBucket(heads, COPIES_NBYTES)
        self._talks = CopiedBucket(talks, COPIES_NBYTES)
        self._new_name = new_name
        self._clock = clock

    async def create(
        self, scope: Scope, items: Items, metadata: dict[str, str]
    ) -> ConversationBody:
        name = ID_PREFIX + self._new_mark(scope)
        head = ConversationBody(id=name, created_at=int(self._clock()), metadata=metadata)
        await self._talks.put(scope, name, Talk(self.with_ids(scope, items)))
        await self._heads.put(scope, name, head)
        return head

    def with_ids(self, scope: Scope, items: Items) -> Items:
        """Items as a conversation shows them; their ids are ours, or one could come twice."""
        given = [{key: item[key] for key in item if key != "id"} for item in items]
        return shown(given, self._new_mark(scope))

    async def head(self, name: str, scope: Scope) -> ConversationBody:
        """A conversation without its items."""
        entry = await self._heads.get(scope, name) if name.startswith(ID_PREFIX) else None
        if entry is None:
            raise UnknownConversation(name)
        return entry.value

    async def talk(self, name: str, scope: Scope, param: str | None = None) -> Talk:
        """The items of a conversation."""
        entry = await self._talks.get(scope, name) if name.startswith(ID_PREFIX) else None
        if entry is None:
            raise UnknownConversation(name, param)
        return entry.value

    async def keep_state(self, scope: Scope, answer: str, state: State) -> None:
        """Keep the state after an answer that is in no conversation. Raises StoreFull too."""
        await self._talks.put(scope, answer, Talk([], state))

    async def state(self, scope: Scope, answer: str) -> State | None:
        """The state after the answer of that id."""
        if answer.startswith(ID_PREFIX):
            return None
        entry = await self._talks.get(scope, answer)
        return None if entry is None else entry.value.state

    async def page(self, scope: Scope, paging: Paging) -> list[ConversationBody]:
        """The first `paging.most` of `scope`."""
        names = await self._heads.bucket.names(scope)
        return [each.value for each in await paging.read(names, partial(self._heads.get, scope))]

    async def set_metadata(
        self, name: str, scope: Scope, metadata: dict[str, str]
    ) -> ConversationBody:
        """Change its metadata; it lives on, with its items, as `change` has it."""
        return await self.change(name, scope, lambda talk: talk, metadata)

    async def change(
        self,
        name: str,
        scope: Scope,
        change: Callable[[Talk], Talk],
        metadata: dict[str, str] | None = None,
    ) -> ConversationBody:
        """Change the items of a conversation, which lives on for as long as one that was made now.

        `metadata`: put in place of its own.
        """
        given = {} if metadata is None else {"metadata": metadata}
        head = None
        if name.startswith(ID_PREFIX):
            head = await self._heads.change(
                scope, name, lambda head: msgspec.structs.replace(head, **given)
            )
        if head is None or await self._talks.change(scope, name, change) is None:
            raise UnknownConversation(name)
        return head

    async def forget(self, name: str, scope: Scope) -> None:
        """Forget a conversation everywhere. Its responses stay."""
        # First: else a failure would leave the items without a name.
        await self._talks.delete(scope, name)
        await self._heads.delete(scope, name)

    def _new_mark(self, scope: Scope) -> str:
        return self._new_name(scope).removeprefix("req_")


def check_room(talk: Talk, num_items: int, param: str) -> None:
    """Raises InvalidParameter where so many items more are too many."""
    total = len(talk.items) + num_items
    if total > MAX_MESSAGES:
        remedy = (
            f"the conversation would have {total} items, of {MAX_MESSAGES} at most; begin another"
        )
        raise InvalidParameter(param, num_items, remedy)
