"""The way in: how many requests are inside, and whether it is open."""

import asyncio
from contextlib import AbstractContextManager, nullcontext

from starlette.types import ASGIApp, Receive, Scope, Send

from mallee.api.errors import error_response
from mallee.protocol.errors import Unavailable

_ALWAYS_OPEN = frozenset(("/health", "/health/live", "/metrics"))
_GATE = "mallee.gate"  # of a request's scope


def staying(scope: Scope) -> AbstractContextManager[object]:
    """Work after its request's answer, which a gate that the request came through counts as inside."""
    gate: Gate | None = scope.get(_GATE)
    return nullcontext() if gate is None else gate


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that this gateway is stopping."""
    answer = error_response(Unavailable("this gateway is stopping; send again"))
    answer.headers["connection"] = "close"  # the next goes to another gateway
    await answer(scope, receive, send)


class Gate:
    """ASGI middleware. Once closed, `refusal` answers requests, readiness too; those inside go on.

    As a context manager, a request or what it has left to go on. Belongs to one event loop.
    """

    def __init__(self, app: ASGIApp, refusal: ASGIApp = refuse) -> None:
        self._app = app
        self._refusal = refusal
        self._num_inside = 0
        self._is_closed = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _ALWAYS_OPEN:
            await self._app(scope, receive, send)
            return
        if self._is_closed:
            await self._refusal(scope, receive, send)
            return
        scope[_GATE] = self
        with self:
            await self._app(scope, receive, send)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def __enter__(self) -> None:
        self._num_inside += 1
        self._is_empty.clear()

    def __exit__(self, *_: object) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self._is_empty.set()

    async def drain(self, timeout_s: float) -> int:
        """Close, and wait until all inside have ended; the number of those that have not in time."""
        self._is_closed = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            pass
        return self._num_inside
