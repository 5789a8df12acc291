"""Lists of stored responses and of conversations, which gateways put together from what each has."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from mallee.api.entry.pages import Page
from mallee.api.responses.store import Record, ResponseStore
from mallee.gateway.records import SharedRecords
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import LookupIncomplete
from mallee.protocol.ids import RequestId, Scope

Bodies = list[dict[str, Any]]


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    after: str
    most: int


_decode_asked: Final = Decoder(_Asked, "a question for a page")
_decode_page: Final = Decoder(Bodies, "a page")


class SharedList:
    """The things of all gateways whose ids begin with `prefix`, of which `store` has this one's.

    `shown(record)`: how a list shows it, which is short. `new_name(scope)` names requests.
    """

    def __init__(
        self,
        records: SharedRecords,
        store: ResponseStore,
        prefix: str,
        *,
        shown: Callable[[Record], dict[str, Any]],
        new_name: Callable[[Scope], RequestId],
    ) -> None:
        self._records = records
        self._store = store
        self._prefix = prefix
        self._kind = f"{prefix}page"
        self._shown = shown
        self._new_name = new_name
        records.share(self._kind, self._tell)

    async def page(self, scope: Scope, page: Page) -> Bodies:
        """The first `page.most` of `scope`. Raises LookupIncomplete."""
        given = encode(_Asked(page.after, page.most))
        name = self._new_name(scope)
        told, is_whole = await self._records.gather(self._kind, name, scope, given=given)
        if not is_whole:
            raise LookupIncomplete.with_message(
                "other gateways may have more for this list, and not all have answered; retry in 1 s",
                retry_after_s=1.0,
            )
        pages = [*map(_decode_page, told), self._own(scope, page.after, page.most)]
        found = {each["id"]: each for bodies in pages for each in bodies}
        return [found[name] for name in sorted(found)[: page.most]]

    def _own(self, scope: Scope, after: str, most: int) -> Bodies:
        return [*map(self._shown, self._store.page(scope, self._prefix, after, most))]

    async def _tell(self, _: str, scope: Scope, given: bytes) -> bytes:
        asked = _decode_asked(given)
        return encode(self._own(scope, asked.after, asked.most))
