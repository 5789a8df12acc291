"""The way in: how many requests are inside, whether it is open, and how many may begin at once."""

import asyncio
from collections import deque
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from mallee.api.errors import error_response
from mallee.protocol.errors import Unavailable

_ALWAYS_OPEN = frozenset(("/health", "/health/live", "/metrics"))
PER_TURN: Final = 16  # requests that begin in one turn of the loop: some 5 ms


class Turns:
    """Lets a few callers go on in each turn of the event loop, in order.

    A thousand requests that come at once would else be read in one turn, for which all streams wait.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = self._num_left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def wait(self) -> None:
        """Return in a turn that has room."""
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._begin, loop)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_left = self._per_turn
        while self._num_left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its caller has gone
                turn.set_result(None)
                self._num_left -= 1
        self._is_due = bool(self._waiting) or self._num_left < self._per_turn
        if self._is_due:
            loop.call_soon(self._begin, loop)


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that this gateway is stopping."""
    answer = error_response(Unavailable("this gateway is stopping; send again"))
    answer.headers["connection"] = "close"  # the next goes to another gateway
    await answer(scope, receive, send)


class Gate:
    """ASGI middleware. Once closed, `refusal` answers requests, readiness too; those inside go on.

    Belongs to one event loop.
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
        self._num_inside += 1
        self._is_empty.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._is_empty.set()

    async def drain(self, timeout_s: float) -> int:
        """Close, and wait until all requests are answered; the number of those that are not in time."""
        self._is_closed = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            pass
        return self._num_inside
