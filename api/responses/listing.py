"""Lists of stored responses and of conversations, which gateways put together from what each has."""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from mallee.api.entry.pages import Paging
from mallee.api.responses.store import ResponseStore
from mallee.gateway.records import SharedRecords
from mallee.protocol.api.responses import ConversationBody, ResponseSummary
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import LookupIncomplete
from mallee.protocol.ids import RequestId, Scope

T = TypeVar("T", bound=ResponseSummary | ConversationBody)


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    after: str
    most: int


_decode_asked: Final = Decoder(_Asked, "a question for a page")


class SharedList(Generic[T]):
    """The things of all gateways whose ids begin with `prefix`, of which `store` has this one's.

    Each is shown as a `kind`, which is short. `new_name(scope)` names requests.
    """

    def __init__(
        self,
        records: SharedRecords,
        store: ResponseStore,
        prefix: str,
        kind: type[T],
        *,
        new_name: Callable[[Scope], RequestId],
    ) -> None:
        self._records = records
        self._store = store
        self._prefix = prefix
        self._kind = kind
        self._question = f"{prefix}list"
        self._decode = Decoder(list[kind], "a part of a list")  # type: ignore[valid-type]
        self._new_name = new_name
        records.share(self._question, self._tell)

    async def find(self, scope: Scope, paging: Paging) -> list[T]:
        """The first `paging.most` of `scope`. Raises LookupIncomplete."""
        asked = _Asked(paging.after, paging.most)
        name, given = self._new_name(scope), encode(asked)
        told, is_whole = await self._records.gather(self._question, name, scope, given=given)
        if not is_whole:
            raise LookupIncomplete.with_message(
                "other gateways may have more for this list, and not all have answered; retry in 1 s",
                retry_after_s=1.0,
            )
        parts = [*map(self._decode, told), self._own(scope, asked)]
        found = {each.id: each for part in parts for each in part}
        return [found[name] for name in sorted(found)[: paging.most]]

    def _own(self, scope: Scope, asked: _Asked) -> list[T]:
        records = self._store.page(scope, self._prefix, asked.after, asked.most)
        return [msgspec.convert(record.body, self._kind) for record in records]

    async def _tell(self, _: str, scope: Scope, given: bytes) -> bytes:
        return encode(self._own(scope, _decode_asked(given)))
