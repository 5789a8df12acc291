"""A body that is a capsule's file, and the query beside it, as there is no room for JSON."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request

from mallee.api.entry.middleware import LINGER_S, body_pieces
from mallee.api.errors import ClientGone, ImportTooLarge
from mallee.gateway.capsules.files.imports import Import, Received
from mallee.protocol.api.capsules import ImportRequest
from mallee.protocol.errors import InvalidParameter, MalleeError

FEED_NBYTES: Final = 1 << 20  # checked and written at once, in another thread
_OWN: Final = ("model", "user", "ttl_s")
_WAITING: Final = (
    "session",
    "priority",
    "weight",
    "deadline_s",
)  # of the `mallee` object elsewhere


def read_query(query: QueryParams) -> ImportRequest:
    """Raises InvalidParameter, naming the parameter."""
    fields: dict[str, Any] = {}
    waiting: dict[str, Any] = {}
    for name, value in query.multi_items():
        if name not in (*_OWN, *_WAITING):
            known = ", ".join((*_OWN, *_WAITING))
            raise InvalidParameter(name, value, f"not known here; give some of {known}")
        into = fields if name in _OWN else waiting
        if name in into:
            raise InvalidParameter(name, value, "give it once")
        into[name] = value
    for name, value in (*fields.items(), *waiting.items()):
        _checked(name, value)
    return msgspec.convert({**fields, "mallee": waiting}, ImportRequest, strict=False)


def _checked(name: str, value: str) -> None:
    """Raises InvalidParameter for a number that is none."""
    given: Mapping[str, Any] = {name: value} if name in _OWN else {"mallee": {name: value}}
    try:
        msgspec.convert(given, ImportRequest, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidParameter(name, value, "give a number") from error


async def take_file(request: Request, incoming: Import, limit: int) -> Received:
    """The capsule whose file is the body. Raises MalleeError, ClientGone."""
    pieces = body_pieces(request, limit, ImportTooLarge)
    try:
        async for data in _runs(pieces):
            await incoming.feed(data)
        return await incoming.finish()
    except MalleeError:
        # A client that is cut off may never read why.
        with suppress(TimeoutError, MalleeError, ClientGone):
            async with asyncio.timeout(LINGER_S):
                async for _ in pieces:
                    pass
        raise


async def _runs(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    waiting: list[bytes] = []
    held = 0
    async for piece in pieces:
        waiting.append(piece)
        held += len(piece)
        if held >= FEED_NBYTES:
            yield b"".join(waiting)
            waiting, held = [], 0
    if held:
        yield b"".join(waiting)
