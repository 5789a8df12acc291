"""Stored responses: their one form, and the bucket that has those of all gateways."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from mallee.api.entry.pages import Paging
from mallee.api.responses.writing import failed
from mallee.api.text.conversation import Conversation, Function, Message
from mallee.gateway.peers import Peers
from mallee.gateway.store.copies import CopiedBucket
from mallee.gateway.store.store import Entry, Store
from mallee.protocol.api.responses import Response, ResponseSummary
from mallee.protocol.errors import InvalidParameter, NotFound, OtherLayout, StoreAway, Unavailable
from mallee.protocol.ids import CapsuleId, Scope
from mallee.runtime.config import ResponsesSettings

ID_PREFIX: Final = "resp_"
COPIES_NBYTES: Final = 64 << 20  # of responses, and of conversations
_LAYOUT: Final = 1
_EVENTS_LAYOUT: Final = 1
_SUMMARY: Final = "summary"

Turns = tuple[tuple[Message, ...], ...]


class UnknownResponse(NotFound):
    """No such response, or one of another scope, or one that was forgotten."""

    code = "response_not_found"

    def __init__(self, name: str, param: str | None = None) -> None:
        super().__init__(
            f"response {name[:80]!r} is not stored here: it was deleted, forgotten, made with store=false or"
            " never was; send the conversation itself",
            param=param,
        )


class Left(msgspec.Struct, frozen=True, array_like=True):
    """A capsule after an answer: `prompt_tokens` of a prompt, then those `drawn`, as `pack_tokens` has them.

    The first `asked_tokens` of the prompt end with the last question of a user, in turn `asked_turn`.
    """

    capsule: CapsuleId
    prompt_tokens: int
    drawn: bytes
    asked_tokens: int
    asked_turn: int

    @property
    def num_tokens(self) -> int:
        """All of the capsule's."""
        return self.prompt_tokens + len(self.drawn) // 4


