"""Stored responses beyond their gateway: taken from the one that has them, ended and forgotten at all."""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from mallee.api.responses.store import Left, Record, ResponseStore, Turn, UnknownResponse
from mallee.api.text.conversation import Conversation, Function, Message
from mallee.gateway.records import ASK_S, SharedRecords
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import CodecError, InternalError, LookupIncomplete, Unavailable
from mallee.protocol.ids import CapsuleId, Scope
from mallee.protocol.messages import pack_tokens, unpack_tokens
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

ID_PREFIX: Final = "resp_"
_REQUEST_PREFIX: Final = "req_"
END_S: Final = 5.0  # for another gateway to end a response
_KIND: Final = "response"
_END: Final = "response.end"  # the record of a response, once it has been ended


class _Left(msgspec.Struct, frozen=True, array_like=True):
    """A `Left`; `asked_turn` counts turns from the first on."""

    capsule: str
    prompt_tokens: int
    drawn: bytes
    asked_tokens: int
    asked_turn: int


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """A `Record` on its way. `turns`: the messages of each, the first first."""

    id: str
    scope: str
    body: dict[str, Any]
    items: list[dict[str, Any]]
    system: tuple[Message, ...]
    functions: tuple[Function, ...]
    variables: dict[str, Any]
    turns: tuple[tuple[Message, ...], ...]
    left: _Left | None
    num_chars: int
    is_running: bool
    num_covered: int


_decode: Final = Decoder(_Told, "a stored response")


def packed(record: Record) -> bytes:
    """`record` as it stands, without its events."""
    path = [] if record.turn is None else [*record.turn.path()][::-1]
    left = None
    if record.left is not None:
        tokens, turn = record.left.asked
        left = _Left(
            record.left.capsule,
            record.left.prompt_tokens,
            pack_tokens(record.left.drawn),
            tokens,
            path.index(turn),
        )
    head = record.head
    told = _Told(
        id=record.id,
        scope=record.scope,
        body=record.body,
        items=record.items,
        system=tuple(head.messages),
        functions=tuple(head.functions),
        variables=dict(head.variables),
        turns=tuple(turn.messages for turn in path),
        left=left,
        num_chars=record.num_chars,
        is_running=record.is_running,
        num_covered=record.num_covered,
    )
    return encode(told)


def unpacked(raw: bytes) -> Record:
    """Raises CodecError."""
    told = _decode(raw)
    path: list[Turn] = []
    for messages in told.turns:
        path.append(Turn(path[-1] if path else None, messages))
    left = None
    if told.left is not None:
        if not 0 <= told.left.asked_turn < len(path):
            raise CodecError(f"not a stored response: turn {told.left.asked_turn} of {len(path)}")
        asked = told.left.asked_tokens, path[told.left.asked_turn]
        drawn = unpack_tokens(told.left.drawn)
        left = Left(CapsuleId(told.left.capsule), told.left.prompt_tokens, drawn, asked)
    return Record(
        id=told.id,
        scope=Scope(told.scope),
        body=told.body,
        items=told.items,
        head=Conversation(told.system, told.functions, told.variables),
        turn=path[-1] if path else None,
        left=left,
        num_chars=max(0, told.num_chars),
        is_running=told.is_running,
        is_copy=True,
        num_covered=told.num_covered,
    )


class SharedResponses:
    """The responses of all gateways, of which `store` has this one's and copies of others'.

    `end(record)` cancels what runs of a response here, and returns once it is over.
    """

    def __init__(
        self,
        records: SharedRecords,
        store: ResponseStore,
        tasks: Tasks,
        end: Callable[[Record], Awaitable[None]],
    ) -> None:
        self._records = records
        self._store = store
        self._tasks = tasks
        self._end = end
        records.share(_KIND, self._tell, self._on_forgotten)
        records.share(_END, self._tell_ended)

    async def find(self, name: str, scope: Scope, param: str | None = None) -> Record:
        """The response; one that runs elsewhere as it stands there.

        Raises UnknownResponse, LookupIncomplete.
        """
        try:
            if not name.startswith(ID_PREFIX):
                raise UnknownResponse(name, param)
            return self._store.get(name, scope, param)
        except UnknownResponse:
            found = await self._fetched(_KIND, name, scope)
            if found is None:
                raise
            return found

    async def end(self, record: Record) -> Record:
        """End a response where it runs; what became of it. Raises Unavailable, UnknownResponse."""
        if not (record.is_copy and record.is_running):
            await self._end(record)
            return record
        found = None
        with suppress(LookupIncomplete):
            found = await self._fetched(_END, record.id, record.scope, wait_s=END_S)
        if found is None:
            found = await self.find(record.id, record.scope)
        if found.is_running:
            raise Unavailable("the gateway that runs this response did not end it; try again")
        return found

    async def forget(self, record: Record) -> None:
        """Forget a response here and everywhere, and end it."""
        self._records.forget(
            _KIND, request_of(record.id), record.scope
        )  # first: no gateway takes it now
        await self._forget(record)

    async def _forget(self, record: Record) -> None:
        await self._end(record)
        self._store.forget(record)

    async def _fetched(
        self, kind: str, name: str, scope: Scope, *, wait_s: float = ASK_S
    ) -> Record | None:
        raw = await self._records.fetch(kind, request_of(name), scope, wait_s=wait_s)
        if raw is None:
            return None
        try:
            record = unpacked(raw)
        except CodecError as error:
            log.exception("a stored response of another gateway was refused")
            raise LookupIncomplete("the answer of another one can't be read") from error
        if (record.id, record.scope) != (name, scope):
            raise InternalError("another gateway told of another response than it was asked for")
        if not record.is_running:
            self._store.keep(record)
        return record

    def own(self, key: str, scope: Scope) -> Record | None:
        """The response that was made here as request `key`."""
        record = self._here(key, scope)
        return None if record is None or record.is_copy else record

    def _here(self, key: str, scope: Scope) -> Record | None:
        try:
            return self._store.get(named(ID_PREFIX, key), scope)
        except UnknownResponse:
            return None

    async def _tell(self, key: str, scope: Scope, _: bytes) -> bytes | None:
        record = self._here(key, scope)
        return None if record is None else packed(record)

    async def _tell_ended(self, key: str, scope: Scope, _: bytes) -> bytes | None:
        record = self._here(key, scope)
        if record is None:
            return None
        await self._end(record)
        return packed(record)

    def _on_forgotten(self, key: str, scope: Scope) -> None:
        record = self._here(key, scope)
        if record is not None:
            self._tasks.spawn(self._forget(record))


def request_of(name: str) -> str:
    """The name of the request that a response or conversation was made as."""
    return _REQUEST_PREFIX + name.partition("_")[2]


def named(prefix: str, request: str) -> str:
    """The id, with that prefix, of what was made as `request`."""
    return prefix + request.removeprefix(_REQUEST_PREFIX)
