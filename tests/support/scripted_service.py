"""A service over HTTP whose answers a test gives, and which can go away and come back at its address."""

import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mallee.runtime.addresses import free_port
from support.live_api import serving

Body: TypeAlias = str | dict[str, Any]
Answer: TypeAlias = Body | tuple[int, Body] | Callable[[], Body | Awaitable[Body]]


class ScriptedService:
    """Answers by method and path, as `"GET /health"`; all others are 404. A context manager."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        everything = Route("/{path:path}", self._answer, methods=["GET", "POST", "DELETE"])
        self._app = Starlette(routes=[everything])
        self._serving = AsyncExitStack()

    async def _answer(self, request: Request) -> Response:
        asked = f"{request.method} {request.url.path}"
        self.asked.append(asked)
        found = self.answers.get(asked, (404, error("no such path", "not_found")))
        body: Any = found() if callable(found) else found
        if isinstance(body, Awaitable):
            body = await body
        status, body = body if isinstance(body, tuple) else (200, body)
        return Response(body if isinstance(body, str) else json.dumps(body), status)

    async def start(self) -> None:
        await self._serving.enter_async_context(serving(self._app, port=self.port))

    async def stop(self) -> None:
        await self._serving.aclose()

    async def __aenter__(self) -> "ScriptedService":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def error(message: str, code: str) -> dict[str, Any]:
    """A body in OpenAI's shape."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}