class State(msgspec.Struct, frozen=True, array_like=True):
    """A conversation up to an answer, which is its last turn, and what that has left."""

    system: tuple[Message, ...]
    functions: tuple[Function, ...]
    variables: dict[str, Any]
    turns: Turns
    left: Left | None = None

    def __post_init__(self) -> None:
        left, num_asked = self.left, len(self.turns) - 1  # without the answer
        if left is not None and not 0 <= left.asked_turn < num_asked:
            raise ValueError(f"turn {left.asked_turn} of {num_asked}")
        if left is not None and len(left.drawn) % 4:
            raise ValueError(f"{len(left.drawn)} bytes of tokens")

    @classmethod
    def of(cls, head: Conversation, turns: Turns, left: Left | None) -> "State":
        """`head`: instructions, functions and variables."""
        functions = tuple(head.functions)
        return cls(tuple(head.messages), functions, dict(head.variables), turns, left)

    @property
    def head(self) -> Conversation:
        return Conversation(self.system, self.functions, self.variables)


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A response; `items` are those of its own input, `gateway` is where it runs or ran.

    `num_events`: before its last one, of one whose events are stored, once it is over. Without a `state`
    it can't be gone on from.
    """

    body: Response
    items: list[dict[str, Any]]
    gateway: str
    num_events: int | None = None
    state: State | None = None

    @property
    def id(self) -> str:
        return self.body.id

    @property
    def is_over(self) -> bool:
        return self.body.is_over


class StoredResponses:
    """The responses of all gateways, and the events of those that are streamed in the background.

    `runs(name)`: whether this gateway runs a response.
    """

    def __init__(
        self,
        store: Store,
        peers: Peers,
        settings: ResponsesSettings,
        *,
        runs: Callable[[str], bool],
    ) -> None:
        bounds: Any = {"ttl_s": settings.ttl_s, "max_nbytes": settings.max_mib << 20}
        whole = store.bucket("responses", Record, version=_LAYOUT, is_json=True, **bounds)
        self._whole = CopiedBucket(whole, COPIES_NBYTES)
        # Below a response, so that a list need not read them whole: of one that is over, which stays so.
        self._summaries = store.bucket("responses", ResponseSummary, version=_LAYOUT, **bounds)
        self.events: Final = store.bucket("events", list[bytes], version=_EVENTS_LAYOUT, **bounds)
        self._store = store
        self._peers = peers
        self._runs = runs

    def check_up(self) -> None:
        """Raises StoreAway, before something is begun that would be lost."""
        if not self._store.is_up:
            raise StoreAway("the broker is away")

    async def find(self, name: str, scope: Scope, param: str | None = None) -> Record:
        """The response as it is now; one whose gateway is gone has failed.

        Raises UnknownResponse, StoreAway.
        """
        entry = await self._whole.get(scope, name) if name.startswith(ID_PREFIX) else None
        if entry is not None and await self._is_lost(entry.value):
            await self._give_up(scope, entry)
            entry = await self._whole.get(scope, name)
        if entry is None:
            raise UnknownResponse(name, param)
        return entry.value

    async def put(self, scope: Scope, record: Record, *, at: int | None = None) -> int | None:
        """Its revision; None as of `Bucket.put`, but not if it was put though that seemed to fail."""
        entry = await self._whole.put(scope, record.id, record, at=at)
        if entry is None:
            with suppress(OtherLayout):
                entry = await self._whole.get(scope, record.id)
            if entry is None or entry.value.body.status != record.body.status:
                return None
        if record.is_over:
            self._summaries.append_soon(scope, record.id, _SUMMARY, _summary(record))
        return entry.revision

    async def append(self, scope: Scope, name: str, number: int, events: list[bytes]) -> None:
        """Store events, of which the first has a `number`. Raises StoreAway, StoreFull."""
        await self.events.append(scope, name, f"{number:09}", events)

    async def events_of(self, scope: Scope, record: Record) -> list[bytes]:
        """Those of a response that is over, without the last. Raises InvalidParameter: not all are there."""
        found: list[bytes] = []
        for below, batch in sorted((await self.events.all_below(scope, record.id)).items()):
            if int(below) <= len(found):
                found += batch[len(found) - int(below) :]
        if len(found) < (record.num_events or 0):
            raise InvalidParameter(
                "stream", True, "its events are not stored any more; leave it out"
            )
        return found[: record.num_events]

    async def delete(self, scope: Scope, name: str) -> None:
        """Returns once it is gone everywhere. Raises StoreAway."""
        if self._summaries.is_waiting(scope, name, _SUMMARY):
            # Else it would come after the delete.
            self._summaries.remove_soon(scope, name, _SUMMARY)
        await self._whole.delete(scope, name)
        await self.events.delete(scope, name)

    async def page(self, scope: Scope, paging: Paging) -> list[ResponseSummary]:
        """The first `paging.most` of `scope`. Raises StoreAway."""
        names = await self._whole.bucket.names(scope)
        return await paging.read(names, partial(self._summary, scope))

    async def _summary(self, scope: Scope, name: str) -> ResponseSummary | None:
        summary = await self._summaries.get_below(scope, name, _SUMMARY)
        if summary is not None:
            return summary
        try:
            return _summary(await self.find(name, scope))
        except UnknownResponse:  # it went meanwhile
            return None

    async def _is_lost(self, record: Record) -> bool:
        """Whether it runs nowhere, though it is not over."""
        if record.is_over:
            return False
        if record.gateway == self._peers.gateway:
            return not self._runs(record.id)
        return await self._peers.is_gone(record.gateway)

    async def _give_up(self, scope: Scope, entry: Entry[Record]) -> None:
        """End a response that runs nowhere, unless it has been ended since."""
        record, num_events = entry.value, None
        if record.num_events is not None:
            known = msgspec.structs.replace(record, num_events=None)
            num_events = len(await self.events_of(scope, known))
        error = Unavailable("the gateway that ran this response is gone; send the request again")
        ended = Record(failed(record.body, error), record.items, record.gateway, num_events)
        await self.put(scope, ended, at=entry.revision)


def _summary(record: Record) -> ResponseSummary:
    return msgspec.convert(record.body, ResponseSummary, from_attributes=True)
