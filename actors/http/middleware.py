"""Checks before every route: the API key, the body's size; and the net under unexpected errors."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable
from typing import Final, TypeAlias

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mallee.actors.http.errors import (
    BodyTooLarge,
    ClientGone,
    SlowBody,
    Unauthorized,
    UnsupportedEncoding,
    error_response,
)
from mallee.actors.http.errors import unexpected as unexpected_error

_log = logging.getLogger(__name__)

BODY_S: Final = 20.0
"""Time of a body, to which each MIN_BODY_RATE bytes that have come add a second."""
MIN_BODY_RATE: Final = 16 << 10

CountAnswer: TypeAlias = Callable[[str, int], None]
"""Called with the path's template (not the path) and the HTTP status when an answer begins."""

_OPEN_PATHS = frozenset(("/health",))


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32).digest()


class AuthMiddleware:
    """ASGI middleware. Refuses requests without the API key, counts answers, catches bugs.

    A bug is logged with a fresh id and answered by a 500 that names the id and nothing else.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        new_id: Callable[[], str],
        count_answer: CountAnswer,
    ) -> None:
        self._app = app
        # Digests have one length, so comparing them does not reveal the key's.
        self._key = _digest(api_key.encode()) if api_key is not None else None
        self._new_id = new_id
        self._count_answer = count_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def counted_send(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                path = getattr(scope.get("route"), "path", "other")
                self._count_answer(path, message["status"])
            await send(message)

        try:
            if self._key is not None and not self._may_pass(scope, self._key):
                await error_response(Unauthorized())(scope, receive, counted_send)
                return
            await self._app(scope, receive, counted_send)
        except Exception:
            request_id = self._new_id()
            _log.exception("request %s failed", request_id)
            if has_begun:
                raise  # the server cuts the connection
            await error_response(unexpected_error(request_id))(scope, receive, counted_send)

    def _may_pass(self, scope: Scope, key: bytes) -> bool:
        if scope["path"] in _OPEN_PATHS:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        kind, _, token = given[0].partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip()), key)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises BodyTooLarge before holding more than `limit` bytes, SlowBody, UnsupportedEncoding, ClientGone.
    """
    declared = request.headers.get("content-length", "0")
    # A sane server passes digits only; for anything else the bytes that arrive are counted.
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise BodyTooLarge(limit)
    if (encoding := request.headers.get("content-encoding", "identity")) not in ("identity", ""):
        raise UnsupportedEncoding(encoding)
    begin = asyncio.get_running_loop().time()
    chunks: list[bytes] = []
    nbytes = 0
    try:
        async with asyncio.timeout_at(begin + BODY_S) as due:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                nbytes += len(chunk)
                if nbytes > limit:
                    raise BodyTooLarge(limit)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
                due.reschedule(begin + BODY_S + nbytes / MIN_BODY_RATE)
    except TimeoutError:
        seconds = asyncio.get_running_loop().time() - begin
        raise SlowBody(nbytes, seconds, MIN_BODY_RATE) from None
